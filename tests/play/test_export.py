import functools
import json
import math

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from canter.core.specs import ACTION_MASK, Continuous, Discrete, EnvSpec, MultiDiscrete, Step, TensorSpec
from canter.nn.actor_critic import ModelConfig
from canter.nn.cnn import CNNConfig
from canter.nn.network import NetworkConfig
from canter.nn.rnn import RNNConfig
from canter.play import export
from canter.play.export import SUFFIXES, ExportError, collect_inputs, export_policy
from covering import usual_of

OBSERVATIONS = 1000
BOX = Continuous((-2.0, -1.0, 0.0), (2.0, 3.0, 0.5))
VECTOR = {"policy": TensorSpec((7,))}
IMAGE = CNNConfig(layers=((8, 4, 2), (8, 3, 1)), features=16)


class Noise:
    """Random observations of any kind, of very different scales; episodes end at random."""

    def __init__(self, obs, action, num_envs=50):
        self.spec = EnvSpec(obs, action, num_envs)

    def observe(self):
        return {name: self.draw(name, spec) for name, spec in self.spec.obs.items()}

    def draw(self, name, spec):
        shape = (self.spec.num_envs, *spec.shape)
        if name == ACTION_MASK:
            mask = torch.rand(shape, generator=self.generator) < 0.5
            mask[:, self.allowed] = True
            return mask
        if spec.dtype == torch.uint8:
            return torch.randint(256, shape, generator=self.generator, dtype=torch.uint8)
        scale = torch.logspace(-2, 2, math.prod(spec.shape)).reshape(spec.shape)
        return (torch.randn(shape, generator=self.generator) + 0.5) * scale

    def reset(self, seed=None):
        self.generator = torch.Generator().manual_seed(seed)
        nvec = {Discrete: lambda a: (a.n,), MultiDiscrete: lambda a: a.nvec}.get(type(self.spec.action), lambda a: ())
        ends = np.cumsum(nvec(self.spec.action)) - 1
        self.allowed = ends.tolist()  # the last choice of every head
        return self.observe()

    def step(self, action):
        n = self.spec.num_envs
        done = torch.rand(n, generator=self.generator) < 0.1
        never = torch.zeros_like(done)
        return Step(self.observe(), torch.zeros(n), done, never, ~never)

    def close(self):
        pass


def trained(config, env):
    """A policy with weights that are not small and statistics that are not 0 and 1."""
    torch.manual_seed(0)
    policy = config.build_policy(env.spec)
    with torch.no_grad():
        for parameter in policy.actor.parameters():
            nn.init.normal_(parameter, std=0.3)
    env.reset(seed=1)
    for _ in range(4):
        obs = env.step(None).obs
        policy.actor.network.update_statistics(
            {name: group[None] for name, group in obs.items()}, torch.ones(1, 50) > 0
        )
    return policy


def network(**options):
    return ModelConfig(policy=NetworkConfig(hidden=(32, 16), cnn=IMAGE, **options))


CASES = {
    "gaussian-rescale": (ModelConfig(), VECTOR, BOX),
    "gaussian-clip": (ModelConfig(bounds="clip"), VECTOR, Continuous((-0.1, -math.inf), (math.inf, 0.1))),
    "gaussian-none": (ModelConfig(bounds="none"), VECTOR, BOX),
    "tanh_gaussian": (ModelConfig(distribution="tanh_gaussian"), VECTOR, BOX),
    "beta": (ModelConfig(distribution="beta"), VECTOR, BOX),
    "categorical": (ModelConfig(), VECTOR, Discrete(5)),
    "categorical-masked": (ModelConfig(), VECTOR | {ACTION_MASK: TensorSpec((5,), torch.bool)}, Discrete(5)),
    "multi_categorical": (ModelConfig(), VECTOR, MultiDiscrete((2, 3))),
    "multi_categorical-masked": (
        ModelConfig(),
        VECTOR | {ACTION_MASK: TensorSpec((5,), torch.bool)},
        MultiDiscrete((2, 3)),
    ),
    "dict": (network(), {"arm": TensorSpec((3,)), "grid": TensorSpec((2, 4))}, BOX),
    "image": (
        network(obs_groups=("camera", "policy")),
        VECTOR | {"camera": TensorSpec((12, 12, 3), torch.uint8), "critic": TensorSpec((9,))},
        Discrete(4),
    ),
    "lstm": (network(rnn=RNNConfig(hidden=12, layers=2)), VECTOR, BOX),
    "gru": (network(rnn=RNNConfig(cell="gru", hidden=12, position="after_mlp")), VECTOR, Discrete(3)),
}


def write(name, format, folder):
    config, obs, action = CASES[name]
    env = Noise(obs, action)
    policy = trained(config, env)
    inputs = collect_inputs(policy, env, OBSERVATIONS, seed=0)
    path = folder / f"policy{SUFFIXES[format]}"
    return export_policy(policy, path, format, *inputs), policy, inputs, path


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Exports a case, once: it takes seconds."""
    return functools.cache(lambda name, format: write(name, format, tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize("name", usual_of(CASES, ["multi_categorical-masked", "lstm"]))
def test_an_onnx_file_equals_the_policy_on_1000_observations(name, exported):
    result, policy, (obs, state), path = exported(name, "onnx")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    parts = {f"state_{i}": part for i, part in enumerate(part for layer in state for part in layer)}
    feed = {entry.name: (obs | parts)[entry.name].numpy() for entry in session.get_inputs()}
    assert result.inputs.keys() == feed.keys() == parts.keys() | (obs.keys() - {"critic"})
    action, _ = policy.act(obs, state)
    got = session.run(["action"], feed)[0]
    assert len(got) == result.observations == OBSERVATIONS
    assert len(np.unique(got, axis=0)) > 1  # not the same action everywhere
    assert np.abs(got - action.numpy()).max() <= 1e-5
    assert result.max_difference <= 1e-5
    assert session.get_inputs()[0].shape[0] == "batch"
    about = json.loads(path.with_name("policy.onnx.json").read_text())
    assert about["max_difference"] == result.max_difference
    assert about["path"] == "policy.onnx"  # where it lies is nobody's business
    inside = json.loads(session.get_modelmeta().custom_metadata_map["canter"])
    assert {key: about[key] for key in inside} == inside
    assert inside.keys() == {"format", "env", "action", "own_arrays", "inputs", "outputs", "versions"}


@pytest.mark.parametrize(
    "name", usual_of(["tanh_gaussian", "categorical-masked", "image", "lstm"], ["tanh_gaussian", "lstm"])
)
def test_a_torch_file_equals_the_policy_on_1000_observations(name, exported):
    result, policy, (obs, state), path = exported(name, "torch")
    module = torch.export.load(path).module()
    groups = {name: obs[name] for name in result.inputs if name in obs}
    expected, expected_state = policy.act(obs, state)
    if name == "lstm":
        action, following = module(groups, state)
        torch.testing.assert_close(following, expected_state, atol=1e-5, rtol=0)
    else:  # called as one would guess
        action = module(groups if len(groups) > 1 else groups["policy"])
    torch.testing.assert_close(action, expected, atol=1e-5, rtol=0)
    assert result.format == "torch"


def test_recurrent_state_goes_in_and_comes_out(exported):
    """An episode played with the file alone is the episode that the policy plays."""
    _, policy, (obs, _), path = exported("lstm", "onnx")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    state = policy.initial_state(1)
    memory = {f"state_{i}": np.zeros((1, 12), np.float32) for i in range(4)}
    for t in range(20):
        row = obs["policy"][t : t + 1]
        action, state = policy.act({"policy": row}, state)
        got, *memory = session.run(None, {"policy": row.numpy(), **dict(memory)})
        memory = {f"state_{i}": part for i, part in enumerate(memory)}
        np.testing.assert_allclose(got, action.numpy(), atol=1e-5)
    assert all(np.abs(part).max() > 0.01 for part in memory.values())


def test_a_file_that_differs_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    save, load = export._FORMATS["torch"]

    def off_by_a_little(path, contract):
        run = load(path, contract)
        return lambda inputs: [output + 2e-5 for output in run(inputs)]

    monkeypatch.setitem(export._FORMATS, "torch", (save, off_by_a_little))
    with pytest.raises(ExportError, match=r"action: file and policy differ by 2\.\d*e-05, more than 1e-05"):
        write("gaussian-rescale", "torch", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "policy.pt2").write_text("mine")
    with pytest.raises(ExportError, match=r"policy.pt2 already exists"):
        write("gaussian-rescale", "torch", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["policy.pt2"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda obs, state: ({"polcy": obs["policy"]}, state), "obs lacks the group 'policy' .* did you mean polcy"),
        (lambda obs, state: (obs["policy"], state), "obs is a Tensor, expected a dict of the groups policy"),
        (
            lambda obs, state: ({"policy": obs["policy"][:, 1:]}, state),
            r"obs 'policy' is \[2, 6\], torch.float32, expected \['M', 7\], torch.float32",
        ),
        (lambda obs, state: ({"policy": obs["policy"] * math.nan}, state), "obs 'policy' has NaN or infinity"),
        (lambda obs, state: (obs, ()), "state has 0 tensors, but the policy's recurrent state has 4"),
        (lambda obs, state: ({"policy": obs["policy"][:1]}, state), "1 observations are too few"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change, message, tmp_path):
    config, obs, action = CASES["lstm"]
    env = Noise(obs, action)
    policy = config.build_policy(env.spec)
    with pytest.raises(ExportError, match=message):
        export_policy(policy, tmp_path / "a.pt2", "torch", *change(*collect_inputs(policy, env, 2, seed=0)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("file", "options", "message"),
    [
        ("a.pt2", {"format": "onx"}, "format 'onx' is unknown: did you mean onnx?"),
        ("a.npz", {"format": "c"}, r"a.npz: expected the suffix .h for the format c"),
        ("a.h", {"format": "c", "weights": "int4"}, "weights 'int4' are unknown: did you mean int8?"),
        ("a.h", {"format": "c", "policy": "runs/a"}, "policy is 'runs/a', expected a Policy"),
    ],
)
def test_other_files_and_formats_are_refused(file, options, message, tmp_path):
    policy = ModelConfig().build_policy(Noise(VECTOR, BOX).spec)
    arguments = {"policy": policy, "path": tmp_path / file, "obs": {"policy": torch.zeros(2, 7)}}
    with pytest.raises(ExportError, match=message):
        export_policy(**(arguments | options))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_policy_trained_in_bfloat16_is_written_in_float32(tmp_path):
    env = Noise(VECTOR, BOX)
    policy = trained(network(precision="bfloat16"), env)
    inputs = collect_inputs(policy, env, 100, seed=0)
    result = export_policy(policy, tmp_path / "policy.onnx", "onnx", *inputs)
    assert result.max_difference <= 1e-5
    assert policy.actor.network.in_bfloat16  # the policy itself goes on as it is
