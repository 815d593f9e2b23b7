"""Curiosity where rewards are rare, mirror images of robots that look the same in a mirror, and style from clips."""

from __future__ import annotations

from typing import Any

from canter.algorithms.ppo import BonusValueConfig, PPOConfig
from canter.config import TrainConfig
from canter.envs import EnvConfig
from canter.extensions import AMPConfig, RNDConfig, SymmetryConfig
from canter.nn.actor_critic import ModelConfig
from canter.nn.heads import StdConfig
from canter.nn.network import NetworkConfig
from canter.optim import OptimizerConfig
from canter.schedules import Constant, Linear

SWIMMER_GOAL, QUADROTOR_GOAL = 150.0, 300.0
"""Returns of an episode that count as learned."""


def maze(*, curious: bool = True) -> TrainConfig:
    """Find the end of a U-shaped corridor, driven by curiosity (`curious`) or by chance."""
    return TrainConfig(
        env=EnvConfig(id="tensor:maze", num_envs=64),
        total_steps=1_000_000,
        algorithm=PPOConfig(
            horizon=128,
            epochs=4,
            num_minibatches=8,
            gamma=0.995,
            optimizer=OptimizerConfig(learning_rate=Constant(3e-4)),
            extensions=(RNDConfig(),) if curious else (),
            bonus_value=BonusValueConfig() if curious else None,
        ),
    )


def deep_sea(*, curious: bool = True) -> TrainConfig:
    """The bottom right of a 20 x 20 grid, which chance finds once in a million episodes."""
    return TrainConfig(
        env=EnvConfig(id="tensor:deep-sea", num_envs=64, options={"size": 20}),
        total_steps=400_000,
        algorithm=PPOConfig(
            horizon=40,
            epochs=4,
            num_minibatches=8,
            optimizer=OptimizerConfig(learning_rate=Constant(1e-3)),
            model=ModelConfig(policy=NetworkConfig(normalize_obs=False)),
            extensions=(RNDConfig(),) if curious else (),
            bonus_value=BonusValueConfig() if curious else None,
        ),
    )


def swimmer(*, mirrored: bool = True) -> TrainConfig:
    """Swim with four links; learn from mirror images too (`mirrored`)."""
    return _robot("tensor:swimmer", mirrored)


def quadrotor(*, mirrored: bool = True) -> TrainConfig:
    """Hover and follow; learn from mirror images across two axes too (`mirrored`)."""
    return _robot("tensor:quadrotor", mirrored)


def _robot(env_id: str, mirrored: bool) -> TrainConfig:
    return TrainConfig(
        # Episodes that do not all end together: then the mean return is of recent ones.
        env=EnvConfig(id=env_id, num_envs=128, options={"random_start": True}),
        total_steps=200_000,
        algorithm=PPOConfig(
            horizon=16,
            epochs=5,
            num_minibatches=8,
            optimizer=OptimizerConfig(learning_rate=Linear(1e-3)),
            model=ModelConfig(std=StdConfig(initial=0.5)),
            extensions=(SymmetryConfig(mirror_loss=10.0),) if mirrored else (),
        ),
    )


def swimmer_style(gait: str, *, task: float = 0.0, style: float = 1.0) -> TrainConfig:
    """Swim as a clip does (`gait`: wide or narrow), with so much of the task; without `style`, by the task alone.

    The task is one that the clips can do: keep up a speed that they have at every moment. Heads point nearly ahead at
    first, because neither clip turns round.
    """
    clip = f"canter:swimmer_{gait}.npz"
    amp = AMPConfig(
        motions=(clip,),
        task_weight=task,
        style_weight=style,
        hidden=(128, 128),
        batch_size=512,
        updates=8,
        # Policies of 300 iterations: one that learns against the last few alone goes round in circles.
        replay=300_000,
        # What the policy's noise does to a joint's rate in a step is as much as the wide clip does.
        input_noise=0.2,
        # Weaker than usual: a gait that is a tenth too quick looks almost right, and must not pass.
        gradient_penalty=0.2,
        logit_regularization=0.005,
        optimizer=OptimizerConfig(learning_rate=Constant(2e-4)),
    )
    options: dict[str, Any] = {"random_start": True}
    if style:
        options |= {"motion": True, "reference": clip}
    if task:
        options |= {"pace": 0.03, "heading": 0.5}
    return TrainConfig(
        env=EnvConfig(id="tensor:swimmer", num_envs=128, options=options),
        total_steps=2_000_000,
        algorithm=PPOConfig(
            horizon=16,
            epochs=5,
            num_minibatches=8,
            gamma=0.99 if task else 0.97,
            # Noise is pressed down: an oscillation with it has another frequency than without.
            entropy_coef=Linear(0.05, -0.1),
            optimizer=OptimizerConfig(learning_rate=Linear(1e-3, 1e-4)),
            # The way it points matters to the task alone.
            model=ModelConfig(
                policy=NetworkConfig(obs_groups=("policy" if task else "motion",)), std=StdConfig(initial=0.2)
            ),
            # Policy and discriminator still circle a little around the clip; their mean lies inside.
            policy_average=0.995 if style else 0.0,
            extensions=(amp,) if style else (),
        ),
    )
