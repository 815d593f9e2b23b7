"""A trained policy in an environment: what `canter play`, `canter eval` and `canter export` begin with."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from canter.app.check.before_run import check_device, plan_for
from canter.app.check.plan import check_size
from canter.app.cli.parser import Parser, UsageError, add_config_flags, config_overrides, flag_of
from canter.app.experiments.settings import differences, in_words, spelled, with_overrides
from canter.app.experiments.sweep import stored_config
from canter.config import TrainConfig
from canter.core.registry import nearest
from canter.core.seeding import derive_seed
from canter.core.specs import Env, EnvSpec
from canter.envs import EnvConfig, unused_settings
from canter.nn.actor_critic import Policy
from canter.nn.policy_file import BEST, FINAL_ACTOR, POLICIES, NoPolicy, find_policy, load_policy, read_policy_file
from canter.runs.records import find_run
from canter.runs.run_folder import CONFIG, RunFolder

NAMES = {"best": BEST, "final": FINAL_ACTOR}
EPILOG = """\
Settings of the environment are flags with the names that they have in training: --env.options.NAME VALUE,
--env.wrappers.NAME.KEY VALUE, --env.reset-steps N and the others. What is not given is as in the run."""


@dataclass(frozen=True)
class Trained:
    """A policy, where it is from, and an environment that it fits."""

    policy: Policy
    source: Path
    """Policy file, or checkpoint folder."""
    run: Path | None
    """The run folder, if the policy is in one."""
    env: Env
    seed: int
    """The one that was asked for, or the run's."""
    changes: dict[str, list[str]]
    """Settings of the environment that are others here than in the run: key -> both values, spelled out."""

    @property
    def where(self) -> str:
        """The environment in words, with what was changed about it."""
        return self.env.spec.env_id + (f" with {in_words(self.changes)}" if self.changes else "")

    @property
    def stream(self) -> int:
        """Seed for the environment and the policy's noise, other than any that was trained with."""
        return derive_seed(self.seed, "eval")


def trained_parser(command: str, argv: list[str], usage: str, description: str) -> Parser:
    """The arguments that say which policy and which environment."""
    parser = Parser(command, f"RUN {usage} [--env.KEY VALUE ...]", description, EPILOG)
    run = "folder of a run, `latest`, the beginning of a run's name, or a policy file"
    parser.add_argument("run", metavar="RUN", help=run)
    parser.flag("--policy", "NAME", "best, final, or a policy file; by default the best that there is, else final")
    short = {"--env": ("env.id", "another environment, with the same observations and actions")}
    add_config_flags(parser, argv, short, section="env.")
    parser.flag("--seed", "N", "start of the random streams; by default the run's seed", type=int)
    parser.flag("--device", "NAME", "by default the run's, or cpu where that is not there")
    parser.run_dir()
    return parser


def add_acting_flags(parser: Parser) -> None:
    """How the policy acts."""
    parser.switch("--stochastic", "act with the noise that the policy explores with")
    parser.flag("--player", "NAME", "a player that you registered, instead of Canter's", default="standard")


def count(text: str) -> int:
    """A number of things, for a flag."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


@contextmanager
def open_trained(arguments: argparse.Namespace, adapt: Callable[[EnvConfig], EnvConfig]) -> Iterator[Trained]:
    """The policy that the arguments mean, in its environment; `adapt` changes the settings of the latter."""
    run, place = _locate(arguments.run, arguments.run_dir, arguments.policy)
    config = _config_of(place) if run is None else stored_config(run)
    overrides = config_overrides(arguments)
    if "env.id" in overrides:
        config = replace(config, env=EnvConfig(id=overrides.pop("env.id"), num_envs=config.env.num_envs))
    changed = with_overrides(config, overrides)
    adapted = replace(changed, env=adapt(changed.env))
    device = arguments.device or (config.device if torch.cuda.is_available() else "cpu")
    check_device(device)
    _check(overrides, changed, adapted, device)
    seed = config.seed if arguments.seed is None else arguments.seed
    with closing(adapted.env.build(device)) as env:
        policy, source = _load(place, config, env.spec)
        yield Trained(policy, source, run, env, seed, differences(spelled(config), spelled(changed)))


def _check(overrides: dict[str, Any], changed: TrainConfig, adapted: TrainConfig, device: str) -> None:
    """Refuse settings that were given and would be without effect."""
    for key, (given, used) in differences(spelled(changed), spelled(adapted)).items():
        if key in overrides:
            raise UsageError(f"{flag_of(key)} {given} cannot be: this command needs {used}")
    for line in unused_settings(changed.env, device):
        if line.partition("=")[0] in overrides:
            raise UsageError(line)


def _locate(text: str, run_dir: Path, name: str | None) -> tuple[Path | None, Path]:
    """The run folder, if there is one, and the place of the policy: a file, or the run folder to choose from."""
    file = Path(text)
    if file.is_file():
        if name is not None:
            raise UsageError(f"two policies: {file} and --policy {name}")
        run = file.absolute().parent.parent
        return (run if (run / CONFIG).is_file() else None), file
    run = find_run(text, run_dir)
    if name is None:
        return run, run
    for candidate in (run / POLICIES / NAMES.get(name, f"{name}.safetensors"), Path(name)):
        if candidate.is_file():
            return run, candidate
    there = {path.stem for path in (run / POLICIES).glob("*.safetensors")}
    known = [*there, *(short for short, stored in NAMES.items() if Path(stored).stem in there)]
    raise NoPolicy(f"--policy {name}: no such file, and no such policy in {run}: {nearest(name, known)}")


def _config_of(file: Path) -> TrainConfig:
    """The settings that a policy file was trained with, as far as it tells: the environment."""
    return TrainConfig(env=EnvConfig(id=read_policy_file(file, "actor")[0].env["env_id"]))


def _load(place: Path, config: TrainConfig, spec: EnvSpec) -> tuple[Policy, Path]:
    """The policy and where it is from; of a run that has no policy file yet, the newest checkpoint's."""
    try:
        file = find_policy(place)
    except NoPolicy:
        store = RunFolder(place).store
        if not store.steps():
            raise
        step, tree = store.load_latest()
        check_size(plan_for(config), config)
        # As many environments as in training, for its minibatches to come out even.
        algorithm = config.algorithm.build(replace(spec, num_envs=config.env.num_envs), config.seed)
        algorithm.load_state_dict(tree["algorithm"])
        return algorithm.policy, store.path(step)
    return load_policy(file, env=spec, device=str(spec.device)), file
