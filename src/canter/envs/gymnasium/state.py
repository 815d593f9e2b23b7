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
from functools import cache
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
_DTYPES = "?bhilqBHILQefdFD"
"""NumPy's codes of the dtypes that tensors have too."""


class StateUnavailable(NotImplementedError):
    """The exact state of an environment is not known; the message says why."""


def snapshot(env: VectorEnv, in_forks: dict[int, dict[str, Any]] | None = None) -> dict[str, Any]:
    """Return a copy of the exact state as plain data, quickly: it is taken before every rollout.

    `as_tree` turns it into a state; there must be no `obstacle`. `in_forks` has the snapshots of
    the environments that forked processes step, by number.
    """
    assert isinstance(env, SyncVectorEnv)
    known = in_forks or {}
    return {
        "fields": {name: _copied(getattr(env, name)) for name in _VECTOR_FIELDS},
        "action_rng": env.action_space.np_random.bit_generator.state,
        "envs": [known.get(number) or snapshot_single(single) for number, single in enumerate(env.envs)],
    }


def restore_singles(env: SyncVectorEnv, singles: dict[int, dict[str, Any]]) -> None:
    """Restore environments to the states that `snapshot_single` returned, by number."""
    for number, single in singles.items():
        _restore_single(env.envs[number], as_tree(single))
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
    env._env_obs = [_from_tree(as_tree(row)) for row in iterate(env.observation_space, env._observations)]
    env.action_space.np_random.bit_generator.state = _from_tree(state["action_rng"])
    for single, saved in zip(env.envs, state["envs"], strict=True):
        _restore_single(single, saved)


def obstacle(env: VectorEnv) -> str | None:
    """Return why the exact state of a vector environment is not known, or None if it is."""
    if type(env) is not SyncVectorEnv:
        return f"{type(env).__name__} is not a SyncVectorEnv, so its environments cannot be inspected"
    try:
        for single in env.envs:
            snapshot_single(single)
    except StateUnavailable as reason:
        return str(reason)
    return None


def snapshot_single(env: gymnasium.Env) -> dict[str, Any]:
    """Return a copy of the state of one environment and its wrappers, as plain data.

    Raise StateUnavailable if it is not known.
    """
    wrappers, base = unwrap(env)
    state = {
        "wrappers": [[type(wrapper).__name__, _copy_wrapper(wrapper)] for wrapper in wrappers],
        "class": type(base).__name__,
        "rng": base.np_random.bit_generator.state,
        "attributes": _copy_attributes(base),
    }
    if _is_mujoco(base):
        state["physics"] = _capture_physics(base)
    return state


def _copy_wrapper(wrapper: gymnasium.Wrapper) -> dict[str, Any]:
    names = _declared(wrapper)
    if names is None:
        text = f"the wrapper {type(wrapper).__name__} may hold state"
        raise StateUnavailable(f"{text}; its class does not declare `state_attributes`")
    return _copy_declared(wrapper, names)


def _copy_attributes(env: gymnasium.Env) -> dict[str, Any]:
    name = type(env).__name__
    declared = _declared(env)
    if declared is not None:
        if drawing := [key for key in declared if not _is_state(key)]:
            raise StateUnavailable(
                f"{name}.state_attributes names {drawing[0]!r}, which is for drawing and not part of its state"
            )
        return _copy_declared(env, declared)
    if not type(env).__module__.startswith((_CLASSIC, _MUJOCO)):
        raise StateUnavailable(
            f"{name} is neither one of Gymnasium's classic control or MuJoCo environments, nor does its class declare "
            "`state_attributes`, the names of its attributes that change"
        )
    copies = {}
    for key, value in vars(env).items():
        if _is_state(key):
            try:
                copies[key] = _copied(value)
            except TypeError:
                continue  # spaces, generators, windows and the simulation are saved separately, or are not state
    return copies


def _copy_declared(part: gymnasium.Env, names: tuple[str, ...]) -> dict[str, Any]:
    """Return copies of the attributes that are there already."""
    present = {name: getattr(part, name) for name in names if hasattr(part, name)}
    copies = {}
    for name, value in present.items():
        try:
            copies[name] = _copied(value)
        except TypeError:
            text = f"{type(part).__name__}.state_attributes names {name!r}, a {type(value).__name__}"
            raise StateUnavailable(f"{text}, and only plain data can be saved") from None
    return copies


def _restore_single(env: gymnasium.Env, state: dict[str, Any]) -> None:
    wrappers, base = unwrap(env)
    # Versions before 0.2 had a wrapper without state that checked the contract.
    saved_wrappers = [(name, attributes) for name, attributes in state["wrappers"] if name != "CheckContract"]
    own = [*(type(wrapper).__name__ for wrapper in wrappers), type(base).__name__]
    saved = [*(name for name, _ in saved_wrappers), state["class"]]
    if own != saved:
        raise UserError(f"the saved state is of {' in '.join(saved[::-1])}, not of {' in '.join(own[::-1])}")
    for wrapper, (_, attributes) in zip(wrappers, saved_wrappers, strict=True):
        for name in attributes.keys() & {*(_declared(wrapper) or ())}:
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
        if undeclared or not _is_state(name):  # never saved by Canter
            raise UserError(f"the saved state sets {name!r} of {type(base).__name__}, which is not part of its state")
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


def _declared(part: gymnasium.Env) -> tuple[str, ...] | None:
    """Return the attributes that a class itself declares as its state; a subclass may have more."""
    declared = vars(type(part)).get("state_attributes", _WRAPPERS.get(type(part)))
    return (declared,) if isinstance(declared, str) else declared


@cache
def _is_state(name: str) -> bool:
    """Return False for names of attributes about drawing and files."""
    return not name.startswith(("__", *_NOT_STATE))


def _is_mujoco(env: gymnasium.Env) -> bool:
    return any(cls.__module__.startswith(_MUJOCO) for cls in type(env).__mro__)


def _capture_physics(env: Any) -> dict[str, np.ndarray]:
    """Return what MuJoCo integrates, and what it has derived from that.

    The derived quantities belong to the last but one substep, and some rewards read a body's
    position from there: they are part of the state though MuJoCo would recompute them.
    """
    if not type(env.data).__module__.startswith("mujoco."):
        raise StateUnavailable(f"{type(env).__name__} uses the old MuJoCo bindings")
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
    """Return a copy of plain data; raise TypeError for anything else."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, np.ndarray | np.generic) and value.dtype.char in _DTYPES:
        return value.copy()
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    if isinstance(value, tuple):
        return tuple([_copied(item) for item in value])
    raise TypeError(f"{type(value).__name__} is not plain data")


def as_tree(copied: Any) -> Any:
    """Return the saveable state of a snapshot: tensors for arrays; NumPy's scalars keep their type."""
    match copied:
        case np.ndarray():
            return torch.from_numpy(np.array(copied, order="C"))
        case np.generic():
            return {_SCALAR: torch.from_numpy(np.array(copied))}
        case list() | tuple():
            return type(copied)(as_tree(item) for item in copied)
        case dict():
            return {key: as_tree(item) for key, item in copied.items()}
    return copied


def _from_tree(tree: Any) -> Any:
    match tree:
        case Tensor():
            return tree.numpy().copy()
        case list() | tuple():
            return type(tree)(_from_tree(item) for item in tree)
        case dict():
            return tree[_SCALAR].numpy()[()] if _SCALAR in tree else {k: _from_tree(v) for k, v in tree.items()}
    return tree
