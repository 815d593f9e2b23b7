"""Sizes that no machine can hold, refused before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Any

from canter.machine import available_memory
from canter.plain import ConfigError
from canter.preflight.plan import Plan, size
from canter.training.settings import RunConfig

ROW = 16
"""Bytes of a transition whatever it is of: reward, value, log-probability and flags."""
COPIES = 4
"""Weights, gradients and two moments."""
LEAST_ENV, LEAST_PROCESS = 1 << 10, 1 << 23
"""Bytes of one Gymnasium environment, and of one in a process of its own; real ones take several times as much."""


def check_size(plan: Plan, config: RunConfig) -> None:
    """Refuse settings whose rollouts, environments or layers alone would not fit into the memory of this machine.

    These are the least that they can take, so nothing that could work is refused; `canter check` estimates the rest.
    """
    room, count = available_memory(), config.env.num_envs
    each = 0 if ":" in config.env.id else LEAST_PROCESS if config.env.vectorization == "async" else LEAST_ENV
    needed = [
        ("env.num_envs", count, "these environments", each * count),
        ("env.num_envs", f"{count} with horizon {plan.horizon}", "a rollout", ROW * plan.batch),
        *((key, list(widths), "its layers", 4 * COPIES * _weights(widths)) for key, widths in _layers(config, "")),
    ]
    for key, value, what, least in needed:
        if least > room:
            text = f"{what} would take {size(least)} or more, and {size(room)} are free here; expected a smaller number"
            raise ConfigError(f"{key}={value}: {text}", key)


def _layers(value: Any, key: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The widths of layers in a tree of settings, by their keys: fields that are called `hidden`."""
    for part in fields(value) if is_dataclass(value) else ():
        inner, path = getattr(value, part.name), f"{key}.{part.name}" if key else part.name
        if part.name == "hidden":
            yield path, inner if isinstance(inner, tuple) else (inner, inner)
        yield from _layers(inner, path)


def _weights(widths: tuple[int, ...]) -> int:
    """How many weights and biases there are at least, with one input."""
    return sum(widths) + sum(a * b for a, b in pairwise(widths))
