"""Names of settings, environments and presets, cached so that help and typos need no torch.

The cache is one JSON file in the user's cache folder. It holds for one state of Canter's sources,
of the installed plugins and of Gymnasium; a cache that cannot be read or written is ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from canter import __version__
from canter.core.registry import PLUGINS
from canter.core.storage.files import replace_file

PACKAGE = Path(__file__).parents[2]
GYMNASIUM = "gymnasium.envs."
"""Prefix of the entry points of the environments that come with Gymnasium itself."""


def read_index(section: str) -> Any:
    """Return a section of the index, see `sections`.

    Once Canter is imported whole, as in Python programs and with `--allow-import`, the section is
    computed, because more may be registered than the cache knows.
    """
    if "canter.app.api" in sys.modules:
        return sections()[section]()
    return cached_index()[section]


def known_algorithms() -> list[str]:
    """Return the names of the algorithms for the help; without a cache, of Canter's own alone.

    The help must not wait for torch, which a new index takes.
    """
    if "canter.app.api" in sys.modules:
        return read_index("algorithms")
    index = _read_cache(cache_key())
    return registered_in_source() if index is None else index["algorithms"]


def registered_in_source() -> list[str]:
    """Return the names under which Canter's own algorithms are registered, without importing them."""
    sources = (PACKAGE / "algorithms").rglob("*.py")
    names = (re.findall(r'^@algorithms\.register\("(\w+)"\)', path.read_text(), re.MULTILINE) for path in sources)
    return sorted(name for found in names for name in found)


@cache
def cached_index() -> dict[str, Any]:
    """Return the index from the cache; compute and cache it, with torch, if it is outdated."""
    key = cache_key()
    index = _read_cache(key)
    if index is None:
        import_module("canter.app.api")
        index = {section: compute() for section, compute in sections().items()}
        with contextlib.suppress(OSError):
            write_cache(key, index)
    return index


def cache_file() -> Path:
    """Return the place of the cache for this installation."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    installation = hashlib.sha256(str(PACKAGE).encode()).hexdigest()[:12]
    return Path(folder) / "canter" / f"index-{installation}.json"


def cache_key() -> str:
    """Return a hash of everything that the index depends on."""
    state = [__version__, sys.version, metadata.version("gymnasium"), *_sources(PACKAGE)]
    for plugin in metadata.entry_points(group=PLUGINS):
        version = "" if plugin.dist is None else plugin.dist.version
        state.append(f"{plugin.name} {plugin.value} {version}")
        spec = find_spec(plugin.value.partition(":")[0].partition(".")[0])  # does not import it
        if spec is not None and spec.origin is not None:
            origin = Path(spec.origin)
            state += _sources(origin.parent if spec.submodule_search_locations else origin)
    return hashlib.sha256("\n".join(state).encode()).hexdigest()


def _sources(path: Path) -> Iterator[str]:
    """Yield a line for each source file below a folder: path, size and time of its last change."""
    if path.is_dir():
        with os.scandir(path) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.is_dir() or entry.name.endswith((".py", ".yaml")):
                    yield from _sources(Path(entry.path))
    else:
        status = path.stat()
        yield f"{path} {status.st_size} {status.st_mtime_ns}"


def _read_cache(key: str) -> dict[str, Any] | None:
    """Return the cached index; None if there is none for this key."""
    try:
        found = json.loads(cache_file().read_text())
        if found["key"] == key and isinstance(found["index"], dict):
            return found["index"]
    except (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError):
        pass  # absent, damaged, or without a home folder
    return None


def write_cache(key: str, index: dict[str, Any]) -> None:
    """Write the index to the cache atomically."""
    file = cache_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, json.dumps({"key": key, "index": index}).encode())


def summary_of(thing: Any) -> str:
    """Return the first line of a docstring."""
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def gymnasium_ids() -> list[str]:
    """Return the ids that Gymnasium knows, those of imported packages included."""
    import gymnasium

    return sorted(gymnasium.registry)


def sections() -> dict[str, Callable[[], Any]]:
    """Return the functions that compute the sections of the index from what is registered now; imports torch.

    They are: metavar of each setting by key, keys of settings with keys of the user's own, old
    names of settings, algorithms, summaries of tensor environments and of schemes, presets (name,
    environment, steps), modules that register namespaces with Gymnasium, and the ids of Gymnasium
    itself.
    """
    import gymnasium

    from canter.algorithms.base import algorithms
    from canter.config import TrainConfig
    from canter.config.presets import presets
    from canter.core.hints import config_keys, is_free, without_none
    from canter.envs import schemes
    from canter.envs.gymnasium.make import NAMESPACES
    from canter.envs.tensor import tensor_envs

    hints = config_keys(TrainConfig, with_old_names=True)
    entry_points = {name: str(spec.entry_point) for name, spec in gymnasium.registry.items()}
    return {
        "settings": lambda: {
            key: {int: "N", float: "X"}.get(without_none(hint), "NAME") for key, hint in hints.items()
        },
        "free_settings": lambda: sorted(key for key, hint in hints.items() if is_free(hint)),
        "old_settings": lambda: sorted(hints.keys() - config_keys(TrainConfig).keys()),
        "algorithms": lambda: sorted(algorithms),
        "tensor": lambda: {name: summary_of(tensor_envs[name]) for name in tensor_envs},
        "schemes": lambda: {name: summary_of(schemes[name]) for name in schemes},
        "presets": lambda: [[name, presets[name].env.id, presets[name].total_steps] for name in presets],
        "namespaces": lambda: {space: module for space, (module, _) in NAMESPACES.items()},
        "gymnasium": lambda: sorted(name for name, place in entry_points.items() if place.startswith(GYMNASIUM)),
    }
