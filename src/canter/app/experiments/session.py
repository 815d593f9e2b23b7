"""One run from its first step to its score, as the command line and `canter.train` carry it out."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from canter.algorithms.base import Algorithm, title_of
from canter.algorithms.ppo.population import PopulationPPO
from canter.app.console.text import format_clock, format_count, two_columns
from canter.app.experiments.scores import Notify, affordable_episodes, final_score, score_members
from canter.app.experiments.task import open_env
from canter.config import TrainConfig
from canter.core.distributed.world import world
from canter.core.registry import UserError
from canter.core.specs import Env, reset_is_clean
from canter.core.storage.validity import check_same_shape
from canter.envs.imports import PYTHON
from canter.nn.actor_critic import Policy
from canter.nn.policy_loading import load_policy_weights
from canter.play.evaluation import Evaluation
from canter.runs.records import CONFIG, write_evaluated
from canter.runs.run_folder import RunFolder
from canter.runs.writers import MetricWriter, TensorBoardWriter, WandbWriter
from canter.training.callbacks import Callback, ignore
from canter.training.progress import RunProgress
from canter.training.trainer import Trainer

WEIGHTS = ("model", "modules")
"""Keys of an algorithm's state that hold its networks."""
OPTIMIZERS = "optimizers"

LOGS: dict[str, Callable[[Path], MetricWriter]] = {
    # Their threads may open files while an environment works in another directory.
    "tensorboard": lambda path: TensorBoardWriter(path.absolute() / "tensorboard"),
    "wandb": lambda path: WandbWriter(path.absolute(), os.environ.get("WANDB_PROJECT", "canter")),
}
"""Writers of metrics in addition to `metrics.jsonl`; each takes the run's folder."""


class RunNotSaved(UserError, OSError):
    """A run ended but not all of its files could be written, as on a full disk."""


@dataclass(frozen=True)
class InitFrom:
    """The run, or policy file, whose weights a new run starts with.

    From a run of another algorithm, such as a student's, and from a policy file only the policy is
    loaded.
    """

    run: Path
    optimizer: bool = False
    """Load the state of the optimizers too: moments and learning rates."""
    fresh_statistics: bool = False
    """Start with new statistics of observations and values; by default they are loaded with the
    weights."""

    def load(self, algorithm: Algorithm[Any]) -> int | None:
        """Load the weights of the run's newest checkpoint or policy; return its iteration.

        Raises `Mismatch` if the networks differ.
        """
        if self.run.is_file():
            return self._load_policy(algorithm)
        store = RunFolder(self.run).store
        if not store.steps():
            raise UserError(f"--init-from {self.run}: there is no checkpoint to take weights from")
        iteration, tree = store.load_latest()
        own = algorithm.state_dict()
        stored = tree["algorithm"]
        wanted = (*WEIGHTS, OPTIMIZERS) if self.optimizer else WEIGHTS
        names = [name for name in wanted if name in own]
        has_weights = any(name in names for name in WEIGHTS)
        if not has_weights or any(name not in stored for name in names):
            return self._load_policy(algorithm)
        loaded = {name: stored[name] for name in names}
        check_same_shape(f"--init-from {self.run}", loaded, {name: own[name] for name in names})
        if self.fresh_statistics:
            loaded = {name: _keep_statistics(part, own[name]) for name, part in loaded.items()}
        algorithm.load_state_dict(own | loaded)
        return iteration

    def _load_policy(self, algorithm: Algorithm[Any]) -> None:
        if self.optimizer or self.fresh_statistics:
            raise UserError(f"--init-from {self.run}: only its policy can be taken, as it is")
        load_policy_weights(algorithm.acting, self.run)


def _keep_statistics(part: Any, own: Any) -> Any:
    """Return the state `part` with the normalizers of the state `own`."""
    if not isinstance(part, dict):
        return part
    return {
        name: own[name] if "normalizer" in name else _keep_statistics(inner, own[name]) for name, inner in part.items()
    }


@dataclass(frozen=True)
class TrainingResult:
    """The result of a run."""

    algorithm: Algorithm[Any]
    path: Path | None
    """The run's folder, for `canter.load`, `canter play` and the like; None for a run without
    one."""
    ended_by: str | None
    """The setting that ended the run, or `on_iteration`."""
    score: Evaluation | None
    """The policy in new episodes, without noise; None if some did not end, or without a final
    evaluation."""
    member_scores: Sequence[Evaluation | None] = ()
    """The same of each member of a population."""

    def __repr__(self) -> str:
        return f"TrainingResult(path={str(self.path)!r}, ended_by={self.ended_by!r}, score={self.score!r})"

    @property
    def policy(self) -> Policy:
        """Trained policy."""
        return self.algorithm.policy

    def predict(self, obs: Any, state: Any = None, deterministic: bool = True) -> tuple[np.ndarray, Any]:
        """Return what `Policy.predict` returns."""
        return self.policy.predict(obs, state, deterministic)


def announcement(config: TrainConfig, source: str, note: str = "") -> str:
    """Return the first line of a run: algorithm, environment, settings, budget and seed; then a note, if any."""
    ends = [] if config.total_steps is None else [f"{config.total_steps:,} steps"]
    ends += [f"until.{key}={end:g}" for key, end in vars(config.until).items() if end is not None]
    line = (
        f"Training {title_of(config.algorithm)} on {config.env.id} with {source}: "
        f"{' or '.join(ends)} in {format_count(config.env.num_envs, 'environment')}, seed {config.seed}"
    )
    return f"{line}\n{note}" if note else line


def run_experiment(
    config: TrainConfig,
    folder: RunFolder | None,
    *,
    env: Env | None = None,
    only_env: bool = False,
    writers: list[MetricWriter],
    on_iteration: Callable[..., Any] = ignore,
    callbacks: Sequence[Callback] = (),
    final_evaluation: bool | int = True,
    init_from: InitFrom | None = None,
    notify: Notify = print,
) -> TrainingResult:
    """Train, then evaluate the policy without noise; with a folder, keep the run there.

    Both happen in `env`, or in an environment that is built here. The evaluation uses a new
    environment if training may have left a trace in `env`, unless `env` is the only one that exists
    (`only_env`). `final_evaluation` is the number of its episodes; True means `EVAL_EPISODES`, or
    fewer if they would take more than a fifth of the steps of the training.
    """
    path = None if folder is None else folder.path
    if folder is not None and folder.store.steps():
        init_from = None  # a resumed run loads its checkpoint instead
    resumed = path is not None and (path / CONFIG).is_file()
    if path is not None:
        notify(f"Settings, metrics, checkpoints and policies go to {path}")
    with removed_if_empty(path), open_env(config, env) as env:
        begin = None if init_from is None else init_from.load
        with Trainer(
            config, on_iteration, env=env, folder=folder, begin=begin, callbacks=callbacks, writers=writers
        ) as trainer:
            if resumed:
                notify(note_start(trainer.progress))
            if init_from is not None:
                notify(note_initialization(init_from, trainer.begin_result, folder))
            algorithm = trainer.learn()
            progress = trainer.progress
            unsaved = [] if folder is None else folder.unsaved
        if not world.end_except_first():
            return TrainingResult(algorithm, path, progress.ended_by, None)
        steps = f"{progress.env_steps:,} steps in {format_clock(progress.spent)}"
        notify(f"Training ended by {progress.ended_by}, after {steps}")
        score = None
        members: Sequence[Evaluation | None] = ()
        if final_evaluation and isinstance(algorithm, PopulationPPO):
            members, text = score_members(config, algorithm, None if unsaved else path, final_evaluation)
            score = members[algorithm.leader]
            notify(text)
        elif final_evaluation:
            reusable = env if only_env or reset_is_clean(env) else None
            episodes = affordable_episodes(progress) if final_evaluation is True else int(final_evaluation)
            score, text = final_score(config, algorithm.policy, None if unsaved else path, reusable, notify, episodes)
            notify(text)
    if path is not None:
        notify(try_report(path))
        if unsaved:
            raise RunNotSaved(f"not all of the run could be written to {path}: {', '.join(unsaved)}; see the log above")
        write_evaluated(path)
        notify(next_commands(config, path, progress.ended_by))
    return TrainingResult(algorithm, path, progress.ended_by, score, members)


def note_start(progress: RunProgress) -> str:
    """Return the line about the checkpoint from which a run continues."""
    if not progress.iteration:
        return "Starting at step 0"
    iterations = format_count(progress.iteration, "iteration")
    return f"Continuing after {iterations}, {format_count(progress.env_steps, 'step')}"


def note_initialization(init_from: InitFrom, iteration: int | None, folder: RunFolder | None) -> str:
    """Note the source of the initial weights in the run's record and return it in words."""
    if folder is not None:
        folder.record.note(init_from={"run": str(init_from.run), "iteration": iteration})
    if iteration is None:
        return f"Starting with the policy of {init_from.run}; everything else is new"
    return f"Starting with the weights of {init_from.run} after {iteration} iterations"


@contextmanager
def removed_if_empty(path: Path | None) -> Iterator[None]:
    """Remove the folder claimed for a run if the block fails before anything is written to it."""
    try:
        yield
    except BaseException:
        if path is not None:
            with suppress(OSError):
                path.rmdir()  # refuses if there is anything in it
        raise


def try_report(run: Path) -> str:
    """Write the report of a run; return its place, or the reason why there is none."""
    from canter.app.report import write_report

    try:
        return f"The report is in {write_report([run])}"
    except (OSError, ValueError) as error:
        return f"There is no report: {error}"


def next_commands(config: TrainConfig, path: Path, ended_by: str | None) -> str:
    """Return commands to continue with, as they can be typed here.

    An environment that exists only in this program can be neither played nor resumed by command,
    and a run that a condition ended has no budget to extend.
    """
    run = shlex.quote(str(path))
    canter = program()
    importable = not config.env.id.startswith(f"{PYTHON}:")
    commands: dict[str, str] = {}
    if importable:
        commands[f"{canter} play {run}"] = "watch it"
    commands[f"{canter} report {run} --open"] = "see its curves in the browser"
    if importable and ended_by == "total_steps" and config.total_steps is not None:
        commands[f"{canter} resume {run} --total-steps {2 * config.total_steps}"] = "train it further"
    return f"What next?\n{two_columns(commands)}"


def program() -> str:
    """Return how this program is called from here: `canter` if that finds it, else its path."""
    script = Path(sys.executable).with_name("canter")
    found = shutil.which("canter")
    if found is not None and Path(found).resolve() == script.resolve():
        return "canter"
    if script.is_file():
        relative = os.path.relpath(script)
        return shlex.quote(str(script) if relative.startswith("..") else relative)
    return f"{shlex.quote(sys.executable)} -m canter"
