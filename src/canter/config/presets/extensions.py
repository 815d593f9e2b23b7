"""More than plain PPO: curiosity, mirror images, style from clips, a critic that sees more, the average reward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from canter.algorithms.extensions import AMPConfig, RNDConfig, SymmetryConfig
from canter.algorithms.ppo import BonusValueConfig, CentralValueConfig, PPOConfig
from canter.config import TrainConfig
from canter.envs import EnvConfig
from canter.nn.actor_critic import ModelConfig
from canter.nn.heads import StdConfig
from canter.nn.network import NetworkConfig
from canter.nn.optimizer import OptimizerConfig
from canter.nn.schedules import Constant, Linear
from canter.runs.run_folder import CheckpointConfig
from canter.training.progress import SuccessConfig

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


def robot(env_id: str, *, mirrored: bool = True) -> TrainConfig:
    """Swim with four links, or hover and follow; learn from mirror images too (`mirrored`).

    A quadrotor has them across two axes.
    """
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
