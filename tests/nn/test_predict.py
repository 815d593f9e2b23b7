"""Policies for NumPy: one observation or a batch, an array or a dict, with memory or without."""

from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from canter.core.declarations import OneHotGroup, OwnArrays
from canter.core.specs import Continuous, Discrete, EnvSpec, TensorSpec
from canter.envs.gymnasium import GymnasiumEnv
from canter.nn.actor_critic import ModelConfig
from canter.nn.arrays import obs_to_arrays
from canter.nn.network import NetworkConfig
from canter.nn.policy_file import PolicyFileCorrupt, policy_info, write_policy_file
from canter.nn.policy_loading import load_policy
from canter.nn.rnn import RNNConfig


def policy(obs, action, discrete=(), **network):
    """A policy for these observations; those of the names `discrete` are of Discrete spaces."""
    one_hot = tuple(OneHotGroup(name, (), obs[name].shape, (0,)) for name in discrete)
    own_arrays = OwnArrays(choices=one_hot)
    spec = EnvSpec(obs=obs, action=action, num_envs=1, device=torch.device("cpu"), own_arrays=own_arrays)
    groups = tuple(name for name in obs if name != "action_mask")
    return ModelConfig(policy=NetworkConfig(obs_groups=groups, **network)).build_policy(spec)


def test_one_observation_returns_one_action_and_a_batch_a_batch():
    torch.manual_seed(0)
    acting = policy({"policy": TensorSpec((3,))}, Continuous((-1.0, -1.0), (1.0, 1.0)))
    batch = np.random.default_rng(0).normal(size=(5, 3))  # float64, as NumPy has it
    actions, state = acting.predict(batch)
    assert actions.shape == (5, 2)
    assert state == ()
    assert np.allclose(acting.predict(batch[2])[0], actions[2], atol=1e-6)
    assert (acting.predict(batch, deterministic=False)[0] != actions).all()
    expected, _ = acting.act({"policy": torch.tensor(batch, dtype=torch.float32)})
    assert np.array_equal(actions, expected.numpy())


def test_dicts_discrete_actions_and_masks_are_read_as_the_environment_returns_them():
    specs = {"arm/joints": TensorSpec((2,)), "gear": TensorSpec((4,)), "action_mask": TensorSpec((3,), torch.bool)}
    acting = policy(specs, Discrete(3), discrete=("gear",))
    one = {"arm": {"joints": np.ones(2)}, "gear": np.int64(2), "action_mask": np.array([0, 1, 0])}
    assert acting.predict(one)[0] == 1
    many = {"arm/joints": np.ones((6, 2)), "gear": np.array([0, 1, 2, 3, 0, 1]), "action_mask": np.eye(3)[[2] * 6]}
    assert acting.predict(many)[0].tolist() == [2] * 6
    del one["action_mask"]  # whoever gives none allows everything
    assert acting.predict(one)[0] in (0, 1, 2)


def test_as_many_choices_as_there_are_to_choose_from_are_a_batch():
    torch.manual_seed(0)
    acting = policy(
        {"joints": TensorSpec((2,)), "gear": TensorSpec((3,))}, Continuous((-1.0,), (1.0,)), discrete=("gear",)
    )
    single = [acting.predict({"joints": np.ones(2), "gear": gear})[0] for gear in range(3)]
    together, _ = acting.predict({"joints": np.ones((3, 2)), "gear": np.arange(3)})
    assert np.allclose(together, single, atol=1e-6)
    alone = policy({"policy": TensorSpec((3,))}, Discrete(2), discrete=("policy",))
    assert alone.predict(np.arange(3)[:, None])[0].shape == (3,)
    with pytest.raises(ValueError, match="observation 'policy' is 7; expected integers from \\[0\\] to \\[2\\]"):
        alone.predict(7)


@pytest.mark.parametrize("obs", [[0, 0, 0], 2, np.int64(2), [[1], [2]], np.zeros((2, 3), int)])
def test_integers_are_numbers_in_a_space_that_is_not_discrete(obs):
    acting = policy({"policy": TensorSpec((4,))}, Discrete(2))
    with pytest.raises(ValueError, match=r"observation 'policy' has shape .*; expected \(4,\)"):
        acting.predict(obs)
    assert acting.predict([1, 0, 0, 2])[0].shape == ()
    assert acting.predict(np.zeros((3, 4), int))[0].shape == (3,)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_observations_that_are_not_finite_are_refused(bad):
    acting = policy({"policy": TensorSpec((3,))}, Discrete(2))
    with pytest.raises(ValueError, match=rf"observation 'policy' is {bad} at \[1, 2\]; expected finite numbers"):
        acting.predict([[0.0, 0.0, 0.0], [0.0, 0.0, bad]])


@pytest.mark.parametrize(
    ("obs", "message"),
    [
        ([0.0, 1e300, 0.0], r"is 1e\+300 at \[1\]; expected finite numbers"),
        ([0, None, 0], "has the dtype object; expected real numbers"),
        ([0, 1j, 0], "has the dtype complex128; expected real numbers"),
        (["a", "b", "c"], "has the dtype <U1; expected real numbers"),
    ],
)
def test_observations_that_are_no_float32_are_refused(obs, message):
    with pytest.raises(ValueError, match=message):
        policy({"policy": TensorSpec((3,))}, Discrete(2)).predict(obs)


def test_recurrence_continues_with_the_state_and_restarts_without_it():
    torch.manual_seed(0)
    acting = policy({"policy": TensorSpec((2,))}, Continuous((-1.0,), (1.0,)), rnn=RNNConfig(hidden=4))
    first, state = acting.predict(np.ones(2))
    second, state = acting.predict(np.ones(2), state)
    assert not np.allclose(first, second, atol=1e-9)
    assert np.array_equal(acting.predict(np.ones(2))[0], first)
    assert np.array_equal(acting.predict(np.ones((1, 2)), state, reset=[True])[0][0], first)


@pytest.mark.parametrize(
    ("obs", "message"),
    [
        (np.ones(4), r"observation 'policy' has shape \(4,\); expected \(3,\)"),
        ({"other": np.ones(3)}, "observation 'policy' is missing; given: other"),
    ],
)
def test_mismatches_are_named(obs, message):
    with pytest.raises(ValueError, match=message):
        policy({"policy": TensorSpec((3,))}, Discrete(2)).predict(obs)


def test_an_array_for_several_groups_is_refused():
    acting = policy({"a": TensorSpec((3,)), "b": TensorSpec((1,))}, Discrete(2))
    with pytest.raises(ValueError, match="array, but the policy has the observations a, b: pass a dict"):
        acting.predict(np.ones(3))
    with pytest.raises(ValueError, match="different numbers of environments"):
        acting.predict({"a": np.ones((2, 3)), "b": np.ones((4, 1))})
    assert acting.predict({"a": np.ones((2, 3)), "b": np.ones(2)})[0].shape == (2,)


class Anything(gymnasium.Env):
    """Shows random observations of a space and refuses what is not in the other."""

    def __init__(self, observed=None, acted=None):
        self.observation_space = observed or spaces.Box(-1.0, 1.0, (3,), np.float64)
        self.action_space = acted or spaces.Box(-2.0, 5.0, (2,), np.float64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        return self.observation_space.sample(), 0.0, False, False, {}


BELOW = np.array([0.0, -np.inf], np.float32), np.array([np.inf, 1.0], np.float32)
SPACES = {
    "choice": {"observed": spaces.Discrete(5, start=2)},
    "choices": {"observed": spaces.MultiDiscrete([3, 4])},
    "table": {"observed": spaces.MultiDiscrete([[3, 4], [2, 5]], start=[[1, 1], [-1, 7]])},  # pyright: ignore[reportArgumentType]
    "flags": {"observed": spaces.MultiBinary(4)},
    "number": {"observed": spaces.Box(-1.0, 1.0, (), np.float32)},
    "dict": {
        "observed": spaces.Dict({"arm": spaces.Dict({"a": spaces.Box(-1.0, 1.0, (2,))}), "k": spaces.Discrete(3)})
    },
    "act: choice": {"acted": spaces.Discrete(3, start=-1)},
    "act: table": {"acted": spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[1, 0], [0, -2]])},  # pyright: ignore[reportArgumentType]
    "act: flags": {"acted": spaces.MultiBinary((2, 2))},
    "act: matrix": {"acted": spaces.Box(-1.0, 1.0, (2, 2), np.float32)},
    "act: whole numbers": {"acted": spaces.Box(0, 3, (2,), np.int64)},
    "act: one bound each": {"acted": spaces.Box(*BELOW)},
}


@pytest.mark.filterwarnings("ignore:.*length of a multi-dimensional")
@pytest.mark.parametrize("name", SPACES)
def test_environment_observations_are_read_and_its_actions_are_returned(name, tmp_path):
    torch.manual_seed(0)
    env = GymnasiumEnv(SyncVectorEnv([lambda: Anything(**SPACES[name])]))
    groups = tuple(env.spec.obs)
    made = ModelConfig(policy=NetworkConfig(obs_groups=groups)).build_policy(env.spec)
    made.save(tmp_path / "a.safetensors")
    alone = Anything(**SPACES[name])
    seen = [alone.reset(seed=seed)[0] for seed in range(4)]
    for acting in (made, load_policy(tmp_path / "a.safetensors")):
        for seed, raw in enumerate(seen):
            groups, _ = obs_to_arrays(raw, acting.spec, acting.reads)
            for group, wanted in groups_of(env, alone, seed).items():
                assert np.array_equal(groups[group], wanted)
            action, _ = acting.predict(raw, deterministic=False)
            assert alone.action_space.contains(action), action
        batch = gymnasium.vector.utils.concatenate(
            alone.observation_space, seen, gymnasium.vector.utils.create_empty_array(alone.observation_space, 4)
        )
        assert len(acting.predict(batch)[0]) == 4
        assert np.allclose(acting.predict(batch)[0], [acting.predict(raw)[0] for raw in seen], atol=1e-5)
    for _ in range(20):
        env.step(made.act(env.reset(seed=0), deterministic=False)[0])


def groups_of(env, alone, seed):
    """Return the adapter's groups of the first observation after a reset by this seed."""
    raw = alone.reset(seed=seed)[0]
    one = gymnasium.vector.utils.create_empty_array(alone.observation_space, 1)
    buffer = env._reader.buffer()
    env._reader.write(buffer, gymnasium.vector.utils.concatenate(alone.observation_space, [raw], one))
    return buffer.arrays


def test_choices_that_do_not_exist_are_named():
    env = GymnasiumEnv(SyncVectorEnv([lambda: Anything(observed=spaces.MultiDiscrete([3, 4], start=[1, 0]))]))
    acting = ModelConfig().build_policy(env.spec)
    with pytest.raises(ValueError, match=r"observation 'policy' is \[0 2\]; expected integers from \[1 0\] to \[3 3\]"):
        acting.predict(np.array([0, 2]))


@pytest.mark.parametrize(
    "own",
    [
        {"action": {"shape": [2], "dtype": "object"}},
        {"action": {"shape": [2], "dtype": "nonsense"}},
        {"choices": [{"group": "policy", "shape": [], "options": [1 << 40], "start": [0]}]},
        {"choices": [{"group": "other", "shape": [], "options": [3], "start": [0]}]},
        {"unknown": 1},
    ],
)
def test_a_file_with_other_arrays_than_its_observations_is_refused(own, tmp_path):
    acting = policy({"policy": TensorSpec((3,))}, Continuous((-1.0, -1.0), (1.0, 1.0)))
    info = policy_info(acting)
    write_policy_file(tmp_path / "a.safetensors", replace(info, env=info.env | {"own_arrays": own}), {})
    with pytest.raises(PolicyFileCorrupt, match="its model cannot be built"):
        load_policy(tmp_path / "a.safetensors")
