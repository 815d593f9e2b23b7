"""A run that was stopped and continued is the run that was never stopped, to the bit."""

import logging

import pytest
import torch

from canter.algorithms.ppo import PPOConfig
from canter.core.storage.checkpoint import load_checkpoint, save_checkpoint
from canter.envs.gymnasium import make_gymnasium
from canter.envs.tensor import CartPole, Pendulum
from canter.nn.optimizer import OptimizerConfig
from canter.nn.schedules import AdaptiveKL
from canter.training.collector import Collector
from covering import usual_of

ITERATIONS = 10
ENVS = {
    "tensor:pendulum": lambda: Pendulum(2, max_episode_steps=10),
    "CartPole-v1": lambda: make_gymnasium("CartPole-v1", 2),
    "CartPole-v1 next_step": lambda: make_gymnasium("CartPole-v1", 2, autoreset="next_step"),
    "HalfCheetah-v5": lambda: make_gymnasium("HalfCheetah-v5", 2, max_episode_steps=10),
}
CONFIG = PPOConfig(
    horizon=8,
    epochs=2,
    num_minibatches=2,
    optimizer=OptimizerConfig(learning_rate=AdaptiveKL(1e-3)),
)


class Training:
    """The loop of a run, cut into iterations."""

    def __init__(self, make_env, seed=5):
        self.env = make_env()
        self.algorithm = CONFIG.build(self.env.spec, seed)
        self.collector = Collector(self.env, self.algorithm, seed)

    def iterate(self, iteration):
        self.algorithm.set_progress(iteration / ITERATIONS)
        metrics = self.algorithm.update(self.collector.collect())
        episodes = self.collector.read_episodes()
        return {name: value.clone() for name, value in metrics.items()}, vars(episodes)

    def state_dict(self):
        return {"algorithm": self.algorithm.state_dict(), "collector": self.collector.state_dict()}

    def load_state_dict(self, state):
        self.algorithm.load_state_dict(state["algorithm"])
        self.collector.load_state_dict(state["collector"])


def bits(tensor):
    return tensor.contiguous().numpy().tobytes()


def same(left, right):
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and bits(left) == bits(right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


@pytest.mark.parametrize("env", usual_of(ENVS, ["CartPole-v1 next_step", "HalfCheetah-v5", "tensor:pendulum"]))
def test_stopped_after_any_iteration_a_run_continues_bit_for_bit(env, tmp_path):
    run, seen, ended = Training(ENVS[env]), [], 0
    for iteration in range(ITERATIONS):
        save_checkpoint(tmp_path / str(iteration), run.state_dict())
        seen.append(run.iterate(iteration))
        ended += len(seen[-1][1]["return_"])
    final = run.state_dict()
    assert ended > 2
    for stop in range(ITERATIONS):
        resumed = Training(ENVS[env], seed=6)  # another seed: nothing may survive from the start
        resumed.load_state_dict(load_checkpoint(tmp_path / str(stop)))
        # Some go on to the very end; as each stop is a start of the next, a few steps of the others say as much.
        until = ITERATIONS if stop % 5 == 0 else min(stop + 2, ITERATIONS)
        for iteration in range(stop, until):
            assert same(resumed.iterate(iteration), seen[iteration]), (stop, iteration)
        expected = final if until == ITERATIONS else load_checkpoint(tmp_path / str(until))
        assert same(resumed.state_dict(), expected), stop


class Forgetful:
    """An environment that cannot save its state."""

    def __init__(self):
        self.inner = CartPole(2)
        self.spec, self.step, self.close = self.inner.spec, self.inner.step, self.inner.close
        self.seeds = []

    def reset(self, seed=None):
        self.seeds.append(seed)
        return self.inner.reset(seed)


def test_an_environment_without_state_starts_new_episodes_and_says_so(tmp_path, caplog):
    run = Training(Forgetful)
    run.iterate(0)
    save_checkpoint(tmp_path / "saved", run.state_dict())
    for _ in range(2):
        caplog.clear()
        resumed = Training(Forgetful)
        with caplog.at_level(logging.WARNING):
            resumed.load_state_dict(load_checkpoint(tmp_path / "saved"))
        assert "all episodes restart: this kind of environment cannot save its state" in caplog.text
        assert not resumed.collector.tracker.running_length.any()
        assert resumed.collector.steps_before == CONFIG.horizon
        first, second = resumed.env.seeds
        assert first != second
        resumed.iterate(1)


def test_the_environments_reason_is_kept(tmp_path):
    run = Training(lambda: make_gymnasium("CartPole-v1", 2, vectorization="vector_entry_point"))
    assert "is not a SyncVectorEnv" in run.collector.state_dict()["episodes_restart"]


class Curriculum(Forgetful):
    """An environment that saves how often it was stepped and nothing of its episodes."""

    resumes = "partial"
    level = 0

    def __init__(self):
        super().__init__()
        self.step = self.count

    def count(self, action):
        self.level += 1
        return self.inner.step(action)

    def state_dict(self):
        return {"level": self.level}

    def load_state_dict(self, state):
        assert len(self.seeds) == 1  # before the episodes start anew, so that they start at the right level
        self.level = state["level"]


def test_an_environment_may_keep_a_part_of_its_state_while_episodes_restart(tmp_path, caplog):
    run = Training(Curriculum)
    for iteration in range(3):
        run.iterate(iteration)
    save_checkpoint(tmp_path / "saved", run.state_dict())
    resumed = Training(Curriculum)
    with caplog.at_level(logging.WARNING):
        resumed.load_state_dict(load_checkpoint(tmp_path / "saved"))
    said = "all episodes restart: the environment saves only a part of its state"
    assert [record.message for record in caplog.records] == [said]
    assert resumed.env.level == 3 * CONFIG.horizon
    assert resumed.collector.rollout.reset[-1].all() and not resumed.collector.tracker.running_length.any()
    first, second = resumed.env.seeds
    assert first != second
    resumed.iterate(3)
    assert resumed.env.level == 4 * CONFIG.horizon


def test_a_part_is_not_loaded_into_an_environment_that_takes_none():
    run = Training(Curriculum)
    with pytest.raises(TypeError, match="Forgetful cannot load the environment state that was saved"):
        Training(Forgetful).load_state_dict(run.state_dict())
