"""Numbers in `info` are averaged and logged as `env/<key>`, whatever else is in it."""

import json
import logging

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

import canter
from canter.envs.gymnasium import GymnasiumEnv
from canter.envs.gymnasium.infos import MAX_KEYS, InfoMeans

STEPS = 4


class Talkative(gymnasium.Env):
    """Report the step's number and much that is no number; an episode has four steps."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {"t": 1000.0, "reset": 1.0}

    def step(self, action):
        self.t += 1
        info = {
            "t": self.t,
            "even": self.t % 2 == 0,
            "single": np.float32(0.5),
            "sometimes": 1.5 if self.t == 2 else None,
            "nan": float("nan"),
            "text": "far",
            "array": np.ones(3),
            "nested": {"r": 1},
            "_mask": True,
            5: 6,
        }
        if self.t == STEPS:
            info["is_success"] = True
        return np.zeros(1, np.float32), 0.0, False, self.t == STEPS, info


EXPECTED = {"t": 2.5, "even": 0.5, "single": 0.5, "sometimes": 1.5, "is_success": 1.0}
MODES = [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED]


class Wrapped(gymnasium.vector.VectorWrapper):
    """Hide the class of a vector environment, so that it is stepped through its own `step`."""


def play(env, steps):
    env.reset(0)
    assert env.read_metrics() == {}
    for _ in range(steps):
        env.step(torch.zeros(env.spec.num_envs, dtype=torch.int64))
    means = env.read_metrics()
    assert env.read_metrics() == {}
    env.close()
    return means


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrap", [lambda env: env, Wrapped], ids=["own", "vector"])
def test_means_are_those_of_all_steps_in_every_mode(mode, wrap):
    env = wrap(SyncVectorEnv([Talkative] * 2, autoreset_mode=mode))
    means = play(GymnasiumEnv(env), 2 * (STEPS + (mode is AutoresetMode.NEXT_STEP)))
    assert means == pytest.approx(EXPECTED)


@pytest.mark.parametrize("forked", [False, True])
def test_means_of_groups_are_those_of_all_environments(forked):
    env = SyncVectorEnv([Talkative] * 4, autoreset_mode=AutoresetMode.SAME_STEP)
    assert play(GymnasiumEnv(env, groups=2, forked=forked), 2 * STEPS) == pytest.approx(EXPECTED)


def test_means_of_worker_processes():
    class Sound(Talkative):
        def step(self, action):
            obs, reward, terminated, truncated, info = super().step(action)
            return obs, reward, terminated, truncated, {key: info[key] for key in ("t", "single", "text")}

    env = AsyncVectorEnv([Sound] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    assert play(GymnasiumEnv(env), STEPS) == pytest.approx({"t": 2.5, "single": 0.5})


class Columns(VectorEnv):
    """A batch with infos of its own making."""

    num_envs = 3
    single_observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
    single_action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.vector.utils.batch_space(single_observation_space, 3)
    action_space = gymnasium.vector.utils.batch_space(single_action_space, 3)

    def __init__(self):
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def reset(self, *, seed=None, options=None):
        return np.zeros((3, 1), np.float32), {}

    def step(self, actions):
        never = np.zeros(3, bool)
        info = {
            "masked": np.array([1.0, 2.0, 99.0]),
            "_masked": np.array([True, True, False]),
            "mixed": np.array([1.0, None, "far"], dtype=object),
            "wide": np.ones((3, 2)),
            "text": np.array(["a", "b", "c"]),
        }
        return np.zeros((3, 1), np.float32), np.zeros(3), never, never, info


@pytest.mark.parametrize("vector", [SyncVectorEnv, AsyncVectorEnv])
def test_steps_before_a_reset_do_not_count(vector):
    env = GymnasiumEnv(vector([Talkative, Talkative], autoreset_mode=AutoresetMode.SAME_STEP))
    env.reset(0)
    env.step(torch.zeros(2, dtype=torch.int64))
    env.reset(0)
    assert env.read_metrics() == {}
    env.close()


def test_masks_of_a_vector_environment_are_respected():
    assert play(GymnasiumEnv(Columns()), 2) == {"masked": 1.5, "mixed": 1.0}


def test_numbers_beyond_floats_are_ignored():
    means = InfoMeans()
    means.add({"huge": 10**400, "t": 2, "": 1.0, "line\n": 1.0, "complex": 1j, "date": np.datetime64("2026-01-01")})
    assert means.read() == {"t": 2.0}


def test_keys_without_end_are_not_all_logged(caplog):
    means = InfoMeans()
    with caplog.at_level(logging.WARNING):
        for number in range(2 * MAX_KEYS):
            means.add({f"item {number}": 1.0})
    assert len(means.read()) == MAX_KEYS
    assert caplog.text.count("info has more than 50 numbers") == 1


def rows(path, **env):
    canter.train(
        Talkative,
        num_envs=2,
        total_steps=32,
        algorithm={"horizon": 8, "epochs": 1, "num_minibatches": 1},
        env=env,
        console="quiet",
        folder=canter.RunFolder(path),
        final_evaluation=False,
    )
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_a_run_logs_them_and_can_be_told_not_to(tmp_path):
    row = rows(tmp_path / "on")[-1]
    assert {name.removeprefix("env/"): row[name] for name in row if name.startswith("env/")} == pytest.approx(EXPECTED)
    row = rows(tmp_path / "off", log_info=False)[-1]
    assert not [name for name in row if name.startswith("env/")]
