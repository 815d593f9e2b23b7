"""`canter train` and `canter distill`: settings from defaults, preset, file and flags, then a run."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from canter.algorithms.base import algorithms, title_of
from canter.cli.importing import add_import_flags, import_with
from canter.cli.parser import Parser, UsageError, add_config_flags, config_overrides, nest
from canter.cli.preflight import environment_for, plan_for
from canter.cli.ranks import agree, folder_of_ranks
from canter.cli.runs import RUNS, find_run, old_run, resume_parser, stored_config
from canter.cli.training import add_output_flags, train_and_evaluate
from canter.compat import is_foreign, task_settings
from canter.config import TrainConfig
from canter.config_file import ConfigFile, dump_config, read_config
from canter.distributed.world import world
from canter.plain import ConfigError, from_plain
from canter.preflight.size import check_size
from canter.recipes import name_for, preset_for, presets

SHORT_FLAGS = {
    "--algorithm": ("algorithm.kind", f"what learns: {', '.join(algorithms)}; its preset for the environment is taken"),
    "--start": ("start", "a policy file or run folder whose policy to begin with"),
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
  --algorithm.optimizer.learning-rate.kind linear     or one that moves (constant, linear, adaptive_kl) ...
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
besides. Then PPO goes on: canter train ENV --start STUDENT"""


def train_command(argv: list[str]) -> None:
    """Train a policy and print how it learns."""
    arguments = train_parser(argv).parse(argv)
    config, source = merged_config(arguments)
    if arguments.print_config:
        print(dump_config(config), end="")
        return
    check_machine(config)
    if arguments.dry_run:
        dry_run(config, source)
        return
    agree(config)
    folder = folder_of_ranks(arguments, config)
    print(announcement(config, source))
    # Ranks that were restarted have had their look.
    with nullcontext() if world.attempt else environment_for(config) as env:
        train_and_evaluate(config, folder, arguments, env)


def distill_command(argv: list[str]) -> None:
    """Train a student to do what a teacher does that sees more."""
    if not argv or argv[0] in ("-h", "--help"):
        print(DISTILL_USAGE)
        return
    teacher, *rest = argv
    if teacher.startswith("-"):
        raise UsageError(f"the teacher comes first, before {teacher}; see `canter distill --help`")
    if Path(teacher).suffix in (".pt", ".pth"):
        raise UsageError(
            f"{teacher} is a checkpoint of another library: canter import {teacher} --config SETTINGS --env ENV "
            "--output RUN makes a run of it, then canter distill RUN ENV"
        )
    argv = [*rest, "--algorithm", "distillation", "--algorithm.teacher", str(Path(teacher).absolute())]
    train_parser(argv).parse(argv)  # what is misspelt first, then what is missing
    if not Path(teacher).exists():
        raise UsageError(f"there is no policy file and no run {teacher!r}")
    train_command(argv)


def resume_command(argv: list[str]) -> None:
    """Go on with a run where it stopped."""
    parser = resume_parser()
    add_output_flags(parser)
    arguments = parser.parse(argv)
    path = find_run(arguments.run, Path(arguments.run_dir))
    stored = stored_config(path)
    config = stored if arguments.total_steps is None else replace(stored, total_steps=arguments.total_steps)
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
    return from_plain(nest(overrides, {"env.options": config.env.options}), config), source


def is_foreign_file(file: str) -> bool:
    """Whether a file of settings is one of rl_games or RSL-RL."""
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
    config = from_plain(nest(overrides, {"env.options": imported.config.env.options}), imported.config)
    return config, f"the settings of {file}, imported"


def named_in(file: ConfigFile, key: str) -> str | None:
    """What a file says under a key, if it does."""
    value: Any = file.plain
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value if isinstance(value, str) else None


def starting_point(
    env_id: str | None, preset: str | None, algorithm: str | None = None, device: str | None = None
) -> tuple[TrainConfig, str]:
    """The settings to begin with: a named preset, or the environment's own for the algorithm, or the defaults."""
    if preset is not None:
        return presets[preset], f"the preset {preset}"
    defaults = TrainConfig()
    env_id = env_id or defaults.env.id
    if algorithm in (None, algorithms.default) and (own := task_settings(env_id, device)) is not None:
        return own.config, f"the task's own settings for {own.deviations.dialect}"
    device = device or defaults.device
    found = preset_for(env_id, algorithm, device)
    if found is None:
        env = replace(defaults.env, id=env_id)
        return replace(defaults, env=env), "the default settings (no preset is known for it)"
    if algorithm in (None, algorithms.default):
        return found, "its preset"
    return replace(found, device=device), f"the preset {name_for(env_id, algorithm, device)}"


def check_device(device: str) -> None:
    """Refuse a device that torch does not know or cannot find."""
    try:
        kind = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device: {device!r} is no device; use cpu, cuda or cuda:N", "device") from error
    count = torch.cuda.device_count()
    if kind.type == "cuda" and (kind.index or 0) >= count:
        raise ConfigError(f"device: {device!r} is not there, torch finds {count} CUDA devices; use cpu", "device")


def check_machine(config: TrainConfig) -> None:
    """Refuse settings for a device that is not there, or of sizes that no memory here could hold."""
    check_device(config.device)
    check_size(plan_for(config), config)


def announcement(config: TrainConfig, source: str) -> str:
    """What is trained, and with which settings."""
    ends = [] if config.total_steps is None else [f"{config.total_steps:,} steps"]
    ends += [f"until.{key}={end:g}" for key, end in vars(config.until).items() if end is not None]
    return (
        f"Training {title_of(config.algorithm)} on {config.env.id} with {source}: "
        f"{' or '.join(ends)} in {config.env.num_envs} environments, seed {config.seed}"
    )


def dry_run(config: TrainConfig, source: str) -> None:
    """Build everything, say what would happen, train nothing."""
    with closing(config.env.build(config.device)) as env:
        config.algorithm.build(env.spec, config.seed)
        groups = ", ".join(f"{name} {tuple(spec.shape)}" for name, spec in env.spec.obs.items())
        print(announcement(config, source))
        print(f"observations: {groups}; actions: {env.spec.action}")
        print(f"{plan_for(config).in_words()}\n{plan_for(config).in_all()}")
        print("Environment and algorithm were built; nothing was trained (--dry-run)")
