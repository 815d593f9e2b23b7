"""Importing this puts Canter's runners in the place of RSL-RL's, for scripts that name `rsl_rl.runners` themselves.

import canter.compat.rsl_rl.take_over  # before whatever imports rsl_rl.runners, such as mjlab
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

from canter.compat.rsl_rl.distillation import DistillationRunner
from canter.compat.rsl_rl.runner import OnPolicyRunner

RUNNERS = {"OnPolicyRunner": OnPolicyRunner, "DistillationRunner": DistillationRunner}


def take_over() -> None:
    """Replace the runners of the installed package, or stand for the package where there is none."""
    try:
        package: Any = importlib.import_module("rsl_rl.runners")
    except ModuleNotFoundError as error:
        if error.name not in ("rsl_rl", "rsl_rl.runners"):
            raise
        package = _stand_in()
    for name, runner in RUNNERS.items():
        theirs = getattr(package, name, None)
        if theirs is not None and theirs is not runner:
            _refuse_if_held(name, theirs)
        setattr(package, name, runner)


def _stand_in() -> types.ModuleType:
    root, runners = types.ModuleType("rsl_rl"), types.ModuleType("rsl_rl.runners")
    root.__path__ = []  # a package
    root.runners = runners  # type: ignore[attr-defined]
    sys.modules |= {"rsl_rl": root, "rsl_rl.runners": runners}
    return runners


def _refuse_if_held(name: str, theirs: Any) -> None:
    """Whoever imported the parent's class already goes on with it, which nobody would notice."""
    for module in list(sys.modules.values()):
        where = getattr(module, "__name__", "")
        if where.partition(".")[0] not in ("rsl_rl", "canter") and vars(module).get(name) is theirs:
            raise ImportError(
                f"{where} has imported rsl_rl's {name} already: import canter.compat.rsl_rl.take_over first"
            )


take_over()
