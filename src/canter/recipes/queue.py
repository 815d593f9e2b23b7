"""A queueing network that never ends, judged by what it costs per unit of time."""

from __future__ import annotations

from dataclasses import replace

from canter.algorithms.ppo import PPOConfig
from canter.config import TrainConfig
from canter.envs import EnvConfig
from canter.optim import OptimizerConfig
from canter.runs.run_folder import CheckpointConfig
from canter.schedules import Linear


def queue_average_reward() -> TrainConfig:
    """Schedule the criss-cross network by its average reward: a cost of 2.85 a unit of time, mean of 5 seeds.

    The best priority rule costs 3.00 (`benchmarks/learning/queue_network.py`).

    Empty queues now and then, every 1,000 steps, keep bad schedules from drowning early on. They are no part of the
    task: the reward rate and the values account for them.
    """
    return TrainConfig(
        env=EnvConfig(id="tensor:queue", num_envs=128, reset_steps=1000),
        total_steps=2_000_000,
        checkpoints=CheckpointConfig(best_by="lta"),
        algorithm=PPOConfig(
            objective="average",
            horizon=128,
            epochs=4,
            num_minibatches=4,
            optimizer=OptimizerConfig(learning_rate=Linear(1e-3)),
        ),
    )


def queue_discounted() -> TrainConfig:
    """The same with discounted rewards, for comparison: a cost of 2.84."""
    average = queue_average_reward()
    return replace(average, algorithm=replace(average.algorithm, objective="discounted", gamma=0.99))
