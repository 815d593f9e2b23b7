import time
from dataclasses import replace

import gymnasium
import pytest
import torch

import canter
from canter.config.presets import preset_for
from canter.envs.gymnasium import GymnasiumEnv
from canter.envs.wrappers import FiniteHorizon
from canter.runs.records import read_record
from canter.runs.run_folder import CheckpointConfig, RunFolder
from canter.training.callbacks import count_arguments
from canter.training.trainer import Trainer, train


def short(env_id, steps=500, seed=0, **env):
    """Return the preset of a task with rollouts of 32 steps in 8 environments."""
    config = preset_for(env_id)
    algorithm = replace(config.algorithm, horizon=32, epochs=2, num_minibatches=4)
    env = replace(config.env, **{"num_envs": 8} | env)
    return replace(config, total_steps=steps, seed=seed, env=env, algorithm=algorithm)


def test_a_run_counts_every_step_and_ends_at_its_budget():
    reports = []
    train(short("CartPole-v1", steps=900), reports.append)
    assert [report.env_steps for report in reports] == [256, 512, 768, 1024]
    assert reports[-1].episodes > 20
    assert reports[-1].return_ == reports[-1].length
    assert all(isinstance(value, float) for value in reports[-1].metrics.values())


@pytest.mark.parametrize(
    ("callback", "taken"),
    [
        (lambda report, rows=(): None, 1),
        (lambda report, policy, *, x=1: None, 2),
        (lambda *given: None, 3),
        ([].append, 1),
    ],
)
def test_a_callback_gets_as_many_arguments_as_it_asks_for(callback, taken):
    assert count_arguments(callback) == taken


class Curriculum:
    """An environment that records the progress it receives."""

    def __init__(self, env):
        self.inner, self.spec, self.told = env, env.spec, []
        self.reset, self.step, self.close = env.reset, env.step, env.close

    def set_progress(self, progress):
        self.told.append((progress.iteration, progress.env_steps, progress.fraction))


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_environment_receives_the_progress_on_request(wrapped):
    config = replace(short("tensor:cartpole", steps=256, num_envs=4), log_every=2)
    config = replace(config, algorithm=canter.PPOConfig(horizon=16, num_minibatches=2))
    env = Curriculum(config.env.build("cpu"))
    train(config, env=FiniteHorizon(env) if wrapped else env)
    assert env.told == [(0, 0, 0.0), (1, 64, 0.25), (2, 128, 0.5), (3, 192, 0.75)]


def test_without_a_budget_there_is_no_fraction_of_it():
    algorithm, until = canter.PPOConfig(horizon=16, num_minibatches=2), canter.UntilConfig(mean_return=1.0)
    config = replace(short("tensor:cartpole", num_envs=4), total_steps=None, until=until, algorithm=algorithm)
    config = replace(config, recent_episodes=5)
    env = Curriculum(config.env.build("cpu"))
    train(config, env=env)
    assert len(env.told) > 1 and all(fraction is None for _, _, fraction in env.told)


def test_reset_rows_are_not_counted_as_steps():
    reports = []
    train(short("CartPole-v1", autoreset="next_step"), reports.append)
    batch = 8 * 32
    assert batch * reports[0].iteration - reports[0].episodes <= reports[0].env_steps < batch


@pytest.mark.parametrize("env_id", ["CartPole-v1", "tensor:pendulum", "envpool:Pendulum-v1"])
def test_equal_seeds_make_equal_runs_and_other_seeds_others(env_id):
    runs = [train(short(env_id, seed=seed)).policy.actor.state_dict() for seed in (0, 0, 1)]
    assert all(torch.equal(a, b) for a, b in zip(runs[0].values(), runs[1].values(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(runs[0].values(), runs[2].values(), strict=True))


def test_a_vector_environment_of_the_users_own_is_trained_on_and_left_open():
    vector_env = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 4)
    env = GymnasiumEnv(vector_env)
    reports = []
    train(short("CartPole-v1", steps=500), reports.append, env=env)
    assert reports[-1].env_steps >= 500
    env.step(torch.zeros(4, dtype=torch.int64))
    env.close()


def test_the_public_names_train_a_policy():
    config = canter.TrainConfig(
        env=canter.EnvConfig(id="tensor:cartpole", num_envs=4),
        algorithm=canter.PPOConfig(horizon=16, num_minibatches=2),
        total_steps=200,
    )
    algorithm = train(config)
    env = config.env.build("cpu")
    assert canter.evaluate(algorithm.policy, env, episodes=4, seed=0).mean > 0


def parameters(algorithm):
    return torch.cat([parameter.detach().reshape(-1) for parameter in algorithm.model.parameters()])


def test_learning_in_several_calls_is_learning_in_one(tmp_path):
    config = short("CartPole-v1", steps=6 * 256)
    reports = []
    with Trainer(config, reports.append, folder=RunFolder(tmp_path, CheckpointConfig(save_every=100))) as trainer:
        assert trainer.learn(2) is trainer.algorithm
        trainer.learn(0)
        assert (trainer.progress.iteration, trainer.finished) == (2, False)
        trainer.learn()
        assert trainer.finished
        trainer.learn(5)  # there is nothing left to do
    assert [report.iteration for report in reports] == [1, 2, 3, 4, 5, 6]
    assert torch.equal(parameters(trainer.algorithm), parameters(train(config)))
    assert (read_record(tmp_path)["status"], read_record(tmp_path)["ended_by"]) == ("finished", "total_steps")


def test_leaving_early_saves_the_state_and_the_run_continues_from_it(tmp_path):
    config = short("CartPole-v1", steps=4 * 256)
    trainer = Trainer(config, folder=RunFolder(tmp_path))
    trainer.learn(3)
    trainer.close()
    trainer.close()  # twice is fine
    assert RunFolder(tmp_path).store.steps() == [0, 3]
    assert (read_record(tmp_path)["status"], read_record(tmp_path)["ended_by"]) == ("stopped", None)
    assert (tmp_path / "policies" / "final_actor.safetensors").exists()
    resumed = train(config, folder=RunFolder(tmp_path))
    assert torch.equal(parameters(resumed), parameters(train(config)))


def test_the_time_between_two_calls_is_not_counted(monkeypatch):
    clock, pause = time.perf_counter, 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + pause)
    reports = []
    with Trainer(short("CartPole-v1", steps=4 * 256), reports.append) as trainer:
        trainer.learn(2)
        pause = 1e6
        trainer.learn()
    assert reports[2].seconds - reports[1].seconds < 1e5
    assert sum(reports[2].times.values()) < 1e5


def test_an_environment_made_by_the_trainer_is_closed_on_failure(monkeypatch):
    closed = []
    monkeypatch.setattr(GymnasiumEnv, "close", lambda self: closed.append(self))
    with pytest.raises(ValueError, match="does not divide"):
        config = short("CartPole-v1")
        Trainer(replace(config, algorithm=replace(config.algorithm, num_minibatches=7)))
    assert len(closed) == 1
