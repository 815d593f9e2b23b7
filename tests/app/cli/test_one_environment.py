"""`canter train` builds its environment once: for the look before, the run and the final score."""

from dataclasses import replace

import gymnasium
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv

from canter.app.check.before_run import environment_for
from canter.app.check.random_rollout import run_random_actions
from canter.app.cli import main
from canter.config import TrainConfig
from canter.config.presets import preset_for
from canter.core.specs import reset_is_clean
from canter.envs import EnvConfig
from canter.envs.tensor import tensor_envs
from canter.play.evaluation import evaluate
from canter.play.player import random_actions
from canter.training.trainer import train


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Runs leave folders behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("canter.app.experiments.scores.EVAL_STEPS", 500)


@pytest.fixture
def builds(monkeypatch):
    """The environments that are built."""
    made, build = [], EnvConfig.build

    def count(self, device):
        made.append(build(self, device))
        return made[-1]

    monkeypatch.setattr(EnvConfig, "build", count)
    return made


def seen(env, steps=24):
    """Return the observations of random steps after `reset(7)`."""
    generator, obs = torch.Generator().manual_seed(0), env.reset(7)
    shown = [*(group.clone() for group in obs.values())]
    for _ in range(steps):
        step = env.step(random_actions(env.spec, obs, generator))
        obs = step.obs
        shown += [step.reward.clone(), step.terminated.clone(), *(group.clone() for group in obs.values())]
    return shown


KINDS = {
    **{f"tensor:{name}": {} for name in tensor_envs if not name.startswith("probe-")},
    "CartPole-v1": {},
    "Pendulum-v1": {"autoreset": "next_step"},
    "HalfCheetah-v5": {"reset_steps": 10},
}


@pytest.mark.parametrize("env_id", KINDS)
def test_a_reset_by_seed_leaves_no_trace_of_what_was_before(env_id):
    config = EnvConfig(id=env_id, num_envs=4, **KINDS[env_id])
    fresh, used = config.build("cpu"), config.build("cpu")
    run_random_actions(used, 3, steps=40, seconds=60.0)
    assert reset_is_clean(used)
    assert all(torch.equal(one, other) for one, other in zip(seen(fresh), seen(used), strict=True))
    fresh.close(), used.close()


@pytest.mark.parametrize("env_id", ["tensor:pendulum", "CartPole-v1"])
def test_a_run_and_its_score_are_the_same_with_and_without_the_look_before(env_id, capsys):
    preset = preset_for(env_id)
    algorithm = replace(preset.algorithm, horizon=16, num_minibatches=4)
    config = replace(preset, total_steps=2 * 16 * 8, algorithm=algorithm, env=replace(preset.env, num_envs=8))
    plain = train(config)
    with environment_for(config) as env:
        looked = train(config, env=env)
        score = evaluate(looked.policy, env, 8, seed=5).return_
    weights = [algorithm.policy.actor.state_dict().values() for algorithm in (plain, looked)]
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
    assert evaluate(plain.policy, config.env.build("cpu"), 8, seed=5).return_ == score


@pytest.mark.parametrize(
    ("env_id", "count"),
    [("tensor:cartpole", 1), ("CartPole-v1", 1), ("Forgetful-v0", 3)],
)
def test_it_is_built_once_unless_it_may_keep_something_over_a_reset(env_id, count, builds, capsys):
    # A class of the user's own: what else it may remember is not known here.
    gymnasium.register("Forgetful-v0", Forgetful, max_episode_steps=50)
    try:
        flags = ["--total-steps=1", "--num-envs=2", "--algorithm.horizon=8", "--algorithm.num-minibatches=1"]
        main(["train", env_id, *flags, "--console=quiet"])
    finally:
        del gymnasium.registry["Forgetful-v0"]
    assert len(builds) == count
    assert "Final score" in capsys.readouterr().out


class Forgetful(CartPoleEnv):
    """A kind of environment that nobody here knows how to save."""


def test_the_look_steps_the_environments_of_the_run_and_reports_a_few(capsys):
    config = TrainConfig(env=EnvConfig(id="tensor:cartpole", num_envs=64))
    with environment_for(config) as env:
        assert env.spec.num_envs == 64
        assert len(run_random_actions(env, 0, steps=3, seconds=60.0).reward[0]) == 4


def test_the_end_of_a_run_is_reported_with_its_condition(capsys):
    flags = ["--total-steps", "null", "--until.iterations", "2", "--console", "quiet", "--algorithm.horizon", "32"]
    main(["train", "tensor:cartpole", *flags, "--algorithm.num-minibatches", "2"])
    out = capsys.readouterr().out
    assert "until.iterations=2 in" in out
    assert "Training ended by until.iterations, after 512 steps" in out
    assert "canter resume" not in out


def test_the_number_of_threads_to_set_is_measured(capsys):
    main(["check", "tensor:cartpole", "--threads", "--algorithm.horizon", "8", "--algorithm.num-minibatches", "1"])
    out = capsys.readouterr().out
    assert "1 thread: an update takes" in out
    assert "Without the setting it is 1; the fastest here: --execution.threads " in out
