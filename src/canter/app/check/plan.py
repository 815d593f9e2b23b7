"""The arithmetic of a run in words, before it begins.

Sizes that no machine can hold, refused before anything is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from typing import Any, Literal

from torch import Tensor

from canter.algorithms.base import RolloutPlan
from canter.core.machine import available_memory
from canter.core.plain import ConfigError
from canter.core.specs import LOST_FINAL_OBS, EnvSpec
from canter.core.struct import TensorStruct
from canter.training.config import RunConfig

Level = Literal["ok", "note", "warning", "error"]

FEW_ROLLOUTS = 10
"""With fewer iterations hardly anything is learned."""
SMALL_MINIBATCH = 16
"""Advantages of fewer rows than this are mostly noise."""


@dataclass(frozen=True)
class Finding:
    """One thing that a look before the run has shown."""

    level: Level
    """Fine, good to know, likely a mistake, or certainly one."""
    subject: str
    text: str
    """A sentence or two."""


@dataclass(frozen=True, kw_only=True)
class Plan(RolloutPlan):
    """The numbers of a run: how much it collects, and how it learns from that."""

    total_steps: int | None
    """None where something else ends the run."""
    num_envs: int
    iterations: int | None = None
    """Rollouts after which it ends at the latest, if there is such a limit."""
    num_agents: int = 1
    """Rows of each environment."""

    @property
    def rows(self) -> int:
        """Transitions in a step of all environments."""
        return self.num_envs * self.num_agents

    @property
    def batch(self) -> int:
        """Transitions in a rollout."""
        return self.horizon * self.rows

    @property
    def updates(self) -> int:
        """Minibatch updates per rollout."""
        return self.epochs * self.num_minibatches

    @property
    def minibatch(self) -> int:
        """Rows of an update."""
        return self.drawn or self.batch // self.num_minibatches

    @property
    def rollouts(self) -> int | None:
        """Rollouts in the whole run, at most; None where nobody knows."""
        by_steps = None if self.total_steps is None else math.ceil(self.total_steps / self.batch)
        return min((limit for limit in (by_steps, self.iterations) if limit is not None), default=None)

    def in_words(self) -> str:
        """How a rollout is cut up."""
        agents = f" x {self.num_agents} agents" if self.num_agents > 1 else ""
        rows = f"{counted(self.horizon, 'step')} x {counted(self.num_envs, 'env')}{agents} = {self.batch:,}"
        updates = counted(self.updates, "update")
        if self.drawn:
            warmup = f"the first {self.warmup_steps:,} steps are random and learn nothing"
            return f"rollout = {rows}, then {updates} on {self.drawn:,} remembered transitions each; {warmup}"
        cut = f"{counted(self.num_minibatches, 'minibatch')} of {self.minibatch:,}, {counted(self.epochs, 'epoch')}"
        return f"batch = {rows}, {cut}: {updates} per rollout"

    def in_all(self) -> str:
        """What the whole run comes to."""
        if self.rollouts is None:
            return "how long the run will be is not known"
        whole = self.rollouts * self.batch
        steps = whole if self.total_steps is None else min(self.total_steps, whole)
        learning = max(0, self.rollouts - max(0, math.ceil(self.warmup_steps / self.batch) - 1))
        total = counted(learning * self.updates, "update")
        return f"{counted(steps, 'step')} = {counted(self.rollouts, 'rollout')}, {total} in all"


def check_plan(plan: Plan) -> list[Finding]:
    """The arithmetic, and what is odd about it."""
    found = [Finding("ok", "arithmetic", plan.in_words()), Finding("ok", "arithmetic", plan.in_all())]
    if plan.rollouts is not None and plan.rollouts < FEW_ROLLOUTS:
        longer = FEW_ROLLOUTS * plan.batch
        text = (
            f"only {counted(plan.rollouts, 'rollout')} in the whole run, and the policy improves once per rollout: "
            f"raise total_steps to {longer:,} or more, or use a smaller horizon or fewer environments"
        )
        found.append(Finding("warning", "budget", text))
    if plan.minibatch < SMALL_MINIBATCH:
        advice = "a larger batch_size" if plan.drawn else "fewer minibatches, more environments or a longer horizon"
        text = f"a minibatch has only {plan.minibatch} rows, so its gradient is mostly noise: use {advice}"
        found.append(Finding("warning", "minibatches", text))
    return found


def check_foresight(plan: Plan, episode_length: float | None) -> Finding:
    """How far gamma looks ahead, against the length of episodes (None if none was seen to end) and of rollouts."""
    if plan.gamma is None:
        return Finding("ok", "foresight", f"a rollout holds {plan.horizon:,} steps of each environment")
    if plan.gamma == 1:
        reach, text = math.inf, "gamma 1 looks ahead without end"
    else:
        reach = 1 / (1 - plan.gamma)
        text = f"gamma {plan.gamma:g} looks about {reach:,.0f} steps ahead, 1 / (1 - gamma)"
    if episode_length is not None:
        text += f"; episodes of random actions last about {episode_length:,.0f} steps"
    text += f"; a rollout holds {plan.horizon:,} steps of each environment"
    if episode_length is not None and reach < episode_length / 10:
        why = "what comes later than that hardly counts for a decision now; raise gamma if it should"
        return Finding("note", "foresight", f"{text}; {why}")
    decay = plan.gamma * plan.gae_lambda
    if decay < 1 and plan.horizon < 1 / (1 - decay):
        why = (
            f"that is less than the {1 / (1 - decay):,.0f} steps over which gae_lambda sums rewards, so advantages "
            "rest on the critic more than gae_lambda suggests"
        )
        return Finding("note", "foresight", f"{text}; {why}")
    return Finding("ok", "foresight", text)


def check_truncation(spec: EnvSpec) -> Finding:
    """What the value of an episode that is cut off is taken from."""
    if spec.truncates is False:
        return Finding("ok", "truncation", "episodes are never cut off, so nothing is added at their end")
    known = "" if spec.truncates else "nobody declares whether episodes are cut off; "
    if spec.final_obs == "unknown":
        return Finding("note", "truncation", known + LOST_FINAL_OBS)
    where = "kept beside the next episode's first one" if spec.final_obs == "separate" else "given before the reset"
    text = (
        f"{known}where a time limit cuts an episode off, the value of its true last observation ({where}) stands for "
        "what would have followed; where it terminates, nothing follows"
    )
    return Finding("ok", "truncation", text)


def check_memory(plan: Plan, spec: EnvSpec, record: Any, state: Any) -> Finding:
    """Bytes for rollout and weights; `record` is what is kept of one step `[N, ...]`, `state` the algorithm's."""
    obs = sum(math.prod(part.shape) * part.dtype.itemsize for part in spec.obs.values())
    row = obs * (2 if spec.final_obs == "separate" else 1) + tree_bytes(record) / plan.rows + 16
    # A second copy is the shuffled one of an epoch; gradients are as large as weights, of which the state has three.
    rollout, learned = 2 * row * plan.batch, tree_bytes(state) * 4 / 3
    parts = f"{size(rollout)} for a rollout and its shuffled copy, {size(learned)} for weights, gradients and moments"
    text = f"about {parts}, on {spec.device}; torch itself and the simulators come on top"
    return Finding("ok", "memory", text)


def tree_bytes(tree: Any) -> int:
    """Bytes of all tensors in a tree, whatever else it holds."""
    if isinstance(tree, TensorStruct):
        tree = vars(tree)
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        return sum(map(tree_bytes, tree))
    return tree.nbytes if isinstance(tree, Tensor) else 0


def size(count: float) -> str:
    """Bytes as people say them."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.0f} PB"


def counted(number: int, noun: str) -> str:
    """A number of things, in singular or plural."""
    plural = f"{noun}es" if noun.endswith("ch") and noun != "epoch" else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


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
