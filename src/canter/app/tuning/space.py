"""Search spaces: settings with ranges, written as text.

`1e-5..1e-2:log` is a range on a logarithmic scale, `0.9..0.999:log1m` one on which the distance
from 1 is logarithmic, `8,16,32` are values. `0.1x..10x:log` is relative to the value of the base
settings; on the scale `log1m` the distance from 1 is multiplied.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from canter.algorithms.base import search_space_of, title_of
from canter.app.experiments.settings import with_overrides
from canter.config import TrainConfig
from canter.core.hints import config_keys, without_none
from canter.core.plain import ConfigError, to_plain
from canter.core.registry import UserError, nearest
from canter.core.storage.files import parse_value, read_yaml
from canter.core.storage.validity import flatten

Scale = Literal["linear", "log", "log1m"]
DIGITS = 4
"""Significant digits of a sampled setting, or of its distance from 1 on the scale log1m."""
_NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,2})?)"
_RANGE = re.compile(rf"{_NUMBER}(x?)\.\.{_NUMBER}\2(?::(linear|log|log1m))?")
_FIXED = ("env.id", "env.num_envs", "seed", "total_steps", "until", "device", "checkpoints", "execution")


@dataclass(frozen=True)
class Dimension:
    """A setting of a search space: an interval on a scale, or values to choose from."""

    key: str
    low: float = 0.0
    high: float = 0.0
    scale: Scale = "linear"
    integer: bool = False
    choices: tuple[str, ...] = ()
    """Texts of the values; empty for an interval."""

    @property
    def spec(self) -> str:
        """Text of the range, without reference to base settings."""
        if self.choices:
            return ",".join(self.choices)
        return f"{self.low:.6g}..{self.high:.6g}:{self.scale}"

    def distribution(self, optuna: Any) -> Any:
        """Return the distribution for Optuna; on the scale log1m it is that of the distance from 1."""
        if self.choices:
            return optuna.distributions.CategoricalDistribution(self.choices)
        if self.integer:
            log = self.scale == "log"
            return optuna.distributions.IntDistribution(int(self.low), int(self.high), log=log)
        if self.scale == "log1m":
            return optuna.distributions.FloatDistribution(1 - self.high, 1 - self.low, log=True)
        return optuna.distributions.FloatDistribution(self.low, self.high, log=self.scale == "log")

    def text(self, sample: Any) -> str:
        """Return a sample of the distribution as the text of the setting."""
        if self.choices or self.integer:
            return str(sample)
        rounded = float(f"{sample:.{DIGITS}g}")
        if self.scale != "log1m":
            return f"{rounded:.{DIGITS}g}"
        return f"{1 - rounded:.15g}"

    def position(self, text: str) -> float:
        """Return where a value lies on the axis of the setting, 0..1."""
        if self.choices:
            return self.choices.index(text) / max(len(self.choices) - 1, 1)
        low, here, high = (_on_scale(value, self.scale) for value in (self.low, float(text), self.high))
        return (here - low) / (high - low)

    def on_axis(self, text: str) -> float | None:
        """Return a value on an axis with the scale's unit, log10 or plain; None if it has no place there."""
        if self.choices:
            return float(self.choices.index(text)) if text in self.choices else None
        try:
            value = 1 - float(text) if self.scale == "log1m" else float(text)
            return value if self.scale == "linear" else math.log10(value)
        except ValueError:
            return None

    def at(self, position: float) -> str:
        """Return the value at a position 0..1 of the axis, as text."""
        if self.choices:
            return self.choices[min(int(position * len(self.choices)), len(self.choices) - 1)]
        low, high = (_on_scale(value, self.scale) for value in (self.low, self.high))
        here = low + (high - low) * position
        value = math.exp(here) if self.scale == "log" else here
        return self._within(1 - math.exp(-here) if self.scale == "log1m" else value)

    def scaled(self, text: str, factor: float) -> str:
        """Return a value, or on the scale log1m its distance from 1, times a factor, within the range.

        A choice moves to its neighbour, and an integer by 1 at least; what is no value of the
        setting becomes the middle.
        """
        if self.choices:
            number = self.choices.index(text) + (1 if factor > 1 else -1) if text in self.choices else 0
            return self.choices[min(max(number, 0), len(self.choices) - 1)]
        try:
            value = float(text)
        except ValueError:
            return self.at(0.5)
        changed = 1 - (1 - value) * factor if self.scale == "log1m" else value * factor
        if self.integer and round(changed) == value:
            changed = value + (1 if factor > 1 else -1)
        return self._within(changed)

    def _within(self, value: float) -> str:
        """Return a number within the range as text."""
        value = min(max(value, self.low), self.high)
        if self.integer:
            return str(round(value))
        return self.text(1 - value if self.scale == "log1m" else value)


def _on_scale(value: float, scale: Scale) -> float:
    if scale == "log":
        return math.log(value)
    return -math.log(1 - value) if scale == "log1m" else value


def read_space(file: Path) -> dict[str, str]:
    """Return the ranges in a YAML file by setting; keys may be nested, a list has values."""
    plain, _ = read_yaml(file)
    if not isinstance(plain, dict):
        raise ConfigError(f"{file}: expected a mapping of settings to ranges such as 1e-5..1e-2:log")
    return {key: spec_of(key, value) for key, value in flatten(plain).items()}


def spec_of(key: str, value: Any) -> str:
    """Return a range as text; a list, or a tuple of two numbers from Python, too."""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and len(value) > 1:
        return ",".join(str(item) for item in value)
    raise ConfigError(f"space.{key}: expected a range such as 1e-5..1e-2:log or a list of values, got {value!r}", key)


def build_space(specs: Mapping[str, str], base: TrainConfig) -> list[Dimension]:
    """Return the dimensions of a search; without ranges those that the algorithm declares.

    A setting that is a schedule keeps its kind, and the range is that of its start. Raises
    ConfigError for an unknown setting, one that a search cannot vary, and values out of range.
    """
    specs = specs or default_space(base)
    if not specs:
        raise UserError(f"{title_of(base.algorithm)} declares no search space: --space.KEY LOW..HIGH, or --space FILE")
    plain = flatten(to_plain(base))
    hints = config_keys(TrainConfig)
    dimensions: list[Dimension] = []
    for written, spec in specs.items():
        key = f"{written}.start" if f"{written}.start" in plain else written
        hint = hints.get(key)
        if hint is None and not key.startswith(("env.options.", "env.wrappers.")):
            raise ConfigError(f"space.{written}: unknown key, {nearest(written, hints)}", written)
        if f"{key}.".startswith(tuple(f"{fixed}." for fixed in _FIXED)):
            raise ConfigError(f"space.{written}: a search keeps {key} fixed", written)
        dimension = parse_dimension(key, spec, plain.get(key), integer=without_none(hint) is int)
        ends = dimension.choices or (dimension.low, dimension.high)
        for value in ends:
            with_overrides(base, plain_values({key: str(int(value) if dimension.integer else value)}))
        dimensions.append(dimension)
    return dimensions


def default_space(base: TrainConfig) -> dict[str, str]:
    """Return the ranges that the algorithm declares."""
    return {f"algorithm.{name}": spec for name, spec in search_space_of(base.algorithm).items()}


def parse_dimension(key: str, spec: str, base: Any, *, integer: bool = False) -> Dimension:
    """Return the dimension of a setting from the text of its range; `base` is its present value."""
    match = _RANGE.fullmatch(spec.strip())
    if match is None:
        texts = [text.strip() for text in spec.split(",")]
        if len(texts) < 2 or not all(texts):
            expected = "LOW..HIGH, LOW..HIGH:log, LOW..HIGH:log1m (the distance from 1 is logarithmic) or values A,B,C"
            raise ConfigError(f"space.{key}: expected {expected}, got {spec!r}", key)
        choices = (_relative_text(key, text, base, integer) for text in texts)
        return Dimension(key, choices=tuple(dict.fromkeys(choices)))
    low = float(match[1])
    high = float(match[3])
    scale = cast(Scale, match[4] or "linear")
    if match[2]:
        low, high = _relative(key, spec, (low, high), base, scale)
    if integer:
        low = max(round(low), 1)
        high = round(high)
    valid = low < high and (scale != "log" or low > 0) and (scale != "log1m" or high < 1)
    if not valid or (integer and scale == "log1m"):
        limits = {"linear": "", "log": " and above 0", "log1m": " and below 1, for a setting that is no integer"}
        expected = f"expected LOW..HIGH with LOW below HIGH{limits[scale]}"
        raise ConfigError(f"space.{key}: {spec} is {low:g}..{high:g}: {expected}", key)
    return Dimension(key, low, high, scale, integer)


def _relative(key: str, spec: str, factors: tuple[float, float], base: Any, scale: Scale) -> tuple[float, float]:
    if not isinstance(base, int | float) or isinstance(base, bool) or base == 0:
        raise ConfigError(f"space.{key}: {spec} is relative to the setting, which is {base}; give numbers", key)
    low, high = sorted(factors)
    rest = 1 - base
    ends = (max(1 - high * rest, 0.0), 1 - low * rest) if scale == "log1m" else (low * base, high * base)
    return float(f"{ends[0]:.6g}"), float(f"{ends[1]:.6g}")


def _relative_text(key: str, text: str, base: Any, integer: bool) -> str:
    if not re.fullmatch(r"[\d.]+x", text):
        return text
    value, _ = _relative(key, text, (float(text[:-1]), float(text[:-1])), base, "linear")
    return str(max(round(value), 1)) if integer else f"{value:.{DIGITS}g}"


def plain_values(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of settings by key from their texts."""
    return {key: parse_value(text) for key, text in texts.items()}


def setting_flags(texts: Mapping[str, str]) -> list[str]:
    """Return settings by key as flags of `canter`."""
    return [f"--{key.replace('_', '-')}={text}" for key, text in texts.items()]


def setting_names(keys: Iterable[str]) -> dict[str, str]:
    """Return the shortest names that tell settings apart, by key; `start` and `initial` go by their setting's."""
    keys = list(keys)
    short = {key: key.removesuffix(".start").removesuffix(".initial").rpartition(".")[2] for key in keys}
    return {key: name if list(short.values()).count(name) == 1 else key for key, name in short.items()}
