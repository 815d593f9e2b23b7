"""What can be told about a Gymnasium environment before it is stepped, and why one cannot be made."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import gymnasium
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import TimeLimit

from canter.core.registry import UserError, nearest
from canter.envs.gymnasium.state import unwrap

NEEDED = {
    "mujoco|imageio": ("MuJoCo", "canter[mujoco]"),
    "box2d": ("Box2D", "gymnasium[box2d]"),
    "pygame": ("pygame", "canter[video]"),
    "opencv|cv2": ("OpenCV", "opencv-python-headless"),
    "jax": ("JAX", "gymnasium[jax]"),
    "ale": ("the Arcade Learning Environment", "ale-py"),
}
"""Words of an error about something that is missing, what that is, and what to install."""
NAMESPACES = {"ALE": ("ale_py", "ale-py"), "minigrid": ("minigrid", "minigrid")}
"""First parts of ids whose module must be imported before Gymnasium knows them: the module, and its package."""


@contextmanager
def quiet_mujoco(env_id: str) -> Iterator[None]:
    """Without MuJoCo's warnings about Gymnasium's own models: one for each environment, and all in a file."""
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
def explained(env_id: str) -> Iterator[None]:
    """Say what is missing when Gymnasium cannot make an environment."""
    try:
        with warnings.catch_warnings(), quiet_mujoco(env_id):
            # An undeclared mode is probed or refused later; Gymnasium's warning would promise less than that.
            warnings.filterwarnings("ignore", message=".*missing AutoresetMode metadata")
            # Asked for a picture; whoever cannot give one is refused in other words.
            warnings.filterwarnings("ignore", message=".*not in the possible render_modes")
            yield
    except (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        # Gymnasium's MuJoCo environments need imageio as well, and do not say so.
        for words, (what, package) in NEEDED.items():
            if re.search(words, str(error).lower()):
                raise ImportError(f'{env_id} needs {what}: pip install "{package}" ({error})') from error
        raise ImportError(f"{env_id} needs another package: {error}") from error
    except gymnasium.error.Error as error:
        name = env_id.rpartition(":")[2]
        if name in gymnasium.registry:
            raise
        space = name.partition("/")[0]
        module, package = NAMESPACES.get(space, ("gymnasium", ""))
        if find_spec(module) is None:
            raise ImportError(f'{env_id}: pip install "{package}" brings {space}/... ({error})') from error
        raise UserError(
            f"unknown Gymnasium environment {env_id!r}: {nearest(name, gymnasium.registry)} ({error})"
        ) from error


def import_module_of(env_id: str) -> None:
    """Import what stands before the colon of an id, which registers it."""
    module = env_id.rpartition(":")[0]
    if not module:
        place = NAMESPACES.get(env_id.partition("/")[0])
        if place is not None and env_id not in gymnasium.registry and find_spec(place[0]) is not None:
            importlib.import_module(place[0])
        return
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(f"environment {env_id!r}: module {module!r} cannot be imported ({error})") from error


def refuse_lost_steps(env: VectorEnv, mode: AutoresetMode) -> None:
    """Refuse a combination in which Gymnasium itself loses steps."""
    base = env.unwrapped
    if mode is AutoresetMode.NEXT_STEP and isinstance(base, AsyncVectorEnv) and not base.shared_memory:
        # NOTE: its workers forget to clear their flag when reset after an end, and lose the next action (1.4.0).
        raise UserError(
            "AsyncVectorEnv with shared_memory=False in next_step mode loses the first step after a reset; "
            "make it with shared_memory=True or with autoreset_mode='SameStep'"
        )


def name_of(env: VectorEnv) -> str:
    """The id that it was made with, or that of its class."""
    base = env.unwrapped
    return base.spec.id if isinstance(base.spec, GymnasiumSpec) else type(base).__name__


def truncates(env: VectorEnv) -> bool | None:
    """True if the environments are known to have a time limit, None if nothing is known."""
    base, limited = env.unwrapped, False
    if isinstance(base, SyncVectorEnv):
        limited = any(isinstance(wrapper, TimeLimit) for wrapper in unwrap(base.envs[0])[0])
    elif isinstance(base.spec, GymnasiumSpec):
        limited = (base.spec.kwargs.get("max_episode_steps", base.spec.max_episode_steps) or 0) > 0
    return limited or None
