"""Gymnasium adapter: reset modes that nobody declared are proven or refused, never guessed."""

import gymnasium
import numpy as np
import pytest
import torch
from counter_env import MODES, Counter, counters, real_rows
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv, VectorEnv, VectorWrapper

from canter.envs.gymnasium import GymnasiumEnv


class Undeclared(VectorWrapper):
    metadata = {}  # noqa: RUF012


class NoFinalObs(Undeclared):
    def step(self, actions):
        *out, _ = self.env.step(actions)
        return *out, {}


class NoReward(Undeclared):
    def step(self, actions):
        obs, reward, *out = self.env.step(actions)
        return obs, reward * 0, *out


class FirstStepUnpaid(gymnasium.RewardWrapper):
    def reward(self, reward):
        return reward * (self.unwrapped.t > 1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedules", [((3, 5), (4,)), ((1,),), ((7,), (7,), (7,))])
def test_undeclared_mode_is_found(mode, schedules):
    env = GymnasiumEnv(Undeclared(counters(mode, schedules)))
    assert env.spec.final_obs == ("in_place" if mode == "next_step" else "separate")
    assert [len(row) for row in real_rows(env, 6)[0]] == [6] * len(schedules)


class SilentlyEnded(VectorEnv):
    """Without autoreset and without complaint: a finished row reports its end until it is reset."""

    num_envs = 2
    single_observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)
    single_action_space = spaces.Discrete(2)
    observation_space = spaces.Box(-np.inf, np.inf, (2, 1), np.float64)
    action_space = spaces.MultiDiscrete([2, 2])
    heeds_mask = True

    def reset(self, *, seed=None, options=None):
        mask = (options or {}).get("reset_mask", np.ones(2, bool)) if self.heeds_mask else np.ones(2, bool)
        self.t = np.where(mask, 0, self.t) if options else np.zeros(2)
        return self.t[:, None].copy(), {}

    def step(self, actions):
        self.t = self.t + 1
        return self.t[:, None].copy(), np.ones(2), self.t >= [3, 7], np.zeros(2, bool), {}


class IgnoresMask(SilentlyEnded):
    heeds_mask = False


def test_rows_that_stay_ended_until_reset_are_found():
    env = GymnasiumEnv(SilentlyEnded())
    env.reset()
    steps = [env.step(torch.zeros(2, dtype=torch.int64)) for _ in range(3)]
    assert steps[-1].obs["policy"].tolist() == [[0], [3]] and steps[-1].final_obs["policy"][0].tolist() == [3]


@pytest.mark.parametrize(
    "make",
    [
        lambda: NoFinalObs(counters("same_step")),
        lambda: NoFinalObs(counters("same_step", ((1,),))),
        lambda: NoFinalObs(SyncVectorEnv([lambda: FirstStepUnpaid(Counter((3,)))], autoreset_mode="SameStep")),
        lambda: NoReward(counters("next_step")),
        lambda: Undeclared(counters("same_step", ((10**6,),))),
        lambda: Undeclared(counters("same_step", mask="growing")),
        IgnoresMask,
    ],
)
def test_undeclared_mode_is_not_guessed(make):
    with pytest.raises(ValueError, match=r"(?s)next_step.*same_step.*disabled.*autoreset_mode"):
        GymnasiumEnv(make(), probe_steps=50)
    assert GymnasiumEnv(make(), autoreset="next_step").spec.final_obs == "in_place"


def test_deterministic_start_proves_next_step_without_rewards():
    class SameStart(gymnasium.ObservationWrapper):
        def observation(self, observation):
            return observation % 100

    vector = SyncVectorEnv([lambda: SameStart(Counter((3,)))])
    assert GymnasiumEnv(NoReward(vector)).spec.final_obs == "in_place"


def test_declared_mode_may_be_a_string_but_not_contradicted():
    vector = Undeclared(counters("same_step"))
    vector.metadata = {"autoreset_mode": "same_step"}
    assert GymnasiumEnv(vector).spec.final_obs == "separate"
    with pytest.raises(ValueError, match="contradicts"):
        GymnasiumEnv(counters("same_step"), autoreset="next_step")
    with pytest.raises(ValueError, match="unknown"):
        GymnasiumEnv(Undeclared(counters("same_step")), autoreset="sometimes")


def test_same_step_without_last_observation_is_refused_when_it_matters():
    env = GymnasiumEnv(NoFinalObs(counters("same_step", ((1,),))), autoreset="same_step")
    env.reset()
    with pytest.raises(ValueError, match="final_obs"):
        env.step(torch.tensor([0]))


def test_single_environment_is_refused():
    with pytest.raises(TypeError, match="SyncVectorEnv"):
        GymnasiumEnv(Counter())
