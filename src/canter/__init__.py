"""Canter trains control policies with PPO and its relatives.

All public names are in `canter.app.api`, which is imported when the first of them is used, so that
`canter --help` does not wait for torch.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from canter.core.hints import DEPRECATED

if TYPE_CHECKING:
    from canter.app.api import *  # noqa: F403

__version__ = "0.2.0"

if sys.platform == "win32":
    raise ImportError("Canter needs Linux or macOS; on Windows use WSL 2, which is Linux (docs/stability.md)")


def __getattr__(name: str) -> Any:
    """Return a public name, a deprecated one or a module; called at its first use."""
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module 'canter' has no attribute {name!r}")
    if name in DEPRECATED:
        current = DEPRECATED[name]
        warnings.warn(f"canter.{name} is now called canter.{current}", DeprecationWarning, stacklevel=2)
        globals()[name] = value = getattr(import_module("canter"), current)
        return value
    if name != "__all__" and find_spec(f"canter.{name}") is not None:
        return import_module(f"canter.{name}")
    api = import_module("canter.app.api")
    if not hasattr(api, name):
        raise AttributeError(f"module 'canter' has no attribute {name!r}")
    globals()[name] = value = getattr(api, name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *import_module("canter.app.api").__all__]
