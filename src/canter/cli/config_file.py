"""Settings in YAML files: strict, limited, and nothing in a file is ever run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from canter.config import TrainConfig
from canter.plain import MAX_DEPTH, ConfigError, from_plain, to_plain

__all__ = ["ConfigError", "ConfigFile", "dump_config", "from_plain", "load_config", "parse", "read_config", "to_plain"]

MAX_BYTES = 2**20
MAX_ALIASES = 100
MAX_NODES = 10_000
"""Values in a file, each alias counted as all that it stands for."""

MAX_DIGITS = 400
"""Characters of a value that is not a string; reading a number in base 60 takes time by the square of its length."""

_STRING = "tag:yaml.org,2002:str"
_MERGE = "tag:yaml.org,2002:merge"
_FLOAT = "tag:yaml.org,2002:float"
_EXPONENT = re.compile(r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9_]+)[eE][-+]?[0-9]+$")
"""1e-3 is a number to everybody but YAML 1.1."""


class _Loader(yaml.SafeLoader):
    """The safe loader, which stops reading as soon as a limit is passed."""

    nodes = aliases = depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.nodes += 1
        self.aliases += self.check_event(yaml.AliasEvent)
        self.depth += 1
        for count, limit, what in (
            (self.nodes, MAX_NODES, "values"),
            (self.aliases, MAX_ALIASES, "aliases"),
            (self.depth, MAX_DEPTH, "levels"),
        ):
            if count > limit:
                mark = self.peek_event().start_mark
                raise yaml.MarkedYAMLError(problem=f"more than {limit:,} {what}", problem_mark=mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    """Mappings as blocks, lists in one line, no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_list(self, data: Any) -> Any:
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)


_Loader.add_implicit_resolver(_FLOAT, _EXPONENT, list("-+.0123456789"))
_Dumper.add_implicit_resolver(_FLOAT, _EXPONENT, list("-+.0123456789"))
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


def read_config(path: str | Path) -> ConfigFile:
    """Read a YAML file of settings."""
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path}: not a regular file")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{path}: cannot read the config file: {reason}") from error
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES:,} bytes")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text: {error.reason}") from error
    plain, lines = parse(text, str(path))
    if not isinstance(plain, dict):
        found = "nothing" if plain is None else f"a {type(plain).__name__}"
        raise ConfigError(f"{path}: expected a mapping of settings at the top, found {found}")
    return ConfigFile(str(path), plain, lines)


def load_config(path: str | Path, base: TrainConfig) -> TrainConfig:
    """`base` with the settings of a YAML file put over it."""
    return read_config(path).over(base)


def dump_config(config: TrainConfig) -> str:
    """All settings as YAML text; `load_config` reads it back to an equal config, whatever its base."""
    return yaml.dump(to_plain(config), Dumper=_Dumper, sort_keys=False, width=120)


def parse(text: str, name: str) -> tuple[Any, dict[str, int]]:
    """The plain data in a YAML text, and the line of each key path; `name` stands for the text in errors."""
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None, {}
            lines: dict[str, int] = {}
            for count, (key, mark) in enumerate(_walk(node, "", 0)):
                if count >= MAX_NODES:
                    raise yaml.MarkedYAMLError(problem=f"more than {MAX_NODES:,} values", problem_mark=mark)
                lines.setdefault(key, mark.line + 1)
            return loader.construct_document(node), lines
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = name if mark is None else f"{name}:{mark.line + 1}"
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or error
        raise ConfigError(f"{place}: not valid YAML: {problem}") from error
    except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError) as error:
        # What `!!int x`, `!!bool x`, `!!timestamp x` or 2001-13-45 end in.
        raise ConfigError(f"{name}: not valid YAML: a value does not fit its type ({error})") from error


def _walk(node: yaml.Node, key: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Key path and place of each value, aliases expanded; refuses what a config has no use for."""
    yield key, node.start_mark
    if depth > MAX_DEPTH:  # an alias inside of what it stands for has no end
        raise yaml.MarkedYAMLError(problem=f"more than {MAX_DEPTH} levels", problem_mark=node.start_mark)
    if isinstance(node, yaml.ScalarNode):
        if node.tag != _STRING and len(node.value) > MAX_DIGITS:
            raise yaml.MarkedYAMLError(problem=f"more than {MAX_DIGITS} digits", problem_mark=node.start_mark)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _walk(item, key, depth + 1)
    elif isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for name, value in node.value:
            if not isinstance(name, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a plain name", problem_mark=name.start_mark)
            if name.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {name.value} is there twice", problem_mark=name.start_mark)
            seen.add(name.value)
            part = name.value[:200]  # as in errors; a path repeats the names above it
            inner = key if name.tag == _MERGE else f"{key}.{part}" if key else part
            yield from _walk(name, inner, depth + 1)
            yield from _walk(value, inner, depth + 1)
