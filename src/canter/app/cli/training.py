"""`canter train`, `canter distill` and `canter resume`."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from canter.app.check.before_run import check_machine, environment_for
from canter.app.check.plan import plan_for
from canter.app.cli.commands import parse_arguments
from canter.app.cli.parser import UsageError, flag_of
from canter.app.cli.process import exit_on_sigterm, exit_process, report_error
from canter.app.cli.settings import merged_config, read_settings
from canter.app.console.console import make_console
from canter.app.console.text import two_columns
from canter.app.experiments.folders import check_name, find_run_or_policy, new_run, open_run, stored_config
from canter.app.experiments.session import LOGS, InitFrom, announcement, program, run_experiment
from canter.app.experiments.settings import with_overrides
from canter.config import TrainConfig
from canter.config.files import commented_config, dump_config
from canter.core import distributed
from canter.core.distributed.world import broadcast_value, require_equal_on_ranks, world
from canter.core.machine import describe_versions
from canter.core.specs import Env
from canter.envs import closed_quietly
from canter.envs.imports import allowed_imports
from canter.runs.changes import changed_settings, flat_settings, refuse_fixed
from canter.runs.crash import CRASH, CrashFile, Witness, last_crash
from canter.runs.permissions import trusted_modules
from canter.runs.records import find_run
from canter.runs.run_folder import CONFIG, RunFolder
from canter.training.guard import RunFailed
from canter.training.trainer import RunStopped

DEMO_ENV = "CartPole-v1"
RUN = "run"
"""Name of the note between ranks with the folder of their run."""


def train_command(arguments: argparse.Namespace) -> None:
    """Train a policy and print its progress."""
    config, source = merged_config(arguments)
    if arguments.print_config:
        print(commented_config(config), end="")
        return
    check_machine(config)
    if arguments.dry_run:
        dry_run(config, source)
        return
    init_from = initial_weights(arguments)
    require_equal_settings(config)
    check_run_name(arguments)
    print(announcement(config, source))
    # A restarted rank has checked the environment in an earlier attempt.
    with nullcontext() if world.attempt else environment_for(config) as env:
        folder = shared_folder(arguments, config)
        train_and_evaluate(config, folder, arguments, env, init_from)


def demo_command(arguments: argparse.Namespace) -> None:
    """Train CartPole-v1 for about ten seconds and say what to try next."""
    folder: Path = arguments.folder
    if os.path.lexists(folder):
        other = folder.with_name(f"{folder.name}-2")
        raise UsageError(f"{folder} already exists and is kept; to run the demo again: canter demo --folder {other}")
    print("CartPole-v1: push a cart so that its pole stays upright. The return is the number of steps, at most 500.")
    flags = {"--run-dir": folder.parent, "--name": folder.name, "--until.seconds": arguments.seconds}
    train_command(parse_arguments("train", [DEMO_ENV, *(f"{flag}={value}" for flag, value in flags.items())]))
    canter = program()
    commands = {
        f"{canter} train Pendulum-v1": "another task; every setting is a flag",
        f"{canter} envs": "all environments",
        f"{canter} check MODULE:CLASS --allow-import MODULE": "your own Gymnasium environment",
    }
    if find_spec("pygame") is None:
        commands = {'pip install "canter[video]"': "what `play` draws and records with", **commands}
    print(f"The demo has ended. Other first steps:\n{two_columns(commands)}")


def distill_command(arguments: argparse.Namespace) -> None:
    """Train a student to imitate a teacher that sees more."""
    teacher = arguments.teacher
    if teacher is None:
        raise UsageError("the teacher comes first; see `canter distill --help`")
    if Path(teacher).suffix in (".pt", ".pth"):
        raise UsageError(
            f"{teacher} is a checkpoint of another library: canter import {teacher} --config SETTINGS --env ENV "
            "--output RUN makes a run of it, then canter distill RUN ENV"
        )
    if not Path(teacher).exists():
        raise UsageError(f"there is no policy file and no run {teacher!r}")
    arguments.settings |= {"algorithm.kind": ["distillation"], "algorithm.teacher": [str(Path(teacher).absolute())]}
    train_command(arguments)


def dry_run(config: TrainConfig, source: str) -> None:
    """Build environment and algorithm and print the plan of the run."""
    with closed_quietly(config.env.build(config.device)) as env:
        config.algorithm.build(env.spec, config.seed)
        groups = ", ".join(f"{name} {tuple(spec.shape)}" for name, spec in env.spec.obs.items())
        print(announcement(config, source))
        print(f"observations: {groups}; actions: {env.spec.action}")
        plan = replace(plan_for(config), num_agents=env.spec.num_agents if config.self_play is None else 1)
        print(f"{plan.describe_rollout()}\n{plan.describe_run()}")
        print("Environment and algorithm were built; nothing was trained (--dry-run)")


def initial_weights(arguments: argparse.Namespace) -> InitFrom | None:
    """Return the run whose weights a new run starts with, if one is given."""
    if arguments.init_from is None:
        for flag in ("init_optimizer", "init_fresh_statistics"):
            if getattr(arguments, flag):
                raise UsageError(f"{flag_of(flag)} needs --init-from RUN")
        return None
    run = find_run_or_policy(arguments.init_from, arguments.run_dir)
    return InitFrom(run, arguments.init_optimizer, arguments.init_fresh_statistics)


def require_equal_settings(config: TrainConfig) -> None:
    """Raise an error if ranks were given different settings, or run different versions."""
    if distributed.active():
        versions = {f"the version of {name}": str(version) for name, version in describe_versions().items()}
        require_equal_on_ranks(versions | flat_settings(config))


def check_run_name(arguments: argparse.Namespace) -> None:
    """Refuse a name that the new run cannot have."""
    if arguments.resume_if_present and arguments.name is None:
        raise UsageError("--resume-if-present needs the --name of the run")
    is_new = not arguments.resume_if_present and world.load_value(RUN) is None
    if is_new and distributed.rank() == 0:
        check_name(arguments.run_dir, arguments.name)


def shared_folder(arguments: argparse.Namespace, config: TrainConfig) -> RunFolder:
    """Return the run's folder on every rank.

    It is new, unless torchrun restarts the ranks or `--resume-if-present` finds a run of that name.
    """
    if distributed.rank() > 0:
        return RunFolder(broadcast_value(None), config.checkpoint_schedule, settings=dump_config(config))
    existing = world.load_value(RUN)
    if existing is None and arguments.resume_if_present:
        path = arguments.run_dir / arguments.name
        if (path / CONFIG).is_file():
            existing = str(path)
    if existing is None:
        folder = new_run(arguments.run_dir, arguments.name, config)
    else:
        folder = open_run(Path(existing), config, config)
    world.store_value(RUN, str(folder.path))
    broadcast_value(str(folder.path))
    return folder


def train_and_evaluate(
    config: TrainConfig,
    folder: RunFolder,
    arguments: argparse.Namespace,
    env: Env | None = None,
    init_from: InitFrom | None = None,
) -> None:
    """Run an experiment, see `run_experiment`; exit with a code if it does not finish."""
    writers = [
        make_console(arguments.console),
        CrashFile(folder.path),
        *([] if distributed.active() else [Witness(folder.path, resume_line(folder.path))]),  # torchrun names its ranks
        *(LOGS[name](folder.path) for name in arguments.log),
    ]
    print_at_once = partial(print, flush=True)  # also if the output is a file
    try:
        with exit_on_sigterm():
            run_experiment(
                config,
                folder,
                env=env,
                writers=writers,
                final_evaluation=True if arguments.final_episodes is None else arguments.final_episodes,
                init_from=init_from,
                notify=print_at_once,
            )
    except RunStopped as stop:
        report_error(f"{stop}; go on with: {resume_line(folder.path)}")
        exit_process(128 + stop.received)
    except KeyboardInterrupt:
        lost = "stopped at once; the training since the last checkpoint is lost"
        report_error(f"{lost}; go on with: {resume_line(folder.path)}")
        exit_process(128 + signal.SIGINT)
    except RunFailed as failed:
        report_error(f"{failed.what}\n{failed.kept}. Go on with: {resume_line(folder.path)}", failed.rank)
        world.end()  # all ranks come here; none may exit, and so end all, before the folder is closed
        exit_process(1)


def resume_line(path: Path) -> str:
    """Return the command that resumes a run, with the permissions that the run does not store."""
    trusted = trusted_modules(path)
    permissions = [f"--allow-import {module}" for module in sorted(allowed_imports()) if module not in trusted]
    ranks = distributed.world_size()
    start = program()
    if ranks > 1:
        on_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == str(ranks)
        how = f"--standalone --nproc-per-node {ranks}" if on_one_machine else "(as before)"
        start = f"torchrun {how} -m canter"
    return " ".join([start, *permissions, "resume", shlex.quote(str(path))])


def resume_command(arguments: argparse.Namespace) -> None:
    """Continue a run from its newest checkpoint."""
    path = find_run(arguments.run, arguments.run_dir)
    stored = stored_config(path)
    config = with_overrides(stored, read_settings(arguments.settings))
    refuse_fixed(changed_settings(flat_settings(stored), flat_settings(config)), flag_of)
    check_machine(config)
    require_equal_settings(config)
    print(announcement(config, f"the settings of {path}"))
    if (crash := last_crash(path)) is not None:
        print(f"The last attempt crashed: {crash}; see {path / CRASH}")
    from_scratch = arguments.from_scratch
    folder = open_run(path, stored, config, accept_edits=arguments.accept_edits, from_scratch=from_scratch)
    train_and_evaluate(config, folder, arguments)
