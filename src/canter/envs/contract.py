"""Whether a step is what `canter.core.specs` promises; shapes, dtypes and devices are known without reading a tensor.

What one Gymnasium environment gives, looked at before it is believed.

NumPy would take much for granted: `(1,)` numbers spread over three, the text "1.0" is a number and "False" is true.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import extract_tb, walk_stack, walk_tb
from types import FrameType, TracebackType
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import Space, spaces
from gymnasium.vector import SyncVectorEnv
from torch import Tensor

from canter.core.specs import FROM_OUTSIDE, ContractBroken, EnvFailed, EnvSpec, Step
from canter.core.struct import Obs


def check_obs(obs: Obs, spec: EnvSpec, source: str) -> None:
    """Refuse observations that are not what the spec declares."""
    if obs.keys() != spec.obs.keys():
        raise ContractBroken(f"{source} gave the observation groups {sorted(obs)}, the spec has {sorted(spec.obs)}")
    for name, declared in spec.obs.items():
        found, shape = obs[name], (spec.num_envs, *declared.shape)
        if (tuple(found.shape), found.dtype) != (shape, declared.dtype):
            raise ContractBroken(
                f"{source} gave observation {name!r} as {found.dtype} {tuple(found.shape)}, "
                f"the spec says {declared.dtype} {shape}"
            )
        if found.device.type != spec.device.type:
            raise ContractBroken(f"{source} gave observation {name!r} on {found.device}, the spec says {spec.device}")


def check_form(step: Step, spec: EnvSpec) -> None:
    """Refuse a step of other shapes, dtypes or devices than `canter.core.specs.Step` has; reads no tensor."""
    check_obs(step.obs, spec, "step()")
    for name in ("reward", "terminated", "truncated", "valid"):
        dtype = torch.float32 if name == "reward" else torch.bool
        found: Tensor = getattr(step, name)
        if not isinstance(found, Tensor):
            raise ContractBroken(f"step() gave {name} as {type(found).__name__}, it must be a tensor")
        if (tuple(found.shape), found.dtype) != ((spec.num_envs,), dtype):
            raise ContractBroken(
                f"step() gave {name} as {found.dtype} {tuple(found.shape)}, it must be {dtype} ({spec.num_envs},)"
            )
    for name, value in step.metrics.items():
        if value.ndim != 0 or value.device.type != spec.device.type:
            raise ContractBroken(
                f"step() gave the metric {name!r} as {tuple(value.shape)} on {value.device}, "
                f"it must be () on {spec.device}"
            )
    if step.final_obs is not None:
        check_obs(step.final_obs, spec, "step().final_obs")


def check_step(step: Step, spec: EnvSpec) -> None:
    """Refuse a step that breaks the contract of `canter.core.specs.Step`; reads its flags."""
    check_form(step, spec)
    if bool((step.terminated & step.truncated).any()):
        raise ContractBroken("step() gave a row that is both terminated and truncated; terminated must win")
    if spec.final_obs == "separate" and step.final_obs is None and bool((step.terminated | step.truncated).any()):
        raise ContractBroken(
            "an episode ended without Step.final_obs, which the spec promises (final_obs: separate); if the simulator "
            'loses it, the spec must say final_obs="unknown"'
        )


NUMBERS: tuple[type, ...] = (float, np.float64, np.float32, int)
"""Types of rewards that need no second look."""


def check_space_obs(obs: Any, space: Space, what: str = "an observation") -> None:
    """Refuse an observation of another form than its space; raises `ContractBroken`."""
    if isinstance(space, spaces.Dict):
        if not isinstance(obs, dict) or obs.keys() != space.spaces.keys():
            keys = sorted(obs) if isinstance(obs, dict) else type(obs).__name__
            raise ContractBroken(f"gave {what} with the keys {keys}, its space has {sorted(space.spaces)}")
        for key, part in space.spaces.items():
            check_space_obs(obs[key], part, f"observation {key!r}")
        return
    try:
        found = np.asarray(obs)
    except ValueError as error:  # a list of lists of different lengths
        raise ContractBroken(f"gave {what} that is no array: {error}") from error
    expected, dtype = space.shape or (), np.dtype(space.dtype)
    if found.dtype.kind not in "fiub":
        raise ContractBroken(f"gave {what} as {found.dtype} ({_short(obs)}), its space has {dtype} numbers")
    if found.shape != expected:
        raise ContractBroken(f"gave {what} of shape {found.shape}, its space has {expected}")
    if found.dtype.kind == "f" and dtype.kind != "f":
        raise ContractBroken(f"gave {what} as {found.dtype}, its space has {dtype}, to which it would be cut off")
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) and not space.contains(found.astype(dtype)):
        raise ContractBroken(f"gave {what} {_short(obs)}, which is outside of {space}")


def as_number(reward: Any) -> float:
    """A reward that is one number, of whatever type; else `ContractBroken`."""
    if isinstance(reward, NUMBERS):
        return float(reward)
    found = np.asarray(reward)
    if found.size != 1 or found.dtype.kind not in "fiub":
        raise ContractBroken(f"gave the reward {_short(reward)} ({type(reward).__name__}), it must be one number")
    return float(found.reshape(()))


def as_flag(flag: Any, name: str) -> bool:
    """A flag that is true or false, of whatever type; else `ContractBroken`."""
    if isinstance(flag, bool | np.bool_):
        return bool(flag)
    found = np.asarray(flag)
    if found.size != 1 or found.dtype.kind not in "biu" or found.reshape(()) not in (0, 1):
        raise ContractBroken(f"gave {name}={_short(flag)} ({type(flag).__name__}), it must be True or False")
    return bool(found.reshape(()))


def checked_reset(came: Any, space: Space) -> tuple[Any, dict[str, Any]]:
    """What `reset()` gave, once it was found to be right."""
    if not isinstance(came, tuple) or len(came) != 2 or not isinstance(came[1], dict):
        raise ContractBroken(f"gave {_short(came)} from reset(), it must be (observation, info)")
    check_space_obs(came[0], space)
    return came


def checked_step(came: Any, space: Space) -> tuple[Any, float, bool, bool, dict[str, Any]]:
    """What `step()` gave, with a plain number and plain flags, once it was found to be right."""
    if not isinstance(came, tuple) or len(came) != 5 or not isinstance(came[4], dict):
        form = f"{len(came)} values" if isinstance(came, tuple) else _short(came)
        expected = "(observation, reward, terminated, truncated, info)"
        raise ContractBroken(f"gave {form} from step(), it must be {expected}")
    obs, reward, terminated, truncated, info = came
    check_space_obs(obs, space)
    return obs, as_number(reward), as_flag(terminated, "terminated"), as_flag(truncated, "truncated"), info


class CheckContract(gymnasium.Wrapper):
    """Refuses what breaks the contract of Gymnasium, with an error that says what."""

    state_attributes = ()

    def reset(self, **kwargs: Any) -> Any:
        """As the environment's own."""
        return checked_reset(self.env.reset(**kwargs), self.observation_space)

    def step(self, action: Any) -> Any:
        """As the environment's own."""
        return checked_step(self.env.step(action), self.observation_space)


class EnvironmentFailed(EnvFailed):
    """An environment raised, died or broke its contract; the message names it, the step, its error and the place."""


def failure(error: BaseException, call: str, step: int | None, before: int = 0) -> EnvironmentFailed:
    """What an environment did, in words: its number, the call, its step, its own error and where that was raised.

    `before` environments are those of other ranks, and are counted first.
    """
    if isinstance(error, EnvironmentFailed):
        return error
    row = error.row if isinstance(error, EnvFailed) else row_of(error.__traceback__)
    who = "the environment" if row is None else f"environment {before + row}"
    when = "" if step is None else f" at its step {step}"
    if isinstance(error, EnvFailed):
        what = f"{who} failed{when}: {text_of(error)}"
    elif isinstance(error, ContractBroken):
        what = f"{who}{when}: {call}() {text_of(error).removeprefix(f'{call}() ')}"
    else:
        what = f"{who} failed{when}: {call}() raised {said(error)}"
    return EnvironmentFailed(what, row, error.trace if isinstance(error, EnvFailed) else "")


@contextmanager
def blamed(call: str, step: int | None = None) -> Iterator[None]:
    """What is raised inside becomes an `EnvironmentFailed`, see `failure`, unless it came from outside."""
    try:
        yield
    except FROM_OUTSIDE:
        raise
    except BaseException as error:
        raise failure(error, call, step) from error


def row_of(trace: TracebackType | FrameType | None) -> int | None:
    """The number of the environment in whose call an error was raised, or a thread is; None where nothing tells.

    Adapters here call it `env_number` in the loop over environments; Gymnasium's has another name for it.
    """
    row = None
    frames = walk_tb(trace) if not isinstance(trace, FrameType) else reversed([*walk_stack(trace)])
    for frame, _ in frames:
        names = frame.f_locals
        row = names.get("env_number", row)
        if isinstance(names.get("self"), SyncVectorEnv) and frame.f_code.co_name in ("reset", "step"):
            row = names.get("i", row)
    return row if isinstance(row, int) else None


def place_of(error: BaseException) -> str:
    """`file:line` of the innermost frame of an error; "no place" where there is none."""
    frames = extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "no place"


def text_of(error: BaseException) -> str:
    """What an error says, on one line; the error of another's `__str__` says nothing."""
    try:
        return " ".join(str(error).split())
    except Exception:
        return ""


def said(error: BaseException) -> str:
    """An error by its type, its text and its place."""
    return f"{type(error).__name__}: {text_of(error)} ({place_of(error)})"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
