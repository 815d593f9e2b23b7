"""Parts that the drop-in runners for rl_games and RSL-RL share.

Environments, logs, and modules put in their place.

N environments, times agents if there are several.
"""

from __future__ import annotations

import importlib
import io
import logging
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from canter.core.plain import ConfigError
from canter.core.specs import ActionSpec, EnvSpec, Step, TensorSpec
from canter.core.storage.files import replace_file
from canter.core.struct import Obs
from canter.envs.imports import is_allowed
from canter.envs.robots.adapter import scalars
from canter.nn.optimizer import ParameterGroup
from canter.training.guard import RunFailed, RunStopped


class SourceEnv:
    """An environment of a source library; the subclass of each library reads its observations."""

    reset_is_clean = False

    def __init__(self, env: Any, device: str | torch.device) -> None:
        self.env = env
        self.device = torch.device(device)

    def describe(self, obs: Obs, action: ActionSpec, num_envs: int, **more: Any) -> EnvSpec:
        """Return the environment's description, with shapes from the first observations."""
        groups = {name: TensorSpec(tuple(group.shape[1:]), group.dtype) for name, group in obs.items()}
        return EnvSpec(groups, action, num_envs, self.device, final_obs="unknown", **more)

    def make_step(self, obs: Obs, reward: Tensor, done: Any, cut: Any, metrics: Any) -> Step:
        """Return the step.

        `done [N]` are episode ends, `truncated` those of them that were cut off, or None.
        """
        done = self.flags(done)
        truncated = torch.zeros_like(done) if cut is None else done & self.flags(cut)
        return Step(
            obs=obs,
            reward=reward.reshape(-1),
            terminated=done & ~truncated,
            truncated=truncated,
            valid=torch.ones_like(done),
            metrics=scalars(metrics or {}, self.device),
        )

    def flags(self, value: Any) -> Tensor:
        """Return a flag for each environment, `[N]`, on the learner's device."""
        return torch.as_tensor(value).to(self.device).bool().reshape(-1)

    def close(self) -> None:
        """Leave the environment open: its creator closes it."""


_log = logging.getLogger(__name__)


def is_first() -> bool:
    """Return True in the process that writes files: the only one, or torchrun's first."""
    return int(os.environ.get("RANK", "0")) == 0


def save_file(tree: Mapping[str, Any], path: str | Path) -> None:
    """Write a file with `torch.save`; whoever reads it sees the old one or the whole new one."""
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    replace_file(Path(path), buffer.getvalue())


@contextmanager
def saves_on_failure(save: Callable[[], str]) -> Iterator[None]:
    """Save the last good state if training fails or is stopped, and name its file in the error."""
    try:
        yield
    except RunFailed as error:
        raise RunFailed(error.what, save(), error.rank) from error
    except RunStopped as error:
        error.add_note(save())
        raise


def optimizer_view(group: ParameterGroup) -> SimpleNamespace:
    """Return torch's view of an optimizer, to be read only: the settings' schedule has the rate."""
    rate = float(group.learning_rate)
    shown = MappingProxyType({"lr": rate, "params": group.parameters})
    return SimpleNamespace(param_groups=[shown], learning_rate=rate)


class NoWriter:
    """A TensorBoard writer that discards everything."""

    def add_scalar(self, tag: str, value: Any, step: int) -> None:
        """Discard the scalar."""

    def flush(self) -> None:
        """Do nothing."""


class ServiceWriter:
    """A TensorBoard writer that also sends each scalar and file to Weights & Biases or Neptune."""

    def __init__(self, events: Any, service: Wandb | Neptune) -> None:
        self.events, self.service = events, service

    def add_scalar(self, tag: str, value: Any, step: int) -> None:
        """Write the scalar to both."""
        self.events.add_scalar(tag, value, step)
        self.service.log(tag, float(value), step)

    def flush(self) -> None:
        """Flush the event file."""
        self.events.flush()


class Wandb:
    """A run of Weights & Biases; without a login it stays on this machine."""

    def __init__(self, folder: str, project: str, config: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False, verify=False) else "offline")
        own = {"entity": os.environ.get("WANDB_USERNAME"), "name": Path(folder).name, "mode": mode}
        self.run = wandb.init(project=project, dir=folder, config=dict(config), **own)

    def log(self, tag: str, value: float, step: int) -> None:
        """Send a scalar."""
        self.run.log({tag: value}, step=step)

    def upload(self, path: str) -> None:
        """Send a file."""
        self.run.save(path, base_path=os.path.dirname(path))

    def stop(self) -> None:
        """Wait until everything is sent."""
        self.run.finish()


class Neptune:
    """A run of Neptune; the account is in `NEPTUNE_API_TOKEN` and `NEPTUNE_USERNAME`."""

    def __init__(self, folder: str, project: str, config: Mapping[str, Any]) -> None:
        neptune = importlib.import_module("neptune")
        account = os.environ["NEPTUNE_USERNAME"]
        self.run = neptune.init_run(project=f"{account}/{project}", api_token=os.environ["NEPTUNE_API_TOKEN"])
        self.run["log_dir"].append(Path(folder).name)
        self.run["train_cfg"] = neptune.utils.stringify_unsupported(dict(config))

    def log(self, tag: str, value: float, step: int) -> None:
        """Send a scalar."""
        self.run[tag].append(value, step=step)

    def upload(self, path: str) -> None:
        """Send a file."""
        self.run[f"model/{Path(path).stem}"].upload(path)

    def stop(self) -> None:
        """Wait until everything is sent."""
        self.run.stop()


SERVICES = {"wandb": Wandb, "neptune": Neptune}


def open_writer(folder: str, service: str = "tensorboard", project: str = "", config: Any = None) -> Any:
    """Return a writer of TensorBoard event files, which also sends to a service.

    A service that is not installed, or has no account, is left out with a warning. Without
    TensorBoard, and on other ranks, everything is discarded.
    """
    if not is_first():
        return NoWriter()
    events = _event_writer(folder)
    only = "only TensorBoard's files are written"
    if service in SERVICES:
        try:
            return ServiceWriter(events, SERVICES[service](folder, project, config or {}))
        except (ModuleNotFoundError, KeyError) as error:
            remedy = f"pip install {error.name}" if isinstance(error, ImportError) else f"set {error.args[0]}"
            _say_once(f"logger={service}: {remedy}; until then {only}")
    elif service != "tensorboard":
        _say_once(f"logger={service!r} is not known (tensorboard, wandb, neptune): {only}")
    return events


def _event_writer(folder: str) -> Any:
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
    """Write `NAME.diff` for the git repository of each file.

    Commit, status and uncommitted changes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        place = Path(file) if Path(file).is_dir() else Path(file).parent
        root = _git(place, "rev-parse", "--show-toplevel")
        commit = _git(place, "rev-parse", "HEAD")
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


def imported_object(given: Any, key: str) -> Any:
    """Return an object, or that of a name `MODULE:NAME` whose package the caller imported before."""
    if not isinstance(given, str):
        return given
    module, _, name = given.rpartition(":" if ":" in given else ".")
    package = module.partition(".")[0]
    if not package:
        raise ConfigError(f"{key}={given!r}: expected MODULE:NAME", key)
    if package not in sys.modules and not is_allowed(module):
        raise ConfigError(f"{key}={given!r}: import {package} before the runner, which imports no other package", key)
    found = getattr(importlib.import_module(module), name, None)
    if found is None:
        raise ConfigError(f"{key}={given!r}: {module} has no {name}", key)
    return found


def replace_classes(library: str, home: str, modules: Mapping[str, Mapping[str, Any]]) -> None:
    """Replace the classes of the module `home`, there and where they are defined.

    If the library is not installed, add modules in its place.

    `modules` lists the contents of each module that scripts import, a package before its modules.
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
            _check_not_imported(library, name, theirs)
            setattr(sys.modules[theirs.__module__], name, own)
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


def _check_not_imported(library: str, name: str, theirs: Any) -> None:
    """Raise ImportError if another module has imported the class already.

    It would silently keep the old one.
    """
    for module in list(sys.modules.values()):
        where = getattr(module, "__name__", "")
        if where.partition(".")[0] not in (library, "canter") and vars(module).get(name) is theirs:
            whose = f"{library}'" if library.endswith("s") else f"{library}'s"
            first = f"import canter.compat.{library}.install_shim first"
            raise ImportError(f"{where} has imported {whose} {name} already: {first}")
