"""Environments stepped without Gymnasium's overhead, and by several threads, against Gymnasium's own stepping."""

import threading

import gymnasium
import numpy as np
import pytest
import torch
from counter_env import Counter, counters
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from canter.envs import EnvConfig
from canter.envs.gymnasium import GymnasiumEnv, make_gymnasium
from canter.envs.gymnasium_sync import SyncSteps, threads_for


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
        obs, *rest = self.env.step(action)
        return self._pair(obs), *rest


def vector(wrap):
    makers = [lambda length=length: wrap(Counter((length, 2), mask="growing")) for length in (3, 4, 5, 3, 2)]
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)


def copied(tree):
    return {key: copied(leaf) for key, leaf in tree.items()} if isinstance(tree, dict) else np.copy(tree)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("wrap", [lambda env: env, Pair], ids=["box", "dict"])
def test_transitions_fields_and_wanted_infos_are_those_of_gymnasium(wrap, threads):
    plain, ours = vector(wrap), vector(wrap)
    steps = SyncSteps(ours, ("clock",), threads)
    for env in (plain, ours):
        env.reset(seed=[0] * 5)
    for t in range(12):
        actions = np.arange(t, t + 5) % 4
        *expected, info = plain.step(actions)
        *got, noted = steps.step(actions)
        for mine, theirs in zip(got, expected, strict=True):
            assert str(copied(mine)) == str(copied(theirs))
        assert np.array_equal(noted["clock"], info["clock"])
        assert "action_mask" not in noted
        assert str(noted.get("final_obs")) == str(info.get("final_obs"))
        assert str(noted.get("final_info", {}).get("clock")) == str(info.get("final_info", {}).get("clock"))
        for name in ("_autoreset_envs", "_terminations", "_truncations", "_rewards"):
            assert np.array_equal(getattr(ours, name), getattr(plain, name))
    steps.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_mujoco_run_is_the_same_with_any_number_of_threads_and_continues_bit_for_bit(threads):
    def rollout(env, steps):
        generator = torch.Generator().manual_seed(0)
        actions = [torch.rand((5, 3), generator=generator) * 2 - 1 for _ in range(steps)]
        return torch.stack([env.step(action).obs["policy"].clone() for action in actions])

    plain = make_gymnasium("Hopper-v5", 5, vectorization="sync")
    env = make_gymnasium("Hopper-v5", 5, vectorization="threads" if threads > 1 else "sync")
    plain.reset(3), env.reset(3)
    assert torch.equal(rollout(plain, 40), rollout(env, 40))
    plain.load_state_dict(env.state_dict())
    assert torch.equal(rollout(plain, 40), rollout(env, 40))
    plain.close(), env.close()


def test_only_plain_synchronous_environments_are_stepped_so():
    assert SyncSteps.fits(counters("same_step"))
    assert not SyncSteps.fits(counters("next_step"))
    assert not SyncSteps.fits(gymnasium.wrappers.vector.RecordEpisodeStatistics(counters("same_step")))


def test_a_mask_in_info_is_still_read():
    env = GymnasiumEnv(counters("same_step", mask="growing"))
    env.reset(seed=1)
    assert env.step(torch.zeros(2, dtype=torch.int64)).obs["action_mask"].tolist() == [[True, True, False, False]] * 2


def test_threads_are_for_many_mujoco_environments_without_a_window(monkeypatch):
    monkeypatch.setattr("canter.envs.gymnasium_sync.cores", lambda: 4)

    def made(env_id, num_envs):
        return SyncVectorEnv([lambda: gymnasium.make(env_id)] * num_envs)

    many = made("InvertedPendulum-v5", 9)
    assert [threads_for(made("CartPole-v1", 16)), threads_for(made("InvertedPendulum-v5", 3))] == [1, 1]
    assert threads_for(many) == 2
    many.render_mode = "human"
    assert threads_for(many) == 1


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
    steps = SyncSteps(env, (), 2)
    with pytest.raises(RuntimeError, match="the motor is stuck"):
        steps.step(np.zeros(2, dtype=np.int64))
    steps.close()
