"""What to train on, and with which settings, as a Python program says it.

A task is an id, a class, a function, one environment or many.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
from gymnasium.vector import SyncVectorEnv, VectorEnv

from canter.app.experiments.settings import base_config, with_settings
from canter.config import TrainConfig
from canter.core.registry import UserError
from canter.core.specs import Env
from canter.envs import EnvConfig, closed_quietly
from canter.envs.gymnasium import GymnasiumEnv
from canter.envs.imports import PYTHON, name_for_import, register_factory
from canter.training.self_play import SelfPlayEnv

EXPECTED = (
    "an environment id, a Gymnasium class or a function that makes an environment, one gymnasium.Env, a "
    "gymnasium.vector.VectorEnv, or an environment with Canter's own interface (canter.Env)"
)

UNNAMED = (
    "This environment has no name that other commands could use: to play, evaluate or resume by command, train "
    "its class or a function of a module instead"
)


@dataclass(frozen=True)
class Task:
    """An environment to train on."""

    env_id: str
    env: Env | None = None
    """The environment itself, if it was passed in and cannot be built again."""
    note: str = ""
    """Advice for the user."""

    def settings(self, env: EnvConfig) -> EnvConfig:
        """Return the environment settings with the task's id and number of environments."""
        num_envs = env.num_envs if self.env is None else self.env.spec.num_envs // self.env.spec.num_agents
        return replace(env, id=self.env_id, num_envs=num_envs)


def task_of(given: Any, device: str = "cpu") -> Task:
    """Return the task that an object describes; raise TypeError with the accepted types."""
    if isinstance(given, str):
        return Task(given)
    if isinstance(given, VectorEnv):
        return Task(_unnamed(given.unwrapped), GymnasiumEnv(given, device=device), UNNAMED)
    if isinstance(given, gymnasium.Env):
        single = SyncVectorEnv([lambda: given], autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP)
        note = "Only this one environment is stepped; to step many, pass its class or a function that makes it"
        return Task(_unnamed(given.unwrapped), GymnasiumEnv(single, device=device), f"{note}. {UNNAMED}")
    if isinstance(given, Env) and not isinstance(given, type):
        name = given.spec.env_id
        if ":" in name or name in gymnasium.registry:
            return Task(name, given)
        return Task(f"{PYTHON}:{name}" if name else _unnamed(given), given, UNNAMED)
    lacks_interface = isinstance(given, type) and not all(hasattr(given, name) for name in ("reset", "step"))
    if callable(given) and not lacks_interface:
        return _task_of_factory(given)
    text = repr(given)
    shown = text if len(text) <= 60 else f"{text[:60]}..."
    raise TypeError(f"{shown} ({type(given).__name__}) is not a task to train on: expected {EXPECTED}")


def _unnamed(env: Any) -> str:
    return f"{PYTHON}:{type(env).__name__}"


def _task_of_factory(factory: Callable[..., Any]) -> Task:
    """Return the task of a class or function, under the name by which it can be imported again."""
    found = name_for_import(factory)
    if found is None:
        inner = factory
        while isinstance(inner, functools.partial):
            inner = inner.func
        name = getattr(inner, "__qualname__", "")
        env_id = f"{PYTHON}:{name if name.isidentifier() else 'environment'}"
        register_factory(env_id, factory)
        return Task(env_id, note=UNNAMED)
    env_id, note = found
    register_factory(env_id, factory)
    return Task(env_id, note=note)


@dataclass(frozen=True)
class RunPlan:
    """The settings of a run."""

    config: TrainConfig
    source: str
    """Source of the settings, in words."""
    env: Env | None = None
    """The environment that was passed in and cannot be built again."""
    note: str = ""
    """Advice for the user."""


def plan_run(task: Any, env: Any, config: TrainConfig | None, preset: str | None, settings: dict[str, Any]) -> RunPlan:
    """Return the settings of a run from a task, a base config or preset, and further settings."""
    if isinstance(task, TrainConfig):
        if config is not None:
            raise TypeError("two configs: pass one")
        config = task
        task = None
    if config is not None and preset is not None:
        raise TypeError(f"preset={preset!r} has no effect on a config, which has every setting: pass one of them")
    if isinstance(env, Mapping):
        settings["env"] = dict(env)
    elif env is not None:
        if task is not None:
            raise TypeError("two environments: pass one, and its settings as env={...}")
        task = env
    if isinstance(task, EnvConfig):
        settings = {"env": task, **settings}
        task = None
    if isinstance(settings.get("algorithm"), str):
        settings["algorithm"] = {"kind": settings["algorithm"]}
    algorithm = settings.get("algorithm")
    kind = algorithm.get("kind") if isinstance(algorithm, Mapping) else None
    device = settings.get("device") or ("cpu" if config is None else config.device)
    found = None if task is None else task_of(task, device)
    source = "the settings given"
    if config is None:
        section = settings.get("env") or {}
        env_id = section.id if isinstance(section, EnvConfig) else section.get("id")
        config, source = base_config(found.env_id if found else env_id, preset, kind, settings.get("device"))
    if found is None:
        return RunPlan(with_settings(config, settings), source)
    base = replace(config, env=found.settings(config.env))
    config = with_settings(base, settings)
    if found.env is not None:
        _refuse_lost_settings(config.env, base.env)
        config = replace(config, env=found.settings(config.env))
        if isinstance(found.env, SelfPlayEnv) and "self_play" not in settings:
            config = replace(config, self_play=None)  # a preset's; this environment has its opponents already
    return RunPlan(config, source, found.env, found.note)


def _refuse_lost_settings(env: EnvConfig, base: EnvConfig) -> None:
    """Raise UserError for settings that change the task, which an environment that was passed in cannot follow."""
    for name in ("options", "wrappers", "reset_steps", "finite_horizon"):
        value = getattr(env, name)
        if value != getattr(base, name):
            raise UserError(
                f"env.{name}={value} would have no effect on an environment that exists already: pass its class or "
                "a function that makes it instead (to a canter.envs.gymnasium.GymnasiumEnv, info_keys are an argument)"
            )


def open_env(config: TrainConfig, env: Env | None) -> AbstractContextManager[Env]:
    """Return a context with `env`, or with a new environment that is closed at the end."""
    return closed_quietly(config.env.build(config.device)) if env is None else nullcontext(env)
