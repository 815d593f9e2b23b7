"""Cart-pole without its velocities: the policy must remember, by itself or from a teacher that sees them."""

from __future__ import annotations

from typing import Literal

from canter.algorithms.distillation import DistillationConfig
from canter.algorithms.ppo import PPOConfig
from canter.config import TrainConfig
from canter.envs import EnvConfig
from canter.nn.actor_critic import ModelConfig
from canter.nn.network import NetworkConfig
from canter.nn.rnn import RNNConfig
from canter.optim import OptimizerConfig
from canter.schedules import Constant, Linear
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


def distillation() -> TrainConfig:
    """A student of any teacher, in any environment, that sees what policies see."""
    return TrainConfig(env=EnvConfig(num_envs=16), algorithm=DistillationConfig())


def cartpole_distillation() -> TrainConfig:
    """A student with memory sees positions alone; its teacher, which reads the group policy, has velocities too."""
    options = {"positions_only": True, "privileged": True, "random_start": True}
    return TrainConfig(
        env=EnvConfig(id="tensor:cartpole", num_envs=32, options=options),
        total_steps=100_000,
        success=SuccessConfig(ending="truncated"),
        algorithm=DistillationConfig(
            teacher_obs={"policy": "critic"},
            policy=NetworkConfig(hidden=(64,), memory=RNNConfig(hidden=64), obs_groups=("policy",)),
            horizon=32,
            optimizer=OptimizerConfig(learning_rate=Constant(2e-3)),
        ),
    )
