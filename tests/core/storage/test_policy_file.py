"""One file holds a whole policy, and any damage to it is found before it is used."""

import io
import json
import os
import pickle
import random
import struct
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

import canter
from canter.algorithms.ppo import PPOConfig
from canter.core.specs import Continuous, Discrete, EnvSpec, MultiDiscrete, TensorSpec
from canter.core.storage.validity import Mismatch, NonFiniteParameters
from canter.nn.actor_critic import ModelConfig
from canter.nn.cnn import CNNConfig
from canter.nn.heads import StdConfig
from canter.nn.network import NetworkConfig
from canter.nn.policy_file import (
    NoPolicy,
    PolicyFileCorrupt,
    find_policy,
    read_policy_file,
    save_policy,
    write_policy_file,
)
from canter.nn.policy_loading import load_critic, load_policy
from canter.nn.rnn import RNNConfig

N = 3
ARM = Continuous((-2.0, -1.0), (2.0, 3.0))
VECTOR = {"policy": TensorSpec((4,))}
MODEL = ModelConfig(policy=NetworkConfig(hidden=(8,)))


def mask(width):
    return {"action_mask": TensorSpec((width,), torch.bool)}


def with_memory(cell):
    return replace(MODEL, policy=NetworkConfig(hidden=(8,), rnn=RNNConfig(cell=cell, hidden=5)))


CASES = {
    "gaussian": (MODEL, VECTOR, ARM),
    "gaussian clipped": (replace(MODEL, bounds="clip"), VECTOR, ARM),
    "gaussian without bounds": (replace(MODEL, bounds="none"), VECTOR, Continuous((float("-inf"),), (float("inf"),))),
    "gaussian with a std of the state": (replace(MODEL, std=StdConfig(kind="network")), VECTOR, ARM),
    "tanh gaussian": (replace(MODEL, distribution="tanh_gaussian"), VECTOR, ARM),
    "beta": (replace(MODEL, distribution="beta"), VECTOR, ARM),
    "categorical": (MODEL, VECTOR, Discrete(5)),
    "categorical with mask": (MODEL, VECTOR | mask(5), Discrete(5)),
    "multi-categorical": (MODEL, VECTOR, MultiDiscrete((2, 3))),
    "multi-categorical with mask": (MODEL, VECTOR | mask(5), MultiDiscrete((2, 3))),
    "image and vector": (
        replace(MODEL, policy=NetworkConfig(hidden=(8,), cnn=CNNConfig(layers=((4, 4, 2),), features=6))),
        {"camera": TensorSpec((3, 12, 12), torch.uint8), "joints": TensorSpec((2, 2))},
        ARM,
    ),
    "lstm": (with_memory("lstm"), VECTOR, ARM),
    "gru": (with_memory("gru"), VECTOR, Discrete(3)),
    "shared trunk": (replace(MODEL, shared_trunk=True), VECTOR, ARM),
    "critic of its own": (
        replace(MODEL, critic=NetworkConfig(hidden=(6, 6), layer_norm=True)),
        VECTOR | {"critic": TensorSpec((7,))},
        ARM,
    ),
    "nothing normalised": (
        ModelConfig(policy=NetworkConfig(hidden=(), normalize_obs=False), normalize_value=False),
        VECTOR,
        ARM,
    ),
}


def observations(spec, seed):
    generator = torch.Generator().manual_seed(seed)
    obs = {}
    for name, group in spec.obs.items():
        shape = (N, *group.shape)
        if group.dtype is torch.bool:
            obs[name] = torch.rand(shape, generator=generator) < 0.6
            obs[name][:, [0, 2]] = True  # something is allowed in every choice
        elif group.dtype is torch.uint8:
            obs[name] = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        else:
            obs[name] = 3 * torch.randn(shape, generator=generator) + 1
    return obs


def trained(case="gaussian"):
    """An algorithm whose weights and statistics are not those of the start."""
    model, obs, action = CASES[case]
    spec = EnvSpec(obs, action, N, env_id="Arm-v0")
    algorithm = PPOConfig(model=model, horizon=16, num_minibatches=1).build(spec, seed=1)
    rows = {name: group.unsqueeze(0) for name, group in observations(spec, 9).items()}
    algorithm.model.update_statistics(rows, torch.ones(1, N, dtype=torch.bool))
    algorithm.model.critic.head.update_statistics(torch.tensor([[3.0, 50.0, 7.0]]), torch.ones(1, N, dtype=torch.bool))
    generator = torch.Generator().manual_seed(0)
    for parameter in algorithm.model.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return algorithm


def actions(policy, spec, *, deterministic):
    """Six steps of N environments, some of which restart on the way."""
    generator, state, seen = torch.Generator().manual_seed(4), policy.initial_state(N), []
    for step in range(6):
        reset = torch.tensor([step == 0, step in (0, 3), step == 0])
        action, state = policy.act(
            observations(spec, step), state, reset, deterministic=deterministic, generator=generator
        )
        seen.append(action)
    return torch.stack(seen)


@pytest.mark.parametrize("case", CASES)
def test_a_policy_loaded_alone_acts_as_the_one_that_was_saved(case, tmp_path):
    policy = trained(case).policy
    path = tmp_path / "policy.safetensors"
    policy.save(path, env_steps=123, return_=-4.5)
    random_state = torch.random.get_rng_state()
    loaded = load_policy(path)
    assert torch.equal(torch.random.get_rng_state(), random_state)
    for deterministic in (True, False):
        expected = actions(policy, policy.spec, deterministic=deterministic)
        assert torch.equal(actions(loaded, policy.spec, deterministic=deterministic), expected)
    assert len(expected.unique()) > 1
    assert (loaded.config, loaded.spec.obs, loaded.spec.action) == (policy.config, policy.spec.obs, policy.spec.action)
    info, _ = read_policy_file(path)
    assert (info.what, info.env_steps, info.return_, info.canter) == ("actor", 123, -4.5, canter.__version__)


def test_a_recurrent_policy_with_the_old_names_of_settings_is_read(tmp_path):
    """Files of earlier versions name the setting `memory`; the names of tensors have not changed."""
    policy = trained("lstm").policy
    policy.save(tmp_path / "new.safetensors")
    info, tensors = read_policy_file(tmp_path / "new.safetensors")
    assert {name.split(".")[1] for name in tensors if "cells" in name} == {"memory"}
    network = {name: value for name, value in info.model["policy"].items() if name != "rnn"}
    model = info.model | {"policy": network | {"memory": info.model["policy"]["rnn"]}}
    write_policy_file(tmp_path / "old.safetensors", replace(info, model=model), tensors)
    loaded = load_policy(tmp_path / "old.safetensors")
    assert loaded.config == policy.config
    expected = actions(policy, policy.spec, deterministic=True)
    assert torch.equal(actions(loaded, policy.spec, deterministic=True), expected)


@pytest.mark.parametrize("case", ["gaussian", "lstm", "shared trunk", "critic of its own", "nothing normalised"])
def test_a_critic_loaded_alone_values_in_the_units_of_the_reward(case, tmp_path):
    algorithm = trained(case)
    algorithm.critic.save(tmp_path / "critic.safetensors")
    loaded, spec, critic = load_critic(tmp_path / "critic.safetensors"), algorithm.policy.spec, algorithm.model.critic
    rows = [observations(spec, step) for step in range(4)]
    resets = torch.tensor([[step in (0, 2)] * N for step in range(4)])
    together = {name: torch.stack([obs[name] for obs in rows]) for name in spec.obs}
    expected, _ = critic.unroll(together, critic.network.initial_state(N), resets)
    state = loaded.initial_state(N)
    for obs, reset, value in zip(rows, resets, expected, strict=True):
        found, state = loaded.value(obs, state, reset)
        torch.testing.assert_close(found, value)
    if case != "nothing normalised":
        assert expected.abs().max() > 5  # not in units of the normaliser


def test_an_observation_of_a_single_environment_is_enough(tmp_path):
    save_policy(tmp_path / "p.safetensors", trained().policy)
    policy = canter.load_policy(tmp_path / "p.safetensors")
    action, state = policy.act({"policy": torch.as_tensor(np.zeros(4, np.float32))[None]})
    assert action.shape == (1, 2)
    assert state == ()


def test_of_a_run_folder_the_best_then_the_final_then_the_newest_policy_is_meant(tmp_path):
    algorithm, folder = trained(), tmp_path / "policies"
    with pytest.raises(NoPolicy, match="holds no policy"):
        load_policy(tmp_path)
    for name in ("step-000000900", "step-000001000", "step-1000000000", "final_actor", "best"):
        save_policy(folder / f"{name}.safetensors", algorithm.policy)
        assert load_policy(tmp_path).spec.env_id == "Arm-v0"
        assert find_policy(tmp_path) == folder / f"{name}.safetensors"
    algorithm.artefacts()["final_critic.safetensors"](folder / "final_critic.safetensors")
    assert load_critic(tmp_path).value(observations(algorithm.policy.spec, 0))[0].shape == (N,)


def test_a_missing_file_is_reported(tmp_path):
    with pytest.raises(NoPolicy, match=r"there is no policy .*nowhere"):
        load_policy(tmp_path / "nowhere.safetensors")
    with pytest.raises(NoPolicy, match="final_critic"):
        load_critic(tmp_path)


def test_actor_and_critic_are_not_confused(tmp_path):
    algorithm = trained()
    save_policy(tmp_path / "actor", algorithm.policy)
    algorithm.artefacts()["final_critic.safetensors"](tmp_path / "critic")
    with pytest.raises(PolicyFileCorrupt, match="it holds the critic, not the actor"):
        load_policy(tmp_path / "critic")
    with pytest.raises(PolicyFileCorrupt, match="it holds the actor, not the critic"):
        load_critic(tmp_path / "actor")


@pytest.mark.parametrize(
    ("change", "field", "saved", "here"),
    [
        ({"obs": {"policy": TensorSpec((5,))}}, "obs.policy.shape", "[4]", "[5]"),
        ({"obs": {"policy": TensorSpec((4,), torch.uint8)}}, "obs.policy.dtype", "float32", "uint8"),
        ({"obs": {"state": TensorSpec((4,))}}, "obs.policy.shape", "[4]", "missing"),
        ({"action": Discrete(2)}, "action.kind", "continuous", "discrete"),
        ({"action": Continuous((-2.0, -1.0), (2.0, 4.0))}, "action.high", "[2.0, 3.0]", "[2.0, 4.0]"),
    ],
)
def test_an_environment_that_does_not_fit_is_refused_by_field_and_both_values(change, field, saved, here, tmp_path):
    policy = trained().policy
    save_policy(tmp_path / "p", policy)
    with pytest.raises(Mismatch) as caught:
        load_policy(tmp_path / "p", env=replace(policy.spec, **change))
    assert caught.value.field == field
    assert f"{field} is {saved} in what was saved and {here} here" in str(caught.value)


def test_an_environment_may_show_more_and_have_another_name(tmp_path):
    policy = trained().policy
    save_policy(tmp_path / "p", policy)
    richer = replace(policy.spec, obs=VECTOR | {"camera": TensorSpec((9,))}, num_envs=64, env_id="envpool:Arm-v0")
    assert load_policy(tmp_path / "p", env=richer).spec.num_envs == 1


def test_a_mask_that_is_missing_is_refused(tmp_path):
    policy = trained("categorical with mask").policy
    save_policy(tmp_path / "p", policy)
    with pytest.raises(Mismatch, match=r"obs\.action_mask"):
        load_policy(tmp_path / "p", env=replace(policy.spec, obs=VECTOR))


def test_a_policy_with_nan_is_not_saved_and_the_old_file_stays(tmp_path):
    policy, path = trained().policy, tmp_path / "p"
    save_policy(path, policy, env_steps=1)
    policy.actor.head.mean.weight.data[0, 3] = float("nan")
    with pytest.raises(NonFiniteParameters, match=r"1 of 16 numbers in head.mean.weight are NaN or infinite"):
        save_policy(path, policy, env_steps=2)
    assert read_policy_file(path)[0].env_steps == 1
    assert os.listdir(tmp_path) == ["p"]


def test_cut_off_anywhere_a_file_is_refused(tmp_path):
    path = tmp_path / "p"
    save_policy(path, trained().policy)
    data = path.read_bytes()
    for length in [*range(0, 64), *range(64, len(data), 37), len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(PolicyFileCorrupt, match=str(path)):
            load_policy(path)


def test_a_changed_bit_is_found_or_changes_nothing(tmp_path):
    policy, path, rng = trained().policy, tmp_path / "p", random.Random(0)
    save_policy(path, policy)
    data, expected = path.read_bytes(), actions(policy, policy.spec, deterministic=True)
    refused = 0
    for at in [*range(0, 40), *(rng.randrange(len(data)) for _ in range(300))]:
        damaged = bytearray(data)
        damaged[at] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            assert torch.equal(actions(load_policy(path), policy.spec, deterministic=True), expected)
        except PolicyFileCorrupt:
            refused += 1
    assert refused > 330  # spaces between the parts of the header may be other spaces


def forged(path, policy, tensors=None, **changes):
    """A file whose hash is right and whose content is not."""
    save_policy(path, policy)
    info, saved = read_policy_file(path)
    write_policy_file(path, replace(info, **changes), saved if tensors is None else tensors(saved))


def plain(**changes):
    return canter.core.storage.validity.spec_to_plain(trained().policy.spec) | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"policy": {"hiden": [8]}}}, "policy.hiden: unknown key, did you mean hidden"),
        ({"model": {"policy": {"hidden": [10**9, 10**9]}}}, "tensor network.hidden.0.weight is"),
        ({"model": {"policy": {"hidden": ["import os"]}}}, r"policy.hidden\[0\]: expected an integer"),
        ({"model": {}}, "its model needs"),
        ({"model": []}, "description is malformed"),
        ({"env": {}}, "the environment is malformed"),
        ({"env": plain(action={"kind": "call", "n": "os.abort"})}, "the action is malformed"),
        ({"env": plain(action={"kind": "discrete", "n": -1})}, "-1 is not a size"),
        ({"env": plain(obs={"policy": {"shape": [4], "dtype": "object"}})}, "the environment is malformed"),
        ({"env": plain(groups=["other"])}, "groups or env_id are malformed"),
        ({"env_steps": "1"}, "description is malformed"),
        ({"what": "code"}, "description is malformed"),
        ({"tensors": lambda saved: {}}, "None, its model needs"),
        ({"tensors": lambda saved: saved | {"more": torch.zeros(1)}}, "tensor more is"),
        ({"tensors": lambda saved: {name: t.double() for name, t in saved.items()}}, "its model needs"),
    ],
)
def test_a_forged_description_is_refused_at_once(changes, message, tmp_path):
    forged(tmp_path / "p", trained().policy, **changes)
    start = time.perf_counter()
    with pytest.raises(PolicyFileCorrupt, match=message):
        load_policy(tmp_path / "p")
    assert time.perf_counter() - start < 5


def test_a_newer_schema_and_a_file_of_others_are_refused(tmp_path, monkeypatch):
    policy, path = trained().policy, tmp_path / "p"
    monkeypatch.setattr("canter.nn.policy_file.SCHEMA", 2)
    save_policy(path, policy)
    monkeypatch.undo()
    with pytest.raises(PolicyFileCorrupt, match="not of schema 1"):
        load_policy(path)
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(PolicyFileCorrupt, match="not written by canter"):
        load_policy(path)


def test_nan_in_a_file_is_refused(tmp_path, monkeypatch):
    path, policy = tmp_path / "p", trained().policy
    policy.actor.head.raw_std.data[0] = float("inf")
    monkeypatch.setattr("canter.nn.policy_file.check_finite", lambda *_: None)
    save_policy(path, policy)
    with pytest.raises(PolicyFileCorrupt, match="NaN or infinity"):
        load_policy(path)


def test_a_pipe_or_a_device_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(PolicyFileCorrupt, match="not a regular file"):
            load_policy(path)


class Harm:
    """Unpickled, it creates the file `path`."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("form", [*range(6), "torch"])
def test_a_disguised_pickle_is_refused_and_not_run(form, tmp_path):
    path, harm = tmp_path / "policy.safetensors", tmp_path / "harm"
    buffer = io.BytesIO()
    if form == "torch":
        torch.save(Harm(harm), buffer)
    else:
        buffer.write(pickle.dumps(Harm(harm), form))
    path.write_bytes(buffer.getvalue())
    for load in (load_policy, load_critic):
        with pytest.raises(PolicyFileCorrupt):
            load(path)
    assert not harm.exists()
    if form != "torch":
        pickle.loads(path.read_bytes()).close()
        assert harm.exists()  # it was armed
