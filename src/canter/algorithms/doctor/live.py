"""The doctor of a run that is being trained: measures signals and keeps the findings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from canter.algorithms.doctor.findings import Finding, Rules, Signals, diagnose_signals
from canter.algorithms.doctor.signals import PREFIX, episode_signals, measure
from canter.algorithms.doctor.task import TASK_RULES
from canter.core.data.rollout import Rollout
from canter.core.struct import Metrics

LOOKS = 50
"""Times that the doctor would look in a run whose length is known, if it looked as often as at its start."""
DENSE = 0.2
"""Fraction of the run after which two of three looks are left out."""
LARGE_UPDATE = 1 << 14
"""Samples that an update of a CPU learns from, passes counted, from which a look is cheap beside it."""
REST_LARGE = 2
REST_SMALL = 5
REST_GPU = 12
"""Least iterations from one look to the next. Short iterations on a GPU take only a few times as long as it takes
to launch the kernels of a look."""
MAX_ROWS = 4000
"""Rows of the log that are kept; beyond, older ones are thinned out."""
UNKNOWN_LENGTH_REST = 25
"""Iterations between two looks in a run of unknown length."""


class Doctor:
    """Looks at a run every few iterations; which ones follows from the settings alone.

    `signals` are those of the algorithm and `rules` its rules. `samples` are those that an update
    learns from, passes counted; `rollouts` is the length of the run, None if unknown, and `unit` the
    iterations between rows of the log. `settings` are plain values by dotted key. If not `enabled`,
    it never looks.
    """

    def __init__(
        self,
        signals: Callable[[Rollout[Any]], Metrics],
        rules: Iterable[Rules],
        settings: Mapping[str, Any],
        *,
        samples: int,
        rollouts: float | None,
        unit: int,
        rows: Sequence[Mapping[str, Any]] = (),
        on_gpu: bool = False,
        enabled: bool = True,
    ) -> None:
        self.enabled = enabled
        self.own_signals = signals
        self.settings = settings
        self.rules = (TASK_RULES, *rules)
        rest = REST_LARGE if samples >= LARGE_UPDATE else REST_SMALL
        rest = REST_GPU if on_gpu else rest
        rest = UNKNOWN_LENGTH_REST if rollouts is None else max(math.ceil(rollouts / LOOKS), rest)
        self.every = math.ceil(rest / unit) * unit
        self.dense = math.inf if rollouts is None else max(DENSE * rollouts, 4 * self.every)
        self.rows: list[Mapping[str, Any]] = list(rows)
        """Rows of the log so far."""
        self._numbers: dict[str, list[float]] = {}
        self.findings: list[Finding] = []
        """Findings of the last look."""
        self._known: set[str] = set()
        self.signals: Metrics = {}
        """Signals of the last rollout, on the device; {} in most iterations."""

    def looks_at(self, iteration: int) -> bool:
        """Return whether the doctor looks at that iteration."""
        every = self.every if iteration <= self.dense else 3 * self.every
        return self.enabled and (iteration == 1 or iteration % every == 0)

    def measure(self, rollout: Rollout[Any], iteration: int) -> None:
        """Measure the signals of a complete rollout if the doctor looks at the iteration."""
        self.signals = {}
        if self.looks_at(iteration):
            self.signals = measure(rollout, self.own_signals)

    def measure_episodes(self, iteration: int, episodes: Iterable[tuple[float, int, bool]]) -> dict[str, float]:
        """Return the signals of recent episodes (return, length, terminated) for the row of an iteration."""
        return episode_signals(list(episodes)) if self.looks_at(iteration) else {}

    def is_new(self, finding: Finding) -> bool:
        """Return whether a finding is the first of its rule in this process."""
        new = finding.rule not in self._known
        self._known.add(finding.rule)
        return new

    def diagnose(self, row: Mapping[str, Any], *, last: bool = False) -> list[Finding]:
        """Add a row of the log and return the findings, which are new if the doctor looks at it."""
        self.rows.append(row)
        if len(self.rows) > MAX_ROWS:  # keep every second one of the older half, and all with signals
            half = MAX_ROWS // 2
            older = [row for i, row in enumerate(self.rows[:half]) if i % 2 == 0 or f"{PREFIX}return_std" in row]
            self.rows = older + self.rows[half:]
            self._numbers = {}
        if last or self.looks_at(int(row["iteration"])):
            self.findings = diagnose_signals(Signals(self.settings, self.rows, self._numbers), self.rules)
        return self.findings
