"""Beginning with what another run has learned.

A run from its first step to its score: train, say how it goes, and at the end what came of it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from canter.algorithms.base import Algorithm, title_of
from canter.app.check.plan import counted
from canter.app.console.text import duration, two_columns
from canter.config import TrainConfig
from canter.core.distributed.world import world
from canter.core.registry import UserError
from canter.core.registry import UserError
from canter.core.seeding import derive_seed
from canter.core.specs import Env, reset_is_clean
from canter.core.storage.validity import check_same_shape
from canter.envs import closed_quietly
from canter.envs.failures import failure
from canter.envs.imports import PYTHON
from canter.nn.actor_critic import Policy
from canter.nn.policy_file import begin_with
from canter.play.evaluation import EpisodesUnfinished, Evaluation, evaluate, long_run_average
from canter.play.player import Turn
from canter.runs.metrics import MetricWriter, TensorBoardWriter, WandbWriter
from canter.runs.policies import enter_by_average, enter_hall_of_fame
from canter.runs.records import write_score
from canter.runs.run_folder import RunFolder
from canter.training.trainer import Trainer

WEIGHTS = ("model", "modules")
"""Parts of an algorithm's state that are its networks."""
OPTIMIZERS = "optimizers"


@dataclass(frozen=True)
class InitFrom:
    """A run to take weights from, and what else of it.

    Of a run of another algorithm, such as a student's, and of a policy file only the policy is taken.
    """

    run: Path
    optimizer: bool = False
    """Take the state of the optimisers too, such as their moments and learning rates."""
    fresh_statistics: bool = False
    """Begin with new statistics of observations and values; by default they come with the weights made for them."""

    def load(self, algorithm: Algorithm[Any]) -> int | None:
        """Give an algorithm the weights of the run's newest checkpoint; gives the iteration that they are of.

        None where they are those of a policy alone. Raises `Mismatch` where the networks are others.
        """
        if self.run.is_file():
            return self._load_policy(algorithm)
        store = RunFolder(self.run).store
        if not store.steps():
            raise UserError(f"--init-from {self.run}: there is no checkpoint to take weights from")
        iteration, tree = store.load_latest()
        own, theirs = algorithm.state_dict(), tree["algorithm"]
        names = [name for name in (*WEIGHTS, *[OPTIMIZERS] * self.optimizer) if name in own]
        if not set(WEIGHTS) & set(names) or any(name not in theirs for name in names):
            return self._load_policy(algorithm)
        taken = {name: theirs[name] for name in names}
        check_same_shape(f"--init-from {self.run}", taken, {name: own[name] for name in names})
        if self.fresh_statistics:
            taken = {name: _keep_statistics(part, own[name]) for name, part in taken.items()}
        algorithm.load_state_dict(own | taken)
        return iteration

    def _load_policy(self, algorithm: Algorithm[Any]) -> None:
        if self.optimizer or self.fresh_statistics:
            raise UserError(f"--init-from {self.run}: only its policy can be taken, as it is")
        begin_with(algorithm.acting, self.run)


def _keep_statistics(part: Any, own: Any) -> Any:
    if not isinstance(part, dict):
        return part
    return {
        name: own[name] if "normalizer" in name else _keep_statistics(inner, own[name]) for name, inner in part.items()
    }


EVAL_EPISODES = 100
EVAL_STEPS = 20_000
"""Steps after which the final evaluation gives up on a task that does not end."""
AVERAGE_STEPS = 2_000
"""Steps of every environment behind a long-run average, and a tenth as many before."""

LOGS: dict[str, Callable[[Path], MetricWriter]] = {
    "tensorboard": lambda path: TensorBoardWriter(path / "tensorboard"),
    "wandb": lambda path: WandbWriter(path, os.environ.get("WANDB_PROJECT", "canter")),
}
"""Where metrics can go besides `metrics.jsonl`; each takes the run's folder."""

Say = Callable[[str], Any]


class RunNotSaved(UserError, OSError):
    """A run ended but not all of its files could be written, as on a full disk."""


@dataclass(frozen=True)
class TrainingResult:
    """What came of a run."""

    algorithm: Algorithm[Any]
    path: Path | None
    """The run's folder, for `canter.load`, `canter play` and the like; None for a run without one."""
    ended_by: str | None
    """The setting that ended it, or `on_iteration`."""
    score: Evaluation | None
    """The policy in new episodes, without noise; None where not all of them ended, or it was not asked for."""

    @property
    def policy(self) -> Policy:
        """What was learned."""
        return self.algorithm.policy

    def predict(self, obs: Any, state: Any = None, deterministic: bool = True) -> tuple[np.ndarray, Any]:
        """As `Policy.predict`."""
        return self.policy.predict(obs, state, deterministic)


def announcement(config: TrainConfig, source: str) -> str:
    """What is trained, and with which settings."""
    ends = [] if config.total_steps is None else [f"{config.total_steps:,} steps"]
    ends += [f"until.{key}={end:g}" for key, end in vars(config.until).items() if end is not None]
    return (
        f"Training {title_of(config.algorithm)} on {config.env.id} with {source}: "
        f"{' or '.join(ends)} in {counted(config.env.num_envs, 'environment')}, seed {config.seed}"
    )


def carry_out(
    config: TrainConfig,
    folder: RunFolder | None,
    *,
    env: Env | None = None,
    only_env: bool = False,
    writers: list[MetricWriter],
    on_iteration: Callable[..., Any] = lambda report: None,
    final_evaluation: bool = True,
    init_from: InitFrom | None = None,
    say: Say = print,
) -> TrainingResult:
    """Train, in a run folder if there is one, then say how good the policy is without noise.

    Both happen in `env`, or in an environment that is built here; the score in a new one where the run may have left
    a trace, unless `env` is the only one that there is.
    """
    path = None if folder is None else folder.path
    if folder is not None and folder.store.steps():
        init_from = None  # a run that goes on has weights of its own
    if path is not None:
        say(f"Settings, metrics, checkpoints and policies go to {path}")
    with emptied(path), opened(config, env) as env:
        begin = None if init_from is None else init_from.load
        with Trainer(config, on_iteration, env=env, folder=folder, writers=writers, begin=begin) as trainer:
            if init_from is not None:
                say(begun_with(init_from, trainer.begun, folder))
            algorithm, run = trainer.learn(), trainer.progress
            unsaved = [] if folder is None else folder.unsaved
        if not world.end_except_first():
            return TrainingResult(algorithm, path, run.ended_by, None)
        say(f"Training ended by {run.ended_by}, after {run.env_steps:,} steps in {duration(run.spent)}")
        score = None
        if final_evaluation:
            again = env if only_env or reset_is_clean(env) else None
            score, words = final_score(config, algorithm.policy, None if unsaved else path, again, say)
            say(words)
    if path is not None:
        say(report_of(path))
    if unsaved:
        raise RunNotSaved(f"not all of the run could be written to {path}: {', '.join(unsaved)}; see the log above")
    if path is not None:
        say(what_next(config, path, run.ended_by))
    return TrainingResult(algorithm, path, run.ended_by, score)


def begun_with(init_from: InitFrom, iteration: int | None, folder: RunFolder | None) -> str:
    """Says with what a new run began, and the run's record keeps it."""
    if folder is not None:
        folder.record.note(init_from={"run": str(init_from.run), "iteration": iteration})
    if iteration is None:
        return f"It begins with the policy of {init_from.run}; all else begins anew"
    return f"It begins with the weights of {init_from.run} after {iteration} iterations"


@contextmanager
def emptied(path: Path | None) -> Iterator[None]:
    """Takes a folder away that was claimed for a run and in which nothing came to be written."""
    try:
        yield
    except BaseException:
        if path is not None:
            with suppress(OSError):
                path.rmdir()  # refuses where there is anything
        raise


def final_score(
    config: TrainConfig, policy: Policy, run: Path | None, env: Env | None = None, say: Say = print
) -> tuple[Evaluation | None, str]:
    """How good the policy is in new episodes, and whether it beats earlier runs; a rate where episodes do not end.

    They are played in `env`, or else in an environment that is built for it. Without a `run` nothing is compared.
    """
    with opened(config, env) as playing:
        seed = derive_seed(config.seed, "eval")
        try:
            result = evaluate(policy, playing, EVAL_EPISODES, seed, max_steps=EVAL_STEPS, on_turn=Told(say))
        except EpisodesUnfinished as error:
            rate = error.games.reward_per_step
            why = f"fewer than {EVAL_EPISODES} episodes ended within {EVAL_STEPS:,} steps"
            words = f"Final score: reward {rate:.4g} per step without noise; {why}"
            about = {"reward_per_step": rate, "steps": EVAL_STEPS}
            return None, words if run is None else f"{words}\n{average_score(config, policy, run, playing, about)}"
        except Exception as error:  # whatever it raises, what was learned is saved already
            why = failure(error, "step", None)
            return None, f"Final score: none, as the environment failed while it was played. {why}"
    score = f"Final score: mean return {result.mean:.1f} over {EVAL_EPISODES} new episodes, acting without noise"
    if run is None:
        return result, score
    low, high = result.confidence_interval
    about = {"mean": result.mean, "std": result.std, "low": low, "high": high, "episodes": EVAL_EPISODES}
    score = f"{score}\n{enter_hall_of_fame(run, config.env, result.return_, config.seed)}"
    if config.checkpoints.best_by == "lta":
        uncut = env if config.env.reset_steps is None else None
        return result, f"{score}\n{average_score(config, policy, run, uncut, about)}"
    write_score(run, about)
    return result, score


def average_score(config: TrainConfig, policy: Policy, run: Path, env: Env | None, about: dict[str, Any]) -> str:
    """The reward per unit of time without noise, and whether it beats earlier runs; the run's record keeps both scores.

    In `env`, or else in an environment that is built for it, whose episodes nothing cuts.
    """
    forever = replace(config, env=replace(config.env, reset_steps=None))
    try:
        with opened(forever, env) as playing:
            seed = derive_seed(config.seed, "eval")
            average = long_run_average(policy, playing, AVERAGE_STEPS, warm_up=AVERAGE_STEPS // 10, seed=seed)
    except Exception as error:  # whatever it raises, what was learned is saved already
        write_score(run, about)
        return f"Long-run average: none. {failure(error, 'step', None)}"
    write_score(run, {**about, "long_run_average": average.mean, "ci": average.ci})
    words = f"Long-run average: {average.mean:.4g} ± {average.ci:.2g} per unit of time, acting without noise"
    return f"{words}\n{enter_by_average(run, config.env, (average.mean, average.ci), config.seed)}"


class Told:
    """Says how far an evaluation is, if it takes long."""

    def __init__(self, say: Say, every: float = 10.0) -> None:
        self.say, self.every = say, every
        self.ended, self.steps, self.last = 0, 0, time.perf_counter()

    def __call__(self, turn: Turn) -> None:
        """Count a step of all environments."""
        self.steps += 1
        self.ended += int((turn.step.terminated | turn.step.truncated).sum())
        if time.perf_counter() - self.last > self.every:
            self.last = time.perf_counter()
            self.say(f"Evaluating: {self.ended:,} episodes have ended after {self.steps:,} steps of each environment")


def report_of(run: Path) -> str:
    """Write the report of a run; says where it is, or why there is none, which is no reason to fail."""
    from canter.app.report import write_report

    try:
        return f"The report is in {write_report([run])}"
    except (OSError, ValueError) as error:
        return f"There is no report: {error}"


def what_next(config: TrainConfig, path: Path, ended_by: str | None) -> str:
    """Commands to go on with, as they can be typed here; a run that a condition ended has no budget to extend.

    What exists only in this program can be neither played nor resumed from another.
    """
    run, canter, nameless = shlex.quote(str(path)), program(), config.env.id.startswith(f"{PYTHON}:")
    commands = {} if nameless else {f"{canter} play {run}": "watch it"}
    commands[f"{canter} report {run} --open"] = "see its curves in the browser"
    if ended_by == "total_steps" and config.total_steps is not None and not nameless:
        commands[f"{canter} resume {run} --total-steps {2 * config.total_steps}"] = "train it further"
    return f"What next?\n{two_columns(commands)}"


def program() -> str:
    """How this program is called from here: `canter` where that is it, else its path."""
    beside = Path(sys.executable).with_name("canter")
    found = shutil.which("canter")
    if found is not None and Path(found).resolve() == beside.resolve():
        return "canter"
    if beside.is_file():
        place = os.path.relpath(beside)
        return shlex.quote(str(beside) if place.startswith("..") else place)
    return f"{shlex.quote(sys.executable)} -m canter"


def opened(config: TrainConfig, env: Env | None) -> AbstractContextManager[Env]:
    """The environments of a run: those given, or others that are closed at the end."""
    return closed_quietly(config.env.build(config.device)) if env is None else nullcontext(env)
