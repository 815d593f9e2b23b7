"""Arrays as an environment's own spaces have them, where tensors here are others: for whoever acts with NumPy.

N environments, A numbers of an action, or K choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class ActionArray:
    """One environment's action as its own space has it."""

    shape: tuple[int, ...]
    dtype: str
    start: tuple[int, ...] = (0,)
    """Added to choices, which the space may count from elsewhere than 0: one number for each, or one for all."""

    def __post_init__(self) -> None:
        """Refuse what is no number."""
        if np.dtype(self.dtype).kind not in "biuf":
            raise ValueError(f"dtype={self.dtype!r} is no kind of number")

    @cached_property
    def _start(self) -> np.ndarray:
        return np.array(self.start)

    def encode(self, action: np.ndarray) -> np.ndarray:
        """A policy's action `[N, A]`, `[N]` or `[N, K]` as a new array `[N, *shape]`; nothing is clipped."""
        if action.dtype.kind != "f":
            action = action + self._start
        elif not self.dtype.startswith("float"):
            # A cast alone truncates towards zero, which makes the interval around 0 twice as wide as the others.
            action = np.rint(action)
        # NOTE: astype copies even when nothing changes, so no environment ever holds memory that is written again.
        return action.reshape(len(action), *self.shape).astype(self.dtype)


@dataclass(frozen=True)
class Choices:
    """An observation group of one-hot vectors side by side, which are numbers in the environment's own array."""

    group: str
    shape: tuple[int, ...]
    """One environment's array."""
    options: tuple[int, ...]
    """Among how many options each choice is."""
    start: tuple[int, ...]
    """The number of the first option of each."""

    def __call__(self, raw: np.ndarray) -> np.ndarray:
        """Choices `[M, ...]` as float32 `[M, sum(options)]`."""
        hot = np.zeros((len(raw), sum(self.options)), np.float32)
        np.put_along_axis(hot, raw.reshape(len(raw), -1).astype(np.int64) + self._offset, 1.0, axis=1)
        return hot

    @cached_property
    def _offset(self) -> np.ndarray:
        return np.cumsum(self.options) - self.options - np.array(self.start)


@dataclass(frozen=True)
class OwnArrays:
    """What is different in arrays of the environment's own spaces, for whoever acts with NumPy."""

    action: ActionArray | None = None
    """None: as the action spec says."""
    choices: tuple[Choices, ...] = ()
