"""Watches every operation of torch and remembers where numbers that are not finite come from.

Plays the iteration that a black box holds again, eagerly, and names what was not finite first.

T steps, N environments, L sequence length, B sequences in a minibatch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves as any_leaves

from canter.algorithms.base import Algorithm
from canter.core.data.rollout import Rollout
from canter.core.seeding import derive_seed
from canter.core.specs import Env, EnvSpec, Step
from canter.core.storage.validity import flatten, spec_from_plain
from canter.core.struct import tree_copy_, tree_leaves, tree_map
from canter.envs.contract import place_of, text_of
from canter.nn.optimizer import Optimizer
from canter.training.collector import Collector
from canter.training.config import RunConfig
from canter.training.episodes import ACTION, first_nonfinite, floats_seen, moment

_OWN = __file__
_TORCH = os.path.dirname(torch.__file__)


@dataclass(frozen=True)
class Origin:
    """The first operation of a chain: its results are not finite, and all that went into it was."""

    operation: str
    """Name of the operation, such as `div`."""
    place: str
    """`file:line` of the Python code that called for it."""
    function: str
    """The function that this line is in."""
    value: Tensor
    """The result."""
    index: Tensor | None
    """`[B]` the sequences of the minibatch that was at hand, if one was."""

    def __str__(self) -> str:
        return f"{self.operation} in {self.function} ({self.place})"


class Trace(TorchDispatchMode):
    """While entered, knows of every tensor with NaN or infinity in it by which operation that began."""

    def __init__(self) -> None:
        super().__init__()
        self._origins: dict[int, Origin | None] = {}
        """By the address of a tensor; None where it came from outside."""
        self._alive: list[Tensor] = []
        """Keeps the addresses from being used again."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and look at its results."""
        # NaN before infinity: a bound that is infinite on purpose is no cause.
        before = [leaf for leaf in any_leaves((args, kwargs)) if is_spoilt(leaf)]
        before.sort(key=lambda leaf: not bool(torch.isnan(leaf).any()))
        result = func(*args, **(kwargs or {}))
        for leaf in any_leaves(result):
            if is_spoilt(leaf):
                self._alive.append(leaf)
                self._origins[leaf.data_ptr()] = self.origin_of(*before) if before else _origin(func, leaf)
        return result

    def origin_of(self, *tensors: Tensor) -> Origin | None:
        """Where the numbers of the first of these went wrong that did so in what was watched; None without one."""
        found = (self._origins.get(tensor.data_ptr()) for tensor in tensors)
        return next((origin for origin in found if origin is not None), None)


def is_spoilt(leaf: Any) -> bool:
    """Whether something is a tensor with NaN or infinity in it."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and not bool(torch.isfinite(leaf).all())


def _origin(func: Any, result: Tensor) -> Origin:
    frame, place, function, index = sys._getframe(2), "", "backward", None
    while frame is not None:
        code = frame.f_code
        if not place and not code.co_filename.startswith((_OWN, _TORCH)):
            place, function = f"{code.co_filename}:{frame.f_lineno}", code.co_name
        if code.co_name == "gradients" and isinstance(frame.f_locals.get("index"), Tensor):
            index = frame.f_locals["index"]
        frame = frame.f_back
    return Origin(str(func).removeprefix("aten.").partition(".")[0], place, function, result, index)


@dataclass(frozen=True)
class Explanation:
    """What was found."""

    kind: str
    """Who made it: environment, policy, update; state, where it was there before; or unknown."""
    text: str
    """All of it, a line each."""
    env: int | None = None
    """The environment that it came from, where it came from one."""
    step: int | None = None
    """That environment's step."""
    operation: str = ""
    place: str = ""


class Found(Exception):
    """Ends a replay."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def explain(config: RunConfig, box: dict[str, Any], env: Env | None = None) -> Explanation:
    """Name the first operation that was not finite, and the environment.

    Without `env` only the update is played again; with it, built like that of the run, the rollout too, where the
    environment's state was kept.
    """
    spec = box_spec(box["about"]["env_spec"])
    spoilt = [name for name, leaf in flatten(box["algorithm"]).items() if is_spoilt(leaf)]
    if spoilt:
        return Explanation("state", f"the state before the iteration was not finite already: {', '.join(spoilt[:5])}")
    if box["rollout"] is None:
        text = "the rollout is not there: it was overwritten before the host read of it; log_every=1 reads each one"
        return Explanation("unknown", text)
    algorithm = config.algorithm.build(spec, config.seed)
    algorithm.use_engine("autograd")
    algorithm.load_state_dict(_fitting(box["algorithm"], algorithm.state_dict()))
    for generator, state in zip(algorithm.generators(), box.get("random", ()), strict=False):
        generator.set_state(_fitting(state, generator.get_state()))
    algorithm.set_progress(box["about"]["progress"])
    rollout = _rollout(algorithm, spec, box["rollout"])
    steps = box.get("collector", {}).get("steps_before", 0)
    first = box["about"].get("rank", 0) * spec.num_envs
    place = first_in(rollout, first)
    if place is not None and place[0] == ACTION:
        return _replay_act(algorithm, rollout, place, steps)
    if place is not None:
        name, value, t, row, component = place
        where = f" component {component}" if component else ""
        text = f"environment {row} gave {name}{where} = {value} at its step {steps + t}"
        cause, origin = _replay_env(config, algorithm, box, env, t)
        return _explained("environment", f"{text}\n{cause}", row, steps + t, origin)
    return _replay_update(algorithm, rollout, steps, first)


def _explained(kind: str, text: str, env: int | None, step: int | None, origin: Origin | None) -> Explanation:
    operation, place = ("", "") if origin is None else (origin.operation, origin.place)
    return Explanation(kind, text, env, step, operation, place)


def box_spec(plain: dict[str, Any]) -> EnvSpec:
    """The environments as the run had them, on a CPU."""
    own = {key: plain[key] for key in ("num_envs", "final_obs", "truncates", "num_agents", "durations")}
    return replace(spec_from_plain(plain["spec"], torch.device("cpu")), **own)


Place = tuple[str, float, int, int, list[int]]
"""Name, value, step, environment and component."""


def first_in(rollout: Rollout[Any], first: int) -> Place | None:
    """The first number of a rollout that is not finite; its environments are counted from `first` on."""
    found = []
    for name, values in floats_seen(rollout).items():
        place, value = first_nonfinite(values).tolist()
        if not np.isfinite(value):
            t, row, *component = (int(i) for i in np.unravel_index(int(place), values.shape))
            found.append((name, value, t, first + row, component))
    return min(found, key=lambda item: moment(item[0], item[2]), default=None)


def _fitting(saved: Any, own: Any) -> Any:
    """`saved` with random states of `own` for those of another kind of device, which mean nothing to this one."""
    if isinstance(saved, dict) and isinstance(own, dict):
        return {name: _fitting(value, own.get(name)) for name, value in saved.items()}
    if not (isinstance(saved, Tensor) and isinstance(own, Tensor)):
        return saved
    return own if saved.dtype == own.dtype == torch.uint8 and saved.shape != own.shape else saved


def _rollout(algorithm: Algorithm[Any], spec: EnvSpec, saved: dict[str, Any]) -> Rollout[Any]:
    obs = {name: group[0] for name, group in saved["obs"].items()}
    state = algorithm.policy.initial_state(spec.num_envs)
    length = algorithm.sequence_length
    rollout = Rollout.allocate(algorithm.horizon, obs, algorithm.empty_record(), spec, state, length)
    for name in ("obs", "reward", "terminated", "truncated", "valid", "duration", "final_obs", "reset", "state"):
        if getattr(rollout, name) is not None:
            tree_copy_(getattr(rollout, name), saved[name])
    for target, source in zip(tree_leaves(rollout.record), saved["record"].values(), strict=True):
        target.copy_(source)
    return rollout


def _replay_act(algorithm: Algorithm[Any], rollout: Rollout[Any], place: Place, steps: int) -> Explanation:
    """Choose the actions of a step again, watched; with the memory of the first row, where there is memory."""
    _, value, t, row, _ = place
    text = f"the policy gave environment {row} an action that is {value} at its step {steps + t}"
    state = tree_map(lambda x: x[t // algorithm.sequence_length], rollout.state)
    with Trace() as trace:
        sent, record, _ = algorithm.act(rollout.obs_at(t), state, rollout.reset[t])
        origin = trace.origin_of(sent, *tree_leaves(record))
    text += "" if origin is None else f"\nit began with {origin}"
    return _explained("policy", text, row, steps + t, origin)


def _replay_update(algorithm: Algorithm[Any], rollout: Rollout[Any], steps: int, first: int) -> Explanation:
    """Learn from the rollout again, watched, until an optimiser would have to take a step that is not finite."""
    usual = Optimizer.step

    def refused(self: Optimizer, skip: Tensor) -> dict[str, Tensor]:
        for adam in self.adams:
            if is_spoilt(adam.gradient):
                raise Found(adam.gradient)
        return usual(self, skip)

    with Trace() as trace, _replaced(Optimizer, "step", refused):
        try:
            metrics = algorithm.update(rollout)
        except Found as found:
            origin = trace.origin_of(found.tensor)
        else:
            after = [*metrics.values(), *flatten(algorithm.state_dict()).values()]
            spoilt = [x for x in after if is_spoilt(x)]
            if not spoilt:
                text = "the update was played again by the autograd engine, and everything in it was finite"
                return Explanation("unknown", text)
            origin = trace.origin_of(*spoilt)
    if origin is None:
        return Explanation("update", "a gradient was not finite, and no single operation began it")
    row = _row_of(origin, rollout, algorithm.sequence_length)
    value = origin.value[~torch.isfinite(origin.value)].flatten()[0].item()
    text = f"{origin.operation} gave {value} in {origin.function} ({origin.place}), from numbers that were all finite"
    if row is None:
        return _explained("update", text, None, None, origin)
    step, env = steps + row[0], first + row[1]
    text += f"\nthe first row of it is of environment {env} at its step {step}"
    return _explained("update", text, env, step, origin)


@contextmanager
def _replaced(owner: Any, name: str, other: Callable[..., Any]) -> Iterator[None]:
    """Something else in the place of a method of `owner`, for a while."""
    usual = getattr(owner, name)
    setattr(owner, name, other)
    try:
        yield
    finally:
        setattr(owner, name, usual)


def _row_of(origin: Origin, rollout: Rollout[Any], length: int) -> tuple[int, int] | None:
    """Step and environment of the first result that is not finite; None where the result is not by rows, or all is."""
    bad, num_envs = ~torch.isfinite(origin.value), rollout.reward.shape[1]
    if bad.all():
        return None
    shape, first = origin.value.shape, bad.nonzero()[0].tolist()
    if origin.index is None:
        return (first[0], first[1]) if shape[:2] == rollout.reward.shape else None
    count = len(origin.index)
    if shape[:2] == (length, count):
        t, column = first[0], first[1]
    elif shape[:1] == (length * count,):
        t, column = divmod(first[0], count)
    else:
        return None
    chunk, env = divmod(int(origin.index[column]), num_envs)
    return chunk * length + t, env


def _replay_env(
    config: RunConfig, algorithm: Algorithm[Any], box: dict[str, Any], env: Env | None, t: int
) -> tuple[str, Origin | None]:
    """Take the steps of the rollout again, watched, if the environment's state was kept; says what came of it."""
    state = box.get("collector")
    if env is None or state is None or state.get("env") is None or state["episodes_restart"] is not None:
        return "what computed it inside of the environment cannot be told", None
    if config.execution.engine != "autograd":
        algorithm.use_engine(config.execution.engine)  # acts by the same bits as the run did
    usual, taken = env.step, count()

    def watched(action: Tensor) -> Step:
        strict = "raise" if next(taken) >= t - 1 else "warn"
        with np.errstate(divide=strict, over=strict, invalid=strict):
            step = usual(action)
        for leaf in (step.reward, *step.obs.values(), *(step.final_obs or {}).values()):
            if is_spoilt(leaf):
                raise Found(leaf)
        return step

    collector = Collector(env, algorithm, derive_seed(config.seed, "env"))
    fitting = _fitting(state, collector.state_dict())
    collector.load_state_dict(fitting)
    with Trace() as trace, _replaced(env, "step", watched):
        try:
            collector.collect()
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, Found | FloatingPointError):
                cause = cause.__cause__
            if isinstance(cause, Found):
                origin = trace.origin_of(cause.tensor)
                return "it came from code that is not torch's" if origin is None else f"it began with {origin}", origin
            if cause is not None:
                return f"it began with: {text_of(cause)} ({place_of(cause)})", None
    before, now = flatten(state), flatten(fitting)
    drawn = ", with other random numbers than the GPU's" if any(now[k] is not before[k] for k in before) else ""
    return f"the rollout was played again{drawn}, and this time everything was finite", None
