"""MuJoCo locomotion, for one million steps on a CPU."""

from __future__ import annotations

from dataclasses import replace

from canter.algorithms.ppo import PPOConfig
from canter.config import TrainConfig
from canter.envs import EnvConfig
from canter.nn.actor_critic import ModelConfig
from canter.nn.heads import StdConfig
from canter.nn.network import NetworkConfig
from canter.optim import OptimizerConfig
from canter.schedules import Linear
from canter.training.progress import SuccessConfig


def _locomotion(
    env_id: str,
    *,
    gamma: float = 0.99,
    gae_lambda: float = 0.95,
    num_minibatches: int = 32,
    clip_ratio: float = 0.2,
    std: float = 0.6,
    target_kl: float | None = None,
) -> TrainConfig:
    """What the tasks have in common: 2,048 steps a rollout, everything normalised, a step size that falls to zero."""
    return TrainConfig(
        env=EnvConfig(id=env_id, num_envs=8),
        total_steps=1_000_000,
        success=SuccessConfig(ending="truncated"),  # it did not fall
        algorithm=PPOConfig(
            horizon=256,
            epochs=10,
            num_minibatches=num_minibatches,
            gamma=gamma,
            gae_lambda=gae_lambda,
            clip_ratio=clip_ratio,
            target_kl=target_kl,
            value_coef=0.5,
            # Within ten passes the critic moves a lot; later ones should not learn from its first judgement
            # (Andrychowicz et al. 2021, "What Matters in On-Policy Reinforcement Learning").
            recompute_advantage=True,
            optimizer=OptimizerConfig(learning_rate=Linear(3e-4)),
            model=ModelConfig(policy=NetworkConfig(hidden=(64, 64)), std=StdConfig(initial=std)),
        ),
    )


def half_cheetah() -> TrainConfig:
    """Run on two legs, never falling: what a step is worth shows soon after it."""
    return _locomotion("HalfCheetah-v5", gamma=0.98, gae_lambda=0.92, std=0.3)


def hopper() -> TrainConfig:
    """Hop on one leg."""
    return _locomotion("Hopper-v5")


def walker2d() -> TrainConfig:
    """Walk on two legs in a plane."""
    return _locomotion("Walker2d-v5")


def ant() -> TrainConfig:
    """Run on four legs; with much noise its actions cost more than being upright pays.

    Its observations are mostly contact forces, rare and large where they come: ten passes go far from the policy that
    collected, and the noise shrinks too soon.
    """
    return _locomotion("Ant-v5", std=0.3, target_kl=0.02)


def humanoid() -> TrainConfig:
    """Stay up and walk with 17 joints."""
    return _locomotion("Humanoid-v5")


def swimmer() -> TrainConfig:
    """Swim with two joints; only a long horizon shows that swimming pays."""
    return _locomotion("Swimmer-v5", gamma=0.9999, gae_lambda=0.98)


def inverted_double_pendulum() -> TrainConfig:
    """Balance two poles on a cart.

    Shorter than the others: once every episode lasts, its first steps are one row in a thousand, and a policy that is
    trained further forgets how to recover from hard starts.
    """
    preset = _locomotion("InvertedDoublePendulum-v5", gamma=0.98, gae_lambda=0.8, num_minibatches=8, clip_ratio=0.3)
    return replace(preset, total_steps=400_000)
