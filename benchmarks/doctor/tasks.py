"""Tasks, budgets and seeds: those that thresholds were fitted on, and those that are reported."""

from __future__ import annotations

from typing import Any

_LINEAR = {"algorithm.optimizer.learning_rate.kind": "linear", "algorithm.optimizer.learning_rate.start": 1e-3}
_FAST = _LINEAR | {"algorithm.optimizer.learning_rate.start": 3e-3}
_PASSES = {"env.num_envs": 8, "algorithm.horizon": 256, "algorithm.num_minibatches": 16}
_ROBOT = {"env.num_envs": 64, "algorithm.horizon": 32, "algorithm.epochs": 5, "algorithm.model.std.initial": 0.5}
_SYNC = {"env.vectorization": "sync"}
FIT_TASKS: dict[str, dict[str, Any]] = {
    "Acrobot-v1": {"total_steps": 80_000},
    "MountainCarContinuous-v0": {"total_steps": 100_000},
    "InvertedPendulum-v5": {"total_steps": 60_000, **_PASSES, **_LINEAR, **_SYNC},
    "HalfCheetah-v5": {"total_steps": 60_000, **_SYNC},
    "tensor:cartpole": {"total_steps": 100_000, "env.num_envs": 16, "algorithm.horizon": 64, **_FAST},
    "tensor:swimmer": {"total_steps": 80_000, **_ROBOT, **_LINEAR},
}
"""Settings beside the preset's, or the defaults."""
REPORT_TASKS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {"total_steps": 80_000},
    "Pendulum-v1": {"total_steps": 160_000},
    "Hopper-v5": {"total_steps": 120_000, **_SYNC},
    "tensor:quadrotor": {"total_steps": 160_000, **_ROBOT, **_LINEAR},
}
FIT_PRESETS: dict[str, dict[str, Any]] = {
    "Acrobot": {},
    "MountainCarContinuous": {},
    "Walker2d": {"total_steps": 100_000, **_SYNC},
    "HalfCheetah": {"total_steps": 100_000, **_SYNC},
    "tensor:swimmer": {},
}
REPORT_PRESETS: dict[str, dict[str, Any]] = {
    "CartPole": {},
    "Pendulum": {},
    "cartpole-positions-lstm": {},
    "cartpole-positions-gru": {},
    "Rendezvous": {},
    "RPS": {},
    "tensor:deep-sea": {},
    "quadrotor-symmetry": {},
    "quadrotor-central-value": {},
    "Pendulum-sac": {},
    "quadrotor-sac": {"total_steps": 20_000},
    "swimmer-narrow": {"total_steps": 100_000},
    "tensor:maze": {"total_steps": 300_000},
    "InvertedDoublePendulum": {"total_steps": 150_000, **_SYNC},
    "Pusher": {"total_steps": 100_000, **_SYNC},
    "Swimmer": {"total_steps": 100_000, **_SYNC},
}
"""Presets whose healthy runs must have no finding; a budget is shorter than the preset's where it is given."""
WHOLE_PRESETS: dict[str, dict[str, Any]] = {
    "Acrobot": {},
    "CartPole": {},
    "HalfCheetah": _SYNC,
    "Hopper": _SYNC,
    "InvertedDoublePendulum": _SYNC,
    "LunarLander": _SYNC,
    "MountainCarContinuous": {},
    "Pendulum": {},
    "Pendulum-sac": {},
    "Pusher": _SYNC,
    "RPS": {},
    "Rendezvous": {},
    "Walker2d": _SYNC,
    "cartpole-positions-gru": {},
    "cartpole-positions-lstm": {},
    "quadrotor-central-value": {},
    "quadrotor-symmetry": {},
    "tensor:deep-sea": {},
    "tensor:maze": {},
    "tensor:swimmer": {},
}
"""Presets that train for the whole of their budget, with seeds that no rule was changed for."""
FIT_SEEDS = (1000, 1001)
REPORT_SEEDS = (200, 201, 202)
WHOLE_SEEDS = (404, 405)
MORE_HEALTHY = (203, 204, 205)
"""Further healthy runs of the report's tasks: their mean is what a restored run is compared with."""
GOALS = {
    "Acrobot-v1": -90.0,
    "MountainCarContinuous-v0": 90.0,
    "InvertedPendulum-v5": 500.0,
    "HalfCheetah-v5": 500.0,
    "tensor:cartpole": 200.0,
    "tensor:swimmer": 60.0,
    "CartPole-v1": 200.0,
    "Pendulum-v1": -300.0,
    "Hopper-v5": 800.0,
    "tensor:quadrotor": 300.0,
}
"""Return from which an episode of the sparse task counts as a success; far beyond an untrained policy."""
COST = {
    "Hopper-v5": 30,
    "HalfCheetah-v5": 16,
    "Pendulum-v1": 15,
    "tensor:swimmer": 14,
    "tensor:quadrotor": 10,
    "InvertedPendulum-v5": 10,
    "Acrobot-v1": 7,
    "Pendulum-sac": 60,
    "quadrotor-central-value": 50,
    "Walker2d": 300,
    "Hopper": 300,
    "HalfCheetah": 140,
    "InvertedDoublePendulum": 80,
    "tensor:maze": 60,
    "LunarLander": 60,
    "quadrotor-symmetry": 40,
    "Pusher": 80,
    "Swimmer": 20,
}
"""Seconds of a run, roughly, 5 if not given: long ones start first."""
SLOW = {"epochs 40": 4.0, "lost statistics": 1.5, "healthy": 1.5}
"""Factors of the seconds of a run with that fault."""


def seconds_of(task: str, fault: str) -> float:
    """Return about how long a run takes."""
    return COST.get(task, 5) * SLOW.get(fault, 1.0)
