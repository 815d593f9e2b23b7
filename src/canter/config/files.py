"""Config files: YAML read with the line of each key, and written with or without comments."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from canter.config import TrainConfig
from canter.core.plain import ConfigError, from_plain, to_plain
from canter.core.storage.files import dump_plain, read_yaml


@dataclass(frozen=True)
class ConfigFile:
    """The settings in a file."""

    name: str
    plain: dict[str, Any]
    lines: dict[str, int]
    """Line of each key."""

    def over(self, base: TrainConfig) -> TrainConfig:
        """Return `base` updated with the settings of a file; errors name file, line and key."""
        try:
            return from_plain(self.plain, base)
        except ConfigError as error:
            key = re.sub(r"\[\d+\]$", "", error.key)
            while key and key not in self.lines:
                key = key.rpartition(".")[0]
            place = f"{self.name}:{self.lines[key]}" if key else self.name
            raise ConfigError(f"{place}: {error}", error.key) from error


def read_config(path: str | Path, within: Path | None = None, twice: list[str] | None = None) -> ConfigFile:
    """Read a YAML file of settings; raise ConfigError if it is not inside the folder `within`.

    A duplicate key is an error, unless a list `twice` is given to collect duplicates.
    """
    plain, lines = read_yaml(Path(path), within, twice)
    if not isinstance(plain, dict):
        found = "nothing" if plain is None else f"a {type(plain).__name__}"
        raise ConfigError(f"{path}: expected a mapping of settings at the top, found {found}")
    return ConfigFile(str(path), plain, lines)


def dump_config(config: TrainConfig) -> str:
    """Return all settings as YAML text, which `read_config` reads back to an equal config."""
    return dump_plain(to_plain(config))


def commented_config(config: TrainConfig) -> str:
    """Return all settings as YAML text, each below a comment with its description."""
    descriptions = dict(_descriptions(config, ""))
    lines: list[str] = []
    path: list[str] = []
    for line in dump_config(config).splitlines():
        match = re.match(r"( *)([A-Za-z_]\w*):", line)
        if match is not None:
            path = [*path[: len(match[1]) // 2], match[2]]
            description = descriptions.get(".".join(path))
            if description is not None:
                lines.append(f"{match[1]}# {description}")
        lines.append(line)
    return "\n".join(lines) + "\n"


def _descriptions(config: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield the key of every setting and the first sentence of its documentation."""
    for name, text in field_docs(type(config)).items():
        path = f"{key}.{name}" if key else name
        yield path, re.split(r"(?<=\.)\s(?=[A-Z`])", text)[0].rstrip(".")
        value = getattr(config, name)
        if is_dataclass(value):
            yield from _descriptions(value, path)


@cache
def field_docs(cls: type) -> dict[str, str]:
    """Return the docstring of each field of a dataclass, also inherited ones, as one line."""
    docs: dict[str, str] = {}
    for base in filter(is_dataclass, reversed(cls.__bases__)):
        docs |= field_docs(base)
    try:
        source = inspect.getsource(cls)
    except (OSError, TypeError):  # defined without a file, as in a notebook
        return docs
    body = cast(ast.ClassDef, ast.parse(textwrap.dedent(source)).body[0]).body
    for field, after in pairwise(body):
        match field, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = " ".join(text.split())
    return docs
