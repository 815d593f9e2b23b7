"""Reading the command line: errors in one line, and every setting is a flag."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any, NoReturn, get_origin

from canter.app.cli.index import UsageError as UsageError
from canter.app.cli.index import advise
from canter.core.hints import accepts_none, config_keys, is_free, is_text, without_none
from canter.core.plain import ConfigError
from canter.core.plain import nest as nest
from canter.core.storage.strict import parse
from canter.runs.records import RUNS


class Parser(argparse.ArgumentParser):
    """Reads the arguments of one command; what it does not know is an error that offers the nearest flag."""

    def __init__(self, command: str, usage: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=f"canter {command}",
            usage=f"canter {command} {usage}",
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.flags: list[str] = ["--help"]

    def flag(self, name: str, metavar: str, help: str, **options: Any) -> None:
        """Add a flag that takes a value; it may be typed with underscores for its hyphens."""
        self.flags.append(name)
        self.add_argument(name, metavar=metavar, help=help, **options)

    def switch(self, name: str, help: str) -> None:
        """Add a flag that is given or not."""
        self.flags.append(name)
        self.add_argument(name, action="store_true", help=help)

    def run_dir(self, what: str = "runs are looked for") -> None:
        """Add the flag for the folder of all runs."""
        self.flag("--run-dir", "DIR", f"where {what} (default {RUNS})", type=Path, default=RUNS)

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """The arguments by name."""
        arguments, rest = self.parse_known_args(self._regular(argv))
        unknown = next((token.partition("=")[0] for token in rest if token.startswith("-")), None)
        if unknown:
            raise UsageError(f"unknown flag {unknown}: {advise(unknown, self.flags)}")
        if rest:
            raise UsageError(f"unexpected argument {rest[0]!r}; see `{self.prog} --help`")
        return arguments

    def _regular(self, argv: list[str]) -> list[str]:
        """Flags with hyphens, and negative numbers tied to their flag: argparse takes -1e-3 for a flag."""
        regular: list[str] = []
        for token in argv:
            head, equals, value = token.partition("=")
            hyphens = head.replace("_", "-")
            if re.match(r"-\.?\d", token) and regular and regular[-1].startswith("--") and "=" not in regular[-1]:
                regular[-1] += f"={token}"
            else:
                regular.append(f"{hyphens}{equals}{value}" if hyphens in self.flags else token)
        return regular

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting, so that all errors are shown in one place."""
        raise UsageError(f"{message}; see `{self.prog} --help`")


def all_keys() -> dict[str, Any]:
    """Every setting of a run with its type hint."""
    from canter.config import TrainConfig

    return config_keys(TrainConfig, with_old_names=True)


def add_config_flags(
    parser: Parser, argv: list[str], short: dict[str, tuple[str, str]], *, section: str = "", **options: Any
) -> None:
    """Make every setting of a section a flag; `short` gives the flags to show in the help: name -> (key, help)."""
    keys = {key: hint for key, hint in all_keys().items() if key.startswith(section)}
    hidden = {flag_of(key): (key, argparse.SUPPRESS) for key in keys if flag_of(key) not in short}
    for name, (key, text) in (short | hidden).items():
        metavar = {int: "N", float: "X"}.get(without_none(keys[key]), "NAME")
        parser.flag(name, metavar, text, dest=f"key:{key}", **options)
    free = tuple(f"--{key}." for key, hint in keys.items() if is_free(hint))
    for token in dict.fromkeys(token.partition("=")[0] for token in argv if token.startswith(free)):
        parser.add_argument(token, dest=f"key:{token[2:].replace('-', '_')}", help=argparse.SUPPRESS, **options)


def flag_of(key: str) -> str:
    """The flag of a setting."""
    return f"--{key.replace('_', '-')}"


def given_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings given as flags, as they were typed: key path -> text."""
    return {name[4:]: text for name, text in vars(arguments).items() if name.startswith("key:") and text is not None}


def config_overrides(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings given as flags: key path -> plain value."""
    keys = all_keys()
    return {key: _read_value(text, keys.get(key, Any), key) for key, text in given_settings(arguments).items()}


def _read_value(text: str, hint: Any, key: str) -> Any:
    """A flag's text as the plain value that its key expects; strings need no quotes and lists no brackets."""
    kind = without_none(hint)
    if accepts_none(hint) and text.lower() in ("null", "none", "~"):
        return None
    if is_text(kind):
        return text
    if get_origin(kind) is tuple and not text.lstrip().startswith("["):
        text = f"[{text}]"
    try:
        return parse(text, key)[0]
    except ConfigError as error:
        raise ConfigError(f"{key}: cannot read {text!r}: {error}", key) from error
