"""Tasks that cannot be solved without memory, on many seeds."""

import pytest

from canter.algorithms.ppo import PPOConfig
from canter.envs.tensor import tensor_envs
from canter.nn.actor_critic import ModelConfig
from canter.nn.network import NetworkConfig
from canter.nn.optimizer import OptimizerConfig
from canter.nn.rnn import RNNConfig
from canter.nn.schedules import Linear
from canter.training.collector import Collector

SEEDS = [(0,), pytest.param((1, 2), marks=pytest.mark.long)]
ITERATIONS = 40


def mean_return(seed, memory):
    """Mean return of the last rollout's episodes: 1 if every question was answered right, 0 by guessing."""
    env = tensor_envs["probe-recall"](32)
    config = PPOConfig(
        horizon=10,
        sequence_length=5,
        epochs=4,
        num_minibatches=1,
        optimizer=OptimizerConfig(learning_rate=Linear(1e-2)),
        model=ModelConfig(policy=NetworkConfig(hidden=(16,), rnn=memory)),
    )
    algorithm = config.build(env.spec, seed)
    collector = Collector(env, algorithm, seed)
    for iteration in range(ITERATIONS):
        algorithm.set_progress(iteration / ITERATIONS)
        algorithm.update(collector.collect())
    collector.collect()
    returns = collector.read_episodes().return_
    return sum(returns) / len(returns)


@pytest.mark.parametrize("cell", ["lstm", pytest.param("gru", marks=pytest.mark.long)])
@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_recurrence_solves_recall_on_every_seed(cell, seeds):
    returns = [mean_return(seed, RNNConfig(cell=cell, hidden=16)) for seed in seeds]
    assert min(returns) > 0.9, returns


def test_without_recurrence_only_guessing_is_left():
    # 64 episodes of +-1: the mean of guesses has a standard deviation of 1/8.
    assert abs(mean_return(0, None)) < 0.5
