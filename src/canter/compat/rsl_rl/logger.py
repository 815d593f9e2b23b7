"""RSL-RL's logger, as scripts and subclasses use it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from canter.compat.drop_in import NoWriter, ServiceWriter, is_first, open_writer, store_code_state
from canter.training.progress import Report


class Logger:
    """RSL-RL's logger, as scripts and subclasses use it; it writes under RSL-RL's tags."""

    def __init__(self, log_dir: str | None, cfg: Mapping[str, Any]) -> None:
        self.log_dir, self.cfg, self.disable_logs = log_dir, cfg, log_dir is None
        chosen = cfg.get("logger") or "tensorboard"
        own: Mapping[str, Any] = {"class_name": chosen} if isinstance(chosen, str) else chosen
        self.logger_type = LOGGERS.get(str(own.get("class_name")), str(own.get("class_name")))
        named = cfg.get(f"{self.logger_type}_project") or cfg.get("experiment_name")
        self.project = str(own.get("project_name") or named or "rsl_rl")
        self.git_status_repos: list[str] = []
        self.writer: Any = NoWriter()

    def save_model(self, path: str, it: int) -> None:
        """Send the file to the service, if there is one and `upload_model` does not forbid it."""
        if isinstance(self.writer, ServiceWriter) and self.cfg.get("upload_model", True):
            self.writer.service.upload(path)

    def init_logging_writer(self) -> None:
        """Open the event file, and store the uncommitted changes of the noted repositories."""
        if self.log_dir is not None and is_first() and isinstance(self.writer, NoWriter):
            self.writer = open_writer(self.log_dir, self.logger_type, self.project, {"train_cfg": plain_text(self.cfg)})
            store_code_state(Path(self.log_dir) / "git", self.git_status_repos)

    def stop_logging_writer(self) -> None:
        """Flush the event file; end the run of a service, which the next `learn` starts again."""
        self.writer.flush()
        if isinstance(self.writer, ServiceWriter):
            self.writer.service.stop()
            self.writer = NoWriter()

    def rows(self, report: Report) -> dict[str, float]:
        """Return an iteration's scalars by RSL-RL's tags."""
        metrics, times = report.metrics, report.times
        rate = next((v for name, v in metrics.items() if name.startswith("optim/learning_rate")), None)
        rows = {
            "Train/mean_reward": report.return_,
            "Train/mean_episode_length": report.length,
            "Loss/behavior": metrics.get("loss/distillation"),
            "Loss/value": 2 * metrics["loss/value"] if "loss/value" in metrics else None,  # half the square here
            "Loss/surrogate": metrics.get("loss/policy"),
            "Loss/entropy": metrics.get("policy/entropy"),
            "Loss/symmetry": metrics.get("policy/asymmetry"),
            "Loss/learning_rate": rate,
            "Loss/rnd": metrics.get("loss/rnd"),
            "Rnd/weight": metrics.get("rnd/weight"),
            "Policy/mean_std": metrics.get("policy/std"),
            "Perf/total_fps": report.rollout_steps / max(sum(times.values()), 1e-9),
            "Perf/collection_time": sum(seconds for part, seconds in times.items() if part != "update"),
            "Perf/learning_time": times.get("update"),
        }
        simulated = {name.removeprefix("env/"): v for name, v in metrics.items() if name.startswith("env/")}
        rows |= {name if "/" in name else f"Episode/{name}": value for name, value in simulated.items()}
        return {tag: value for tag, value in rows.items() if value is not None and value == value}  # NaN: not reported

    def write(self, report: Report, it: int) -> None:
        """Write a row of the log."""
        for tag, value in self.rows(report).items():
            self.writer.add_scalar(tag, value, it)

    def print(self, report: Report, it: int, first: int, total: int) -> None:
        """Print an iteration as RSL-RL does; `first` is the first one of `learn`, `total` the last."""
        rows = self.rows(report)
        left = sum(report.times.values()) * max(0, total - it)
        lines = {
            "Total steps": f"{report.env_steps}",
            "Steps per second": f"{rows.pop('Perf/total_fps'):.0f}",
            "Collection time": f"{rows.pop('Perf/collection_time'):.3f}s",
            "Learning time": f"{rows.pop('Perf/learning_time', 0.0):.3f}s",
        }
        lines |= {NAMES.get(tag, tag): f"{value:.4f}" for tag, value in rows.items()}
        lines |= {"Iteration time": f"{sum(report.times.values()):.2f}s", "ETA": str(timedelta(seconds=int(left)))}
        head = f" Learning iteration {it}/{total} ".center(80)
        print(
            "\n".join(["#" * 80, head, "", *(f"{name + ':':>40} {text}" for name, text in lines.items()), ""]),
            flush=True,
        )


LOGGERS = {"WandbLogWriter": "wandb", "NeptuneLogWriter": "neptune"}
NAMES = {
    "Train/mean_reward": "Mean reward",
    "Train/mean_episode_length": "Mean episode length",
    "Loss/value": "Mean value loss",
    "Loss/surrogate": "Mean surrogate loss",
    "Loss/entropy": "Mean entropy loss",
    "Loss/symmetry": "Mean symmetry loss",
    "Loss/rnd": "Mean rnd loss",
    "Loss/behavior": "Mean behavior loss",
    "Policy/mean_std": "Mean action std",
}
"""Names of the tags in RSL-RL's printed block."""


def plain_text(value: Any) -> Any:
    """Return settings as plain data, with the text of everything else."""
    if isinstance(value, Mapping):
        return {str(key): plain_text(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_text(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
