"""Where metrics go besides the run's own file: TensorBoard, Weights & Biases, the console.

All of them take the same rows (`Report.row()`) through the same three methods, and none of them can end a run.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, Self

from canter.core import distributed
from canter.core.plain import to_plain
from canter.core.storage.files import read_untrusted

logger = logging.getLogger(__name__)


class MetricWriter(Protocol):
    """Takes the rows of a run, one per iteration; `env_steps` is the x-axis."""

    def start(self, settings: dict[str, Any]) -> None:
        """The run begins or goes on; `settings` are all of its settings as plain data."""
        ...

    def write(self, row: dict[str, Any]) -> None:
        """One iteration: counters, times and metrics by name; None where there is no value yet."""
        ...

    def close(self) -> None:
        """The run is over, whether it went well or not."""
        ...


class Writers:
    """Several writers as one; closed when left. One that fails is named in the log and dropped, and the run goes on.

    Ranks other than the first write nothing.
    """

    def __init__(self, writers: Sequence[MetricWriter]) -> None:
        self.active = list(writers) if distributed.rank() == 0 else []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._each("close")

    def start(self, config: Any) -> None:
        """Tell all that the run with these settings begins."""
        if self.active:
            self._each("start", to_plain(config))

    def write(self, row: dict[str, Any]) -> None:
        """Give all of them a row."""
        self._each("write", row)

    def _each(self, method: str, *arguments: Any) -> None:
        for writer in list(self.active):
            try:
                getattr(writer, method)(*arguments)
            except Exception as error:
                self.active.remove(writer)
                if method != "close":
                    self._close(writer)
                name = type(writer).__name__
                logger.warning("%s failed and is left out from here on (%s); training goes on", name, error)

    def _close(self, writer: MetricWriter) -> None:
        try:
            writer.close()
        except Exception as error:
            logger.debug("%s could not be closed either (%s)", type(writer).__name__, error)


class TensorBoardWriter:
    """Event files for TensorBoard under `path`; what a continued run repeats replaces what was there."""

    def __init__(self, path: Path) -> None:
        self.path, self.settings, self.events = path, {}, None
        self.tensorboard = import_extra("torch.utils.tensorboard", "tensorboard")

    def start(self, settings: dict[str, Any]) -> None:
        """Nothing is written before the first row, which tells from which step on older rows are void."""
        self.settings = settings

    def write(self, row: dict[str, Any]) -> None:
        """Every number under its name; those without a section go to `run/`."""
        step = row["env_steps"]
        if self.events is None:
            self.events = self.tensorboard.SummaryWriter(str(self.path), purge_step=step)
            self.events.add_text("settings", f"```\n{json.dumps(self.settings, indent=1)}\n```", step)
        for name, value in row.items():
            if value is not None and name != "env_steps":
                self.events.add_scalar(name if "/" in name else f"run/{name}", value, step)

    def close(self) -> None:
        """Write what is still held back."""
        if self.events is not None:
            self.events.close()


class WandbWriter:
    """A Weights & Biases run, kept under `path`.

    Nobody needs an account: without a login it stays on this machine, until `wandb sync` sends it. The environment
    variable `WANDB_MODE` takes precedence. A continued run goes on under the same id.
    """

    def __init__(self, path: Path, project: str = "canter") -> None:
        self.path, self.project, self.run = path, project, None
        self.wandb = import_extra("wandb", "wandb")

    def start(self, settings: dict[str, Any]) -> None:
        """Begin the run, or go on with it."""
        identity = self.path / "wandb" / "id"  # the run's folder is there by now
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
        """All numbers at their env step; one that was sent before, and is repeated alike, is not sent again."""
        assert self.run is not None
        self.run.log({name: value for name, value in row.items() if value is not None}, step=row["env_steps"])

    def close(self) -> None:
        """Wait until all is written."""
        if self.run is not None:
            self.run.finish()

    def _mode(self) -> str:
        return "online" if self.wandb.login(prompt=False, verify=False) else "offline"


def import_extra(module: str, extra: str) -> ModuleType:
    """A module that one of the package's extras brings; its absence is an error that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f'{extra} is not installed; to log to it: pip install "canter[{extra}]"') from error
