"""Parts that the drop-in runners for rl_games and RSL-RL share: environments, logs, and modules put in their place.

N environments, times agents if there are several.
"""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
import types
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from canter.core.specs import ActionSpec, EnvSpec, Step, TensorSpec
from canter.core.struct import Obs
from canter.envs.robots.adapter import scalars


class ParentEnv:
    """Description and steps; how observations are asked for is up to each parent's own."""

    reset_is_clean = False

    def __init__(self, env: Any, device: str | torch.device) -> None:
        self.env, self.device = env, torch.device(device)

    def describe(self, obs: Obs, action: ActionSpec, rows: int, **more: Any) -> EnvSpec:
        """Shapes and conventions, from first observations."""
        groups = {name: TensorSpec(tuple(group.shape[1:]), group.dtype) for name, group in obs.items()}
        return EnvSpec(groups, action, rows, self.device, final_obs="unknown", **more)

    def stepped(self, obs: Obs, reward: Tensor, done: Any, cut: Any, told: Any) -> Step:
        """A step by its ends `[N]`, those of them that were cut off, if anybody says, and the simulator's numbers."""
        done = self.flags(done)
        truncated = torch.zeros_like(done) if cut is None else done & self.flags(cut)
        return Step(
            obs=obs,
            reward=reward.reshape(-1),
            terminated=done & ~truncated,
            truncated=truncated,
            valid=torch.ones_like(done),
            metrics=scalars(told or {}, self.device),
        )

    def flags(self, value: Any) -> Tensor:
        """True or false for each row, on the learner's device."""
        return torch.as_tensor(value).to(self.device).bool().reshape(-1)

    def close(self) -> None:
        """Leave it open: whoever made it closes it."""


_log = logging.getLogger(__name__)


def is_first() -> bool:
    """Whether this process writes files: the only one or torchrun's first, also before and after they train."""
    return int(os.environ.get("RANK", "0")) == 0


class NoWriter:
    """A writer of scalars that forgets them."""

    def add_scalar(self, tag: str, value: Any, step: int) -> None:
        """Forget it."""

    def flush(self) -> None:
        """There is nothing to write."""


def open_writer(folder: str) -> Any:
    """A writer of TensorBoard's event files; one that forgets where TensorBoard is missing, and on other ranks."""
    if not is_first():
        return NoWriter()
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        _say_once('no scalars are written for TensorBoard: pip install "canter[tensorboard]"')
        return NoWriter()
    return SummaryWriter(log_dir=folder, flush_secs=10)


@cache
def _say_once(message: str) -> None:
    _log.warning(message)


def store_code_state(folder: Path, files: Iterable[str]) -> None:
    """Write `NAME.diff` for the repository around each file: its commit, its status and what is not committed."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        place = Path(file) if Path(file).is_dir() else Path(file).parent
        root, commit = _git(place, "rev-parse", "--show-toplevel"), _git(place, "rev-parse", "HEAD")
        if root is None or commit is None:
            _log.info("%s is in no git repository", file)
            continue
        path = folder / f"{Path(root).name}.diff"
        if not path.exists():
            parts = {"commit": commit, "status": _git(place, "status"), "diff": _git(place, "diff", "HEAD")}
            path.write_text("\n\n\n".join(f"--- git {name} ---\n{text}" for name, text in parts.items()))


def _git(place: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(place), *words], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def replace_classes(library: str, home: str, modules: Mapping[str, Mapping[str, Any]]) -> None:
    """Put all that `modules` has for the module `home` there, or stand for the whole library where there is none.

    `modules` are those that scripts import from, each after the package that it is in, with what they find there.
    """
    try:
        package: Any = importlib.import_module(home)
    except ModuleNotFoundError as error:
        if error.name not in (library, home):
            raise
        return _stand_in(modules)
    for name, own in modules[home].items():
        theirs = getattr(package, name, None)
        if theirs is not None and theirs is not own:
            _refuse_if_held(library, name, theirs)
        setattr(package, name, own)


def _stand_in(modules: Mapping[str, Mapping[str, Any]]) -> None:
    for name, content in modules.items():
        module = types.ModuleType(name)
        module.__path__ = []  # a package
        vars(module).update(content)
        sys.modules[name] = module
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)


def _refuse_if_held(library: str, name: str, theirs: Any) -> None:
    """Whoever imported the parent's class already goes on with it, which nobody would notice."""
    for module in list(sys.modules.values()):
        where = getattr(module, "__name__", "")
        if where.partition(".")[0] not in (library, "canter") and vars(module).get(name) is theirs:
            whose = f"{library}'" if library.endswith("s") else f"{library}'s"
            first = f"import canter.compat.{library}.take_over first"
            raise ImportError(f"{where} has imported {whose} {name} already: {first}")
