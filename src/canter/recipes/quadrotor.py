"""A quadrotor with a load and a battery that it cannot see, and a critic that can."""

from __future__ import annotations

from canter.algorithms.ppo import CentralValueConfig, PPOConfig
from canter.config import TrainConfig
from canter.envs import EnvConfig
from canter.nn.actor_critic import ModelConfig
from canter.nn.heads import StdConfig
from canter.nn.network import NetworkConfig
from canter.optim import OptimizerConfig
from canter.schedules import Linear
from canter.training.progress import SuccessConfig


def quadrotor_central_value(*, privileged: bool = True) -> TrainConfig:
    """Fly with an unknown load until an unknown charge is used up; a minute on one core.

    The critic is trained in a phase of its own. It is told load and charge, or sees what the policy sees
    (`privileged`).
    """
    optimizer = OptimizerConfig(learning_rate=Linear(1e-3))
    critic = NetworkConfig(obs_groups=("critic",) if privileged else ("policy",))
    return TrainConfig(
        env=EnvConfig(id="tensor:quadrotor", num_envs=256, options={"loaded": True}),
        total_steps=1_000_000,
        success=SuccessConfig(ending="any", min_return=120.0),  # well flown, as long as the charge allowed it
        algorithm=PPOConfig(
            horizon=32,
            epochs=5,
            num_minibatches=8,
            optimizer=optimizer,
            model=ModelConfig(critic=critic, std=StdConfig(initial=0.5)),
            central_value=CentralValueConfig(epochs=5, num_minibatches=8, optimizer=optimizer),
        ),
    )
