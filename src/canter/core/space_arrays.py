"""Conversion between Canter's tensors and NumPy arrays of an environment's own spaces.

For users that act with NumPy. N environments, A action components, or K discrete actions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from canter.core.registry import UserError


@dataclass(frozen=True)
class ActionArray:
    """Shape and dtype of one environment's action in its own space."""

    shape: tuple[int, ...]
    dtype: str
    start: tuple[int, ...] = (0,)
    """First value of each discrete action in the space, or one for all; Canter counts from 0."""

    def __post_init__(self) -> None:
        """Raise UserError if the dtype is not numeric."""
        if np.dtype(self.dtype).kind not in "biuf":
            raise UserError(f"dtype={self.dtype!r} is not a numeric dtype")

    @cached_property
    def _start(self) -> np.ndarray:
        return np.array(self.start)

    def encode(self, action: np.ndarray) -> np.ndarray:
        """Return a policy's action `[N, A]`, `[N]` or `[N, K]` as a new array `[N, *shape]`.

        Nothing is clipped.
        """
        if action.dtype.kind != "f":
            action = action + self._start
        elif not self.dtype.startswith("float"):
            # A cast alone would truncate towards zero: twice as many values would become 0 as any
            # other.
            action = np.rint(action)
        # astype copies even if nothing changes, so no environment keeps memory that is overwritten.
        return action.reshape(len(action), *self.shape).astype(self.dtype)


@dataclass(frozen=True)
class OneHotGroup:
    """An observation group of concatenated one-hot vectors, which are integers in the own array."""

    group: str
    shape: tuple[int, ...]
    """Shape of one environment's array."""
    options: tuple[int, ...]
    """Number of options of each integer."""
    start: tuple[int, ...]
    """Value of the first option of each integer."""

    def __call__(self, raw: np.ndarray) -> np.ndarray:
        """Return integers `[M, ...]` as one-hot vectors, float32 `[M, sum(options)]`."""
        hot = np.zeros((len(raw), sum(self.options)), np.float32)
        np.put_along_axis(hot, raw.reshape(len(raw), -1).astype(np.int64) + self._offset, 1.0, axis=1)
        return hot

    @cached_property
    def _offset(self) -> np.ndarray:
        return np.cumsum(self.options) - self.options - np.array(self.start)


@dataclass(frozen=True)
class OwnArrays:
    """Differences between Canter's tensors and the arrays of the environment's own spaces."""

    action: ActionArray | None = None
    """None if actions are as in the action spec."""
    choices: tuple[OneHotGroup, ...] = ()
