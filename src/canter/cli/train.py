"""`canter train`: settings from defaults, preset, file and flags, then a run."""

from __future__ import annotations

import argparse
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from canter.algorithms.base import title_of
from canter.cli.config_file import ConfigError, ConfigFile, dump_config, from_plain, read_config
from canter.cli.parser import Parser, UsageError, add_config_flags, config_overrides, nest
from canter.cli.preflight import environment_for, plan_for
from canter.cli.runs import RUNS, find_run, new_run, resume_parser, stored_config
from canter.cli.training import add_output_flags, train_and_evaluate
from canter.config import TrainConfig
from canter.recipes import preset_for, presets
from canter.runs.run_folder import RunFolder

SHORT_FLAGS = {
    "--seed": ("seed", "start of every random stream"),
    "--total-steps": ("total_steps", "transitions to train for, over all environments"),
    "--num-envs": ("env.num_envs", "environments stepped together"),
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


def train_command(argv: list[str]) -> None:
    """Train a policy and print how it learns."""
    arguments = train_parser(argv).parse(argv)
    config, source = merged_config(arguments)
    if arguments.print_config:
        print(dump_config(config), end="")
        return
    check_device(config.device)
    if arguments.dry_run:
        dry_run(config, source)
        return
    folder = new_run(Path(arguments.run_dir), arguments.name, config)
    print(announcement(config, source))
    with environment_for(config) as env:
        train_and_evaluate(config, folder, arguments, env)


def resume_command(argv: list[str]) -> None:
    """Go on with a run where it stopped."""
    parser = resume_parser()
    add_output_flags(parser)
    arguments = parser.parse(argv)
    path = find_run(arguments.run, Path(arguments.run_dir))
    config = stored_config(path, arguments.total_steps)
    check_device(config.device)
    print(announcement(config, f"the settings of {path}"))
    folder = RunFolder(path, config.checkpoints, settings=dump_config(config))
    if not folder.store.steps():
        print("There is no checkpoint yet, so it begins at the beginning")
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
    add_output_flags(parser)
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
    content = ConfigFile("", {}, {}) if file is None else read_config(file)
    config, source = starting_point(overrides.get("env.id") or env_id_of(content), arguments.preset)
    if file is not None:
        config, source = content.over(config), f"{source}, changed by {file}"
    return from_plain(nest(overrides, {"env.options": config.env.options}), config), source


def env_id_of(file: ConfigFile) -> str | None:
    """The environment that a file names, if it does."""
    env = file.plain.get("env")
    env_id = env.get("id") if isinstance(env, dict) else None
    return env_id if isinstance(env_id, str) else None


def starting_point(env_id: str | None, preset: str | None) -> tuple[TrainConfig, str]:
    """The settings to begin with: a named preset, or the environment's own, or the defaults."""
    if preset is not None:
        return presets[preset], f"the preset {preset}"
    defaults = TrainConfig()
    env_id = env_id or defaults.env.id
    found = preset_for(env_id)
    if found:
        return found, "its preset"
    return replace(defaults, env=replace(defaults.env, id=env_id)), "the default settings (no preset is known for it)"


def check_device(device: str) -> None:
    """Refuse a device that torch does not know or cannot find."""
    try:
        kind = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device: {device!r} is no device; use cpu, cuda or cuda:N", "device") from error
    count = torch.cuda.device_count()
    if kind.type == "cuda" and (kind.index or 0) >= count:
        raise ConfigError(f"device: {device!r} is not there, torch finds {count} CUDA devices; use cpu", "device")


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
