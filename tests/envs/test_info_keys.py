"""Entries of `info` that the settings request: one or several, present or refused."""

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from counter_env import MODES, Counter
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

import canter
from canter.app.cli import main
from canter.core.registry import UserError
from canter.core.specs import ContractBroken
from canter.envs.gymnasium import GymnasiumEnv
from canter.training.guard import RunFailed


class Timed(gymnasium.Wrapper):
    """Reports a duration at every step, or only at every second one."""

    def __init__(self, env, gaps=False, duration=2.0):
        super().__init__(env)
        self.gaps = gaps
        self.duration = duration
        self.steps = 0

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.steps += 1
        if not (self.gaps and self.steps % 2):
            info["duration"] = self.duration
        return obs, reward, terminated, truncated, info


def timed(mode="same_step", vector: Any = SyncVectorEnv, **kwargs):
    makers = [lambda lengths=lengths: Timed(Counter(lengths), **kwargs) for lengths in ((3,), (4,))]
    return vector(makers, autoreset_mode=AutoresetMode[mode.upper()])


@pytest.mark.parametrize("mode", MODES)
def test_a_text_is_one_key_of_info(mode):
    env = GymnasiumEnv(timed(mode), info_keys="duration")
    env.reset()
    for _ in range(9):
        step = env.step(torch.zeros(2, dtype=torch.int64))
        assert list(step.info) == ["duration"] and (step.info["duration"][step.valid] == 2).all()
    assert env.spec.durations and env.absent_info() is None


def test_a_step_without_a_duration_is_refused():
    env = GymnasiumEnv(timed(gaps=True), info_keys=["duration"])
    env.reset()
    with pytest.raises(ContractBroken, match=r"no info\['duration'\].*info has clock"):
        env.step(torch.zeros(2, dtype=torch.int64))


def test_time_does_not_run_backwards():
    env = GymnasiumEnv(timed(duration=-1.5), info_keys="duration")
    env.reset()
    with pytest.raises(ContractBroken, match=r"info\['duration'\] = -1\.5, below 0"):
        env.step(torch.zeros(2, dtype=torch.int64))


def test_a_task_in_which_no_time_passes_is_refused():
    env = GymnasiumEnv(timed(duration=0), info_keys="duration")
    env.reset()
    env.step(torch.zeros(2, dtype=torch.int64))
    assert "was 0 in every step" in (env.absent_info() or "")


def test_a_duration_that_is_no_number_is_refused():
    env = GymnasiumEnv(timed(duration=None), info_keys="duration")
    env.reset()
    with pytest.raises(ContractBroken, match=r"every step must have; info\['duration'\] is not a number"):
        env.step(torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("vector", [SyncVectorEnv, AsyncVectorEnv])
def test_a_key_of_info_that_never_appears_is_named_with_those_that_do(vector):
    env = GymnasiumEnv(timed(vector=vector), info_keys=("clock", "clocks"))
    env.reset()
    env.step(torch.zeros(2, dtype=torch.int64))
    advice = env.absent_info() or ""
    assert "never returned info['clocks']" in advice and "did you mean clock?" in advice
    env.close()


def test_names_of_info_must_be_texts():
    keys: Any = [3]
    with pytest.raises(UserError, match="info_keys=\\[3\\]"):
        GymnasiumEnv(timed(), info_keys=keys)


class Queue(gymnasium.Env):
    """Every step takes two units of time."""

    observation_space = spaces.Box(-1, 1, (2,))
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), {}

    def step(self, action):
        ended = self.np_random.random() < 0.05
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), 1.0, False, ended, {"duration": 2.0, "length": 3}


@pytest.fixture
def queue():
    gymnasium.register("Queue-v0", lambda **kwargs: Queue(), disable_env_checker=True)
    yield "Queue-v0"
    del gymnasium.registry["Queue-v0"]


@pytest.mark.parametrize("keys", ["duration", "duration,length", "[duration]"])
def test_keys_of_info_may_be_one_name_or_several_with_commas(capsys, queue, keys):
    assert main(["check", queue, "--env.options.info-keys", keys]) in (None, 0)
    assert "Ready to train: 0 errors" in capsys.readouterr().out


def test_a_key_of_info_that_never_appears_is_refused(capsys, queue):
    with pytest.raises(SystemExit) as leaving:
        main(["check", queue, "--env.options.info-keys", "durations"])
    assert leaving.value.code == 1
    assert "never returned info['durations']" in capsys.readouterr().out


def test_the_first_rollout_refuses_a_key_of_info_that_never_appears(queue):
    env = canter.EnvConfig(id=queue, options={"info_keys": "durations"})
    with (
        pytest.raises(RunFailed, match="did you mean duration"),
        canter.Trainer(canter.TrainConfig(env=env)) as trainer,
    ):
        trainer.learn(1)


def test_the_reward_per_unit_of_time_counts_durations(queue):
    rates = []

    def note(report):
        rates.append(report.metrics.get("lta/mean"))

    canter.train(
        queue,
        note,
        total_steps=30_000,
        console="quiet",
        folder=False,
        final_evaluation=False,
        env={"options": {"info_keys": "duration"}},
        algorithm={"epochs": 1},
    )
    assert rates[-1] == pytest.approx(0.5)


def test_options_of_an_environment_that_is_made_already_are_refused():
    with pytest.raises(UserError, match=r"env\.options=.*would have no effect"):
        canter.train(Queue(), console="quiet", folder=False, env={"options": {"info_keys": "duration"}})
