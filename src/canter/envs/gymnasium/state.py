"""The exact state of Gymnasium environments whose every variable is known.

Known are Gymnasium's own classic control and MuJoCo environments in a `SyncVectorEnv`, within the
wrappers that `gymnasium.make` puts around them. An environment or a wrapper of a user takes part if
its class declares the attributes that change, plain data or arrays, as `state_attributes`; one
without state declares `state_attributes = ()`. The random numbers of `np_random` and, in a subclass
of Gymnasium's `MujocoEnv`, the simulation's data belong to the state without being declared.

A state is a tree of tensors (for arrays), numbers, strings, dicts, lists and tuples.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import iterate
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit
from torch import Tensor

from canter.core.registry import UserError

_CLASSIC = "gymnasium.envs.classic_control"
_MUJOCO = "gymnasium.envs.mujoco"
_WRAPPERS: dict[type, tuple[str, ...]] = {
    TimeLimit: ("_elapsed_steps",),
    OrderEnforcing: ("_has_reset",),
    PassiveEnvChecker: (),
}
_VECTOR_FIELDS = ("_observations", "_rewards", "_terminations", "_truncations", "_autoreset_envs")
_NOT_STATE = ("_ez", "metadata", "spec", "fullpath", "render_mode", "camera_", "width", "height", "screen", "isopen")
"""Prefixes of the names of attributes about drawing and files, which another machine may do
differently."""
_MUJOCO_DERIVED = (
    *("xpos", "xquat", "xmat", "xipos", "ximat", "geom_xpos", "site_xpos", "subtree_com", "ten_length"),
    *("ten_velocity", "cinert", "cvel", "cfrc_ext", "qfrc_actuator", "qfrc_constraint"),
)
_SCALAR = "numpy_scalar"
_PLAIN = frozenset({type(None), bool, int, float, str})


class StateUnavailable(NotImplementedError):
    """The exact state of an environment is not known; the message says why."""


def snapshot(env: VectorEnv, in_forks: dict[int, dict[str, Any]] | None = None) -> dict[str, Any]:
    """Return a copy of the exact state, quickly, as it is taken before every rollout.

    `as_tree` turns it into a state; there must be no `obstacle`. `in_forks` are the states by
    number of environments that forked processes step, as `snapshot_singles` returns them there.
    """
    assert isinstance(env, SyncVectorEnv)
    known = in_forks or {}
    return {
        "fields": {name: _copied(getattr(env, name)) for name in _VECTOR_FIELDS},
        "action_rng": env.action_space.np_random.bit_generator.state,
        "envs": [known.get(number) or _snapshot_single(single) for number, single in enumerate(env.envs)],
    }


def snapshot_singles(env: SyncVectorEnv, numbers: list[int]) -> dict[int, dict[str, Any]]:
    """Return the snapshots of some environments by number, as plain data for other processes."""
    singles = {number: _snapshot_single(env.envs[number]) for number in numbers}
    for single in singles.values():
        single["attributes"] = {name: value for name, value in single["attributes"].items() if _is_plain(value)}
    return singles


def restore_singles(env: SyncVectorEnv, singles: dict[int, dict[str, Any]]) -> None:
    """Restore environments to the states that `snapshot_singles` returned."""
    for number, single in singles.items():
        _restore_single(env.envs[number], _single_as_tree(single))
        env._env_obs[number] = map_parts(lambda rows, n=number: rows[n].copy(), env._observations)


def map_parts(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to every leaf of nested dicts, lists and tuples."""
    if isinstance(value, dict):
        return {key: map_parts(function, part) for key, part in value.items()}
    if isinstance(value, list):
        return [map_parts(function, part) for part in value]
    if isinstance(value, tuple):
        return tuple([map_parts(function, part) for part in value])
    return function(value)


def as_tree(copied: dict[str, Any]) -> dict[str, Any]:
    """Return the saveable state of a snapshot."""
    singles = [_single_as_tree(single) for single in copied["envs"]]
    return {"fields": _to_tree(copied["fields"]), "action_rng": _to_tree(copied["action_rng"]), "envs": singles}


def _single_as_tree(copied: dict[str, Any]) -> dict[str, Any]:
    return _to_tree({**copied, "attributes": {}}) | {"attributes": _plain_attributes(copied["attributes"])}


def restore(env: VectorEnv, state: dict[str, Any]) -> None:
    """Continue from a saved state, bit for bit, in an environment with the same options."""
    reason = obstacle(env)
    if reason is not None:
        raise StateUnavailable(f"the saved state cannot be restored: {reason}")
    assert isinstance(env, SyncVectorEnv)
    if len(state["envs"]) != env.num_envs:
        raise UserError(f"the saved state is of {len(state['envs'])} environments, these are {env.num_envs}")
    for name in _VECTOR_FIELDS:
        setattr(env, name, _from_tree(state["fields"][name]))
    # A reset of only some environments assembles the observations of all of them again.
    env._env_obs = [_from_tree(_to_tree(row)) for row in iterate(env.observation_space, env._observations)]
    env.action_space.np_random.bit_generator.state = _from_tree(state["action_rng"])
    for single, saved in zip(env.envs, state["envs"], strict=True):
        _restore_single(single, saved)


def obstacle(env: VectorEnv) -> str | None:
    """Return why the exact state of a vector environment is not known, or None if it is."""
    if type(env) is not SyncVectorEnv:
        return f"{type(env).__name__} is no SyncVectorEnv, whose environments can be looked into"
    for single in env.envs:
        wrappers, base = unwrap(single)
        unknown = [type(wrapper).__name__ for wrapper in wrappers if _attributes(wrapper) is None]
        if unknown:
            return f"the wrapper {unknown[0]} may hold state; its class does not declare `state_attributes`"
        declared = _declared(base)
        if declared is None and not type(base).__module__.startswith((_CLASSIC, _MUJOCO)):
            return (
                f"{type(base).__name__} is neither one of Gymnasium's classic control or MuJoCo environments, nor does "
                "its class declare `state_attributes`, the names of its attributes that change"
            )
        if (reason := _refusal(base, declared or ())) is not None:
            return reason
        if _is_mujoco(base) and not type(base.data).__module__.startswith("mujoco."):  # pyright: ignore[reportAttributeAccessIssue]
            return f"{type(base).__name__} uses the old MuJoCo bindings"
    return None


def _snapshot_single(env: gymnasium.Env) -> dict[str, Any]:
    wrappers, base = unwrap(env)
    declared = _declared(base)
    if declared is None:
        attributes = dict(vars(base))
    else:
        attributes = {name: getattr(base, name) for name in declared if hasattr(base, name)}
        if (reason := _refusal(base, declared)) is not None:
            raise StateUnavailable(reason)
    for name, value in attributes.items():
        if type(value) not in _PLAIN:
            attributes[name] = _copied(value)
    state = {
        "wrappers": [
            [type(wrapper).__name__, {name: _copied(getattr(wrapper, name)) for name in _attributes(wrapper) or ()}]
            for wrapper in wrappers
        ],
        "class": type(base).__name__,
        "rng": base.np_random.bit_generator.state,
        "attributes": attributes,
    }
    if _is_mujoco(base):
        state["physics"] = _capture_physics(base)
    return state


def _restore_single(env: gymnasium.Env, state: dict[str, Any]) -> None:
    wrappers, base = unwrap(env)
    # Versions before 0.2 had a wrapper without state that checked the contract.
    saved_wrappers = [(name, attributes) for name, attributes in state["wrappers"] if name != "CheckContract"]
    own = [*(type(wrapper).__name__ for wrapper in wrappers), type(base).__name__]
    saved = [*(name for name, _ in saved_wrappers), state["class"]]
    if own != saved:
        raise UserError(f"the saved state is of {' in '.join(saved[::-1])}, not of {' in '.join(own[::-1])}")
    for wrapper, (_, attributes) in zip(wrappers, saved_wrappers, strict=True):
        for name in _attributes(wrapper) or ():
            setattr(wrapper, name, _from_tree(attributes[name]))
        if isinstance(wrapper, PassiveEnvChecker):
            # It checks the first steps of an environment, comparing each with the one before; this
            # one is past them.
            wrapper.checked_reset = wrapper.checked_step = wrapper.checked_data_reuse = True
            wrapper._previous_data = None
    # Before the attributes: making the generator sets the seed that it reports.
    base.np_random.bit_generator.state = _from_tree(state["rng"])
    declared = _declared(base)
    for name, value in state["attributes"].items():
        undeclared = declared is not None and name not in declared
        if undeclared or name.startswith((*_NOT_STATE, "__")):  # never saved by Canter
            raise UserError(f"the saved state sets {name!r} of {type(base).__name__}, which is no state")
        setattr(base, name, _from_tree(value))
    if _is_mujoco(base):
        _restore_physics(base, state["physics"])


def unwrap(env: gymnasium.Env) -> tuple[list[gymnasium.Wrapper], gymnasium.Env]:
    """Return the wrappers around an environment, outermost first, and the environment."""
    wrappers = []
    while isinstance(env, gymnasium.Wrapper):
        wrappers.append(env)
        env = env.env
    return wrappers, env


def _attributes(wrapper: gymnasium.Wrapper) -> tuple[str, ...] | None:
    """Return the attributes in which a wrapper keeps its state, or None if unknown."""
    return _WRAPPERS.get(type(wrapper), _declared(wrapper))


def _declared(part: gymnasium.Env | gymnasium.Wrapper) -> tuple[str, ...] | None:
    """Return the attributes that a class itself declares; a subclass may have more state."""
    declared = type(part).__dict__.get("state_attributes")
    return (declared,) if isinstance(declared, str) else declared


def _refusal(env: gymnasium.Env, declared: tuple[str, ...]) -> str | None:
    """Return why declared attributes of an environment cannot be saved, or None if they can."""
    for name in declared:
        if name.startswith((*_NOT_STATE, "__")):
            return f"{type(env).__name__}.state_attributes names {name!r}, which is about drawing and no state"
        if not _is_plain(getattr(env, name, None)):
            kind = type(getattr(env, name)).__name__
            return f"{type(env).__name__}.state_attributes names {name!r}, a {kind}, and only plain data can be saved"
    return None


def _plain_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    plain = {}
    for name, value in attributes.items():
        # Spaces, generators, windows and the simulation are no plain data: saved separately, or not
        # state.
        with suppress(TypeError):
            if not name.startswith(_NOT_STATE):
                plain[name] = _to_tree(value)
    return plain


def _is_mujoco(env: gymnasium.Env) -> bool:
    return any(cls.__module__.startswith(_MUJOCO) for cls in type(env).__mro__)


def _capture_physics(env: Any) -> dict[str, np.ndarray]:
    """Return what MuJoCo integrates, and what it has derived from that.

    The derived quantities belong to the last but one substep, and some rewards read a body's
    position from there: they are part of the state though MuJoCo would recompute them.
    """
    mujoco = importlib.import_module("mujoco")
    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    integrated = np.zeros(mujoco.mj_stateSize(env.model, kind))
    mujoco.mj_getState(env.model, env.data, integrated, kind)
    derived = np.concatenate([getattr(env.data, name).ravel() for name in _MUJOCO_DERIVED])
    return {"integrated": integrated, "derived": derived}


def _restore_physics(env: Any, state: dict[str, Tensor]) -> None:
    mujoco = importlib.import_module("mujoco")
    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    targets = [getattr(env.data, name) for name in _MUJOCO_DERIVED]
    sizes = mujoco.mj_stateSize(env.model, kind), sum(target.size for target in targets)
    if (state["integrated"].numel(), state["derived"].numel()) != sizes:
        raise UserError(f"the saved physics do not fit the model of {type(env).__name__}, or another MuJoCo wrote them")
    mujoco.mj_setState(env.model, env.data, state["integrated"].numpy(), kind)
    derived = state["derived"].numpy()
    for target in targets:
        target[...] = derived[: target.size].reshape(target.shape)
        derived = derived[target.size :]


def _copied(value: Any) -> Any:
    """Copy plain data and arrays; anything else stays as it is, for `_to_tree` to refuse."""
    return map_parts(lambda part: part.copy() if isinstance(part, np.ndarray) else part, value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN or isinstance(value, np.ndarray | np.generic)


def _to_tree(value: Any) -> Any:
    """Convert plain data, arrays to tensors; NumPy's scalars keep their type for rounding."""
    match value:
        case np.ndarray():
            return torch.from_numpy(np.array(value, order="C"))
        case np.generic():
            return {_SCALAR: torch.from_numpy(np.array(value))}
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [_to_tree(item) for item in value]
        case tuple():
            return tuple(_to_tree(item) for item in value)
        case dict() if all(isinstance(key, str) for key in value):
            return {key: _to_tree(item) for key, item in value.items()}
    raise TypeError(f"{type(value).__name__} is no plain data")


def _from_tree(tree: Any) -> Any:
    match tree:
        case Tensor():
            return tree.numpy().copy()
        case list() | tuple():
            return type(tree)(_from_tree(item) for item in tree)
        case dict():
            return tree[_SCALAR].numpy()[()] if _SCALAR in tree else {k: _from_tree(v) for k, v in tree.items()}
    return tree
