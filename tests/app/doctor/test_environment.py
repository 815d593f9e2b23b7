"""`canter doctor ENV`: what random and constant actions earn, and faults that they show before a run."""

import json

import gymnasium
import pytest

import canter
from canter.app.cli import main


@pytest.fixture(autouse=True)
def slow_environment(monkeypatch):
    """Play only the rollouts that rules need, as in an environment that is slow."""
    monkeypatch.setattr("canter.app.doctor.environment.SECONDS", 0.0)


def test_baselines_of_cartpole_have_the_lengths_of_its_physics():
    diagnosis = canter.diagnose_env("CartPole-v1")
    assert diagnosis.findings == []
    random, left, right = (baseline.plain() for baseline in diagnosis.baselines)
    assert [random["policy"], left["policy"], right["policy"]] == ["random", "action 0", "action 1"]
    assert 18 < random["return"] < 27  # 22 in the literature
    assert 8 < left["return"] < 11 and 8 < right["return"] < 11  # a constant push falls in 8 to 10 steps
    assert random["return"] == random["length"]
    assert random["terminated"] == 1
    assert (random["reward_min"], random["reward_max"]) == (1, 1)


class Negative(gymnasium.RewardWrapper):
    def reward(self, reward):
        return -float(reward)


class Deaf(gymnasium.Wrapper):
    def step(self, action):
        return self.env.step(self.env.action_space.sample())


class Late(gymnasium.Wrapper):
    """Reports its time limit as a termination."""

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, reward, terminated or truncated, False, info


class Blind(gymnasium.ObservationWrapper):
    def observation(self, observation):
        return 0.0 * observation


@pytest.mark.parametrize(
    "wrapper, env_id, settings, rule",
    [
        (Negative, "CartPole-v1", {}, "dying_pays"),
        (Deaf, "CartPole-v1", {}, "no_effect"),
        pytest.param(Deaf, "Pendulum-v1", {}, "no_effect", marks=pytest.mark.long),
        (Late, "Pendulum-v1", {}, "deadline_terminates"),
        (Blind, "Pendulum-v1", {}, "blind"),
        (gymnasium.Wrapper, "Pendulum-v1", {"algorithm": {"gamma": 0.5}}, "short_discount"),
        (gymnasium.Wrapper, "Pendulum-v1", {"algorithm": {"model": {"normalize_value": False}}}, None),
        (gymnasium.Wrapper, "Pendulum-v1", {"success": {"min_return": -5000.0, "ending": "any"}}, "success_from_start"),
    ],
)
def test_faults_are_found_before_anything_is_trained(wrapper, env_id, settings, rule):
    diagnosis = canter.diagnose_env(lambda: wrapper(gymnasium.make(env_id)), num_envs=8, **settings)
    assert [finding.rule for finding in diagnosis.findings] == ([] if rule is None else [rule])


def test_the_command_prints_baselines_findings_and_the_next_command(capsys):
    main(["doctor", "Pendulum-v1", "--algorithm.gamma", "0.5"])
    text = capsys.readouterr().out
    assert "all highest" in text
    assert "evidence  length 200 at step" in text
    assert "train Pendulum-v1 --algorithm.gamma 0.99" in text
    main(["doctor", "Pendulum-v1", "--json"])
    plain = json.loads(capsys.readouterr().out)
    assert plain["findings"] == []
    assert [baseline["policy"] for baseline in plain["baselines"]] == ["random", "zero", "all lowest", "all highest"]


def test_errors_name_the_environment_and_the_flag(capsys):
    with pytest.raises(SystemExit):
        main(["doctor", "CartPole-v1", "--try"])
    assert "--try continues a run" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["doctor", "CartPole-v99"])
    assert "did you mean CartPole-v1" in capsys.readouterr().err
