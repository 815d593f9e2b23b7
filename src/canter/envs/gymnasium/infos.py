"""Means of the numbers that environments return in `info`.

N environments. Everything else in `info` is ignored: text, None, arrays, nested dicts, keys that
are not strings, and Gymnasium's `_key` masks.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

NUMBERS = frozenset((float, int, bool, *(np.dtype(code).type for code in "?bhilqBHILQefdg")))
"""Exact types of values that are averaged."""
MAX_KEYS = 50
"""Keys that are averaged at most; an environment may make up new ones in every step."""
MAX_KEY = 60
"""Characters of a key."""

Totals = dict[str, list[float]]
"""Sum and number of values by key."""


class InfoMeans:
    """Means of numbers by key since they were last read."""

    def __init__(self) -> None:
        self.totals: Totals = {}
        self._has_warned = False

    def add(self, info: dict[Any, Any]) -> None:
        """Add the numbers in the info of one environment after one step."""
        totals = self.totals
        for key, value in info.items():
            if value.__class__ in NUMBERS:
                total = totals[key] if key in totals else self._enter(key)
                try:
                    number = float(value)
                except OverflowError:  # an integer beyond all floats
                    continue
                if total is not None and number - number == 0.0:  # finite; a call would take longer
                    total[0] += number
                    total[1] += 1

    def add_rows(self, info: dict[Any, Any], rows: np.ndarray) -> None:
        """Add the numbers of a vector environment's info for `rows`, bool `[N]`."""
        for key, column in info.items():
            if not isinstance(column, np.ndarray) or column.shape != rows.shape or column.dtype.kind not in "fiubO":
                continue
            present = info.get(f"_{key}")
            if isinstance(present, np.ndarray) and present.shape == rows.shape:
                values = column[rows & present.astype(bool)]
            else:
                values = column[rows]
            if column.dtype.kind == "O":
                for value in values:
                    self.add({key: value})
            elif len(values) and (total := self.totals.get(key) or self._enter(key)) is not None:
                finite = values[np.isfinite(values)]
                total[0] += float(finite.sum(dtype=np.float64))
                total[1] += len(finite)

    def merge(self, totals: Totals) -> None:
        """Add the totals of other environments."""
        for key, (total, count) in totals.items():
            own = self.totals.get(key) or self._enter(key)
            if own is not None:
                own[0] += total
                own[1] += count

    def take(self) -> Totals:
        """Return the totals and begin new ones."""
        totals = self.totals
        self.totals = {}
        return totals

    def read(self) -> dict[str, float]:
        """Return the means by key and begin new ones."""
        means = {key: total / count for key, (total, count) in self.take().items() if count}
        return {key: mean for key, mean in means.items() if math.isfinite(mean)}

    def _enter(self, key: Any) -> list[float] | None:
        """Return new totals of a key; None for a key that is not averaged."""
        if not isinstance(key, str) or key.startswith("_") or not key.isprintable() or not 0 < len(key) <= MAX_KEY:
            return None
        if len(self.totals) >= MAX_KEYS:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("info has more than %d numbers: %r and others are not logged", MAX_KEYS, key)
            return None
        return self.totals.setdefault(key, [0.0, 0])
