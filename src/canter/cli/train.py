"""`canter train` and `canter distill`: settings from defaults, preset, file and flags, then a run."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from canter.algorithms.base import algorithms
from canter.cli.importing import add_import_flags, import_with
from canter.cli.parser import Parser, UsageError, add_config_flags, config_overrides
from canter.cli.ranks import agree, check_folder, folder_of_ranks
from canter.cli.runs import old_run, resume_parser, resumed_config
from canter.cli.training import add_output_flags, train_and_evaluate
from canter.config import TrainConfig
from canter.config_file import ConfigFile, explained_config, read_config
from canter.distributed.world import world
from canter.experiments.folders import stored_config
from canter.experiments.init_from import InitFrom
from canter.experiments.look import check_machine, environment_for, plan_for
from canter.experiments.session import announcement
from canter.experiments.settings import free_settings, starting_point
from canter.plain import from_plain, nest
from canter.runs.finding import RUNS, find_run

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


def init_of(arguments: argparse.Namespace) -> InitFrom | None:
    """The run whose weights are to be taken, if there is one."""
    if arguments.init_from is None:
        for flag in ("init_optimizer", "init_fresh_statistics"):
            if getattr(arguments, flag):
                raise UsageError(f"--{flag.replace('_', '-')} needs --init-from RUN")
        return None
    given = Path(arguments.init_from)
    run = given if given.is_file() else find_run(arguments.init_from, Path(arguments.run_dir))
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


def resume_command(argv: list[str]) -> None:
    """Go on with a run where it stopped."""
    parser = resume_parser(argv)
    add_output_flags(parser)
    arguments = parser.parse(argv)
    path = find_run(arguments.run, Path(arguments.run_dir))
    stored = stored_config(path)
    config = resumed_config(stored, config_overrides(arguments))
    check_machine(config)
    agree(config)
    print(announcement(config, f"the settings of {path}"))
    folder = old_run(path, stored, config, arguments)
    if arguments.from_scratch or not (folder.store.steps() or folder.leftovers()):
        print("It begins at the beginning")
    train_and_evaluate(config, folder, arguments)


def train_parser(argv: list[str]) -> Parser:
    """The flags of `canter train`; `argv` tells which options of the environment are among them."""
    parser = Parser(
        "train",
        usage="[ENV] [--preset NAME] [--config FILE] [--KEY VALUE ...] [--print-config | --dry-run]",
        description="Train a policy and print how it learns.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "env",
        metavar="ENV",
        nargs="?",
        help="environment id: Gymnasium's, envpool:ID or tensor:NAME; by default CartPole-v1 (see `canter envs`)",
    )
    parser.flag(
        "--preset", metavar="NAME", help="begin with these settings instead of the environment's (see `canter presets`)"
    )
    parser.flag("--config", metavar="FILE", help="YAML file of settings, all or some")
    add_config_flags(parser, argv, SHORT_FLAGS)
    parser.flag("--run-dir", metavar="DIR", default=str(RUNS), help=f"where the run's folder goes (default {RUNS})")
    parser.flag("--name", metavar="NAME", help="name of that folder; by default environment, seed and time")
    parser.flag(
        "--resume-if-present", action="store_true", help="where a run of that --name is there, go on with it instead"
    )
    parser.flag(
        "--init-from",
        metavar="RUN",
        help="begin with the weights of another run with the same networks; of a run of another algorithm, or of a "
        "policy file, with its policy",
    )
    parser.flag("--init-optimizer", action="store_true", help="and with the state of its optimisers")
    parser.flag(
        "--init-fresh-statistics", action="store_true", help="but with new statistics of observations and values"
    )
    add_output_flags(parser)
    add_import_flags(parser)
    parser.flag("--print-config", action="store_true", help="print the merged settings as YAML and stop")
    parser.flag(
        "--dry-run", action="store_true", help="build environment and algorithm, say what would happen and stop"
    )
    return parser


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
    wanted = {key: overrides.get(key) or named_in(content, key) for key in ("env.id", "algorithm.kind", "device")}
    config, source = starting_point(wanted["env.id"], arguments.preset, wanted["algorithm.kind"], wanted["device"])
    if file is not None:
        config, source = content.over(config), f"{source}, changed by {file}"
    return from_plain(nest(overrides, free_settings(config)), config), source


def with_flags(arguments: argparse.Namespace, flags: list[str]) -> argparse.Namespace:
    """Arguments of a sweep as those of one of its runs, which has these flags."""
    own = train_parser(flags).parse(flags)
    return argparse.Namespace(**vars(own) | {name: getattr(arguments, name) for name in ("env", "preset", "config")})


def is_foreign_file(file: str) -> bool:
    """Whether a file of settings is one of rl_games or RSL-RL."""
    from canter.compat import is_foreign  # brings all that is known of other libraries

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
    config = from_plain(nest(overrides, free_settings(imported.config)), imported.config)
    return config, f"the settings of {file}, imported"


def named_in(file: ConfigFile, key: str) -> str | None:
    """What a file says under a key, if it does."""
    value: Any = file.plain
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value if isinstance(value, str) else None


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
