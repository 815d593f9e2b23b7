"""SAC: plain for one environment on a CPU, large for a GPU, and for a fleet of environments on one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from canter.algorithms.sac import SACConfig, TemperatureConfig
from canter.config import TrainConfig
from canter.core.data.replay import ReplayConfig
from canter.envs import EnvConfig
from canter.nn.heads import StdConfig
from canter.nn.network import NetworkConfig
from canter.nn.optimizer import OptimizerConfig
from canter.nn.schedules import Constant, Linear, Schedule
from canter.nn.stack import CriticConfig, StackNetworkConfig
from canter.training.progress import SuccessConfig

MUJOCO = ("HalfCheetah", "Hopper", "Walker2d", "Ant", "Humanoid")
"""Tasks with the same settings, plain and large."""


def plain(env_id: str = "HalfCheetah-v5") -> TrainConfig:
    """SAC as published: two critics of 256 x 256, one update a step; hours on a CPU.

    Critics have three times the policy's learning rate, as in CleanRL: with the same one HalfCheetah's return after
    300,000 steps is a quarter lower.
    """
    return TrainConfig(
        env=EnvConfig(id=env_id, num_envs=1),
        total_steps=1_000_000,
        success=SuccessConfig(ending="truncated"),
        algorithm=SACConfig(warmup_steps=10_000, critic_optimizer=_adam(Constant(1e-3))),
    )


def large(env_id: str = "HalfCheetah-v5") -> TrainConfig:
    """Residual blocks with batch norm, 101 atoms, scaled rewards and noise that lasts; needs a GPU.

    After FlashSAC (arXiv 2604.04539), without its unit-norm weights. Eight environments and four updates for each of
    their steps: half of its number, in about half of its time.
    """
    layers: dict[str, Any] = {
        "blocks": 2,
        "norm": "batch",
        "input_norm": "batch",
        "output_norm": "rms",
        "init": "orthogonal",
    }
    return TrainConfig(
        env=EnvConfig(id=env_id, num_envs=8),
        total_steps=1_000_000,
        success=SuccessConfig(ending="truncated"),
        device="cuda",
        algorithm=SACConfig(
            horizon=1,
            updates_per_step=4.0,
            batch_size=512,
            warmup_steps=10_000,
            tau=0.01,
            policy_delay=2,
            noise_repeat=16,
            scale_rewards=True,
            temperature=TemperatureConfig(initial=0.01, target_std=0.15),
            policy=StackNetworkConfig(hidden=(128,), **layers),
            std=StdConfig(kind="network", initial=0.15, minimum=math.exp(-10), maximum=math.exp(2)),
            critic=CriticConfig(hidden=(256,), atoms=101, **layers),
            optimizer=_adam(Linear(3e-4, 1.5e-4)),
        ),
    )


def fleet(env_id: str = "tensor:quadrotor") -> TrainConfig:
    """The large one for a thousand environments on a GPU: returns of three steps, two updates a step of all."""
    config = large(env_id)
    algorithm = replace(
        config.algorithm,
        updates_per_step=2.0,
        batch_size=2048,
        n_steps=3,
        warmup_steps=100_000,
        replay=ReplayConfig(capacity=4_000_000, dtype="bfloat16"),
    )
    env = EnvConfig(id=env_id, num_envs=1024)
    return replace(config, env=env, total_steps=20_000_000, algorithm=algorithm, success=SuccessConfig())


def swimming_fleet() -> TrainConfig:
    """A thousand swimmers: a gait wants its joints at their ends, so little entropy is asked for, and more updates.

    The ring forgets nothing and rounds nothing. With 4 M transitions in bfloat16, and more noise, the return fell
    again at the end.
    """
    config = fleet("tensor:swimmer")
    algorithm = replace(
        config.algorithm,
        updates_per_step=12.0,
        n_steps=1,
        temperature=replace(config.algorithm.temperature, target_std=0.02),
        optimizer=_adam(Linear(3e-4, 1e-5)),
        replay=ReplayConfig(capacity=7_000_000),
    )
    return replace(config, total_steps=6_500_000, algorithm=algorithm)


def pendulum() -> TrainConfig:
    """Swing a pendulum up and hold it: -200 within 20,000 steps, in minutes on one core."""
    return TrainConfig(
        env=EnvConfig(id="Pendulum-v1", num_envs=1),
        total_steps=20_000,
        success=SuccessConfig(ending="any", min_return=-200.0),
        algorithm=_small(20_000, warmup_steps=1_000, optimizer=_adam(Constant(1e-3))),
    )


def quadrotor() -> TrainConfig:
    """Hover and follow, with as few environments as one core steps and learns from."""
    return TrainConfig(
        env=EnvConfig(id="tensor:quadrotor", num_envs=16),
        total_steps=500_000,
        algorithm=_small(500_000, updates_per_step=2.0, warmup_steps=5_000, n_steps=3),
    )


def _small(capacity: int, **settings: Any) -> SACConfig:
    """Networks of 64 x 64, which one core learns quickly, with other settings of SAC."""
    network = NetworkConfig(hidden=(64, 64), activation="relu", init="default", normalize_obs=False)
    critic, replay = CriticConfig(hidden=(64, 64)), ReplayConfig(capacity=capacity)
    return SACConfig(policy=network, critic=critic, replay=replay, **settings)


def _adam(learning_rate: Schedule) -> OptimizerConfig:
    """The optimiser that SAC has by default, with another learning rate."""
    return replace(SACConfig().optimizer, learning_rate=learning_rate)


PRESETS = {
    "sac": plain(),
    "sac-large": large(),
    "Pendulum-sac": pendulum(),
    "quadrotor-sac": quadrotor(),
    "quadrotor-sac-large": fleet(),
    "tensor:swimmer-sac-large": swimming_fleet(),  # by its whole id: MuJoCo has a swimmer too
    **{f"{task}-sac": plain(f"{task}-v5") for task in MUJOCO},
    **{f"{task}-sac-large": large(f"{task}-v5") for task in MUJOCO},
}
"""All of them by name: `TASK-sac` is plain, `TASK-sac-large` is for a GPU, without a task they are for any."""
