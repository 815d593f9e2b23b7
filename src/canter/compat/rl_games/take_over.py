"""Importing this puts Canter's runner in the place of rl_games', for scripts that name `rl_games` themselves.

import canter.compat.rl_games.take_over  # before whatever imports rl_games.torch_runner, such as Isaac Lab's scripts
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from canter.compat.rl_games.observer import AlgoObserver, DefaultAlgoObserver, IsaacAlgoObserver
from canter.compat.rl_games.player import PpoPlayer
from canter.compat.rl_games.registries import env_configurations, model_builder, vecenv
from canter.compat.rl_games.runner import Runner


class IVecEnv:
    """What wrappers for rl_games inherit from; Canter asks them for `reset`, `step` and `get_env_info`."""


def safe_filesystem_op(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run it, once: what fails is raised."""
    return func(*args, **kwargs)


def safe_save(state: Any, filename: str) -> None:
    """Write a file of torch's."""
    torch.save(state, filename)


OBSERVERS = {cls.__name__: cls for cls in (AlgoObserver, DefaultAlgoObserver, IsaacAlgoObserver)}
MODULES: dict[str, dict[str, Any]] = {
    "rl_games": {},
    "rl_games.torch_runner": {"Runner": Runner},
    "rl_games.common": {},
    "rl_games.common.env_configurations": vars(env_configurations),
    "rl_games.common.vecenv": {"IVecEnv": IVecEnv, **vars(vecenv)},
    "rl_games.common.ivecenv": {"IVecEnv": IVecEnv},
    "rl_games.common.algo_observer": OBSERVERS,
    "rl_games.common.player": {"BasePlayer": PpoPlayer},
    "rl_games.algos_torch": {},
    "rl_games.algos_torch.model_builder": vars(model_builder),
    "rl_games.algos_torch.torch_ext": {"safe_filesystem_op": safe_filesystem_op, "safe_save": safe_save},
}
"""What stands for the package where there is none: the names that scripts and Isaac Lab's wrappers import."""


def take_over() -> None:
    """Replace the runner of the installed package, or stand for the package where there is none."""
    try:
        package: Any = importlib.import_module("rl_games.torch_runner")
    except ModuleNotFoundError as error:
        if error.name not in ("rl_games", "rl_games.torch_runner"):
            raise
        return _stand_in()
    if package.Runner is not Runner:
        _refuse_if_held(package.Runner)
    package.Runner = Runner


def _stand_in() -> None:
    for name, content in MODULES.items():
        module = types.ModuleType(name)
        module.__path__ = []  # a package
        vars(module).update(content)
        sys.modules[name] = module
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)


def _refuse_if_held(theirs: Any) -> None:
    """Whoever imported the parent's class already goes on with it, which nobody would notice."""
    for module in list(sys.modules.values()):
        where = getattr(module, "__name__", "")
        if where.partition(".")[0] not in ("rl_games", "canter") and vars(module).get("Runner") is theirs:
            raise ImportError(
                f"{where} has imported rl_games' Runner already: import canter.compat.rl_games.take_over first"
            )


take_over()
