"""Several agents that share one policy, and games learned by self-play; both within a minute or two on two cores."""

from __future__ import annotations

from canter.algorithms.ppo import PPOConfig
from canter.config import TrainConfig
from canter.envs import EnvConfig
from canter.nn.actor_critic import ModelConfig
from canter.nn.heads import StdConfig
from canter.nn.network import NetworkConfig
from canter.nn.optimizer import OptimizerConfig
from canter.nn.schedules import Constant, Linear
from canter.training.progress import SuccessConfig
from canter.training.self_play import SelfPlayConfig


def rendezvous(*, joint_critic: bool = True) -> TrainConfig:
    """Come together as a team, each seeing only the next one.

    With `joint_critic` the critic reads the whole world (MAPPO), otherwise what its agent sees (IPPO).
    """
    critic = None if joint_critic else NetworkConfig(obs_groups=("policy",))
    return TrainConfig(
        env=EnvConfig(id="tensor:rendezvous", num_envs=32),
        total_steps=200_000,
        success=SuccessConfig(ending="truncated", min_return=40.0),  # everyone came home, and soon
        algorithm=PPOConfig(
            horizon=25,
            epochs=5,
            num_minibatches=4,
            gamma=0.98,
            optimizer=OptimizerConfig(learning_rate=Linear(1e-3)),
            model=ModelConfig(critic=critic, std=StdConfig(initial=0.5)),
        ),
    )


def rock_paper_scissors() -> TrainConfig:
    """Play against an even mixture of all past policies; their average is what approaches the equilibrium.

    The learner itself keeps chasing the best answer. Entropy keeps every move in play, or the one that would be needed
    next has died out; it falls so that the average is not drawn towards chance in the end.
    """
    return TrainConfig(
        env=EnvConfig(id="tensor:rps", num_envs=512),
        total_steps=200_000,
        success=SuccessConfig(min_return=0.5),  # the game was won
        self_play=SelfPlayConfig(snapshot_every=1, pool_size=1000, num_opponents=16),
        algorithm=PPOConfig(
            horizon=1,
            epochs=4,
            num_minibatches=1,
            entropy_coef=Linear(0.3, 0.1),
            advantage_normalization="none",
            optimizer=OptimizerConfig(learning_rate=Constant(3e-2)),
            model=ModelConfig(policy=NetworkConfig(hidden=(8,), normalize_obs=False)),
        ),
    )
