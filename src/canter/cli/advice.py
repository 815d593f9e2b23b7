"""What to say about a flag that is not known."""

from __future__ import annotations

from collections.abc import Sequence

from canter.experiments.foreign import translated
from canter.registry import nearest


class UsageError(ValueError):
    """A command line that makes no sense."""


def advise(unknown: str, flags: Sequence[str]) -> str:
    """What another library calls so, flags that end in the same word, or else those that look alike."""
    word = unknown.lstrip("-").replace("_", "-")
    foreign = translated(unknown)
    if foreign is not None and any(flag in foreign for flag in flags):
        return foreign
    same = [flag for flag in flags if flag.endswith(f".{word}")]
    return f"did you mean {' or '.join(same)}?" if same else nearest(unknown, flags)
