"""Settings in YAML files."""

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

import yaml

from canter.config import TrainConfig
from canter.core.plain import ConfigError, from_plain, to_plain
from canter.core.storage.strict import EXPONENT, FLOAT, read_yaml


class _Dumper(yaml.SafeDumper):
    """Mappings as blocks, lists in one line, no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_list(self, data: Any) -> Any:
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)


_Dumper.add_implicit_resolver(FLOAT, EXPONENT, list("-+.0123456789"))
_Dumper.add_representer(list, _Dumper.represent_list)


@dataclass(frozen=True)
class ConfigFile:
    """What a file says, before it is put over other settings."""

    name: str
    plain: dict[str, Any]
    lines: dict[str, int]
    """Line of each key path."""

    def over(self, base: TrainConfig) -> TrainConfig:
        """`base` with the settings of the file put over it; errors name file, line and key."""
        try:
            return from_plain(self.plain, base)
        except ConfigError as error:
            key = re.sub(r"\[\d+\]$", "", error.key)
            while key and key not in self.lines:
                key = key.rpartition(".")[0]
            place = f"{self.name}:{self.lines[key]}" if key else self.name
            raise ConfigError(f"{place}: {error}", error.key) from error


def read_config(path: str | Path, within: Path | None = None, twice: list[str] | None = None) -> ConfigFile:
    """Read a YAML file of settings; one that belongs to the folder `within` must lie there. For `twice` see `parse`."""
    plain, lines = read_yaml(Path(path), within, twice)
    if not isinstance(plain, dict):
        found = "nothing" if plain is None else f"a {type(plain).__name__}"
        raise ConfigError(f"{path}: expected a mapping of settings at the top, found {found}")
    return ConfigFile(str(path), plain, lines)


def dump_config(config: TrainConfig) -> str:
    """All settings as YAML text; `read_config` reads it back to an equal config, whatever its base."""
    return dump_plain(to_plain(config))


def explained_config(config: TrainConfig) -> str:
    """All settings as YAML text, each under a comment that says what it is; `read_config` reads it back."""
    sentences = dict(_sentences(config, ""))
    lines: list[str] = []
    path: list[str] = []
    for line in dump_config(config).splitlines():
        match = re.match(r"( *)([A-Za-z_]\w*):", line)
        if match is not None:
            path = [*path[: len(match[1]) // 2], match[2]]
            sentence = sentences.get(".".join(path))
            lines += [] if sentence is None else [f"{match[1]}# {sentence}"]
        lines.append(line)
    return "\n".join(lines) + "\n"


def _sentences(config: Any, key: str) -> Iterator[tuple[str, str]]:
    """The first sentence about every setting, by its key path."""
    for name, text in field_docs(type(config)).items():
        path = f"{key}.{name}" if key else name
        yield path, re.split(r"(?<=\.)\s(?=[A-Z`])", text)[0].rstrip(".")
        value = getattr(config, name)
        if is_dataclass(value):
            yield from _sentences(value, path)


@cache
def field_docs(cls: type) -> dict[str, str]:
    """The string literal behind each field of a dataclass, inherited or its own, as one line."""
    docs: dict[str, str] = {}
    for base in filter(is_dataclass, reversed(cls.__bases__)):
        docs |= field_docs(base)
    try:
        source = inspect.getsource(cls)
    except (OSError, TypeError):  # made where there is no file, as in a notebook
        return docs
    body = cast(ast.ClassDef, ast.parse(textwrap.dedent(source)).body[0]).body
    for field, after in pairwise(body):
        match field, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = " ".join(text.split())
    return docs


def dump_plain(plain: dict[str, Any]) -> str:
    """Plain settings as YAML text."""
    return yaml.dump(plain, Dumper=_Dumper, sort_keys=False, width=120)
