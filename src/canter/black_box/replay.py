"""Plays the iteration that a black box holds again, eagerly, and names what was not finite first.

T steps, N environments, L sequence length, B sequences in a minibatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canter.algorithms.base import Algorithm
from canter.black_box.trace import Origin, Trace
from canter.data.rollout import Rollout
from canter.envs.gymnasium_contract import place_of, text_of
from canter.optim import Optimizer
from canter.seeding import derive_seed
from canter.specs import Env, EnvSpec, Step
from canter.storage.validity import flatten, spec_from_plain
from canter.struct import tree_copy_, tree_leaves, tree_map
from canter.training.collector import Collector
from canter.training.episodes import ACTION, first_nonfinite, floats_seen, moment
from canter.training.settings import RunConfig


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

    def __init__(self, tensor: Tensor, step: int | None = None) -> None:
        self.tensor, self.step = tensor, step


def explain(config: RunConfig, box: dict[str, Any], env: Env | None = None) -> Explanation:
    """Name the first operation that was not finite, and the environment.

    Without `env` only the update is played again; with it, built like that of the run, the rollout too, where the
    environment's state was kept.
    """
    spec = box_spec(box["about"]["env_spec"])
    spoilt = [name for name, leaf in flatten(box["algorithm"]).items() if _spoilt(leaf)]
    if spoilt:
        return Explanation("state", f"the state before the iteration was not finite already: {', '.join(spoilt[:5])}")
    if box["rollout"] is None:
        text = "the rollout is not there: it was overwritten before the host read of it; log_every=1 reads each one"
        return Explanation("unknown", text)
    algorithm = config.algorithm.build(spec, config.seed)
    algorithm.use_engine("autograd")
    _load(algorithm, box)
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
        inside = _replay_env(config, algorithm, box, env, t) if env is not None else None
        cause = inside or "what computed it inside of the environment cannot be told"
        operation, at = (inside.operation, inside.place) if isinstance(inside, Origin) else ("", "")
        if isinstance(cause, Origin):
            cause = f"it began with {cause.operation} in {cause.function} ({cause.place})"
        return Explanation("environment", f"{text}\n{cause}", row, steps + t, operation, at)
    return _replay_update(algorithm, rollout, steps, first)


def box_spec(plain: dict[str, Any]) -> EnvSpec:
    """The environments as the run had them, on a CPU."""
    own = {key: plain[key] for key in ("num_envs", "final_obs", "truncates", "num_agents", "durations")}
    return replace(spec_from_plain(plain["spec"], torch.device("cpu")), **own)


Place = tuple[str, float, int, int, list[int]]
"""Name, value, step, environment and component."""


def first_in(rollout: Rollout[Any], first: int = 0) -> Place | None:
    """The first number of a rollout that is not finite; its environments are counted from `first` on."""
    found = []
    for name, values in floats_seen(rollout).items():
        place, value = first_nonfinite(values).tolist()
        if not np.isfinite(value):
            t, row, *component = (int(i) for i in np.unravel_index(int(place), values.shape))
            found.append((name, value, t, first + row, component))
    return min(found, key=lambda item: moment(item[0], item[2]), default=None)


def _load(algorithm: Algorithm[Any], box: dict[str, Any]) -> None:
    algorithm.load_state_dict(_fitting(box["algorithm"], algorithm.state_dict()))
    for generator, state in zip(algorithm.generators(), box.get("random", ()), strict=False):
        generator.set_state(_fitting(state, generator.get_state()))
    algorithm.set_progress(box["about"]["progress"])


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
        origin = next((o for o in map(trace.origin_of, [sent, *tree_leaves(record)]) if o is not None), None)
    if origin is None:
        return Explanation("policy", text, row, steps + t)
    text += f"\nit began with {origin.operation} in {origin.function} ({origin.place})"
    return Explanation("policy", text, row, steps + t, origin.operation, origin.place)


def _replay_update(algorithm: Algorithm[Any], rollout: Rollout[Any], steps: int, first: int) -> Explanation:
    """Learn from the rollout again, watched, until an optimiser would have to take a step that is not finite."""
    with Trace() as trace, _steps_refused():
        try:
            metrics = algorithm.update(rollout)
        except Found as found:
            origin = trace.origin_of(found.tensor)
        else:
            after = [*metrics.values(), *(x for x in flatten(algorithm.state_dict()).values() if isinstance(x, Tensor))]
            spoilt = [x for x in after if _spoilt(x)]
            if not spoilt:
                text = "the update was played again by the autograd engine, and everything in it was finite"
                return Explanation("unknown", text)
            origin = next((o for o in map(trace.origin_of, spoilt) if o is not None), None)
    if origin is None:
        return Explanation("update", "a gradient was not finite, and no single operation began it")
    row = _row_of(origin, rollout, algorithm.sequence_length)
    value = origin.value[~torch.isfinite(origin.value)].flatten()[0].item()
    text = f"{origin.operation} gave {value} in {origin.function} ({origin.place}), from numbers that were all finite"
    if row is None:
        return Explanation("update", text, None, None, origin.operation, origin.place)
    t, env = row[0], first + row[1]
    text += f"\nthe first row of it is of environment {env} at its step {steps + t}"
    return Explanation("update", text, env, steps + t, origin.operation, origin.place)


@contextmanager
def _steps_refused() -> Iterator[None]:
    """Optimisers raise `Found` where they would leave out a step."""
    usual = Optimizer.step

    def step(self: Optimizer, skip: Tensor) -> dict[str, Tensor]:
        for adam in self.adams:
            if _spoilt(adam.gradient):
                raise Found(adam.gradient)
        return usual(self, skip)

    Optimizer.step = step
    try:
        yield
    finally:
        Optimizer.step = usual


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


class _Watched:
    """An environment that ends the replay with what it gives, if that is not finite."""

    def __init__(self, env: Env, at: int) -> None:
        self.env, self.at, self.spec, self.count = env, at, env.spec, 0
        for name in ("state_dict", "load_state_dict", "resumes"):
            if hasattr(env, name):
                setattr(self, name, getattr(env, name))

    def reset(self, seed: int | None = None) -> Any:
        return self.env.reset(seed)

    def close(self) -> None:
        """It is not this one's to close."""

    def step(self, action: Tensor) -> Step:
        strict = "raise" if self.count >= self.at else "warn"
        self.count += 1
        with np.errstate(divide=strict, over=strict, invalid=strict):
            step = self.env.step(action)
        for leaf in (step.reward, *step.obs.values(), *(step.final_obs or {}).values()):
            if _spoilt(leaf):
                raise Found(leaf, self.count - 1)
        return step


def _replay_env(
    config: RunConfig, algorithm: Algorithm[Any], box: dict[str, Any], env: Env, t: int
) -> Origin | str | None:
    """Take the steps of the rollout again, watched; None where the environment's state was not kept."""
    state = box.get("collector")
    if state is None or state.get("env") is None or state["episodes_restart"] is not None:
        return None
    if config.execution.engine != "autograd":
        algorithm.use_engine(config.execution.engine)  # acts by the same bits as the run did
    watched = _Watched(env, max(t - 1, 0))
    collector = Collector(watched, algorithm, derive_seed(config.seed, "env"))
    fitting = _fitting(state, collector.state_dict())
    collector.load_state_dict(fitting)
    watched.count = 0
    with Trace() as trace:
        try:
            collector.collect()
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, Found | FloatingPointError):
                cause = cause.__cause__
            if isinstance(cause, Found):
                return trace.origin_of(cause.tensor) or "it came from code that is not torch's"
            if cause is not None:
                return f"it began with: {text_of(cause)} ({place_of(cause)})"
    before, now = flatten(state), flatten(fitting)
    drawn = ", with other random numbers than the GPU's" if any(now[k] is not before[k] for k in before) else ""
    return f"the rollout was played again{drawn}, and this time everything was finite"


def _spoilt(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and not bool(torch.isfinite(leaf).all())
