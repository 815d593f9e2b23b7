"""Additional metric writers: TensorBoard and Weights & Biases.

Writers take the rows of the log (`Report.row()`). A writer that fails is removed; the run
continues.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, Self

from canter.core import distributed
from canter.core.plain import to_plain
from canter.core.storage.files import read_untrusted

logger = logging.getLogger(__name__)


class LogRow(dict[str, Any]):
    """A row of the log: counters, times and metrics by name."""

    def __init__(self, values: Mapping[str, Any], custom: Sequence[str] = ()) -> None:
        super().__init__(values)
        self.custom = tuple(custom)
        """Names of the metrics that callbacks added."""


class MetricWriter(Protocol):
    """Receives the rows of a run; `env_steps` is the x-axis."""

    def start(self, settings: dict[str, Any]) -> None:
        """Start or resume the run; `settings` are all of its settings as plain data."""
        ...

    def write(self, row: dict[str, Any]) -> None:
        """Write a row, a `LogRow`: counters, times and metrics by name; None for those without a value yet."""
        ...

    def close(self) -> None:
        """End the run, successful or not."""
        ...


class Writers:
    """Several writers as one, on rank 0 only; closes them on exit.

    A writer that raises is logged and removed.
    """

    def __init__(self, writers: Sequence[MetricWriter]) -> None:
        self.active = list(writers) if distributed.rank() == 0 else []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._for_each(lambda writer: writer.close(), closing=True)

    def start(self, config: Any) -> None:
        """Start the run with these settings."""
        if self.active:
            settings = to_plain(config)
            self._for_each(lambda writer: writer.start(settings))

    def write(self, row: dict[str, Any]) -> None:
        """Write a row."""
        self._for_each(lambda writer: writer.write(row))

    def _for_each(self, call: Callable[[MetricWriter], None], *, closing: bool = False) -> None:
        for writer in list(self.active):
            try:
                call(writer)
            except Exception as error:
                self.active.remove(writer)
                if not closing:
                    self._close(writer)
                name = type(writer).__name__
                logger.warning("%s failed and is not used any more (%s); training goes on", name, error)

    def _close(self, writer: MetricWriter) -> None:
        try:
            writer.close()
        except Exception as error:
            logger.debug("%s could not be closed (%s)", type(writer).__name__, error)


class TensorBoardWriter:
    """Writes TensorBoard event files; a resumed run replaces the steps that it repeats."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings: dict[str, Any] = {}
        self.events: Any = None
        self.tensorboard = import_extra("torch.utils.tensorboard", "tensorboard")

    def start(self, settings: dict[str, Any]) -> None:
        """Keep the settings for the first row; its step decides which older ones are void."""
        self.settings = settings

    def write(self, row: dict[str, Any]) -> None:
        """Write every number under its name, or `run/<name>` for those without a section."""
        step = row["env_steps"]
        if self.events is None:
            self.events = self.tensorboard.SummaryWriter(str(self.path), purge_step=step)
            self.events.add_text("settings", f"```\n{json.dumps(self.settings, indent=1)}\n```", step)
        for name, value in row.items():
            if value is not None and name != "env_steps":
                self.events.add_scalar(name if "/" in name else f"run/{name}", value, step)

    def close(self) -> None:
        """Write buffered events and close the files."""
        if self.events is not None:
            self.events.close()


class WandbWriter:
    """Writes a Weights & Biases run below `path`.

    Without a login it stays on this machine until `wandb sync` uploads it. The environment variable
    `WANDB_MODE` takes precedence. A resumed run keeps its id.
    """

    def __init__(self, path: Path, project: str = "canter") -> None:
        self.path = path
        self.project = project
        self.run: Any = None
        self.wandb = import_extra("wandb", "wandb")

    def start(self, settings: dict[str, Any]) -> None:
        """Start or resume the run."""
        identity = self.path / "wandb" / "id"  # the run folder exists by now
        identity.parent.mkdir(exist_ok=True)
        if not identity.exists():
            identity.write_text(uuid.uuid4().hex)
        self.run = self.wandb.init(
            project=self.project,
            name=self.path.name,
            id=read_untrusted(identity, 4096, within=self.path).decode(),
            resume="allow",
            dir=str(self.path),
            config=settings,
            mode=os.environ.get("WANDB_MODE") or self._mode(),
            settings=self.wandb.Settings(silent=True, console="off"),
        )

    def write(self, row: dict[str, Any]) -> None:
        """Write all numbers at their env step."""
        assert self.run is not None
        self.run.log({name: value for name, value in row.items() if value is not None}, step=row["env_steps"])

    def close(self) -> None:
        """Wait until everything is written."""
        if self.run is not None:
            self.run.finish()

    def _mode(self) -> str:
        return "online" if self.wandb.login(prompt=False, verify=False) else "offline"


def import_extra(module: str, extra: str) -> ModuleType:
    """Return a module of an extra, or raise ImportError with the command to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f'{extra} is not installed; to log to it: pip install "canter[{extra}]"') from error
