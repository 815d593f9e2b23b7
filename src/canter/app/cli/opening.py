"""Open the environment of a command with the policy or the agent that acts in it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from canter.app.check.before_run import check_device
from canter.app.check.plan import check_size
from canter.app.cli.parser import UsageError, flag_of
from canter.app.cli.settings import read_settings
from canter.app.experiments.folders import stored_config
from canter.app.experiments.settings import with_overrides
from canter.config import TrainConfig
from canter.core.registry import nearest
from canter.core.seeding import derive_seed
from canter.core.specs import Env, EnvSpec
from canter.envs import EnvConfig, closed_quietly, unused_settings
from canter.nn.actor_critic import Policy
from canter.nn.policy_file import BEST, FINAL_ACTOR, POLICIES, NoPolicy, find_policy, read_policy_file
from canter.nn.policy_loading import load_policy
from canter.runs.changes import changed_settings, flat_settings, format_changes
from canter.runs.records import find_run
from canter.runs.run_folder import CONFIG, RunFolder

POLICY_NAMES = {"best": BEST, "final": FINAL_ACTOR}

Adapt = Callable[[EnvConfig], EnvConfig]
"""Changes the settings of an environment to those that a command needs."""


@dataclass(frozen=True)
class OpenEnv:
    """An open environment, with the settings that it was made from."""

    env: Env
    config: TrainConfig
    """Settings of the run, or those of the environment alone."""
    seed: int
    """The seed given, or the run's."""
    changes: dict[str, list[str]]
    """Settings of the environment that differ from the run's: key -> old and new value."""
    run: Path | None
    """The run folder; None for a policy file outside of one, and without a policy."""
    place: Path | None
    """The policy file or run folder that was named; None without one."""

    @property
    def env_text(self) -> str:
        """Description of the environment, with the changed settings."""
        return self.env.spec.env_id + (f" with {format_changes(self.changes)}" if self.changes else "")

    @property
    def eval_seed(self) -> int:
        """Seed of the environment and the policy's noise; no training uses it."""
        return derive_seed(self.seed, "eval")


@dataclass(frozen=True)
class OpenPolicy(OpenEnv):
    """A policy and an open environment that it fits."""

    policy: Policy
    source: Path
    """Policy file, or checkpoint folder."""


@contextmanager
def open_policy(arguments: argparse.Namespace, adapt: Adapt) -> Iterator[OpenPolicy]:
    """Open the requested policy in its environment, whose settings `adapt` changes."""
    if arguments.run is None:
        raise UsageError(
            "RUN is missing: a run's folder, `latest`, the beginning of a run's name, or a policy file; "
            "without a policy: --agent random --env ID"
        )
    with open_env(arguments, adapt) as opened:
        assert opened.place is not None
        policy, source = _load(opened.place, opened.config, opened.env.spec)
        yield OpenPolicy(**vars(opened), policy=policy, source=source)


@contextmanager
def open_env(arguments: argparse.Namespace, adapt: Adapt) -> Iterator[OpenEnv]:
    """Open the environment of a run, or that of `--env ID`, changed by the flags and then by `adapt`."""
    run = None
    place = None
    if arguments.run is not None:
        run, place = _locate(arguments.run, arguments.run_dir, arguments.policy)
        config = _config_of(place) if run is None else stored_config(run)
    elif "env.id" in arguments.settings:
        config = TrainConfig()
    else:
        raise UsageError(f"--agent {arguments.agent} needs an environment: --env ID, or the folder of a run")
    overrides = read_settings(arguments.settings)
    if "env.id" in overrides:
        config = replace(config, env=EnvConfig(id=overrides.pop("env.id"), num_envs=config.env.num_envs))
    requested = with_overrides(config, overrides)
    adapted = replace(requested, env=adapt(requested.env))
    device = arguments.device or (config.device if torch.cuda.is_available() else "cpu")
    check_device(device)
    _check_overrides(overrides, requested, adapted, device)
    seed = config.seed if arguments.seed is None else arguments.seed
    with closed_quietly(adapted.env.build(device)) as env:
        changes = changed_settings(flat_settings(config), flat_settings(requested))
        yield OpenEnv(env, config, seed, changes, run, place)


def _check_overrides(overrides: dict[str, Any], requested: TrainConfig, adapted: TrainConfig, device: str) -> None:
    """Refuse settings that were given and would have no effect."""
    changed = changed_settings(flat_settings(requested), flat_settings(adapted))
    for key, (given, needed) in changed.items():
        if key in overrides:
            raise UsageError(f"{flag_of(key)} {given} cannot be used: this command needs {needed}")
    for line in unused_settings(requested.env, device):
        if line.partition("=")[0] in overrides:
            raise UsageError(line)


def _locate(text: str, run_dir: Path, name: str | None) -> tuple[Path | None, Path]:
    """Return the run folder, if any, and the path of the policy: a file or a run folder."""
    file = Path(text)
    if file.is_file():
        if name is not None:
            raise UsageError(f"two policies: {file} and --policy {name}")
        run = file.absolute().parent.parent
        return (run if (run / CONFIG).is_file() else None), file
    run = find_run(text, run_dir)
    if name is None:
        return run, run
    for candidate in (run / POLICIES / POLICY_NAMES.get(name, f"{name}.safetensors"), Path(name)):
        if candidate.is_file():
            return run, candidate
    stored = {path.stem for path in (run / POLICIES).glob("*.safetensors")}
    stored |= {short for short, file_name in POLICY_NAMES.items() if Path(file_name).stem in stored}
    raise NoPolicy(f"--policy {name}: no such file, and no such policy in {run}: {nearest(name, sorted(stored))}")


def _config_of(file: Path) -> TrainConfig:
    """Return the settings that a policy file stores: the environment it was trained in."""
    return TrainConfig(env=EnvConfig(id=read_policy_file(file, "actor")[0].env["env_id"]))


def _load(place: Path, config: TrainConfig, spec: EnvSpec) -> tuple[Policy, Path]:
    """Return the policy and its file; without policy files, that of the newest checkpoint."""
    try:
        file = find_policy(place)
    except NoPolicy:
        store = RunFolder(place).store
        if not store.steps():
            raise
        step, tree = store.load_latest()
        check_size(config)
        # As many environments as in training, so that its minibatches divide the batch.
        algorithm = config.algorithm.build(replace(spec, num_envs=config.env.num_envs), config.seed)
        algorithm.load_state_dict(tree["algorithm"])
        return algorithm.policy, store.path(step)
    return load_policy(file, env=spec, device=str(spec.device)), file
