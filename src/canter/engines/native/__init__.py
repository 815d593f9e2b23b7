"""The CPU's own engine in C: acting, values, gradients of whole minibatches and optimizer steps.

The C sources are compiled when Canter is installed. Without a compiler, or with a module compiled
from other sources, the engine is refused with that reason and everything runs in plain PyTorch.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

INTERFACE = 2
"""Version of the functions and descriptions that C expects, as in `module.c`."""
MISSING = "it was not built: there was no C compiler when Canter was installed"
OUTDATED = "it was built from other sources: install Canter again"

_native: ModuleType | None
_reason = MISSING
try:
    from canter.engines.native import _native  # pyright: ignore[reportAttributeAccessIssue]
except ImportError:
    _native = None
if _native is not None and vars(_native).get("INTERFACE") != INTERFACE:
    _native = None
    _reason = OUTDATED

AVAILABLE = _native is not None
"""The C module was built."""
ACTIVATIONS: tuple[str, ...] = _native.ACTIVATIONS[1:] if _native else ()
"""Activations of hidden layers in C; the first of its list is the identity of heads."""
STD_FORMS: tuple[str, ...] = _native.STD_FORMS if _native else ()
"""Parameterisations of a standard deviation in C."""


def compiled() -> ModuleType:
    """Return the C module; raise RuntimeError if it was not built."""
    if _native is None:
        raise RuntimeError("the native engine was not built: install Canter again where there is a C compiler")
    return _native


def build_requirement(model: Any) -> str | None:
    """Return why the C module is missing, if it is."""
    return None if AVAILABLE else _reason
