"""Small conveniences of Python and the command line: defaults, advice and short representations."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

import canter
from canter.app.check.plan import check_foresight
from canter.app.experiments.foreign import translate_flag, translate_key
from canter.app.experiments.scores import EVAL_EPISODES, affordable_episodes
from canter.core.registry import UserError, nearest

SHORT: dict[str, Any] = {
    "num_envs": 2,
    "total_steps": 400,
    "algorithm": {"horizon": 50, "epochs": 1, "num_minibatches": 1},
    "console": "quiet",
}


@pytest.fixture
def result(tmp_path):
    return canter.train("CartPole-v1", run_dir=tmp_path, name="a", final_evaluation=2, **SHORT)


def test_a_policy_file_names_its_environment(result, tmp_path):
    file = tmp_path / "alone.safetensors"
    result.policy.save(file)
    expected = canter.evaluate(result, episodes=4).return_
    assert canter.evaluate(file, episodes=4).return_ == expected
    assert canter.evaluate(canter.load(file), episodes=4).return_ == expected
    assert canter.evaluate(result.path / "policies/final_actor.safetensors", episodes=4).return_ == expected


def test_a_policy_without_a_name_needs_an_environment():
    with pytest.raises(UserError, match="does not name its environment"):
        canter.evaluate(canter.ModelConfig().build_policy(canter.EnvSpec({"policy": canter.TensorSpec((4,))}, *SPEC)))


SPEC = (canter.Discrete(2), 1)


def test_the_number_of_final_episodes_is_a_choice(result, tmp_path, capsys):
    assert len(result.score.return_) == 2
    none = canter.train("CartPole-v1", run_dir=tmp_path, name="b", final_evaluation=0, **SHORT)
    assert none.score is None


@pytest.mark.parametrize(("steps", "length", "episodes"), [(10_000, 100, 20), (10_000, 1, EVAL_EPISODES), (10, 500, 1)])
def test_a_final_evaluation_takes_a_fifth_of_the_steps_at_most(steps, length, episodes):
    progress: Any = SimpleNamespace(env_steps=steps, recent=deque([(0.0, length, False)] * 3))
    assert affordable_episodes(progress) == episodes


def test_without_a_recent_episode_all_are_tried():
    progress: Any = SimpleNamespace(env_steps=10, recent=deque())
    assert affordable_episodes(progress) == EVAL_EPISODES


def test_the_preset_none_is_the_defaults(run_canter):
    shown = run_canter("train", "Pendulum-v1", "--preset", "none", "--print-config")
    assert shown.code == 0, shown.err
    assert "gamma: 0.99" in shown.out
    assert "id: Pendulum-v1" in shown.out


def test_zero_final_episodes_on_the_command_line(run_canter, empty_folder):
    flags = ["--num-envs", "2", "--total-steps", "64", "--algorithm.horizon", "32", "--console", "quiet"]
    trained = run_canter("train", "CartPole-v1", *flags, "--algorithm.num-minibatches", "1", "--final-episodes", "0")
    assert trained.code == 0, trained.err
    assert "Final score" not in trained.out
    assert "is not an integer of at least 0" in run_canter("train", "CartPole-v1", "--final-episodes", "-1").err


class NoEnvironment:
    """Neither Gymnasium's interface nor Canter's."""


@pytest.mark.parametrize("task", [NoEnvironment, NoEnvironment()], ids=["class", "instance"])
def test_a_class_without_an_interface_is_refused_as_its_instance_is(task):
    with pytest.raises(TypeError, match="is not a task to train on: expected an environment id"):
        canter.train(task, folder=False, **SHORT)


def test_near_names_do_not_match_by_their_version():
    known = ["CartPole-v0", "CartPole-v1", "GymV26Environment-v0", "Pendulum-v1"]
    assert "GymV26" not in nearest("MyEnv-v0", known).partition("known")[0]
    assert nearest("CartPol-v1", known).startswith("did you mean CartPole-v1 or CartPole-v0")
    assert nearest("pendulm", known) == "did you mean Pendulum-v1?"


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("verbose", "console"),
        ("tensorboard_log", "log"),
        ("callback", "on_iteration"),
        ("policy", "algorithm.model.policy.hidden"),
        ("policy_kwargs", "algorithm.model.policy.hidden"),
        ("env_kwargs", "env.options"),
        ("eval_freq", "evaluate.every"),
        ("normalize_advantage", "algorithm.advantage_normalization"),
    ],
)
def test_names_of_stable_baselines_are_answered(name, here):
    assert f"here it is {here} (" in (translate_key(name) or "")
    assert translate_flag(f"--{name}") is not None
    unknown: Any = {name: 1}
    with pytest.raises(ValueError, match=f"here it is {here}"):
        canter.train("CartPole-v1", folder=False, console="quiet", **unknown)


def test_the_check_names_the_setting_for_tasks_that_never_end():
    plan: Any = SimpleNamespace(gamma=0.99, horizon=128, gae_lambda=0.95)
    assert "--env.reset-steps N" in check_foresight(plan, None).text
    assert "--env.reset-steps" not in check_foresight(plan, 30.0).text


def test_representations_are_short(result):
    assert repr(result.policy) == "Policy(CartPole-v1: policy [4] -> Categorical)"
    assert repr(result.score).startswith("Evaluation(mean=")
    assert len(repr(result)) < 250
