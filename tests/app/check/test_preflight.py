import random
import time
import warnings
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from canter.algorithms.ppo import PPOConfig
from canter.app.check import checks as checks
from canter.app.check.checks import STEPS, check_env, preflight
from canter.app.check.plan import Plan
from canter.app.check.random_rollout import ENOUGH_STEPS
from canter.config import TrainConfig
from canter.core.specs import Step
from canter.envs import EnvConfig
from canter.envs.gymnasium import GymnasiumEnv
from canter.envs.tensor import CartPole

PLAN = Plan(total_steps=100_000, num_envs=4, horizon=128, epochs=4, num_minibatches=4, gamma=0.99, gae_lambda=0.95)


class Nasty(gymnasium.Env):
    """Random observations, reward 1, ten steps an episode; `kind` names what is wrong with it."""

    def __init__(self, kind=""):
        self.kind, self.t = kind, 0
        high = 1e9 if kind == "float64" else 1.0
        self.observation_space = spaces.Box(-high, high, (3,), np.float64 if kind == "float64" else np.float32)
        self.action_space = spaces.Box(-np.inf, np.inf, (2,)) if kind == "unbounded" else spaces.Discrete(2)
        if kind == "one choice":
            self.action_space = spaces.Discrete(1)

    def _obs(self):
        obs = self.np_random.uniform(-1, 1, 3)
        match self.kind:
            case "outside":
                obs *= 100
            case "constant":
                obs[:] = 0.5
            case "partly constant":
                obs[1] = 0.5
            case "nan observation" if self.t == 7:
                obs[1] = np.nan
            case "unseeded":
                obs = np.random.rand(3)
            case "float64":
                obs += 1e8
        return obs.astype(self.observation_space.dtype)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=1 if self.kind == "deaf" and seed is not None else seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action):
        self.t += 1
        if self.kind == "raises" and self.t == 5:
            raise ZeroDivisionError("no such wheel")
        if self.kind == "slow":
            time.sleep(0.02)
        reward = {"nan reward": np.nan, "huge": 1e7, "zero": 0.0}.get(self.kind, 1.0)
        ended = self.kind == "ends at once" or (self.kind != "never ends" and self.t >= 10)
        return self._obs(), reward, ended, False, {}


@pytest.fixture(autouse=True)
def time_enough(monkeypatch):
    """A busy machine must not change what is found."""
    monkeypatch.setattr(checks, "SECONDS", 60.0)
    monkeypatch.setattr(checks, "LONG_STEP", 0.01)


@pytest.fixture(autouse=True, scope="module")
def registered():
    gymnasium.register("Nasty-v0", Nasty)
    yield
    del gymnasium.registry["Nasty-v0"]


def config_of(kind, **env):
    return TrainConfig(env=EnvConfig(id="Nasty-v0", num_envs=4, options={"kind": kind}, **env))


def problems(kind):
    """Level, subject and text of the findings that are not ok."""
    found = preflight(config_of(kind), PLAN)
    return [(finding.level, finding.subject, finding.text) for finding in found if finding.level != "ok"]


@pytest.mark.parametrize(
    ("kind", "level", "subject", "part"),
    [
        ("nan reward", "error", "rewards", "environment 0 returned reward = nan after 1 random step"),
        ("nan observation", "error", "observations", "observation 'policy' component [1] = nan after 7 random steps"),
        ("raises", "error", "environment", "ZeroDivisionError: no such wheel (test_preflight.py, line "),
        ("outside", "warning", "warned", "obs returned by the `step()` method is not within the observation space"),
        ("float64", "warning", "observations", "policy reaches 1e+08; float32 has about seven digits"),
        ("unseeded", "warning", "seeds", "the same seed and actions gave two different trajectories"),
        ("deaf", "note", "seeds", "two seeds gave the same 32 steps"),
        ("never ends", "warning", "episodes", f"none ended within {STEPS} random steps, and no time limit"),
        ("ends at once", "warning", "episodes", "every episode ended at its first step"),
        ("huge", "warning", "rewards", "they reach 1e+07"),
        ("zero", "warning", "rewards", "all 1,024 were 0"),
        ("constant", "warning", "observations", "the policy is blind"),
        ("partly constant", "note", "observations", "1 of 3 components of policy never changed: 1"),
        ("unbounded", "note", "actions", "not all actions have finite bounds"),
        ("one choice", "warning", "actions", "nothing to learn"),
    ],
)
def test_problems_of_an_environment_are_reported(kind, level, subject, part):
    found = problems(kind)
    assert [(level, subject)] == [(a, b) for a, b, text in found if part in text], found


def test_a_healthy_environment_has_nothing_but_ok_and_every_subject():
    found = preflight(config_of(""), PLAN)
    assert {finding.level for finding in found} == {"ok"}
    assert {finding.subject for finding in found} == {
        *("observations", "actions", "autoreset", "episodes", "rewards", "seeds"),
        *("arithmetic", "foresight", "truncation", "engine", "memory", "process"),
    }
    texts = {finding.subject: finding.text for finding in found}
    assert texts["episodes"] == "100 ended in 256 random steps, after 10 steps; 100 terminated, 0 truncated"
    assert texts["rewards"] == "between 1 and 1 a step; random actions earn 10 an episode (10): the score to beat"


@pytest.mark.parametrize("kind", ["", "unseeded"])
def test_the_random_streams_of_the_process_are_left_alone(kind):
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(()).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    preflight(config_of(kind), PLAN)
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == expected


def test_the_environment_is_closed_even_if_it_breaks(monkeypatch):
    closed = []
    monkeypatch.setattr(GymnasiumEnv, "close", lambda self: closed.append(self))
    preflight(config_of("raises"), PLAN)
    assert len(closed) == 1


def test_a_slow_environment_is_not_stepped_for_long(monkeypatch):
    monkeypatch.setattr(checks, "SECONDS", 0.3)
    found = preflight(replace(config_of("slow"), env=replace(config_of("slow").env, num_envs=1)), PLAN)
    assert any(f"in {ENOUGH_STEPS} random steps" in finding.text for finding in found)


@pytest.mark.parametrize(
    ("vectorization", "advised"),
    [
        ("auto", True),
        pytest.param("sync", False, marks=pytest.mark.long),
        pytest.param("async", False, marks=pytest.mark.long),
    ],
)
def test_cores_that_could_step_a_slow_environment_are_pointed_out(monkeypatch, vectorization, advised):
    monkeypatch.setattr(checks, "SECONDS", 0.3)
    monkeypatch.setattr("canter.core.distributed.cores", lambda: 3)
    config = config_of("slow", vectorization=vectorization)
    found = preflight(replace(config, env=replace(config.env, num_envs=2)), PLAN)  # four in the run
    speed = [finding.text for finding in found if finding.subject == "speed"]
    assert bool(speed) == advised
    if advised:
        assert "4 take turns; --env.vectorization forked would share them among 3 cores" in speed[0]


def test_settings_that_cannot_work_are_an_error_among_the_other_findings():
    config = replace(config_of(""), algorithm=PPOConfig(num_minibatches=7))
    errors = [finding for finding in preflight(config, PLAN) if finding.level == "error"]
    assert [finding.subject for finding in errors] == ["settings"]
    assert "num_minibatches=7 does not divide" in errors[0].text


def test_warnings_given_on_the_way_are_findings_and_not_lost():
    config = replace(config_of(""), algorithm=PPOConfig(gamma=1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = preflight(config, PLAN)
    assert ["gamma=1" in finding.text for finding in found if finding.subject == "warned"] == [True]


def test_every_agent_of_a_world_counts_in_the_plan():
    config = TrainConfig(env=EnvConfig(id="tensor:rendezvous", num_envs=2, options={"num_agents": 3}))
    texts = [finding.text for finding in preflight(config, PLAN) if finding.level != "error"]
    assert any("batch = 128 steps x 4 envs x 3 agents = 1,536, 4 minibatches of 384" in text for text in texts)


@pytest.mark.parametrize(("mode", "text"), [("same_step", "within the same step"), ("next_step", "only resets")])
def test_the_way_of_resetting_is_reported(mode, text):
    found = preflight(config_of("", autoreset=mode), PLAN)
    assert [text in finding.text for finding in found if finding.subject == "autoreset"] == [True]


class LostFinalObs(CartPole):
    """Returns the next episode's first observation as the last of the ended one."""

    def step(self, action):
        step = super().step(action)
        return replace(step, final_obs={name: group.clone() for name, group in step.obs.items()})


def test_a_lost_last_observation_is_noticed():
    found = [finding for finding in check_env(LostFinalObs(4, "cpu"), 0)[0] if finding.subject == "autoreset"]
    assert [finding.level for finding in found] == ["ok", "warning"]
    assert "the true last one is lost" in found[1].text
    assert {finding.level for finding in check_env(CartPole(4, "cpu"), 0)[0]} == {"ok"}


class NanFinalObs(CartPole):
    """Only the last observations of episodes are NaN."""

    def step(self, action):
        step = super().step(action)
        last = {name: torch.full_like(group, torch.nan) for name, group in step.obs.items()}
        return replace(step, final_obs=last)


def test_a_last_observation_that_is_nan_is_found_among_the_observations():
    (found,) = check_env(NanFinalObs(4, "cpu"), 0)[0]
    assert (found.level, found.subject) == ("error", "observations")
    assert "returned final observation 'policy' component [0] = nan after" in found.text


class Unmarked:
    """Declares reset steps after the end of an episode and does not mark them."""

    def __init__(self):
        self.inner = CartPole(4, "cpu")
        self.spec = replace(self.inner.spec, final_obs="in_place")

    def reset(self, seed=None):
        return self.inner.reset(seed)

    def step(self, action) -> Step:
        return replace(self.inner.step(action), final_obs=None)

    def close(self):
        pass


def test_a_reset_step_that_is_not_marked_is_an_error():
    errors = [finding for finding in check_env(Unmarked(), 0)[0] if finding.level == "error"]
    assert len(errors) == 1
    assert "its next step is marked valid" in errors[0].text


def test_a_simulator_may_lose_the_last_observation_if_its_spec_says_so():
    env = Unmarked()
    env.spec = replace(env.spec, final_obs="unknown")
    found = check_env(env, 0)[0]
    assert {finding.level for finding in found} == {"ok"}
    assert any("restarts within the same step" in finding.text for finding in found)


def test_a_broken_contract_is_an_error():
    env = Unmarked()
    env.spec = replace(env.spec, final_obs="separate")
    assert [(f.level, "without Step.final_obs" in f.text) for f in check_env(env, 0)[0]] == [("error", True)]
