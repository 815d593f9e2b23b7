"""Checks of what environments return: Canter's contract, and Gymnasium's before conversion.

The checks of Canter's contract (`canter.core.specs`) compare shapes, dtypes and devices without
reading a tensor. The checks of Gymnasium's contract are needed as NumPy accepts too much: it
spreads one number over a row, reads the text "1.0" as a number and the text "False" as true.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor

from canter.core.specs import ContractBroken, EnvSpec, Step
from canter.core.struct import Obs

NUMBERS: tuple[type, ...] = (float, np.float64, np.float32, int)
"""Types of rewards that are known to be one number."""


@runtime_checkable
class PassesInfo(Protocol):
    """Optional for an environment that passes requested numbers of its simulator on as `Step.info`."""

    def absent_info(self) -> str | None:
        """Return an error about a requested number that no step has had so far; None if all appeared."""
        ...


def absent_info(env: Any) -> str | None:
    """Return an error about a number requested of an environment that no step has had; None without one."""
    return env.absent_info() if isinstance(env, PassesInfo) else None


def check_obs(obs: Obs, spec: EnvSpec, source: str) -> None:
    """Raise ContractBroken if the observations' groups, shapes, dtypes or device are wrong."""
    if obs.keys() != spec.obs.keys():
        raise ContractBroken(f"{source} returned the observation groups {sorted(obs)}, the spec has {sorted(spec.obs)}")
    for name, declared in spec.obs.items():
        tensor = obs[name]
        shape = (spec.num_envs, *declared.shape)
        if (tuple(tensor.shape), tensor.dtype) != (shape, declared.dtype):
            raise ContractBroken(
                f"{source} returned observation {name!r} as {tensor.dtype} {tuple(tensor.shape)}, "
                f"the spec says {declared.dtype} {shape}"
            )
        if tensor.device.type != spec.device.type:
            raise ContractBroken(
                f"{source} returned observation {name!r} on {tensor.device}, the spec says {spec.device}"
            )


def check_layout(step: Step, spec: EnvSpec) -> None:
    """Raise ContractBroken if a step's shapes, dtypes or devices are wrong; read no tensor."""
    check_obs(step.obs, spec, "step()")
    columns = {
        "reward": step.reward,
        "terminated": step.terminated,
        "truncated": step.truncated,
        "valid": step.valid,
    }
    for name, column in columns.items():
        dtype = torch.float32 if name == "reward" else torch.bool
        if not isinstance(column, Tensor):
            raise ContractBroken(f"step() returned {name} as {type(column).__name__}, it must be a tensor")
        if (tuple(column.shape), column.dtype) != ((spec.num_envs,), dtype):
            raise ContractBroken(
                f"step() returned {name} as {column.dtype} {tuple(column.shape)}, it must be {dtype} ({spec.num_envs},)"
            )
    for name, value in step.metrics.items():
        if value.ndim != 0 or value.device.type != spec.device.type:
            raise ContractBroken(
                f"step() returned the metric {name!r} as {tuple(value.shape)} on {value.device}, "
                f"it must be () on {spec.device}"
            )
    if step.final_obs is not None:
        check_obs(step.final_obs, spec, "step().final_obs")


def check_step(step: Step, spec: EnvSpec) -> None:
    """Raise ContractBroken if a step breaks the contract of `Step`; read its flags."""
    check_layout(step, spec)
    if bool((step.terminated & step.truncated).any()):
        raise ContractBroken("step() returned a row that is both terminated and truncated; terminated must win")
    if spec.final_obs == "separate" and step.final_obs is None and bool((step.terminated | step.truncated).any()):
        raise ContractBroken(
            "an episode ended without Step.final_obs, which the spec promises (final_obs: separate); if the simulator "
            'loses it, the spec must say final_obs="unknown"'
        )


def validate_reset(result: Any, space: Space) -> tuple[Any, dict[str, Any]]:
    """Return the result of a Gymnasium environment's `reset()`, or raise ContractBroken."""
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
        raise ContractBroken(f"reset() returned {_short(result)}, it must be (observation, info)")
    _check_space("reset", result[0], space)
    return result


def validate_step(result: Any, space: Space) -> tuple[Any, float, bool, bool, dict[str, Any]]:
    """Return the result of a Gymnasium `step()` with plain reward and flags; check it."""
    if not isinstance(result, tuple) or len(result) != 5 or not isinstance(result[4], dict):
        form = f"{len(result)} values" if isinstance(result, tuple) else _short(result)
        expected = "(observation, reward, terminated, truncated, info)"
        raise ContractBroken(f"step() returned {form}, it must be {expected}")
    obs, reward, terminated, truncated, info = result
    _check_space("step", obs, space)
    return obs, *to_numbers(reward, terminated, truncated), info


def to_reward(reward: Any) -> float:
    """Return a reward of any type that is one number as a float; raise ContractBroken otherwise."""
    if isinstance(reward, NUMBERS):
        return float(reward)
    array = np.asarray(reward)
    if array.size != 1 or array.dtype.kind not in "fiub":
        kind = type(reward).__name__
        raise ContractBroken(f"step() returned the reward {_short(reward)} ({kind}), it must be one number")
    return float(array.reshape(()))


def to_flag(flag: Any, name: str) -> bool:
    """Return a flag of any type that is true or false as a bool; raise ContractBroken otherwise."""
    if isinstance(flag, bool | np.bool_):
        return bool(flag)
    array = np.asarray(flag)
    if array.size != 1 or array.dtype.kind not in "biu" or array.reshape(()) not in (0, 1):
        kind = type(flag).__name__
        raise ContractBroken(f"step() returned {name}={_short(flag)} ({kind}), it must be True or False")
    return bool(array.reshape(()))


def to_numbers(reward: Any, terminated: Any, truncated: Any) -> tuple[float, bool, bool]:
    """Return a reward and two flags of any types as a float and two bools; raise ContractBroken otherwise."""
    return to_reward(reward), to_flag(terminated, "terminated"), to_flag(truncated, "truncated")


def check_columns(num_envs: int, **columns: Any) -> None:
    """Raise ContractBroken unless there is one reward and one flag per environment."""
    for name, values in columns.items():
        array = np.asarray(values)
        if array.shape != (num_envs,):
            raise ContractBroken(f"step() returned {name} of shape {array.shape}, it must be ({num_envs},)")
        if array.dtype.kind not in ("fiu" if name == "reward" else "b"):
            kind = "numbers" if name == "reward" else "bool"
            raise ContractBroken(f"step() returned {name} as {array.dtype}, it must be {kind}")


def _check_space(call: str, obs: Any, space: Space, name: str = "an observation") -> None:
    """Raise ContractBroken if an observation has another form than its space."""
    if isinstance(space, spaces.Dict):
        if not isinstance(obs, dict) or obs.keys() != space.spaces.keys():
            keys = sorted(obs) if isinstance(obs, dict) else type(obs).__name__
            raise ContractBroken(f"{call}() returned {name} with the keys {keys}, its space has {sorted(space.spaces)}")
        for key, part in space.spaces.items():
            _check_space(call, obs[key], part, f"observation {key!r}")
        return
    try:
        array = np.asarray(obs)
    except ValueError as error:  # a list of lists of different lengths
        raise ContractBroken(f"{call}() returned {name} that is not an array: {error}") from error
    shape = space.shape or ()
    dtype = np.dtype(space.dtype)
    problem = None
    if array.dtype.kind not in "fiub":
        problem = f"as {array.dtype} ({_short(obs)}), its space has {dtype} numbers"
    elif array.shape != shape:
        problem = f"of shape {array.shape}, its space has {shape}"
    elif array.dtype.kind == "f" and dtype.kind != "f":
        problem = f"as {array.dtype}, its space has {dtype}, which would cut the fractions off"
    elif isinstance(space, spaces.Discrete | spaces.MultiDiscrete) and not space.contains(array.astype(dtype)):
        problem = f"{_short(obs)}, which is outside of {space}"
    if problem is not None:
        raise ContractBroken(f"{call}() returned {name} {problem}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
