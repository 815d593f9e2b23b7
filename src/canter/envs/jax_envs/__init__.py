"""Simulators written in JAX: ids `gymnax:NAME`, `brax:NAME` and `playground:NAME`."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from canter.core.specs import Env

PACKAGES = {"gymnax": "gymnax", "brax": "brax", "playground": "mujoco_playground"}
"""Packages by scheme."""
ALLOCATION = (
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_CLIENT_MEM_FRACTION",
)
"""Variables by which users choose how JAX takes the GPU's memory."""


def make_gymnax(name: str, num_envs: int, device: str, *, matmul_precision: str = "highest", **options: Any) -> Env:
    """In JAX, such as gymnax:CartPole-v1 (pip install "canter[jax]").

    `options` are fields of the task's parameters, such as `force_mag`, and arguments of its class.
    `max_episode_steps` is the time limit. See `JaxEnv` for `matmul_precision`.
    """
    return _make("gymnax", name, num_envs, device, matmul_precision, options)


def make_brax(name: str, num_envs: int, device: str, *, matmul_precision: str = "highest", **options: Any) -> Env:
    """In JAX, such as brax:ant (pip install "canter[jax]").

    `options` are arguments of the task's class, such as `backend`, and `action_repeat`.
    `max_episode_steps` is the time limit, by default 1000 as in Brax. As in Brax's own training an
    ended environment restarts from its first state. See `JaxEnv` for `matmul_precision`.
    """
    return _make("brax", name, num_envs, device, matmul_precision, options)


def make_playground(name: str, num_envs: int, device: str, *, matmul_precision: str = "highest", **options: Any) -> Env:
    """MuJoCo Playground, such as playground:CartpoleBalance (pip install "canter[playground]").

    `options` are entries of the task's configuration by their dotted path, such as
    `reward_config.scales.energy`; `full_reset` (restart from new states instead of the first one)
    and `domain_randomization` (of the model, drawn once). `max_episode_steps` is the time limit, by
    default the task's own. See `JaxEnv` for `matmul_precision`.
    """
    return _make("playground", name, num_envs, device, matmul_precision, options)


def ids_of(scheme: str) -> list[str]:
    """Return the ids of an installed simulator; imports it."""
    return [f"{scheme}:{name}" for name in _tasks().NAMES[scheme]()]


def _make(scheme: str, name: str, num_envs: int, device: str, matmul_precision: str, options: dict[str, Any]) -> Env:
    try:
        make_task = _tasks().MAKERS[scheme]
        adapter = import_module("canter.envs.jax_envs.adapter")
        import_module(PACKAGES[scheme])
    except ImportError as error:
        extra = "playground" if scheme == "playground" else "jax"
        raise ImportError(f'{scheme}:{name} needs pip install "canter[{extra}]" ({error})') from error
    return adapter.JaxEnv(make_task(name, num_envs, options), device, matmul_precision)


def _tasks() -> Any:
    """Import what needs JAX; unless the user chose otherwise, JAX leaves the GPU's memory to others."""
    if not any(name in os.environ for name in ALLOCATION):
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    return import_module("canter.envs.jax_envs.tasks")
