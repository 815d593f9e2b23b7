"""The arithmetic of a run before it begins: batches, updates, foresight and memory.

Also the lower bound on memory that refuses impossible sizes before anything is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from typing import Any, Literal

from torch import Tensor

from canter.algorithms.base import RolloutPlan, plan_of
from canter.app.console.text import format_bytes, format_count
from canter.core.machine import available_memory
from canter.core.plain import ConfigError
from canter.core.specs import LOST_FINAL_OBS, EnvSpec
from canter.core.struct import TensorStruct
from canter.training.config import RunConfig

Level = Literal["ok", "note", "warning", "error"]

FEW_ROLLOUTS = 10
"""Hardly anything is learned from fewer rollouts."""
SPARSE_UPDATES = 0.25
"""Updates per replayed transition, below which a short run learns little."""
FEW_UPDATES = 50_000
"""Updates that are enough for a short run, however many transitions they are shared among."""
SHORT_RUN = 1_000_000
"""Transitions of a run that has no fleet of environments."""
SMALL_MINIBATCH = 16
"""Gradients of fewer samples are mostly noise."""
TRANSITION_BYTES = 16
"""Bytes of any transition: reward, value, log-probability and flags."""
WEIGHT_COPIES = 4
"""Weights, gradients and two moments."""
MIN_ENV_BYTES = 1 << 10
"""Lower bound of a Gymnasium environment."""
MIN_PROCESS_BYTES = 1 << 23
"""Lower bound of an environment in its own process."""


@dataclass(frozen=True)
class Finding:
    """One result of the environment check."""

    level: Level
    """Correct, good to know, likely a mistake, or certainly a mistake."""
    subject: str
    text: str
    """One or two sentences."""


@dataclass(frozen=True, kw_only=True)
class Plan(RolloutPlan):
    """The numbers of a run: how much it collects, and how it learns from that."""

    total_steps: int | None
    """Budget of environment steps; None if something else ends the run."""
    num_envs: int
    iterations: int | None = None
    """Limit of iterations, each with one rollout; None for no limit."""
    num_agents: int = 1
    """Agents of each environment."""

    @property
    def num_actors(self) -> int:
        """Transitions in a step of all environments: one per agent."""
        return self.num_envs * self.num_agents

    @property
    def batch(self) -> int:
        """Transitions in a rollout."""
        return self.horizon * self.num_actors

    @property
    def updates(self) -> int:
        """Minibatch updates per rollout."""
        if self.updates_per_transition is not None:
            return round(self.updates_per_transition * self.batch)
        return self.epochs * self.num_minibatches

    @property
    def minibatch(self) -> int:
        """Samples of an update."""
        return self.drawn or self.batch // self.num_minibatches

    @property
    def rollouts(self) -> int | None:
        """Rollouts of the whole run, at most; None if unknown."""
        by_steps = None if self.total_steps is None else math.ceil(self.total_steps / self.batch)
        return min((limit for limit in (by_steps, self.iterations) if limit is not None), default=None)

    @property
    def all_updates(self) -> int:
        """Minibatch updates of the whole run, at most; 0 if its length is unknown."""
        warmup = max(0, math.ceil(self.warmup_steps / self.batch) - 1)
        return max(0, (self.rollouts or 0) - warmup) * self.updates

    def describe_rollout(self) -> str:
        """Return how a rollout is divided into minibatches."""
        agents = f" x {self.num_agents} agents" if self.num_agents > 1 else ""
        size = f"{format_count(self.horizon, 'step')} x {format_count(self.num_envs, 'env')}{agents} = {self.batch:,}"
        updates = format_count(self.updates, "update")
        if self.drawn:
            warmup = f"the first {self.warmup_steps:,} steps are random and without updates"
            return f"rollout = {size}, then {updates} on {self.drawn:,} replayed transitions each; {warmup}"
        minibatches = format_count(self.num_minibatches, "minibatch")
        epochs = format_count(self.epochs, "epoch")
        return f"batch = {size}, {minibatches} of {self.minibatch:,}, {epochs}: {updates} per rollout"

    def describe_run(self) -> str:
        """Return steps, rollouts and updates of the whole run."""
        if self.rollouts is None:
            return "the length of the run is unknown"
        steps = self.rollouts * self.batch
        if self.total_steps is not None:
            steps = min(self.total_steps, steps)
        parts = f"{format_count(self.rollouts, 'rollout')}, {format_count(self.all_updates, 'update')} in total"
        return f"{format_count(steps, 'step')} = {parts}"


def plan_for(config: RunConfig) -> Plan:
    """Return the numbers of a run."""
    return Plan(
        **vars(plan_of(config.algorithm)),
        total_steps=config.total_steps,
        iterations=config.until.iterations,
        num_envs=config.env.num_envs,
    )


def check_plan(plan: Plan) -> list[Finding]:
    """Return the arithmetic of the run, and warnings about few rollouts or small minibatches."""
    findings = [Finding("ok", "arithmetic", plan.describe_rollout()), Finding("ok", "arithmetic", plan.describe_run())]
    if plan.rollouts is not None and plan.rollouts < FEW_ROLLOUTS:
        text = (
            f"only {format_count(plan.rollouts, 'rollout')} in the whole run, and the policy improves once per "
            f"rollout: raise total_steps to {FEW_ROLLOUTS * plan.batch:,} or more, or use a smaller horizon or "
            "fewer environments"
        )
        findings.append(Finding("warning", "budget", text))
    findings += _check_updates(plan)
    if plan.minibatch < SMALL_MINIBATCH:
        advice = "a larger batch_size" if plan.drawn else "fewer minibatches, more environments or a longer horizon"
        text = f"a minibatch has only {plan.minibatch} samples, so its gradient is mostly noise: use {advice}"
        findings.append(Finding("warning", "minibatches", text))
    return findings


def _check_updates(plan: Plan) -> Iterator[Finding]:
    """Yield a warning about a short run with few updates for the transitions that it stores."""
    if not plan.drawn or plan.rollouts is None:
        return
    transitions = plan.rollouts * plan.batch
    sparse = plan.updates < SPARSE_UPDATES * plan.batch and plan.all_updates < FEW_UPDATES
    if sparse and transitions < SHORT_RUN:
        text = (
            f"only {format_count(plan.all_updates, 'update')} for {transitions:,} transitions, one for "
            f"{plan.batch / plan.updates:.3g} of them, and a run this short learns little from so few: set "
            "algorithm.updates_per_transition to 1 (and algorithm.updates_per_step to null), or train for longer"
        )
        yield Finding("warning", "updates", text)


def check_foresight(plan: Plan, episode_length: float | None) -> Finding:
    """Compare the horizon of gamma with the length of episodes and rollouts.

    `episode_length` is None if no episode was seen to end.
    """
    if plan.gamma is None:
        return Finding("ok", "foresight", f"a rollout has {plan.horizon:,} steps of each environment")
    if plan.gamma == 1:
        foresight = math.inf
        text = "gamma 1 does not discount: it looks ahead without limit"
    else:
        foresight = 1 / (1 - plan.gamma)
        text = f"gamma {plan.gamma:g} looks about {foresight:,.0f} steps ahead, 1 / (1 - gamma)"
    if episode_length is not None:
        text += f"; episodes of random actions last about {episode_length:,.0f} steps"
    else:
        text += "; no episode of random actions ended: if the task never ends, --env.reset-steps N cuts episodes"
    text += f"; a rollout has {plan.horizon:,} steps of each environment"
    if episode_length is not None and foresight < episode_length / 10:
        advice = "later rewards hardly affect the current decision; raise gamma if they should"
        return Finding("note", "foresight", f"{text}; {advice}")
    decay = plan.gamma * plan.gae_lambda
    if decay < 1 and plan.horizon < 1 / (1 - decay):
        text += (
            f"; this is less than the {1 / (1 - decay):,.0f} steps over which gae_lambda sums rewards, so advantages "
            "depend on the critic more than gae_lambda suggests"
        )
        return Finding("note", "foresight", text)
    return Finding("ok", "foresight", text)


def check_truncation(spec: EnvSpec) -> Finding:
    """Return the value that a truncated episode is bootstrapped from."""
    if spec.truncates is False:
        return Finding("ok", "truncation", "episodes are never truncated, so nothing is bootstrapped at their end")
    known = "" if spec.truncates else "the environment does not declare whether it truncates episodes; "
    if spec.final_obs == "unknown":
        return Finding("note", "truncation", known + LOST_FINAL_OBS)
    where = (
        "returned together with the next episode's first"
        if spec.final_obs == "separate"
        else "returned before the reset"
    )
    text = (
        f"{known}an episode truncated by a time limit is bootstrapped from the value of its true last observation "
        f"({where}); a terminated one is not bootstrapped"
    )
    return Finding("ok", "truncation", text)


def check_memory(plan: Plan, spec: EnvSpec, record: Any, state: Any) -> Finding:
    """Return an estimate of the memory for rollout and weights.

    `record` is the algorithm's record of one step `[N, ...]`, `state` its `state_dict`.
    """
    obs = sum(math.prod(part.shape) * part.dtype.itemsize for part in spec.obs.values())
    copies = 2 if spec.final_obs == "separate" else 1
    transition = obs * copies + tree_bytes(record) / plan.num_actors + TRANSITION_BYTES
    rollout = 2 * transition * plan.batch  # the rollout and its shuffled copy
    # The state has weights and two moments; gradients are as large as the weights.
    learned = tree_bytes(state) * 4 / 3
    parts = (
        f"{format_bytes(rollout)} for a rollout and its shuffled copy, "
        f"{format_bytes(learned)} for weights, gradients and moments"
    )
    return Finding("ok", "memory", f"about {parts}, on {spec.device}; torch itself and the simulators need more")


def check_size(config: RunConfig) -> None:
    """Raise ConfigError if rollouts, environments or layers alone exceed the free memory.

    Only lower bounds are compared, so nothing that could work is refused; `canter check` estimates
    the rest.
    """
    plan = plan_for(config)
    available = available_memory()
    num_envs = config.env.num_envs
    env_bytes = MIN_PROCESS_BYTES if config.env.vectorization == "async" else MIN_ENV_BYTES
    if ":" in config.env.id:  # another scheme than Gymnasium's
        env_bytes = 0
    needs: list[tuple[str, Any, str, float]] = [
        ("env.num_envs", num_envs, "these environments", env_bytes * num_envs),
        ("env.num_envs", f"{num_envs} with horizon {plan.horizon}", "a rollout", TRANSITION_BYTES * plan.batch),
    ]
    for key, widths in _layers(config, ""):
        needs.append((key, list(widths), "its layers", 4 * WEIGHT_COPIES * _weights(widths)))
    for key, value, name, least in needs:
        if least > available:
            text = f"{name} would take {format_bytes(least)} or more, and {format_bytes(available)} are free here"
            raise ConfigError(f"{key}={value}: {text}; use a smaller number", key)


def _layers(value: Any, key: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the layer widths in a tree of settings by key: the fields named `hidden`."""
    for part in fields(value) if is_dataclass(value) else ():
        inner = getattr(value, part.name)
        path = f"{key}.{part.name}" if key else part.name
        if part.name == "hidden":
            yield path, inner if isinstance(inner, tuple) else (inner, inner)
        yield from _layers(inner, path)


def _weights(widths: tuple[int, ...]) -> int:
    """Return the number of weights and biases of a network with one input."""
    return sum(widths) + sum(a * b for a, b in pairwise(widths))


def tree_bytes(tree: Any) -> int:
    """Return the bytes of all tensors in a tree."""
    if isinstance(tree, TensorStruct):
        tree = vars(tree)
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        return sum(map(tree_bytes, tree))
    return tree.nbytes if isinstance(tree, Tensor) else 0
