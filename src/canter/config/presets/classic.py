"""Classic control; each learns within minutes on two cores.

Cart-pole without its velocities is among it: the policy must remember, by itself or from a teacher that sees them.
"""

from __future__ import annotations

from typing import Literal

from canter.algorithms.distillation import DistillationConfig
from canter.algorithms.ppo import PPOConfig
from canter.config import TrainConfig
from canter.envs import EnvConfig
from canter.nn.actor_critic import ModelConfig
from canter.nn.heads import StdConfig
from canter.nn.network import NetworkConfig
from canter.nn.optimizer import OptimizerConfig
from canter.nn.rnn import RNNConfig
from canter.nn.schedules import Constant, Linear
from canter.training.progress import SuccessConfig


def cartpole() -> TrainConfig:
    """Keep a pole upright: 475 of 500 within 100,000 steps.

    Observations stay raw: they are of order one already.
    """
    return TrainConfig(
        env=EnvConfig(id="CartPole-v1", num_envs=8),
        total_steps=100_000,
        success=SuccessConfig(ending="truncated"),  # the pole did not fall
        algorithm=PPOConfig(
            horizon=128,
            epochs=6,
            num_minibatches=4,
            gamma=0.98,
            optimizer=OptimizerConfig(learning_rate=Linear(3e-3)),
            model=ModelConfig(policy=NetworkConfig(normalize_obs=False)),
        ),
    )


def acrobot() -> TrainConfig:
    """Swing a two-link arm above a line."""
    return TrainConfig(
        env=EnvConfig(id="Acrobot-v1", num_envs=16),
        total_steps=300_000,
        algorithm=PPOConfig(
            horizon=128,
            epochs=4,
            num_minibatches=8,
            gae_lambda=0.94,
            optimizer=OptimizerConfig(learning_rate=Linear(1e-3)),
            entropy_coef=Linear(0.01, 0.0),
        ),
    )


def pendulum() -> TrainConfig:
    """Swing a pendulum up and hold it."""
    return TrainConfig(
        env=EnvConfig(id="Pendulum-v1", num_envs=8),
        total_steps=300_000,
        success=SuccessConfig(ending="any", min_return=-200.0),
        algorithm=PPOConfig(
            horizon=512,
            epochs=10,
            num_minibatches=32,
            gamma=0.9,
            optimizer=OptimizerConfig(learning_rate=Linear(1e-3)),
        ),
    )


def mountain_car_continuous() -> TrainConfig:
    """Rock a weak car out of a valley.

    Throttle costs and only the top pays, so a policy that never gets there learns to stand still. A large noise,
    mostly full throttle one way or the other, gets there by chance often enough to find out.
    """
    return TrainConfig(
        env=EnvConfig(id="MountainCarContinuous-v0", num_envs=16),
        total_steps=200_000,
        algorithm=PPOConfig(
            horizon=256,
            epochs=10,
            num_minibatches=16,
            gamma=0.9999,
            gae_lambda=0.9,
            optimizer=OptimizerConfig(learning_rate=Linear(1e-3)),
            model=ModelConfig(std=StdConfig(initial=5.0)),
        ),
    )


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
