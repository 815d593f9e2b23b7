"""Files from strangers and files that must survive: read within limits, written atomically.

A file that is read must be a regular one, of limited size and inside its folder; JSON and YAML are
plain data within limits of size, depth and aliases, and nothing in them is ever executed. A file
that is written is complete or absent, even if the process or the machine dies meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NoReturn

import yaml

from canter.core.machine import available_memory
from canter.core.plain import MAX_DEPTH, ConfigError
from canter.core.registry import UserError


class Unreadable(UserError, OSError):
    """A file that is refused unread; the message says which and why."""


class Corrupt(UserError):
    """A stored file or folder cannot be used; `kind` says what it should hold."""

    kind: ClassVar[str]

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{self.kind} {path} cannot be used: {reason}")
        self.path = path
        self.reason = reason


def open_untrusted(path: Path, limit: int, within: Path | None = None) -> BinaryIO:
    """Open a regular file of at most `limit` bytes for reading; pipes and devices are refused.

    With `within`, the file must lie in that folder after resolving links. Without it, the user
    named the file, which may be a link.
    """
    if within is not None and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(within)):
        raise Unreadable(f"{path} is a link out of {within}, which is not followed")
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise Unreadable(f"{path} is not a regular file")
        if info.st_size > limit:
            raise Unreadable(f"{path} has {info.st_size:,} bytes, more than the {limit:,} allowed")
        return open(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def read_untrusted(path: Path, limit: int, within: Path | None = None) -> bytes:
    """Return the bytes of such a file; raise Unreadable if they would not fit into memory."""
    with open_untrusted(path, limit, within) as file:
        size = os.fstat(file.fileno()).st_size
        free = available_memory()
        if size > free:
            raise Unreadable(f"{path} has {size:,} bytes, more than the free memory ({free:,.0f})")
        return file.read(size)


def write_synced(path: Path, data: bytes | Iterable[bytes], mode: int = 0o666) -> None:
    """Write a new file from one or several pieces and wait until it is on the disk.

    Its permissions are those of `mode` that the umask allows.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with open(fd, "wb") as file:
        file.writelines([data] if isinstance(data, bytes) else data)
        file.flush()
        os.fsync(fd)


def sync_folder(folder: Path) -> None:
    """Wait until the directory entries of a folder are on the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def append(path: Path, data: bytes) -> None:
    """Append to a regular file; if that fails, remove what was appended."""
    # Refuse links, and do not wait for pipes.
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | flags, 0o666)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(fd, rest) :]
        except OSError:
            os.ftruncate(fd, info.st_size)
            raise
    finally:
        os.close(fd)


def replace_file(path: Path, data: bytes | Iterable[bytes], mode: int = 0o666) -> None:
    """Replace a file atomically and durably; if this raises, the old file is unchanged.

    There must be one writer of `path` at a time. The partial file of a killed writer, whose name
    starts with a dot, is overwritten by the next.
    """
    fresh = path.with_name(f".{path.name}.partial")
    fresh.unlink(missing_ok=True)
    try:
        write_synced(fresh, data, mode)
        os.rename(fresh, path)
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


MAX_JSON_BYTES = 1 << 20
"""Larger files are refused unread."""


class Malformed(UserError):
    """Data that Canter never writes; the message says what is wrong."""


def parse_json(data: bytes) -> Any:
    """Return the value of a JSON text; raise Malformed if it is invalid or not finite."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    def finite(text: str) -> float:
        number = float(text)
        return number if math.isfinite(number) else refuse(text[:40])

    try:
        return json.loads(data.decode("utf-8"), parse_constant=refuse, parse_float=finite)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"not valid JSON ({error})") from error


def read_json(path: Path) -> Any:
    """Return the content of a small JSON file that is no link out of its folder.

    Raises OSError or Malformed if it cannot be used.
    """
    return parse_json(read_untrusted(path, MAX_JSON_BYTES, within=path.parent))


def write_json(path: Path, content: Any) -> None:
    """Replace a JSON file atomically; raise ValueError for values that JSON does not have."""
    replace_file(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


MAX_YAML_BYTES = 2**20
MAX_ALIASES = 100
MAX_NODES = 10_000
"""Limit of values in a file, with aliases expanded."""

MAX_DIGITS = 400
"""Limit of characters of a value that is not a string; reading a base-60 number takes quadratic
time."""

_STRING = "tag:yaml.org,2002:str"
_MERGE = "tag:yaml.org,2002:merge"
FLOAT = "tag:yaml.org,2002:float"
EXPONENT = re.compile(r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9_]+)[eE][-+]?[0-9]+$")
"""Numbers such as 1e-3, which YAML 1.1 reads as strings."""


class _Loader(yaml.SafeLoader):
    """The safe loader, with limits that are checked while reading."""

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


_Loader.add_implicit_resolver(FLOAT, EXPONENT, list("-+.0123456789"))


def read_yaml(
    path: Path, within: Path | None = None, duplicates: list[str] | None = None
) -> tuple[Any, dict[str, int]]:
    """Return the plain data in a YAML file and the line of each key path; see `parse`."""
    try:
        content = read_untrusted(path, MAX_YAML_BYTES, within)
    except Unreadable as error:
        raise ConfigError(str(error)) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{path}: cannot read the config file: {reason}") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text: {error.reason}") from error
    return parse(text, str(path), duplicates)


def parse(text: str, name: str, duplicates: list[str] | None = None) -> tuple[Any, dict[str, int]]:
    """Return the plain data in a YAML text and the line of each key path.

    Raises ConfigError, in which `name` stands for the text. A duplicate key is an error too, unless
    a list `duplicates` is given: then it is added to the list, and the last value is used.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        lines: dict[str, int] = {}
        for count, (key, mark) in enumerate(_walk(node, "", 0, duplicates)):
            if count >= MAX_NODES:
                raise yaml.MarkedYAMLError(problem=f"more than {MAX_NODES:,} values", problem_mark=mark)
            lines.setdefault(key, mark.line + 1)
        return loader.construct_document(node), lines
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)  # some subclasses of YAMLError have no mark or problem
        place = name if mark is None else f"{name}:{mark.line + 1}"
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or error
        raise ConfigError(f"{place}: not valid YAML: {problem}") from error
    except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError) as error:
        # Raised for `!!int x`, `!!bool x`, `!!timestamp x` or 2001-13-45.
        raise ConfigError(f"{name}: not valid YAML: a value does not fit its type ({error})") from error


def parse_value(text: str) -> Any:
    """Return the value of a YAML text, or the text itself if it is not valid YAML."""
    try:
        return parse(text, "")[0]
    except ConfigError:
        return text


def _walk(node: yaml.Node, key: str, depth: int, duplicates: list[str] | None) -> Iterator[tuple[str, Any]]:
    """Yield key path and mark of each value, with aliases expanded, and check keys and limits."""
    yield key, node.start_mark
    if depth > MAX_DEPTH:  # an alias inside its own value never ends
        raise yaml.MarkedYAMLError(problem=f"more than {MAX_DEPTH} levels", problem_mark=node.start_mark)
    if isinstance(node, yaml.ScalarNode):
        if node.tag != _STRING and len(node.value) > MAX_DIGITS:
            raise yaml.MarkedYAMLError(problem=f"more than {MAX_DIGITS} digits", problem_mark=node.start_mark)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _walk(item, key, depth + 1, duplicates)
    elif isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for name, value in node.value:
            if not isinstance(name, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a plain name", problem_mark=name.start_mark)
            if name.value in seen and duplicates is not None:
                duplicates.append(f"{key}.{name.value}" if key else name.value)
            elif name.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {name.value} is there twice", problem_mark=name.start_mark)
            seen.add(name.value)
            part = name.value[:200]  # as long as in error messages
            if name.tag == _MERGE:
                inner = key
            else:
                inner = f"{key}.{part}" if key else part
            yield from _walk(name, inner, depth + 1, duplicates)
            yield from _walk(value, inner, depth + 1, duplicates)


class _Dumper(yaml.SafeDumper):
    """Writes mappings as blocks and lists in one line, without aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_list(self, data: Any) -> Any:
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)


_Dumper.add_implicit_resolver(FLOAT, EXPONENT, list("-+.0123456789"))
_Dumper.add_representer(list, _Dumper.represent_list)


def dump_plain(plain: Mapping[str, Any]) -> str:
    """Return plain data as YAML text."""
    return yaml.dump(plain, Dumper=_Dumper, sort_keys=False, width=120)
