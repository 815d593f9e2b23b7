"""Gymnasium environments made by id, with reasons in the user's words if one cannot be made."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal, cast

import gymnasium
import torch
from gymnasium.envs.registration import find_highest_version, parse_env_id
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from canter.core.registry import UserError, nearest
from canter.envs.gymnasium.adapter import Autoreset, GymnasiumEnv
from canter.envs.gymnasium.sync import choose_groups
from canter.envs.gymnasium.vector import CLOSE_TIMEOUT, STEP_TIMEOUT, parse_mode
from canter.envs.gymnasium.workers import WorkerEnv, run_worker
from canter.envs.spaces import TupleActions

Vectorization = Literal["auto", "sync", "threads", "forked", "async", "vector_entry_point"]
MISSING_PACKAGES = {
    "mujoco|imageio": ("MuJoCo", "canter[mujoco]"),
    "box2d": ("Box2D", "gymnasium[box2d]"),
    "pygame": ("pygame", "canter[video]"),
    "opencv|cv2": ("OpenCV", "opencv-python-headless"),
    "jax": ("JAX", "gymnasium[jax]"),
    "ale": ("the Arcade Learning Environment", "ale-py"),
}
"""Words of an error about something that is missing, its name, and the package to install."""
NAMESPACES = {"ALE": ("ale_py", "ale-py"), "minigrid": ("minigrid", "minigrid")}
"""First parts of ids whose module must be imported before Gymnasium knows them: the module, and its
package."""


def make_gymnasium(
    env_id: str,
    num_envs: int,
    *,
    vectorization: Vectorization = "auto",
    autoreset: Autoreset | None = None,
    info_keys: str | Sequence[str] = (),
    log_info: bool = True,
    device: torch.device | str = "cpu",
    wrappers: Sequence[Callable[[gymnasium.Env], gymnasium.Env]] = (),
    vector_kwargs: dict[str, Any] | None = None,
    step_timeout: float = STEP_TIMEOUT,
    close_timeout: float = CLOSE_TIMEOUT,
    **kwargs: Any,
) -> GymnasiumEnv:
    """Registered with Gymnasium; the id is enough: CartPole-v1, HalfCheetah-v5 (canter[mujoco]).

    Makes N copies; `module:Name-v0` imports `module` first. `sync` steps them one by one, `threads`
    in one thread per core, `forked` in one process per core, `async` in one process each; `auto` is
    `forked` or `threads` for MuJoCo and `sync` for others. See `GymnasiumEnv`.
    """
    import_module_of(env_id)
    registered = gymnasium.registry.get(env_id.rpartition(":")[2])
    mode = parse_mode(autoreset or AutoresetMode.SAME_STEP)
    if vectorization == "auto" and registered is not None and registered.entry_point is None:
        vectorization = "vector_entry_point"
    _check_mode(vectorization, mode)
    vector_kwargs = dict(vector_kwargs or {})
    around = cast(list[Any], list(wrappers))
    if vectorization != "vector_entry_point":
        vector_kwargs["autoreset_mode"] = mode
        around.append(TupleActions.if_needed)
        if vectorization == "async":
            around.append(WorkerEnv)
            vector_kwargs.setdefault("worker", partial(run_worker, making=partial(_quiet_mujoco, env_id)))
        if str(registered and registered.entry_point).startswith("gymnasium.envs."):
            # Its checks are for environments that nobody has checked yet; the wrapper around every
            # step would remain.
            kwargs = {"disable_env_checker": True, **kwargs}
    in_process = vectorization in ("auto", "threads", "forked")
    kind = "sync" if in_process else vectorization
    with _explained(env_id):
        env = gymnasium.make_vec(env_id, num_envs, kind, vector_kwargs, around, **kwargs)
    try:
        groups = choose_groups(env, vectorization) if in_process and isinstance(env, SyncVectorEnv) else {}
        return GymnasiumEnv(
            env,
            autoreset=autoreset,
            info_keys=info_keys,
            log_info=log_info,
            device=device,
            env_id=env_id,
            step_timeout=step_timeout,
            close_timeout=close_timeout,
            **groups,
        )
    except Exception:
        with suppress(Exception):
            env.close()  # worker processes would outlive a refused space
        raise


def _check_mode(vectorization: str, mode: AutoresetMode) -> None:
    if vectorization in ("threads", "forked") and mode is not AutoresetMode.SAME_STEP:
        raise UserError(
            f"vectorization={vectorization} needs autoreset=same_step; with autoreset={mode.name.lower()} environments "
            "are stepped one after the other"
        )


def import_module_of(env_id: str) -> None:
    """Import the module before the colon of an id, which registers the environment."""
    module = env_id.rpartition(":")[0]
    if not module:
        known = NAMESPACES.get(env_id.partition("/")[0])
        if known is not None and env_id not in gymnasium.registry and find_spec(known[0]) is not None:
            importlib.import_module(known[0])
        return
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(f"environment {env_id!r}: module {module!r} cannot be imported ({error})") from error


def check_registered(env_id: str) -> None:
    """Raise UserError, or ImportError that says what to install, for an id that nothing has registered."""
    import_module_of(env_id)
    name = env_id.rpartition(":")[2]
    with _explained(env_id):
        namespace, base, version = parse_env_id(name)
        if name not in gymnasium.registry and (version is not None or find_highest_version(namespace, base) is None):
            gymnasium.spec(name)  # raises


@contextmanager
def _quiet_mujoco(env_id: str) -> Iterator[None]:
    """Silence MuJoCo's warnings about Gymnasium's own models, which fill a file."""
    spec = gymnasium.registry.get(env_id)
    if spec is None or "gymnasium.envs.mujoco" not in str(spec.entry_point) or find_spec("mujoco") is None:
        yield
        return
    mujoco = importlib.import_module("mujoco")
    before = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(lambda text: None)
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(before)


@contextmanager
def _explained(env_id: str) -> Iterator[None]:
    """Explain errors while Gymnasium makes an environment: missing package or nearest id."""
    try:
        with warnings.catch_warnings(), _quiet_mujoco(env_id):
            # An undeclared mode is refused later; Gymnasium's warning would promise less
            # than that.
            warnings.filterwarnings("ignore", message=".*missing AutoresetMode metadata")
            # Pictures were requested; an environment that cannot draw is refused with another
            # message.
            warnings.filterwarnings("ignore", message=".*not in the possible render_modes")
            yield
    except (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        # Gymnasium's MuJoCo environments need imageio as well, and do not say so.
        for words, (name, package) in MISSING_PACKAGES.items():
            if re.search(words, str(error).lower()):
                raise ImportError(f'{env_id} needs {name}: pip install "{package}" ({error})') from error
        raise ImportError(f"{env_id} needs another package: {error}") from error
    except gymnasium.error.Error as error:
        name = env_id.rpartition(":")[2]
        if name in gymnasium.registry:
            raise
        namespace = name.partition("/")[0]
        module, package = NAMESPACES.get(namespace, ("gymnasium", ""))
        if find_spec(module) is None:
            raise ImportError(f'{env_id}: pip install "{package}" brings {namespace}/... ({error})') from error
        what = f"unknown Gymnasium environment {env_id!r}" if env_id else "env.id: the settings name no environment"
        raise UserError(f"{what}: {nearest(name, gymnasium.registry)} ({error})") from error
