"""MuJoCo locomotion, for one million steps on a CPU."""

from __future__ import annotations

from typing import Any

from canter.algorithms.ppo import PPOConfig
from canter.config import TrainConfig
from canter.envs import EnvConfig
from canter.nn.actor_critic import ModelConfig
from canter.nn.heads import StdConfig
from canter.nn.network import NetworkConfig
from canter.nn.optimizer import OptimizerConfig
from canter.nn.schedules import Linear
from canter.training.progress import SuccessConfig


def _locomotion(
    env_id: str, *, total_steps: int = 1_000_000, num_minibatches: int = 32, std: float = 0.6, **changes: Any
) -> TrainConfig:
    """What the tasks have in common: 2,048 steps a rollout, everything normalised, a step size that falls to zero.

    `changes` are further settings of PPO.
    """
    return TrainConfig(
        env=EnvConfig(id=env_id, num_envs=8),
        total_steps=total_steps,
        success=SuccessConfig(ending="truncated"),  # it did not fall
        algorithm=PPOConfig(
            horizon=256,
            epochs=10,
            num_minibatches=num_minibatches,
            value_coef=0.5,
            # Within ten passes the critic moves a lot; later ones should not learn from its first judgement
            # (Andrychowicz et al. 2021, "What Matters in On-Policy Reinforcement Learning").
            recompute_advantage=True,
            optimizer=OptimizerConfig(learning_rate=Linear(3e-4)),
            model=ModelConfig(policy=NetworkConfig(hidden=(64, 64)), std=StdConfig(initial=std)),
            **changes,
        ),
    )


PRESETS = {
    # It never falls: what a step is worth shows soon after it.
    "HalfCheetah": _locomotion("HalfCheetah-v5", gamma=0.98, gae_lambda=0.92, std=0.3),
    "Hopper": _locomotion("Hopper-v5"),
    "Walker2d": _locomotion("Walker2d-v5"),
    # With much noise its actions cost more than being upright pays. Its observations are mostly contact forces, rare
    # and large where they come: ten passes go far from the policy that collected, and the noise shrinks too soon.
    "Ant": _locomotion("Ant-v5", std=0.3, target_kl=0.02),
    "Humanoid": _locomotion("Humanoid-v5"),
    # Only a long horizon shows that swimming pays.
    "Swimmer": _locomotion("Swimmer-v5", gamma=0.9999, gae_lambda=0.98),
    # Shorter than the others: once every episode lasts, its first steps are one row in a thousand, and a policy that is
    # trained further forgets how to recover from hard starts.
    "InvertedDoublePendulum": _locomotion(
        "InvertedDoublePendulum-v5", total_steps=400_000, gamma=0.98, gae_lambda=0.8, num_minibatches=8, clip_ratio=0.3
    ),
}
"""By task."""
