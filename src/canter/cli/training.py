"""A run on the command line: train, say how it goes, and at the end what came of it and what to do next."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType

from canter.cli.parser import Parser
from canter.cli.ranks import complain, end_ranks, leave
from canter.cli.runs import RUNS
from canter.config import TrainConfig
from canter.console.console import CONSOLES, make_console
from canter.console.figures import duration
from canter.envs import closed_quietly
from canter.envs.imports import allowed_imports
from canter.nn.actor_critic import Policy
from canter.play.evaluation import EpisodesUnfinished, evaluate
from canter.registry import nearest
from canter.report import write_report
from canter.runs.hall_of_fame import enter_hall_of_fame
from canter.runs.run_folder import LATEST, RunFolder
from canter.runs.writers import MetricWriter, TensorBoardWriter, WandbWriter
from canter.seeding import derive_seed
from canter.specs import Env, begins_anew
from canter.training.collector import failure
from canter.training.rescue import RunFailed
from canter.training.signals import AskedToEnd
from canter.training.trainer import RunStopped, Trainer

EVAL_EPISODES = 100
EVAL_STEPS = 20_000
"""Steps after which the final evaluation gives up on a task that does not end."""

LOGS: dict[str, Callable[[Path], MetricWriter]] = {
    "tensorboard": lambda path: TensorBoardWriter(path / "tensorboard"),
    "wandb": lambda path: WandbWriter(path, os.environ.get("WANDB_PROJECT", "canter")),
}
"""Where metrics can go besides `metrics.jsonl`; each takes the run's folder."""


def add_output_flags(parser: Parser) -> None:
    """The flags that choose what is shown and where metrics go."""
    parser.flag(
        "--console",
        metavar="KIND",
        type=one_of("auto", *CONSOLES),
        default="auto",
        help="live (a table, on a terminal), lines (one every few seconds, elsewhere), verbose (a block per rollout) "
        "or quiet",
    )
    parser.flag(
        "--log",
        metavar="NAMES",
        type=lambda text: [one_of(*LOGS)(name) for name in text.split(",")],
        default=[],
        help="metrics also to tensorboard, wandb or both: --log tensorboard,wandb",
    )


def one_of(*names: str) -> Callable[[str], str]:
    """The type of a flag that takes one of these names."""

    def check(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"unknown name {text!r}, {nearest(text, names)}")
        return text

    return check


def train_and_evaluate(
    config: TrainConfig, folder: RunFolder, arguments: argparse.Namespace, env: Env | None = None
) -> None:
    """Train in a run folder, show how it goes, then say how good the policy is without noise.

    Both happen in `env`, or in an environment that is built here; the score in a new one where the run may have left
    a trace.
    """
    writers = [make_console(arguments.console), *(LOGS[name](folder.path) for name in arguments.log)]
    print(f"Settings, metrics, checkpoints and policies go to {folder.path}", flush=True)
    with built(config) if env is None else nullcontext(env) as env:
        try:
            with sigterm_unwinds(), Trainer(config, env=env, folder=folder, writers=writers) as trainer:
                policy, run, unsaved = trainer.learn().policy, trainer.run, folder.unsaved
        except RunStopped as stop:
            complain(f"{stop}; go on with: canter resume {folder.path}")
            leave(128 + stop.received)
        except KeyboardInterrupt:
            complain(
                "stopped at once, without saving what was learned since the last checkpoint; go on with: "
                f"canter resume {folder.path}"
            )
            leave(128 + signal.SIGINT)
        except RunFailed as failed:
            complain(f"{failed.what}\n{failed.kept}. Go on with: {resume_line(folder.path)}")
            leave(1)
        if not end_ranks():
            return
        print(f"Training ended by {run.ended_by}, after {run.env_steps:,} steps in {duration(run.spent)}")
        print(final_score(config, policy, None if unsaved else folder.path, env if begins_anew(env) else None))
    print(report_of(folder.path))
    if unsaved:
        raise OSError(f"not all of the run could be written to {folder.path}: {', '.join(unsaved)}; see the log above")
    print(what_next(config, folder.path, run.ended_by))


def final_score(config: TrainConfig, policy: Policy, run: Path | None, env: Env | None = None) -> str:
    """How good the policy is in new episodes, and whether it beats earlier runs; a rate where episodes do not end.

    They are played in `env`, or else in an environment that is built for it. Without a `run` nothing is compared.
    """
    with built(config) if env is None else nullcontext(env) as env:
        seed = derive_seed(config.seed, "eval")
        try:
            result = evaluate(policy, env, EVAL_EPISODES, seed, max_steps=EVAL_STEPS)
        except EpisodesUnfinished as error:
            return (
                f"Final score: reward {error.games.reward_per_step:.4g} per step without noise; fewer than "
                f"{EVAL_EPISODES} episodes ended within {EVAL_STEPS:,} steps"
            )
        except Exception as error:  # whatever it raises, what was learned is saved already
            return f"Final score: none, as the environment failed while it was played. {failure(error, 'step', None)}"
    score = f"Final score: mean return {result.mean:.1f} over {EVAL_EPISODES} new episodes, acting without noise"
    return score if run is None else f"{score}\n{enter_hall_of_fame(run, config.env, result.return_, config.seed)}"


def report_of(run: Path) -> str:
    """Write the report of a run; says where it is, or why there is none, which is no reason to fail."""
    try:
        return f"The report is in {write_report([run])}"
    except (OSError, ValueError) as error:
        return f"There is no report: {error}"


def what_next(config: TrainConfig, path: Path, ended_by: str | None) -> str:
    """Commands to go on with; a run that a condition ended has no budget to extend."""
    run = LATEST if path.parent == RUNS else str(path)
    commands = {f"canter play {run}": "watch it", f"canter report {run} --open": "see its curves in the browser"}
    if ended_by == "total_steps" and config.total_steps is not None:
        commands[f"canter resume {run} --total-steps {2 * config.total_steps}"] = "train it further"
    width = max(map(len, commands))
    return "\n".join(["What next?", *(f"  {command:<{width}}  {what}" for command, what in commands.items())])


def built(config: TrainConfig) -> AbstractContextManager[Env]:
    """The environments of a run, closed at the end."""
    return closed_quietly(config.env.build(config.device))


def resume_line(path: Path) -> str:
    """What to type to go on with a run, with the permissions that this command had."""
    permissions = [f"--allow-import {module}" for module in sorted(allowed_imports())]
    return " ".join(["canter", *permissions, "resume", shlex.quote(str(path))])


@contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """SIGTERM ends the program as Ctrl-C does, step by step: the terminal is restored and the run's lock given back."""

    def unwind(number: int, frame: FrameType | None) -> None:
        raise AskedToEnd(128 + number)

    before = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
