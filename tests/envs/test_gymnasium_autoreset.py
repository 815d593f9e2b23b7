"""Gymnasium adapter: reset modes that nobody declared are refused, never guessed."""

import pytest
import torch
from counter_env import MODES, Counter, counters, real_rows
from gymnasium.vector import VectorWrapper

from canter.core.registry import UserError
from canter.envs.gymnasium import GymnasiumEnv


class Undeclared(VectorWrapper):
    metadata = {}  # noqa: RUF012


class NoFinalObs(Undeclared):
    def step(self, actions):
        *out, _ = self.env.step(actions)
        return *out, {}


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_that_nobody_declared_is_refused_and_not_guessed(mode):
    vector = Undeclared(counters(mode, ((3, 5), (4,))))
    with pytest.raises(UserError, match=r"(?s)does not declare.*next_step.*same_step.*disabled.*autoreset_mode"):
        GymnasiumEnv(vector)
    env = GymnasiumEnv(vector, autoreset=mode)
    assert env.spec.final_obs == ("in_place" if mode == "next_step" else "separate")
    assert [len(row) for row in real_rows(env, 6)[0]] == [6, 6]


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
