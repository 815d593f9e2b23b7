"""Arguments of commands as data, the parser built from them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import Any, NoReturn

from canter.app.cli.index import known_algorithms, read_index
from canter.app.experiments.foreign import PYTHON_ONLY, translate_flag
from canter.core.registry import UserError, nearest

SPACE = "space."
"""Beginning of the keys of flags with ranges."""


class UsageError(UserError):
    """A command line that cannot be understood or contradicts itself."""


@dataclass(frozen=True)
class Argument:
    """A positional argument (`RUN`), a flag with a value (`--seed N`) or a switch (`--json`)."""

    name: str
    """How it is typed; a positional argument is named in capitals, as in the help."""
    help: str
    """Text of the help, which shows the default too."""
    metavar: str | None = None
    """Name of the value in the help; None for a switch."""
    type: Callable[[str], Any] | None = None
    """Converts the text; ArgumentTypeError and ValueError are reported with the name of the
    flag."""
    default: Any = None
    nargs: str | None = None
    """`?` makes the value optional, `+` takes several."""
    const: Any = None
    """The value of a flag that is given without one (`nargs="?"`)."""
    repeatable: bool = False
    """The values of all occurrences are collected in a list."""

    @property
    def is_flag(self) -> bool:
        """True for arguments that begin with hyphens."""
        return self.name.startswith("--")

    @property
    def attribute(self) -> str:
        """Name of the value in the parsed arguments."""
        return self.name.lstrip("-").replace("-", "_").lower()

    def is_given(self, arguments: argparse.Namespace) -> bool:
        """Return True if parsed arguments have a value other than the default."""
        return vars(arguments).get(self.attribute) not in (None, False, [], self.default)

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Declare the argument to argparse."""
        if self.is_flag and self.metavar is None:
            parser.add_argument(self.name, action="store_true", help=self.help)
            return
        options = {name: value for name in ("type", "nargs", "const") if (value := getattr(self, name)) is not None}
        options["default"] = self.default
        if self.repeatable:
            options |= {"action": "append", "default": []}
        shown = f"{self.default:,}" if isinstance(self.default, int) else self.default
        options["help"] = f"{self.help} (default {shown})" if shown else self.help
        if self.is_flag:
            parser.add_argument(self.name, metavar=self.metavar, **options)
        else:
            parser.add_argument(self.attribute, metavar=self.name, **options)


@dataclass(frozen=True)
class SettingFlags:
    """The settings of a run that a command takes as flags, such as `--algorithm.gamma 0.99`."""

    short: Mapping[str, tuple[str, str, str]] = field(default_factory=dict)
    """Flags shown in the help: name -> (key of the setting, name of the value, help)."""
    epilog: str = ""
    """Text below the list of arguments in the help."""
    section: str = ""
    """Only settings whose key begins with this text are flags."""
    ranges: bool = False
    """Every setting is also a flag `--space.KEY` with a range of values."""

    def keys(self, index: str) -> list[str]:
        """Return the keys in a section of the index that are flags, those of ranges included."""
        keys = [key for key in read_index(index) if key.startswith(self.section)]
        return [*keys, *(f"{SPACE}{key}" for key in keys)] if self.ranges else keys


@dataclass(frozen=True)
class Command:
    """A command of `canter`: its function, its help and its arguments."""

    function: str
    """`module:function` below `canter.app.cli`; it takes the parsed arguments."""
    summary: str
    arguments: Sequence[Argument] = ()
    details: str = ""
    """Text below the summary in the help."""
    settings: SettingFlags | None = None
    """None for a command that takes no settings of runs."""
    light: bool = False
    """The command runs without importing torch."""
    ranked: bool = False
    """torchrun may start several ranks of the command."""

    @property
    def usage(self) -> str:
        """Usage line of the help: positional arguments, flags and settings."""
        forms = {None: "{}", "?": "[{}]", "+": "{} ..."}
        parts = [forms[argument.nargs].format(argument.name) for argument in self.arguments if not argument.is_flag]
        if any(argument.is_flag for argument in self.arguments):
            parts.append("[--FLAG ...]")
        if self.settings is not None:
            parts.append(f"[--{self.settings.section}KEY VALUE ...]")
        return " ".join(parts)


class Parser(argparse.ArgumentParser):
    """Parses the arguments of one command; the error for an unknown flag lists similar ones."""

    def __init__(self, name: str, command: Command) -> None:
        super().__init__(
            prog=f"canter {name}",
            usage=f"canter {name} {command.usage}",
            description=f"{command.summary}\n\n{command.details}",
            epilog=command.settings and command.settings.epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.command = command
        self.own_flags = ["--help", *(argument.name for argument in command.arguments if argument.is_flag)]
        self._add_short_flags()
        for argument in command.arguments:
            argument.add_to(self)

    @cached_property
    def setting_flags(self) -> dict[str, str]:
        """Flags of all settings of the command, with the keys that they mean."""
        if self.command.settings is None:
            return {}
        flags = {flag_of(key): key for key in self.command.settings.keys("settings")}
        return flags | {flag: key for flag, (key, *_) in self.command.settings.short.items()}

    @cached_property
    def free_prefixes(self) -> tuple[str, ...]:
        """Beginnings of the flags whose last part the user chooses."""
        if self.command.settings is None:
            return ()
        return tuple(f"{flag_of(key)}." for key in self.command.settings.keys("free_settings"))

    def _add_short_flags(self) -> None:
        """Show the short flags of settings in the help; `take_settings` reads their values."""
        if self.command.settings is None:
            return
        for flag, (_, metavar, text) in self.command.settings.short.items():
            algorithms = ", ".join(known_algorithms()) if "{algorithms}" in text else ""
            self.add_argument(flag, metavar=metavar, help=text.format(algorithms=algorithms))

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Return the arguments by name; `settings` has the texts of setting flags by key."""
        settings, others = self.take_settings(argv)
        arguments, rest = self.parse_known_args(self._normalized(others))
        unknown = next((token.partition("=")[0] for token in rest if token.startswith("-")), None)
        if unknown is not None:
            raise self.unknown_flag(unknown)
        if rest:
            raise UsageError(f"unexpected argument {rest[0]!r}; see `{self.prog} --help`")
        arguments.settings = settings
        return arguments

    def take_settings(self, argv: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
        """Return the texts of setting flags by key, in the order typed, and the other arguments."""
        settings: dict[str, list[str]] = {}
        others: list[str] = []
        tokens = list(argv)
        while tokens:
            token = tokens.pop(0)
            flag, equals, text = token.partition("=")
            key = self.key_of(flag)
            if key is None:
                others.append(token)
                continue
            if not equals:
                if not tokens or looks_like_flag(tokens[0]):
                    self.error(f"argument {hyphenated(flag)}: expected one argument")
                text = tokens.pop(0)
            settings.setdefault(key, []).append(text)
        return settings, others

    def key_of(self, flag: str) -> str | None:
        """Return the key of the setting that a flag means; None if the flag is not a setting."""
        typed = hyphenated(flag)
        if self.free_prefixes and typed.startswith(self.free_prefixes):
            return flag[2:].replace("-", "_")
        return self.setting_flags.get(typed)

    def knows(self, flag: str) -> bool:
        """Return True if the command has the flag."""
        return hyphenated(flag) in self.own_flags or self.key_of(flag) is not None

    def unknown_flag(self, flag: str) -> UsageError:
        """Return the error about a flag that the command does not have."""
        old_names = {flag_of(key) for key in read_index("old_settings")}
        known = [*self.own_flags, *(flag for flag in self.setting_flags if flag not in old_names)]
        return UsageError(f"unknown flag {flag}: {advise(flag, known)}")

    def _normalized(self, argv: Iterable[str]) -> list[str]:
        """Return flags with hyphens, and join negative numbers to their flag for argparse."""
        normalized: list[str] = []
        for token in argv:
            flag, equals, value = token.partition("=")
            follows_flag = bool(normalized) and normalized[-1].startswith("--") and "=" not in normalized[-1]
            if is_negative_number(token) and follows_flag:
                normalized[-1] += f"={token}"
            elif hyphenated(flag) in self.own_flags:
                normalized.append(f"{hyphenated(flag)}{equals}{value}")
            else:
                normalized.append(token)
        return normalized

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting, so that all errors are shown in one place."""
        raise UsageError(f"{message}; see `{self.prog} --help`")


def hyphenated(flag: str) -> str:
    """Return a flag with hyphens for the underscores that may be typed instead."""
    return flag.replace("_", "-")


def flag_of(key: str) -> str:
    """Return the flag of a setting."""
    return f"--{hyphenated(key)}"


def is_negative_number(token: str) -> bool:
    """Return True for -1, -.5, -1e-3 and the like."""
    return re.match(r"-\.?\d", token) is not None


def looks_like_flag(token: str) -> bool:
    """Return True for a token that is a flag rather than a value."""
    return token.startswith("-") and token != "-" and not is_negative_number(token)


def advise(unknown: str, flags: Sequence[str]) -> str:
    """Return Canter's flag for another library's, or flags with a similar name."""
    word = hyphenated(unknown).lstrip("-")
    foreign = translate_flag(unknown)
    if foreign is not None and (PYTHON_ONLY in foreign or any(flag in foreign for flag in flags)):
        return foreign
    same_end = [flag for flag in flags if flag.endswith(f".{word}")]
    if same_end:
        return f"did you mean {' or '.join(same_end)}?"
    return nearest(unknown, flags)


def positive_int(text: str) -> int:
    """Convert the text of a flag to an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer above 0")
    return int(text)


def whole_number(text: str) -> int:
    """Convert the text of a flag to an integer of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 0")
    return int(text)


def duration(text: str) -> float:
    """Convert the text of a flag, such as 90s, 30m, 2h or 1h30m, to seconds."""
    match = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text)
    if match is None or not text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 90s, 30m, 2h or 1h30m")
    hours, minutes, seconds = (int(number or 0) for number in match.groups())
    return 3600.0 * hours + 60.0 * minutes + seconds


def one_of(*names: str) -> Callable[[str], str]:
    """Return the type of a flag that takes one of these names."""

    def check(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"unknown name {text!r}, {nearest(text, names)}")
        return text

    return check


def truth(text: str) -> bool:
    """Convert true or false."""
    return one_of("true", "false")(text.lower()) == "true"


def name_in(place: str, *more: str) -> Callable[[str], str]:
    """Return the type of a flag that takes a key of the dict at MODULE:NAME, imported at its first use."""

    def check(text: str) -> str:
        module, _, name = place.partition(":")
        return one_of(*more, *getattr(import_module(f"canter.{module}"), name))(text)

    return check


def comma_separated(kind: Callable[[str], str]) -> Callable[[str], list[str]]:
    """Return the type of a flag that takes several values of another type."""
    return lambda text: [kind(name) for name in text.split(",")]
