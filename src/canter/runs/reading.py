"""Reading what a run has left on disk, however damaged, without torch: `canter runs` should not wait for it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from canter.plain import ConfigError
from canter.storage.strict_yaml import read_yaml
from canter.storage.untrusted import open_untrusted

MAX_ROWS = 4000
"""Of longer files only every n-th row is read."""
MAX_LINE = 1 << 20
MAX_BYTES = 4 << 30
MAX_SETTINGS = 1000
TAIL = 1 << 16
"""Where the last row is looked for."""

Row = dict[str, float]
"""One iteration: names to finite numbers."""


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a metrics file, thinned out to about `MAX_ROWS`; what is no row is passed over."""
    try:
        with open_untrusted(path, MAX_BYTES, within=path.parent) as file:
            start = file.read(TAIL)
            length = max(1.0, len(start) / max(1, start.count(b"\n")))
            stride = max(1, math.ceil(os.fstat(file.fileno()).st_size / length / MAX_ROWS))
            file.seek(0)
            number, line = 0, b""
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE), b"")):
                if number % stride == 0 and (row := parse_row(line)):
                    yield row
            if number % stride and (row := parse_row(line)):  # the last one is always shown
                yield row
    except OSError:
        return


def read_last_row(path: Path) -> Row:
    """The last whole row of a metrics file, without reading the others; empty if there is none near the end."""
    try:
        with open_untrusted(path, MAX_BYTES, within=path.parent) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            lines = file.read(TAIL).splitlines()
    except OSError:
        return {}
    return next((row for line in reversed(lines) if (row := parse_row(line))), {})


def parse_row(line: bytes) -> Row:
    """The finite numbers of one line; empty where the line is torn or holds no `env_steps`."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(content, dict):
        return {}
    row: Row = {}
    for name, value in content.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300:
            row[name] = float(value)
    return row if "env_steps" in row else {}


def read_settings(path: Path) -> dict[str, Any]:
    """A run's settings as dotted key paths; empty where the file cannot be read.

    Older or newer versions may know other settings, so they are shown as they are and not checked.
    """
    try:
        content, _ = read_yaml(path, within=path.parent)
    except ConfigError:
        return {}
    return dict(islice(flatten(content), MAX_SETTINGS))


def flatten(plain: Any, key: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Dotted key paths and values of nested mappings; an empty mapping is a value."""
    if isinstance(plain, dict) and plain and depth < 20:
        for name, value in plain.items():
            yield from flatten(value, f"{key}.{name}" if key else str(name), depth + 1)
    elif key:
        yield key, plain
