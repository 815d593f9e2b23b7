"""Cart-pole without its velocities: the policy must remember."""

from __future__ import annotations

from typing import Literal

from canter.algorithms.ppo import PPOConfig
from canter.config import TrainConfig
from canter.envs import EnvConfig
from canter.nn.actor_critic import ModelConfig
from canter.nn.network import NetworkConfig
from canter.nn.rnn import RNNConfig
from canter.optim import OptimizerConfig
from canter.schedules import Linear
from canter.training.progress import SuccessConfig


def cartpole_positions(cell: Literal["lstm", "gru"]) -> TrainConfig:
    """Balance from positions alone, with a recurrent policy and a recurrent critic."""
    network = NetworkConfig(hidden=(64,), memory=RNNConfig(cell=cell, hidden=64))
    return TrainConfig(
        env=EnvConfig(id="tensor:cartpole", num_envs=32, options={"positions_only": True}),
        total_steps=200_000,
        success=SuccessConfig(ending="truncated"),
        algorithm=PPOConfig(
            horizon=64,
            epochs=6,
            num_minibatches=4,
            sequence_length=16,
            optimizer=OptimizerConfig(learning_rate=Linear(1e-3)),
            model=ModelConfig(policy=network),
        ),
    )
