"""Replay the iteration of a black box eagerly, and name the first nonfinite operation.

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
from canter.core.storage.validity import flatten, spec_from_plain, spec_to_plain
from canter.core.struct import tree_copy_, tree_leaves, tree_map
from canter.envs.failures import error_chain, place_of, text_of
from canter.nn.optimizer import Optimizer
from canter.training.collector import Collector
from canter.training.config import RunConfig
from canter.training.episodes import ACTION, first_nonfinite, floats_seen, moment

_OWN = __file__
_TORCH = os.path.dirname(torch.__file__)


@dataclass(frozen=True)
class Origin:
    """The operation where NaN or infinity starts: finite inputs, a nonfinite result."""

    operation: str
    """Name of the operation, such as `div`."""
    place: str
    """`file:line` of the Python code that called it."""
    function: str
    """Function that contains this line."""
    value: Tensor
    """Result of the operation."""
    index: Tensor | None
    """`[B]` sequences of the current minibatch, if there is one."""

    def __str__(self) -> str:
        return f"{self.operation} in {self.function} ({self.place})"


class Trace(TorchDispatchMode):
    """Records the origin of every tensor with NaN or infinity while entered."""

    def __init__(self) -> None:
        super().__init__()
        self._origins: dict[int, Origin | None] = {}
        """Origin by the address of a tensor; None if it came from outside the trace."""
        self._alive: list[Tensor] = []
        """Keeps the addresses from being reused."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and check its results."""
        # NaN before infinity: a bound may be infinite on purpose.
        before = [leaf for leaf in any_leaves((args, kwargs)) if has_nonfinite(leaf)]
        before.sort(key=lambda leaf: not bool(torch.isnan(leaf).any()))
        result = func(*args, **(kwargs or {}))
        for leaf in any_leaves(result):
            if has_nonfinite(leaf):
                self._alive.append(leaf)
                self._origins[leaf.data_ptr()] = self.origin_of(*before) if before else _origin(func, leaf)
        return result

    def origin_of(self, *tensors: Tensor) -> Origin | None:
        """Return the origin of the first of these tensors that has one, else None."""
        found = (self._origins.get(tensor.data_ptr()) for tensor in tensors)
        return next((origin for origin in found if origin is not None), None)


def has_nonfinite(leaf: Any) -> bool:
    """Return whether `leaf` is a tensor with NaN or infinity."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and not bool(torch.isfinite(leaf).all())


def _origin(func: Any, result: Tensor) -> Origin:
    """Describe the current operation; the Python stack tells which line called it."""
    frame = sys._getframe(2)
    place = ""
    function = "backward"
    index = None
    while frame is not None:
        code = frame.f_code
        if not place and not code.co_filename.startswith((_OWN, _TORCH)):
            place = f"{code.co_filename}:{frame.f_lineno}"
            function = code.co_name
        if code.co_name == "gradients" and isinstance(frame.f_locals.get("index"), Tensor):
            index = frame.f_locals["index"]
        frame = frame.f_back
    return Origin(str(func).removeprefix("aten.").partition(".")[0], place, function, result, index)


@dataclass(frozen=True)
class Explanation:
    """Result of a replay."""

    kind: str
    """Source of the NaN: environment, policy or update; state, if it was there before; or
    unknown."""
    text: str
    """Explanation, one finding per line."""
    env: int | None = None
    """Number of the environment that returned it, if one did."""
    step: int | None = None
    """Step of that environment."""
    operation: str = ""
    """Name of the first operation with a result that is not finite."""
    place: str = ""
    """`file:line` of that operation."""


class NonFiniteFound(Exception):
    """Ends a replay at the first tensor that is not finite."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def explain(config: RunConfig, box: dict[str, Any], env: Env | None = None) -> Explanation:
    """Name the first operation with a result that is not finite, and the environment it came from.

    Without `env` only the update is replayed. With it, built like the run's, the rollout is
    replayed too if the environment's state was saved.
    """
    spec = spec_from_box(box["about"]["env_spec"])
    nonfinite = [name for name, leaf in flatten(box["algorithm"]).items() if has_nonfinite(leaf)]
    if nonfinite:
        return Explanation(
            "state", f"the state before the iteration was not finite already: {', '.join(nonfinite[:5])}"
        )
    if box["rollout"] is None:
        text = "the rollout is missing: it was overwritten before the host read it; log_every=1 reads every rollout"
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
        text = f"environment {row} returned {name}{where} = {value} at its step {steps + t}"
        cause, origin = _replay_env(config, algorithm, box, env, t)
        return _explained("environment", f"{text}\n{cause}", row, steps + t, origin)
    return _replay_update(algorithm, rollout, steps, first)


def _explained(kind: str, text: str, env: int | None, step: int | None, origin: Origin | None) -> Explanation:
    if origin is None:
        return Explanation(kind, text, env, step)
    return Explanation(kind, text, env, step, origin.operation, origin.place)


SPEC_FIELDS = ("num_envs", "final_obs", "truncates", "num_agents", "durations")
"""Fields of `EnvSpec` that a black box stores in addition to the spec's plain form."""


def spec_to_box(spec: EnvSpec) -> dict[str, Any]:
    """Return everything that an algorithm is built by, as plain data."""
    return {"spec": spec_to_plain(spec)} | {name: getattr(spec, name) for name in SPEC_FIELDS}


def spec_from_box(plain: dict[str, Any]) -> EnvSpec:
    """Return the spec of the run's environments, on a CPU."""
    spec = spec_from_plain(plain["spec"], torch.device("cpu"))
    return replace(spec, **{name: plain[name] for name in SPEC_FIELDS})


Place = tuple[str, float, int, int, list[int]]
"""Name, value, step, environment and component of a number in a rollout."""


def first_in(rollout: Rollout[Any], first: int) -> Place | None:
    """Return the first nonfinite number of a rollout; environments are counted from `first`."""
    found = []
    for name, values in floats_seen(rollout).items():
        place, value = first_nonfinite(values).tolist()
        if not np.isfinite(value):
            t, row, *component = (int(i) for i in np.unravel_index(int(place), values.shape))
            found.append((name, value, t, first + row, component))
    return min(found, key=lambda item: moment(item[0], item[2]), default=None)


def _fitting(saved: Any, own: Any) -> Any:
    """Return `saved`, with random states of another kind of device replaced by those of `own`."""
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
    """Choose the actions of a step again under a trace, from the sequence's recurrent state."""
    _, value, t, row, _ = place
    text = f"the policy sent environment {row} an action of {value} at its step {steps + t}"
    state = tree_map(lambda x: x[t // algorithm.sequence_length], rollout.state)
    with Trace() as trace:
        sent, record, _ = algorithm.act(rollout.obs_at(t), state, rollout.reset[t])
        origin = trace.origin_of(sent, *tree_leaves(record))
    text += "" if origin is None else f"\nit started in {origin}"
    return _explained("policy", text, row, steps + t, origin)


def _replay_update(algorithm: Algorithm[Any], rollout: Rollout[Any], steps: int, first: int) -> Explanation:
    """Learn from the rollout again under a trace, up to the first nonfinite optimizer step."""
    original = Optimizer.step

    def refused(self: Optimizer, skip: Tensor) -> dict[str, Tensor]:
        for adam in self.adams:
            if has_nonfinite(adam.gradient):
                raise NonFiniteFound(adam.gradient)
        return original(self, skip)

    with Trace() as trace, _replaced(Optimizer, "step", refused):
        try:
            metrics = algorithm.update(rollout)
        except NonFiniteFound as found:
            origin = trace.origin_of(found.tensor)
        else:
            after = [*metrics.values(), *flatten(algorithm.state_dict()).values()]
            nonfinite = [x for x in after if has_nonfinite(x)]
            if not nonfinite:
                text = "the update was replayed by the autograd engine, and everything in it was finite"
                return Explanation("unknown", text)
            origin = trace.origin_of(*nonfinite)
    if origin is None:
        return Explanation("update", "a gradient was not finite, and it started in no single operation")
    row = _row_of(origin, rollout, algorithm.sequence_length)
    value = origin.value[~torch.isfinite(origin.value)].flatten()[0].item()
    text = f"{origin.operation} returned {value} in {origin.function} ({origin.place}), and all its inputs were finite"
    if row is None:
        return _explained("update", text, None, None, origin)
    step, env = steps + row[0], first + row[1]
    text += f"\nits first sample is from environment {env} at its step {step}"
    return _explained("update", text, env, step, origin)


@contextmanager
def _replaced(owner: Any, name: str, other: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of `owner` inside the block."""
    original = getattr(owner, name)
    setattr(owner, name, other)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _row_of(origin: Origin, rollout: Rollout[Any], length: int) -> tuple[int, int] | None:
    """Return step and environment of the first result that is not finite.

    None if all of them are not, or if the result has no sample axis.
    """
    bad = ~torch.isfinite(origin.value)
    num_envs = rollout.reward.shape[1]
    if bad.all():
        return None
    shape = origin.value.shape
    first = bad.nonzero()[0].tolist()
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
    """Step through the rollout again under a trace, if possible; return the origin found."""
    state = box.get("collector")
    if env is None or state is None or state.get("env") is None or state["episodes_restart"] is not None:
        return "the code inside the environment that computed it is unknown: its state was not saved", None
    if config.execution.engine != "autograd":
        algorithm.use_engine(config.execution.engine)  # acts by the same bits as the run did
    original = env.step
    steps_taken = count()

    def step_checked(action: Tensor) -> Step:
        strict = "raise" if next(steps_taken) >= t - 1 else "warn"
        with np.errstate(divide=strict, over=strict, invalid=strict):
            step = original(action)
        for leaf in (step.reward, *step.obs.values(), *(step.final_obs or {}).values()):
            if has_nonfinite(leaf):
                raise NonFiniteFound(leaf)
        return step

    collector = Collector(env, algorithm, derive_seed(config.seed, "env"))
    fitting = _fitting(state, collector.state_dict())
    collector.load_state_dict(fitting)
    with Trace() as trace, _replaced(env, "step", step_checked):
        try:
            collector.collect()
        except Exception as error:
            expected = (link for link in error_chain(error) if isinstance(link, NonFiniteFound | FloatingPointError))
            cause = next(expected, None)
            if isinstance(cause, NonFiniteFound):
                origin = trace.origin_of(cause.tensor)
                if origin is None:
                    return "it came from code outside torch", None
                return f"it started in {origin}", origin
            if cause is not None:
                return f"it started with: {text_of(cause)} ({place_of(cause)})", None
    saved = flatten(state)
    loaded = flatten(fitting)
    drawn = ", with other random numbers than the GPU's" if any(loaded[k] is not saved[k] for k in saved) else ""
    return f"the rollout was replayed{drawn}, and this time everything was finite", None
