"""What there is to type, kept in a file, so that help, lists and typos are answered without importing torch.

`python -m canter.app.cli.make_index` (`make index`) writes the file; a test holds it against the code.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from canter.app.experiments.foreign import translated
from canter.core.registry import PLUGINS, UserError, nearest

FILE = Path(__file__).with_name("index.json")
FREE = ("--env.options.", "--env.wrappers.")


class UsageError(UserError):
    """A command line that makes no sense."""


def read_index() -> dict[str, Any]:
    """Flags by command, environments, schemes and presets.

    Where the user's own modules or plugins may have added some, they are looked up instead.
    """
    if others_may_add():
        from canter.app.cli.make_index import make_index

        return make_index()
    return json.loads(FILE.read_text())


def others_may_add() -> bool:
    """Whether this process knows more than Canter's own, or may: all is imported already, or there are plugins."""
    return "canter.app.api" in sys.modules or bool(entry_points(group=PLUGINS))


def check_arguments(command: str, argv: list[str]) -> None:
    """Refuse a flag or an environment that cannot exist, before anything heavy is imported.

    Whatever a module of the user's or a plugin may have added is left to the command itself.
    """
    if others_may_add():
        return
    flags = [token.partition("=")[0].replace("_", "-") for token in argv if token.startswith("--")]
    index = read_index()
    known = {*index["flags"].get(command, ()), "--help"}
    unknown = next((flag for flag in flags if flag not in known and not flag.startswith(FREE)), None)
    if unknown is not None:
        raise UsageError(f"unknown flag {unknown}: {advise(unknown, sorted(known))}")
    if argv and command in ("train", "check") and not argv[0].startswith("-"):
        check_env(argv[0], index)


def advise(unknown: str, flags: Sequence[str]) -> str:
    """What another library calls so, flags that end in the same word, or else those that look alike."""
    word = unknown.lstrip("-").replace("_", "-")
    foreign = translated(unknown)
    if foreign is not None and any(flag in foreign for flag in flags):
        return foreign
    same = [flag for flag in flags if flag.endswith(f".{word}")]
    return f"did you mean {' or '.join(same)}?" if same else nearest(unknown, flags)


def check_env(env_id: str, index: dict[str, Any]) -> None:
    """Refuse an id that is not listed, and not of a kind that only its own scheme knows."""
    scheme, colon, name = env_id.rpartition(":")
    if scheme == "tensor":
        what, names = "environment tensor:", index["tensor"]
    elif colon or "/" in env_id or env_id in index["gymnasium"] or Path(env_id).exists():
        return
    else:
        what, names = "Gymnasium environment ", gymnasium_ids()
    if name not in names:
        raise UsageError(f"unknown {what}{name!r}: {nearest(name, names)} `canter envs` lists what there is")


def gymnasium_ids() -> list[str]:
    """What Gymnasium knows here, that of installed packages included."""
    import gymnasium

    return sorted(gymnasium.registry)
