"""`canter train` and `canter distill`: settings from defaults, preset, file and flags, then a run."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from canter.algorithms.base import algorithms
from canter.app.check.before_run import check_machine, environment_for, plan_for
from canter.app.cli.export import add_import_flags, import_with
from canter.app.cli.parser import Parser, UsageError, add_config_flags, config_overrides
from canter.app.cli.resume import old_run
from canter.app.cli.training import add_output_flags, agree, train_and_evaluate
from canter.app.experiments.session import InitFrom, announcement
from canter.app.experiments.settings import starting_point, with_overrides
from canter.app.experiments.sweep import check_name, located, new_run
from canter.config import TrainConfig
from canter.config.files import ConfigFile, dump_config, explained_config, read_config
from canter.core import distributed
from canter.core.distributed.world import from_rank_0, world
from canter.core.storage.validity import flatten
from canter.runs.run_folder import CONFIG, RunFolder

SHORT_FLAGS = {
    "--algorithm": ("algorithm.kind", f"what learns: {', '.join(algorithms)}; its preset for the environment is taken"),
    "--seed": ("seed", "start of every random stream"),
    "--total-steps": ("total_steps", "transitions to train for, over all environments"),
    "--num-envs": ("env.num_envs", "environments stepped together, over all ranks"),
    "--device": ("device", "where networks and tensors live: cpu, cuda, cuda:1, ..."),
}
"""Settings with a short name, shown in the help: flag -> (key, explanation)."""

EPILOG = """\
Every setting is a flag by its path, and keys of a file are the same paths:
  --algorithm.gamma 0.995
  --algorithm.optimizer.learning-rate 3e-4            a number that stays
  --algorithm.optimizer.learning-rate.kind linear     or one that moves (constant, linear, step, adaptive_kl) ...
  --algorithm.optimizer.learning-rate.start 1e-3      ... with settings of its own
  --algorithm.model.policy.hidden 256,256             a list
  --env.options.NAME VALUE                            a keyword argument of the environment

`canter train ENV --print-config` lists all of them with their values, ready to be saved and edited for --config.
Later sources win: defaults < preset < file < flags."""

DISTILL_USAGE = """\
usage: canter distill TEACHER ENV [--KEY VALUE ...]

A student learns what a teacher would do, where it goes itself. TEACHER is a policy file or a run folder; a checkpoint
of rl_games or RSL-RL becomes one by `canter import`. What the student sees is --algorithm.policy.obs-groups; where the
teacher's groups have other names in ENV: --algorithm.teacher-obs '{policy: critic}'. All flags of `canter train` work
besides. Then it goes on by reward: canter train ENV --init-from STUDENT"""

RUN = "run"
"""Where the ranks note the folder of their run."""


def train_command(argv: list[str]) -> None:
    """Train a policy and print how it learns."""
    arguments = train_parser(argv).parse(argv)
    config, source = merged_config(arguments)
    if arguments.print_config:
        print(explained_config(config), end="")
        return
    check_machine(config)
    if arguments.dry_run:
        dry_run(config, source)
        return
    init_from = init_of(arguments)
    agree(config)
    check_folder(arguments)
    print(announcement(config, source))
    # Ranks that were restarted have had their look.
    with nullcontext() if world.attempt else environment_for(config) as env:
        train_and_evaluate(config, folder_of_ranks(arguments, config), arguments, env, init_from)


def check_folder(arguments: argparse.Namespace) -> None:
    """Refuse a name that no new run can have."""
    if arguments.resume_if_present and arguments.name is None:
        raise UsageError("--resume-if-present needs the --name of the run")
    if not arguments.resume_if_present and distributed.rank() == 0 and world.kept(RUN) is None:
        check_name(arguments.run_dir, arguments.name)


def folder_of_ranks(arguments: argparse.Namespace, config: TrainConfig) -> RunFolder:
    """A folder for a new run; or that of the run that torchrun restarts, or that is there and may be gone on with."""
    parent, name = arguments.run_dir, arguments.name
    if distributed.rank() > 0:
        return RunFolder(from_rank_0(None), config.checkpoints, settings=dump_config(config))
    before = world.kept(RUN)
    if before is None and arguments.resume_if_present and (parent / name / CONFIG).is_file():
        before = str(parent / name)
    if before is None:
        folder = new_run(parent, name, config)
    else:
        folder = old_run(Path(before), config, config)
    world.keep(RUN, str(folder.path))
    from_rank_0(str(folder.path))
    return folder


def init_of(arguments: argparse.Namespace) -> InitFrom | None:
    """The run whose weights are to be taken, if there is one."""
    if arguments.init_from is None:
        for flag in ("init_optimizer", "init_fresh_statistics"):
            if getattr(arguments, flag):
                raise UsageError(f"--{flag.replace('_', '-')} needs --init-from RUN")
        return None
    run = located(arguments.init_from, arguments.run_dir)
    return InitFrom(run, arguments.init_optimizer, arguments.init_fresh_statistics)


def distill_command(argv: list[str]) -> None:
    """Train a student to do what a teacher does that sees more."""
    if argv and argv[0] in ("-h", "--help"):
        print(DISTILL_USAGE)
        return
    teacher, rest = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else ("", argv)
    if Path(teacher).suffix in (".pt", ".pth"):
        raise UsageError(
            f"{teacher} is a checkpoint of another library: canter import {teacher} --config SETTINGS --env ENV "
            "--output RUN makes a run of it, then canter distill RUN ENV"
        )
    argv = [*rest, "--algorithm", "distillation", "--algorithm.teacher", str(Path(teacher).absolute())]
    train_parser(argv).parse(argv)  # what is misspelt first, then what is missing
    if not teacher:
        raise UsageError("the teacher comes first; see `canter distill --help`")
    if not Path(teacher).exists():
        raise UsageError(f"there is no policy file and no run {teacher!r}")
    train_command(argv)


def train_parser(argv: list[str]) -> Parser:
    """The flags of `canter train`; `argv` tells which options of the environment are among them."""
    usage = "[ENV] [--preset NAME] [--config FILE] [--KEY VALUE ...] [--print-config | --dry-run]"
    parser = Parser("train", usage, "Train a policy and print how it learns.", EPILOG)
    env = "environment id: Gymnasium's, envpool:ID or tensor:NAME; by default CartPole-v1 (see `canter envs`)"
    parser.add_argument("env", metavar="ENV", nargs="?", help=env)
    add_settings_flags(parser, argv)
    parser.run_dir("the run's folder goes")
    parser.flag("--name", "NAME", "name of that folder; by default environment, seed and time")
    parser.switch("--resume-if-present", "where a run of that --name is there, go on with it instead")
    parser.flag(
        "--init-from",
        "RUN",
        "begin with the weights of another run with the same networks; of a run of another algorithm, or of a "
        "policy file, with its policy",
    )
    parser.switch("--init-optimizer", "and with the state of its optimisers")
    parser.switch("--init-fresh-statistics", "but with new statistics of observations and values")
    add_output_flags(parser)
    add_import_flags(parser)
    parser.switch("--print-config", "print the merged settings as YAML and stop")
    parser.switch("--dry-run", "build environment and algorithm, say what would happen and stop")
    return parser


def add_settings_flags(parser: Parser, argv: list[str], **options: Any) -> None:
    """The flags that say what to train with."""
    parser.flag("--preset", "NAME", "begin with these settings instead of the environment's (see `canter presets`)")
    parser.flag("--config", "FILE", "YAML file of settings, all or some")
    add_config_flags(parser, argv, SHORT_FLAGS, **options)


def merged_config(arguments: argparse.Namespace) -> tuple[TrainConfig, str]:
    """Defaults < preset < file < flags, and in words where the settings began."""
    overrides, file = config_overrides(arguments), arguments.config
    if arguments.env is not None:
        if "env.id" in overrides:
            raise UsageError(f"two environments: {arguments.env} and --env.id {overrides['env.id']}")
        overrides["env.id"] = arguments.env
    if file is not None and is_foreign_file(file):
        return imported_config(arguments, overrides, file)
    content = ConfigFile("", {}, {}) if file is None else read_config(file)
    named = {key: value for key, value in flatten(content.plain).items() if isinstance(value, str)} | overrides
    env_id, algorithm, device = (named.get(key) for key in ("env.id", "algorithm.kind", "device"))
    config, source = starting_point(env_id, arguments.preset, algorithm, device)
    if file is not None:
        config, source = content.over(config), f"{source}, changed by {file}"
    return with_overrides(config, overrides), source


def with_flags(arguments: argparse.Namespace, flags: list[str]) -> argparse.Namespace:
    """Arguments of a sweep as those of one of its runs, which has these flags."""
    own = train_parser(flags).parse(flags)
    return argparse.Namespace(**vars(own) | {name: getattr(arguments, name) for name in ("env", "preset", "config")})


def is_foreign_file(file: str) -> bool:
    """Whether a file of settings is one of rl_games or RSL-RL."""
    from canter.compat import is_foreign

    return ".py" in Path(file).suffix or is_foreign(read_config(file, twice=[]).plain)  # FILE.py:NAME too


def imported_config(arguments: argparse.Namespace, overrides: dict[str, Any], file: str) -> tuple[TrainConfig, str]:
    """The settings of a parent's file, changed by flags; the report goes to stderr."""
    arguments.env, arguments.num_envs = overrides.get("env.id"), overrides.get("env.num_envs")
    if arguments.preset is not None:
        raise UsageError(f"--preset {arguments.preset}: {file} was written for another library and stands alone")
    imported = import_with(arguments, file)
    if not imported.names_env:
        raise UsageError(f"{file} names no environment that is known here: canter train ENV --config {file}")
    print(imported.deviations.text(), file=sys.stderr)
    return with_overrides(imported.config, overrides), f"the settings of {file}, imported"


def dry_run(config: TrainConfig, source: str) -> None:
    """Build everything, say what would happen, train nothing."""
    with closing(config.env.build(config.device)) as env:
        config.algorithm.build(env.spec, config.seed)
        groups = ", ".join(f"{name} {tuple(spec.shape)}" for name, spec in env.spec.obs.items())
        print(announcement(config, source))
        print(f"observations: {groups}; actions: {env.spec.action}")
        plan = replace(plan_for(config), num_agents=env.spec.num_agents if config.self_play is None else 1)
        print(f"{plan.in_words()}\n{plan.in_all()}")
        print("Environment and algorithm were built; nothing was trained (--dry-run)")
