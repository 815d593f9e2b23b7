"""What to learn in, however it is given: an id, a class, a function, one environment, or many of them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.vector import SyncVectorEnv, VectorEnv

from canter.envs import EnvConfig
from canter.envs.gymnasium import GymnasiumEnv
from canter.envs.imports import PYTHON, allow_import, introduce
from canter.specs import Env

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
    """What to learn in."""

    env_id: str
    env: Env | None = None
    """The environment itself, where it was given and cannot be made again."""
    note: str = ""
    """What its user should know; empty for nothing."""

    def settings(self, env: EnvConfig) -> EnvConfig:
        """The settings of an environment, for this one."""
        num_envs = env.num_envs if self.env is None else self.env.spec.num_envs // self.env.spec.num_agents
        return replace(env, id=self.env_id, num_envs=num_envs)


def task_of(what: Any, device: str = "cpu") -> Task:
    """The task that an object means; a wrong one is named with what is expected."""
    if isinstance(what, str):
        return Task(what)
    if isinstance(what, VectorEnv):
        return Task(_unnamed(what.unwrapped), GymnasiumEnv(what, device=device), UNNAMED)
    if isinstance(what, gymnasium.Env):
        alone = SyncVectorEnv([lambda: what], autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP)
        note = "One environment was given, so one is stepped; give its class or a function that makes it to step many"
        return Task(_unnamed(what.unwrapped), GymnasiumEnv(alone, device=device), f"{note}. {UNNAMED}")
    if isinstance(what, Env) and not isinstance(what, type):
        name = what.spec.env_id
        if ":" in name or name in gymnasium.registry:
            return Task(name, what)
        return Task(f"{PYTHON}:{name}" if name else _unnamed(what), what, UNNAMED)
    if callable(what):
        return _named(what)
    shown = repr(what) if len(repr(what)) <= 60 else f"{repr(what)[:60]}..."
    raise TypeError(f"{shown} ({type(what).__name__}) is nothing to train in: expected {EXPECTED}")


def _unnamed(env: Any) -> str:
    return f"{PYTHON}:{type(env).__name__}"


def _named(factory: Callable[..., Any]) -> Task:
    """A class or function, by the name under which it can be imported again."""
    inner = factory
    while isinstance(inner, functools.partial):
        inner = inner.func
    name, module = getattr(inner, "__qualname__", ""), getattr(inner, "__module__", "")
    place = _place(module) if name.isidentifier() and inner is factory else None
    if place is None:
        env_id = f"{PYTHON}:{name if name.isidentifier() else 'environment'}"
        introduce(env_id, factory)
        return Task(env_id, note=UNNAMED)
    module, folder, note = place
    allow_import(module, folder)
    introduce(f"{module}:{name}", factory)
    return Task(f"{module}:{name}", note=note)


def _place(module: str) -> tuple[str, str, str] | None:
    """Name of a module, the folder it is found in and what to know; None where it has no file, as in a notebook."""
    found = sys.modules.get(module)
    file = getattr(found, "__file__", None)
    if file is None:
        return None
    path = Path(file).resolve()
    if module == "__main__":
        spec = getattr(found, "__spec__", None)
        module = path.stem if spec is None else spec.name
    if not all(part.isidentifier() for part in module.split(".")):
        return None
    depth = len(module.split(".")) - (path.name != "__init__.py")
    note = ""
    if found is sys.modules.get("__main__") and "__name__" not in path.read_text(errors="replace"):
        note = f'Put canter.train(...) under `if __name__ == "__main__":`; other commands import {path.name}'
    return module, str(path.parents[depth]), note
