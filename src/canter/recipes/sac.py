"""SAC: plain for one environment on a CPU, large for a GPU, and for a fleet of environments on one."""

from __future__ import annotations

import math
from dataclasses import replace

from canter.algorithms.sac import SACConfig, TemperatureConfig
from canter.config import TrainConfig
from canter.data.replay import ReplayConfig
from canter.envs import EnvConfig
from canter.nn.critics import CriticConfig
from canter.nn.heads import StdConfig
from canter.nn.network import NetworkConfig
from canter.nn.stack import StackNetworkConfig
from canter.optim import OptimizerConfig
from canter.schedules import Constant, Linear
from canter.training.progress import SuccessConfig

MUJOCO = ("HalfCheetah", "Hopper", "Walker2d", "Ant", "Humanoid")
"""Tasks with the same settings, plain and large."""


def plain(env_id: str = "HalfCheetah-v5") -> TrainConfig:
    """SAC as published: two critics of 256 x 256, one update a step; hours on a CPU.

    Critics have three times the policy's learning rate, as in CleanRL: with the same one HalfCheetah's return after
    300,000 steps is a quarter lower.
    """
    critics = OptimizerConfig(learning_rate=Constant(1e-3), eps=1e-8, max_grad_norm=math.inf)
    return TrainConfig(
        env=EnvConfig(id=env_id, num_envs=1),
        total_steps=1_000_000,
        success=SuccessConfig(ending="truncated"),
        algorithm=SACConfig(warmup_steps=10_000, critic_optimizer=critics),
    )


def large(env_id: str = "HalfCheetah-v5") -> TrainConfig:
    """Residual blocks with batch norm, 101 atoms, scaled rewards and noise that lasts; needs a GPU.

    After FlashSAC (arXiv 2604.04539), without its unit-norm weights. Eight environments and four updates for each of
    their steps: half of its number, in about half of its time.
    """
    optimizer = OptimizerConfig(learning_rate=Linear(3e-4, 1.5e-4), eps=1e-8, max_grad_norm=math.inf)
    constant = replace(optimizer, learning_rate=Constant(3e-4))
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
            temperature=TemperatureConfig(initial=0.01, target_std=0.15, optimizer=constant),
            policy=StackNetworkConfig(
                hidden=(128,), blocks=2, norm="batch", input_norm="batch", output_norm="rms", init="orthogonal"
            ),
            std=StdConfig(kind="network", initial=0.15, minimum=math.exp(-10), maximum=math.exp(2)),
            critic=CriticConfig(
                hidden=(256,),
                blocks=2,
                norm="batch",
                input_norm="batch",
                output_norm="rms",
                init="orthogonal",
                atoms=101,
            ),
            optimizer=optimizer,
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
        optimizer=replace(config.algorithm.optimizer, learning_rate=Linear(3e-4, 1e-5)),
        replay=ReplayConfig(capacity=7_000_000),
    )
    return replace(config, total_steps=6_500_000, algorithm=algorithm)


def pendulum() -> TrainConfig:
    """Swing a pendulum up and hold it: -200 within 20,000 steps, in minutes on one core."""
    network = NetworkConfig(hidden=(64, 64), activation="relu", init="default", normalize_obs=False)
    return TrainConfig(
        env=EnvConfig(id="Pendulum-v1", num_envs=1),
        total_steps=20_000,
        success=SuccessConfig(ending="any", min_return=-200.0),
        algorithm=SACConfig(
            warmup_steps=1_000,
            policy=network,
            critic=CriticConfig(hidden=(64, 64)),
            optimizer=OptimizerConfig(learning_rate=Constant(1e-3), eps=1e-8, max_grad_norm=math.inf),
            replay=ReplayConfig(capacity=20_000),
        ),
    )


def quadrotor() -> TrainConfig:
    """Hover and follow, with as few environments as one core steps and learns from."""
    network = NetworkConfig(hidden=(64, 64), activation="relu", init="default", normalize_obs=False)
    return TrainConfig(
        env=EnvConfig(id="tensor:quadrotor", num_envs=16),
        total_steps=500_000,
        algorithm=SACConfig(
            updates_per_step=2.0,
            warmup_steps=5_000,
            n_steps=3,
            policy=network,
            critic=CriticConfig(hidden=(64, 64)),
            replay=ReplayConfig(capacity=500_000),
        ),
    )


def sac_presets() -> dict[str, TrainConfig]:
    """All of them by name: `TASK-sac` is plain, `TASK-sac-large` is for a GPU, without a task they are for any."""
    named = {"sac": plain(), "sac-large": large(), "Pendulum-sac": pendulum(), "quadrotor-sac": quadrotor()}
    # By its whole id: MuJoCo has a swimmer too.
    named |= {"quadrotor-sac-large": fleet(), "tensor:swimmer-sac-large": swimming_fleet()}
    for task in MUJOCO:
        named[f"{task}-sac"], named[f"{task}-sac-large"] = plain(f"{task}-v5"), large(f"{task}-v5")
    return named
