"""The record that rules read, the findings that they return, and the diagnosis of a run.

A rule is a function of `Signals` that returns a `Finding` or None. An algorithm declares its rules
in its `ReportSpec`; rules about the task hold for every algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, wraps
from typing import Any

import numpy as np

MOST = 3
"""Findings that are shown at most."""
MIN_ROWS = 4
"""Rows of the log before anything is concluded."""
PAGE = "docs/doctor.md"
FLAT = 0.2
"""Share of a run at its end in which the return of a solved task no longer rises."""
LEARNED = 3.0
"""Gain of the mean return, in standard deviations of untrained episodes, that chance does not give."""
SOLVED_RATE = 0.8
ALWAYS = 0.95
"""Rate of success of a task that needs no policy."""
FAR_FROM_SOLVED = 0.1
"""Rate of success below which a return that no longer rises is not the best."""


@dataclass(frozen=True)
class Evidence:
    """A metric that crossed a threshold."""

    metric: str
    value: float
    step: int
    """Transitions after which the value was logged."""
    threshold: float

    def __str__(self) -> str:
        return f"{self.metric} {self.value:.3g} at step {self.step:,} (threshold {self.threshold:g})"


@dataclass(frozen=True)
class Finding:
    """A likely cause of a run that does not learn, and the change to try."""

    evidence: tuple[Evidence, ...]
    why: str
    """One sentence."""
    change: Mapping[str, Any] = field(default_factory=dict)
    """Settings to change, by dotted key; empty if no setting helps."""
    advice: str = ""
    """Advice if no setting helps."""
    rule: str = ""
    """Name of the rule, and of its section in docs/doctor.md; set by the rule."""
    title: str = ""
    """Headline; by default the title of the rule."""

    def __str__(self) -> str:
        shown = "; ".join(str(evidence) for evidence in self.evidence)
        return f"{self.title}: {shown}. {self.why} Change: {self.flags or self.advice} ({PAGE}#{self.anchor})"

    @property
    def flags(self) -> str:
        """Flags of the change on the command line."""
        return " ".join(f"--{key.replace('_', '-')} {_flag_value(value)}" for key, value in self.change.items())

    @property
    def anchor(self) -> str:
        """Section of docs/doctor.md."""
        return self.rule.replace("_", "-")

    def plain(self) -> dict[str, Any]:
        """Return the finding as plain data."""
        return {**asdict(self), "flags": self.flags}


def _flag_value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


class Signals:
    """Settings of a run and the rows of its log so far, oldest first.

    `numbers` caches the metrics of the first rows by name; columns that are read extend it.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        rows: Sequence[Mapping[str, Any]],
        numbers: dict[str, list[float]] | None = None,
    ) -> None:
        self.settings = settings
        """Plain values by dotted key."""
        self.rows = rows
        self._numbers = {} if numbers is None else numbers
        self._columns: dict[str, np.ndarray] = {}
        self._known: dict[str, np.ndarray] = {}

    @property
    def steps(self) -> np.ndarray:
        """Transitions after each row `[rows]`."""
        return self.column("env_steps")

    def column(self, name: str) -> np.ndarray:
        """Return a metric, float64 `[rows]`; NaN where a row has none."""
        if name not in self._columns:
            numbers = self._numbers.setdefault(name, [])
            numbers.extend(_number(row.get(name)) for row in self.rows[len(numbers) :])
            self._columns[name] = np.array(numbers)
        return self._columns[name]

    def known(self, name: str, *, since: float = 0.0) -> np.ndarray:
        """Return the finite values of a metric, after that fraction of the run."""
        values = self.column(name)
        if since > 0.0:
            return values[np.isfinite(values) & (self.fractions >= since)]
        if name not in self._known:
            self._known[name] = values[np.isfinite(values)]
        return self._known[name]

    def recent(self, name: str, count: int) -> np.ndarray:
        """Return the last finite values of a metric; empty if there are fewer than `count`."""
        values = self.known(name)
        return values[-count:] if len(values) >= count else values[:0]

    def setting(self, key: str, default: Any = None) -> Any:
        """Return a setting; a section of several keys has no value of its own."""
        return self.settings.get(key, default)

    def number(self, key: str, default: float = math.nan) -> float:
        """Return the number of a setting: of a schedule, that at its start."""
        for name in (key, f"{key}.start", f"{key}.value", f"{key}.initial"):
            value = self.settings.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
        return default

    def evidence(self, metric: str, value: float, threshold: float, step: float | None = None) -> Evidence:
        """Return evidence at a step, by default that of the last row."""
        return Evidence(metric, float(value), int(self.steps[-1] if step is None else step), threshold)

    @cached_property
    def fractions(self) -> np.ndarray:
        """Completed fraction of the run after each row `[rows]`; 1 throughout if its length is unknown."""
        shares = [
            self.column(name) / budget
            for name, key in (("env_steps", "total_steps"), ("iteration", "until.iterations"))
            if math.isfinite(budget := self.number(key))
        ]
        return np.fmax.reduce(shares) if shares else np.ones(len(self.steps))

    @property
    def fraction(self) -> float:
        """Completed fraction of the run."""
        return float(self.fractions[-1])

    @property
    def self_play(self) -> bool:
        """True if the policy plays against its past."""
        return any(key.startswith("self_play.") for key in self.settings)

    def extension(self, kind: str) -> Mapping[str, Any]:
        """Return the settings of the algorithm's extension of this kind; {} if it has none."""
        extensions = self.setting("algorithm.extensions") or ()
        # A kind with a single setting may be written as its value alone.
        named = [settings for settings in extensions if isinstance(settings, Mapping)]
        return next((settings for settings in named if settings["kind"] == kind), {})

    @property
    def return_misleads(self) -> bool:
        """True if the policy learns without a rising return: against its past, or driven by curiosity."""
        return self.self_play or bool(self.extension("rnd"))

    @property
    def one_step(self) -> bool:
        """True if all episodes have one step."""
        lengths = self.known("length")
        return len(lengths) > 0 and bool(lengths.max() <= 1)

    # How well the run does

    @cached_property
    def start(self) -> tuple[float, float] | None:
        """Mean and standard deviation of the return of the untrained policy; None while unknown."""
        returns = self.known("rollout_return")
        spreads = self.known("doctor/return_std")
        if not len(returns) or not len(spreads):
            return None
        return float(returns[0]), float(max(spreads[0], 1e-9 + 1e-3 * abs(returns[0])))

    def gain(self, return_: float) -> float:
        """Return how far a mean return lies above the untrained policy's, in its standard deviations."""
        if self.start is None or not math.isfinite(return_):
            return 0.0
        return (return_ - self.start[0]) / self.start[1]

    @cached_property
    def current_gain(self) -> float:
        """Gain of the recent episodes."""
        returns = self.known("return")
        return self.gain(float(returns[-1])) if len(returns) else 0.0

    @cached_property
    def solved(self) -> bool:
        """True if episodes succeed, or the return has learned and is flat at its best."""
        success = self.recent("success_rate", 1)
        clear = len(success) > 0 and (success[-1] >= SOLVED_RATE or success[-1] < FAR_FROM_SOLVED)
        if clear and not self.succeeds_untrained:
            return bool(success[-1] >= SOLVED_RATE)
        returns = self.known("return")
        if self.current_gain < LEARNED or self.fraction < 2 * FLAT:
            return False
        before = self.known("return")[: len(returns) - len(self.known("return", since=self.fraction - FLAT))]
        climbed = returns.max() - returns[0]
        return (
            len(before) > 0
            and returns[-1] >= returns.max() - 0.1 * climbed
            and before[-1] >= 0.8 * climbed + returns[0]
        )

    @cached_property
    def rising(self) -> bool:
        """True if recent episodes are better than the untrained policy's, and near the best so far."""
        returns = self.known("return")
        return self.current_gain >= 1.0 and bool(returns[-1] >= returns.max() - 0.1 * (returns.max() - returns[0]))

    @cached_property
    def succeeds_untrained(self) -> bool:
        """True if the episodes of an untrained policy, whose std is the initial one, were all a success."""
        success = self.known("success_rate")[:MIN_ROWS]
        std = self.known("policy/std")
        if self.self_play or len(success) < MIN_ROWS or not len(std):
            return False
        untrained = abs(std[0] / self.number("algorithm.model.std.initial") - 1.0) < 0.05
        return bool(untrained and success.min() >= ALWAYS)

    @cached_property
    def learned(self) -> bool:
        """True if recent episodes are far better than the untrained policy's, and near the best so far."""
        returns = self.known("return")
        return self.solved or (self.current_gain >= LEARNED and returns[-1] >= 0.5 * (returns.max() + returns[0]))

    @property
    def has_learned(self) -> bool:
        """True if the return was ever far better than the untrained policy's."""
        return self.gain(float(self.known("return").max(initial=-math.inf))) >= LEARNED

    @cached_property
    def learns(self) -> bool:
        """True if learned, or the return has risen in the last rows: `return` is late where episodes are few."""
        return self.learned or self.gain(median(self.recent("rollout_return", 3))) > 1.0


Rule = Callable[[Signals], Finding | None]
GROUPS = ("environment", "scales", "settings", "symptoms")
"""Groups of rules in the order of their causes: what the environment returns; sizes of observations and rewards;
settings that keep a sound environment from being learned; signs without a cause that the rules before have found."""


class Rules:
    """Rules by group; a finding of one group explains those of later groups."""

    def __init__(self, **groups: Sequence[Rule]) -> None:
        self.groups: dict[str, list[Rule]] = {group: list(groups.get(group, ())) for group in GROUPS}

    def rule(self, group: str, title: str, *, after: float = 0.0, unless: Sequence[str] = ()) -> Callable[[Rule], Rule]:
        """Add a function as the last rule of a group: its findings have its name and, by default, that title.

        It is silent before that fraction of the run, and if one of those properties of `Signals` is true.
        """

        def add(function: Rule) -> Rule:
            @wraps(function)
            def guarded(signals: Signals) -> Finding | None:
                if signals.fraction < after or any(getattr(signals, name) for name in unless):
                    return None
                finding = function(signals)
                return finding and replace(finding, rule=function.__name__, title=finding.title or title)

            self.groups[group].append(guarded)
            return guarded

        return add


def diagnose_signals(signals: Signals, tables: Iterable[Rules]) -> list[Finding]:
    """Return the findings of the first group that has any, three at most; [] for a healthy run."""
    tables = tuple(tables)
    if len(signals.rows) < MIN_ROWS:
        return []
    for group in GROUPS:
        rules = [rule for table in tables for rule in table.groups[group]]
        found = [finding for rule in rules if (finding := rule(signals)) is not None]
        if found:
            return [_with_real_changes(finding, signals) for finding in found[:MOST]]
    return []


def _with_real_changes(finding: Finding, signals: Signals) -> Finding:
    """Leave out settings that have the suggested value already; if none is left, refer to the documentation."""
    missing = object()
    change = {key: value for key, value in finding.change.items() if signals.settings.get(key, missing) != value}
    return replace(finding, change=change, advice=finding.advice or "see docs/does_not_learn.md")


def median(values: np.ndarray) -> float:
    """Return the median, NaN of nothing; `np.median` takes ten times as long for so few numbers."""
    if not len(values):
        return math.nan
    ordered = np.sort(values)
    return 0.5 * float(ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2])


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else math.nan
