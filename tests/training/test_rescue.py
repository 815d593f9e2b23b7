"""A failed iteration loses nothing of the state before it, to the bit."""

import math
import threading
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch

from canter.algorithms.extension import Extension
from canter.algorithms.ppo import PPOConfig
from canter.config import TrainConfig
from canter.core.registry import register
from canter.core.storage.checkpoint import load_checkpoint
from canter.core.storage.validity import flatten
from canter.envs import EnvConfig
from canter.envs.tensor import CartPole
from canter.nn.actor_critic import ModelConfig
from canter.nn.network import NetworkConfig
from canter.nn.rnn import RNNConfig
from canter.runs.run_folder import RunFolder
from canter.training.episodes import NonFinite
from canter.training.guard import RunFailed
from canter.training.trainer import Trainer, train
from covering import pairwise, usual_of

HORIZON, ITERATIONS, BAD = 8, 12, 61
"""The bad step is in iteration 8, and seven are complete before it."""
MEMORY = ModelConfig(policy=NetworkConfig(hidden=(8,), rnn=RNNConfig(hidden=4)))
PLAIN = ModelConfig(policy=NetworkConfig(hidden=(8,)))
CONFIG = TrainConfig(
    env=EnvConfig(id="tensor:cartpole", num_envs=4),
    algorithm=PPOConfig(
        horizon=HORIZON, epochs=2, num_minibatches=2, model=ModelConfig(policy=NetworkConfig(hidden=(8,)))
    ),
    total_steps=ITERATIONS * HORIZON * 4,
)


class Fails(CartPole):  # pyright: ignore[reportGeneralTypeIssues]
    """Does something at its step `BAD`, and only in the process, or with the object, that takes it first."""

    def __init__(self, how=None):
        super().__init__(4)
        self.how, self.count = how, 0

    def step(self, action):
        step = super().step(action)
        self.count += 1
        if self.count == BAD:
            self.spoil(step)
        return step

    def spoil(self, step):
        if self.how == "raise":
            raise ValueError("broken")
        if self.how == "shape":
            step.reward = step.reward[:1]
        if self.how in ("nan", "inf"):
            step.obs["policy"][2, 1] = float(self.how)
        if self.how == "reward":
            step.reward[2] = math.nan


def state_of(trainer):
    return {name: leaf for name, leaf in flatten(trainer.algorithm.state_dict()).items()}


def same(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(a, other[name]) if isinstance(a, torch.Tensor) else a == other[name] for name, a in one.items()
    )


def late(trainer):
    """Let a trainer find NaN only when it reads, as on a GPU."""
    trainer.collector.tracker.reads_at_once = False
    return trainer


@pytest.mark.parametrize(
    ("how", "at_once", "log_every"), pairwise(["raise", "shape", "nan", "inf", "reward"], [True, False], [1, 3])
)
def test_the_state_before_the_rollout_is_saved_to_the_bit(how, at_once, log_every, tmp_path):
    config = replace(CONFIG, log_every=log_every)
    straight = Trainer(config, env=Fails())
    straight.learn(7)
    with pytest.raises(RunFailed), Trainer(config, env=Fails(how), folder=RunFolder(tmp_path)) as trainer:
        trainer if at_once else late(trainer)
        trainer.learn()
    saved = load_checkpoint(tmp_path / "checkpoints" / "step-000000000007")
    assert same(flatten(saved["algorithm"]), state_of(straight))
    assert same(state_of(trainer), state_of(straight)), "the living one was not brought back"
    assert saved["run"]["counters"] == straight.progress.state_dict()["counters"]


@pytest.mark.parametrize(
    ("how", "memory"), usual_of([*product(["raise", "inf"], [False, True])], [("raise", True), ("inf", False)])
)
def test_a_resumed_run_ends_as_if_nothing_had_failed(how, memory, tmp_path):
    algorithm = replace(CONFIG.algorithm, model=MEMORY, sequence_length=4) if memory else CONFIG.algorithm
    config = replace(CONFIG, algorithm=algorithm)
    straight = train(config, env=Fails()).state_dict()
    with pytest.raises(RunFailed, match=r"7 iterations .* are saved. The traceback"):
        train(config, env=Fails(how), folder=RunFolder(tmp_path))
    resumed = train(config, env=Fails(), folder=RunFolder(tmp_path)).state_dict()
    assert same(flatten(resumed), flatten(straight))


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "when read"])
def test_an_infinite_observation_changes_nothing_of_the_algorithm(at_once):
    trainer = Trainer(CONFIG, env=Fails("inf"))
    trainer if at_once else late(trainer)
    trainer.learn(7)
    before = state_of(trainer)
    with pytest.raises(RunFailed, match=r"environment 2 returned .* component \[1\] = inf at its step 61"):
        trainer.learn(1)
    assert same(state_of(trainer), before)
    trainer.learn(2)  # nothing of it is left that would be found again
    assert trainer.progress.iteration == 9


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "when read"])
def test_weights_that_become_infinite_are_undone(at_once, tmp_path, monkeypatch):
    trainer: Any = Trainer(CONFIG, env=Fails(), folder=RunFolder(tmp_path))
    trainer if at_once else late(trainer)
    trainer.learn(3)
    before = state_of(trainer)
    usual = trainer.algorithm.model.update_statistics

    def spoil(*arguments):
        usual(*arguments)
        next(trainer.algorithm.model.parameters()).data.fill_(math.inf)

    monkeypatch.setattr(trainer.algorithm.model, "update_statistics", spoil)
    with pytest.raises(RunFailed, match="became NaN or infinite in an update") as raised:
        trainer.learn(2)
    assert isinstance(raised.value.__cause__, NonFinite)
    assert same(state_of(trainer), before)
    assert same(flatten(load_checkpoint(tmp_path / "checkpoints" / "step-000000000003")["algorithm"]), before)
    trainer.close()


@register("extension", "raises-in-update")
@dataclass(frozen=True)
class RaisesConfig:
    """An extension of the user's that breaks in the fourth update."""

    def build(self, spec, model, generator):
        return Raises()


class Raises(Extension):
    def __init__(self):
        super().__init__()
        self.count = 0

    def reward(self, rollout):
        self.count += 1
        if self.count == 4:
            raise LookupError("no such reward")
        return rollout.reward


def test_an_error_in_the_update_saves_the_state_before_and_is_raised(tmp_path):
    config = replace(CONFIG, algorithm=replace(CONFIG.algorithm, extensions=(RaisesConfig(),)))
    straight = Trainer(config, env=Fails())
    straight.learn(3)
    with pytest.raises(LookupError, match="no such reward") as raised:
        train(config, env=Fails(), folder=RunFolder(tmp_path))
    assert "3 iterations" in raised.value.__notes__[0]
    saved = load_checkpoint(tmp_path / "checkpoints" / "step-000000000003")
    assert same(flatten(saved["algorithm"]), state_of(straight))


def test_a_callback_that_raises_costs_nothing(tmp_path):
    def callback(report):
        if report.iteration == 5:
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        train(CONFIG, callback, env=Fails(), folder=RunFolder(tmp_path))
    assert RunFolder(tmp_path).store.steps() == [0, 5]


def test_threads_that_watch_end_with_the_run():
    before = set(threading.enumerate())
    for _ in range(3):
        with Trainer(CONFIG, env=Fails()) as trainer:
            trainer.learn(1)
    assert set(threading.enumerate()) <= before  # threads of earlier tests may have ended meanwhile
