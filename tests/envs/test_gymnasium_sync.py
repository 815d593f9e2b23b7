"""Environments of this process stepped by one thread, several, or forked processes, against Gymnasium's stepping."""

import pickle
import threading
from contextlib import closing
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from counter_env import MODES, Counter, counters
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import OrderEnforcing, TimeLimit

from canter.core.specs import ContractBroken
from canter.envs import EnvConfig
from canter.envs.failures import env_number, failure
from canter.envs.gymnasium import GymnasiumEnv, make_gymnasium
from canter.envs.gymnasium.forked import ForkedStepper
from canter.envs.gymnasium.sync import SyncStepper, choose_groups
from canter.envs.gymnasium.vector import VectorStepper
from canter.envs.gymnasium.workers import AsyncStepper


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr("canter.core.distributed.cores", lambda: 2)


class Pair(gymnasium.Wrapper):
    """The counter's observation under two keys."""

    def __init__(self, env):
        super().__init__(env)
        self.observation_space = spaces.Dict({"a": env.observation_space, "b": spaces.Discrete(1000)})

    def _pair(self, obs):
        return {"a": obs, "b": int(obs[0])}

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        return self._pair(obs), info

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self._pair(obs), reward, terminated, truncated, info


def vector(wrap, mode) -> Any:
    makers = [lambda length=length: wrap(Counter((length, 2), mask="growing")) for length in (3, 4, 5, 3, 2)]
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode[mode.upper()])


def copied(tree):
    return {key: copied(leaf) for key, leaf in tree.items()} if isinstance(tree, dict) else np.copy(tree)


WRAPPERS = {
    "box": lambda env: env,
    "dict": Pair,
    "as made by gymnasium": lambda env: TimeLimit(OrderEnforcing(env), 3),
    "limited": lambda env: TimeLimit(env, 3),
    "limited twice": lambda env: TimeLimit(TimeLimit(OrderEnforcing(env), 3), 2),
    "ordered": OrderEnforcing,
    "limited outside": lambda env: TimeLimit(Pair(OrderEnforcing(env)), 3),
}


@pytest.mark.parametrize(
    ("mode", "groups", "forked"),
    [
        ("same_step", 1, False),
        ("same_step", 2, False),
        ("same_step", 3, False),
        ("same_step", 1, True),
        ("same_step", 2, True),
        ("next_step", 1, False),
        ("disabled", 1, False),
    ],
)
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_transitions_fields_and_requested_infos_are_those_of_gymnasium(wrap, mode, groups, forked):
    plain, ours = vector(wrap, mode), vector(wrap, mode)
    steps = (ForkedStepper if forked else SyncStepper)(ours, groups)
    steps.info_keys = ("clock", "action_mask")
    expected, info = plain.reset(seed=[0] * 5)
    got, found = steps.reset([0] * 5)
    assert str(copied(got)) == str(copied(expected)) and str(found) == str(info)
    for t in range(12):
        actions = np.arange(t, t + 5) % 4
        *expected, info = plain.step(actions)
        *got, noted = steps.step(actions)
        for mine, theirs in zip(got, expected, strict=True):
            assert str(copied(mine)) == str(copied(theirs))
        assert np.array_equal(noted["clock"], info["clock"])
        assert str(noted["action_mask"]) == str(info["action_mask"])
        assert str(noted.get("final_obs")) == str(info.get("final_obs"))
        assert str(noted.get("final_info", {}).get("clock")) == str(info.get("final_info", {}).get("clock"))
        for number in [] if forked else range(5):  # or they are in other processes
            mine, theirs = ours.envs[number], plain.envs[number]
            assert getattr(mine, "_elapsed_steps", None) == getattr(theirs, "_elapsed_steps", None)
        for name in ("_autoreset_envs", "_terminations", "_truncations", "_rewards"):
            assert np.array_equal(getattr(ours, name), getattr(plain, name))
        ended = plain._autoreset_envs.copy()
        if mode == "disabled" and ended.any():
            expected, info = plain.reset(options={"reset_mask": ended})
            got, found = steps.reset(mask=ended)
            assert str(copied(got)) == str(copied(expected)) and str(found) == str(info)
            assert not ours._autoreset_envs.any() and not ours._truncations.any()
    steps.close()


def test_without_a_reset_gymnasium_says_so():
    env = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")], autoreset_mode=AutoresetMode.SAME_STEP)
    steps = SyncStepper(env)
    with pytest.raises(gymnasium.error.ResetNeeded):
        steps.step(np.zeros(1, dtype=np.int64))
    steps.close()


@pytest.mark.parametrize("vectorization", ["sync", "threads", "forked"])
def test_a_mujoco_run_is_the_same_however_it_is_stepped_and_continues_bit_for_bit(vectorization, two_cores):
    def rollout(env, steps):
        generator = torch.Generator().manual_seed(0)
        actions = [torch.rand((5, 3), generator=generator) * 2 - 1 for _ in range(steps)]
        return torch.stack([env.step(action).obs["policy"].clone() for action in actions])

    plain = make_gymnasium("Hopper-v5", 5, vectorization="sync")
    env = make_gymnasium("Hopper-v5", 5, vectorization=vectorization)
    plain.reset(3), env.reset(3)
    assert torch.equal(rollout(plain, 40), rollout(env, 40))
    plain.load_state_dict(env.state_dict())
    assert torch.equal(rollout(plain, 40), rollout(env, 40))
    env.load_state_dict(plain.state_dict())
    assert torch.equal(rollout(plain, 40), rollout(env, 40))
    assert torch.equal(plain.reset()["policy"], env.reset()["policy"])  # without a seed random streams go on
    assert torch.equal(rollout(plain, 40), rollout(env, 40))
    plain.close(), env.close()


@pytest.mark.parametrize("mode", MODES)
def test_each_kind_of_vector_environment_has_its_stepper(mode):
    class Derived(SyncVectorEnv):
        pass

    kinds: Any = ((SyncVectorEnv, SyncStepper), (AsyncVectorEnv, AsyncStepper), (Derived, VectorStepper))
    for vector, stepper in kinds:
        with closing(GymnasiumEnv(counters(mode, vector=vector))) as env:
            assert type(env._stepper) is stepper
    recorded = gymnasium.wrappers.vector.RecordEpisodeStatistics(counters(mode))
    assert type(GymnasiumEnv(recorded)._stepper) is VectorStepper


class Failing(Counter):
    """Raises in its reset or step after a number of calls."""

    def __init__(self, call, calls):
        super().__init__()
        self.left = {call: calls}

    def reset(self, **kwargs):
        self._count("reset")
        return super().reset(**kwargs)

    def step(self, action):
        self._count("step")
        return super().step(action)

    def _count(self, call):
        if call in self.left:
            self.left[call] -= 1
            if self.left[call] < 0:
                raise KeyError("joint")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrap", [lambda env: env, gymnasium.wrappers.vector.RecordEpisodeStatistics])
@pytest.mark.parametrize(("call", "calls"), [("step", 2), ("reset", 1), ("reset", 2)])
def test_an_error_carries_the_number_of_its_environment(mode, wrap, call, calls):
    makers = [Counter, lambda: Failing(call, calls), Counter]
    env = GymnasiumEnv(wrap(SyncVectorEnv(makers, autoreset_mode=AutoresetMode[mode.upper()])))
    with pytest.raises(KeyError) as raised:
        env.reset(0)
        for _ in range(20):
            env.step(torch.zeros(3, dtype=torch.int64))
    assert env_number(raised.value) == 1
    assert "in environment 1" in raised.value.__notes__
    message = str(failure(raised.value, call, 7))
    assert message.startswith(f"environment 1 failed at its step 7: {call}() raised KeyError: 'joint' (")
    assert env_number(pickle.loads(pickle.dumps(raised.value))) == 1


@pytest.mark.parametrize("wrap", [lambda env: env, gymnasium.wrappers.vector.RecordEpisodeStatistics])
def test_a_reset_that_breaks_the_contract_names_its_environment(wrap):
    class Short(Counter):
        def reset(self, **kwargs):
            obs, info = super().reset(**kwargs)
            return obs[:1], info

    vector = wrap(SyncVectorEnv([Counter, Short], autoreset_mode=AutoresetMode.SAME_STEP))
    with pytest.raises(ContractBroken) as raised:
        GymnasiumEnv(vector)  # which resets, to see if there is an action mask
    message = str(failure(raised.value, "reset", None))
    assert message == "environment 1: reset() returned an observation of shape (1,), its space has (2,)"


def test_a_mask_in_info_is_still_read():
    env = GymnasiumEnv(counters("same_step", mask="growing"))
    env.reset(seed=1)
    assert env.step(torch.zeros(2, dtype=torch.int64)).obs["action_mask"].tolist() == [[True, True, False, False]] * 2


def test_groups_are_for_many_mujoco_environments_without_a_window(monkeypatch):
    monkeypatch.setattr("canter.core.distributed.cores", lambda: 4)

    def made(env_id, num_envs):
        return SyncVectorEnv([lambda: gymnasium.make(env_id)] * num_envs)

    def groups(env):
        return choose_groups(env, "auto")["groups"]

    many = made("InvertedPendulum-v5", 9)
    assert [groups(made("CartPole-v1", 16)), groups(made("InvertedPendulum-v5", 3))] == [1, 1]
    assert groups(many) == 2
    many.render_mode = "human"
    assert groups(many) == 1


def test_closing_ends_the_threads():
    before = set(threading.enumerate())
    env = EnvConfig(id="InvertedPendulum-v5", num_envs=4, vectorization="threads", options={}).build("cpu")
    env.reset(0)
    env.step(torch.zeros(4, 1))
    env.close()
    assert set(threading.enumerate()) <= before  # threads of earlier tests may have ended meanwhile


def test_an_error_of_an_environment_comes_through_from_any_thread():
    class Broken(Counter):
        def step(self, action):
            raise RuntimeError("the motor is stuck")

    env = SyncVectorEnv([Counter, Broken], autoreset_mode=AutoresetMode.SAME_STEP)
    env.reset()
    steps = SyncStepper(env, 2)
    with pytest.raises(RuntimeError, match="the motor is stuck"):
        steps.step(np.zeros(2, dtype=np.int64))
    steps.close()
