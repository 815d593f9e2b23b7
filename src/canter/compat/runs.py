"""Checkpoints of rl_games and RSL-RL as run folders, and runs as checkpoints of theirs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from canter.algorithms.ppo import PPO
from canter.algorithms.sac import SAC
from canter.compat.drop_in import save_file
from canter.compat.pickled_file import CheckpointRefused, read_pickled
from canter.compat.rl_games import checkpoint as rl_games
from canter.compat.rl_games import sac as rl_games_sac
from canter.compat.rsl_rl import checkpoint as rsl_rl
from canter.config import TrainConfig
from canter.config.files import dump_config
from canter.core.plain import ConfigError
from canter.core.specs import Continuous
from canter.nn.actor_critic import Policy
from canter.nn.normalizer import Normalizer
from canter.runs.run_folder import RunFolder
from canter.training.trainer import Trainer


def import_run(path: str | Path, config: TrainConfig, folder: str | Path) -> int:
    """Write a new run folder that continues a checkpoint of rl_games or RSL-RL.

    Return its iteration.

    `config` holds the settings of its training, imported with parity: the file has none.
    `until.iterations` counts from the checkpoint on.
    """
    path = Path(path)
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: a checkpoint becomes a new run")
    tree = read_pickled(path)
    known = ((rsl_rl, rsl_rl.is_rsl_rl), (rl_games, rl_games.is_rl_games), (rl_games_sac, rl_games_sac.is_sac))
    theirs = next((module for module, is_its_own in known if is_its_own(tree)), None)
    if theirs is None:
        raise CheckpointRefused(path, f"neither RSL-RL's nor rl_games': it has {', '.join(map(str, list(tree)[:8]))}")
    weights = theirs.weights_in(tree, path)
    if config.until.iterations is not None:
        further = weights.iteration + config.until.iterations
        config = replace(config, until=replace(config.until, iterations=further))
    with Trainer(config, folder=RunFolder(folder, config.checkpoints, settings=dump_config(config))) as trainer:
        algorithm: Any = trainer.algorithm
        if not isinstance(algorithm, SAC if theirs is rl_games_sac else PPO):
            raise ConfigError(f"algorithm: {type(algorithm).__name__} is not what made {path}")
        theirs.load(algorithm, weights)
        counters = trainer.progress.counters
        trainer.progress.counters = replace(counters, rollouts=weights.iteration, updates=weights.iteration)
    return weights.iteration


FORMS = {".pt": "RSL-RL 5.x", ".pth": "rl_games 1.6"}


def export_run(run: str | Path, config: TrainConfig, policy: Policy, path: str | Path) -> int:
    """Write `policy` with the critic and the optimizer of its run's newest checkpoint.

    Return the checkpoint's iteration.

    `config` holds the run's settings. A path ending in `.pt` is written for RSL-RL, in `.pth` for
    rl_games.
    """
    path = Path(path)
    store = RunFolder(Path(run)).store
    if path.exists():
        raise ConfigError(f"{path} already exists; remove it or export to another name")
    iteration, saved = store.load_latest()
    spec = replace(policy.spec, num_envs=config.env.num_envs)  # minibatches come out even as in training
    algorithm: Any = config.algorithm.build(spec, config.seed)
    algorithm.load_state_dict(saved["algorithm"])
    algorithm.acting.actor.load_state_dict(policy.actor.state_dict())
    tree = _written(algorithm, path.suffix, iteration, spec.num_envs)
    save_file(tree, path)
    return iteration


def _written(algorithm: Any, suffix: str, iteration: int, num_envs: int) -> dict[str, Any]:
    if suffix == ".pth" and isinstance(algorithm, SAC):
        return rl_games_sac.dump(algorithm, iteration, 0, 0.0)
    if not isinstance(algorithm, PPO):
        raise ConfigError(f"{FORMS[suffix]} has no file for {type(algorithm).__name__}; .onnx and .pt2 take any policy")
    if suffix == ".pth":
        return rl_games.dump(algorithm, iteration, iteration * algorithm.config.horizon * num_envs, 0.0)
    return _of_rsl_rl(algorithm, iteration)


@torch.no_grad()
def _of_rsl_rl(ppo: PPO, iteration: int) -> dict[str, Any]:
    """Return RSL-RL's file: the mean is the action, and values are in units of the reward."""
    spec = ppo.policy.spec
    dist = ppo.policy.distribution
    probe = torch.full((1, spec.action.dim), 0.1, device=spec.device) if isinstance(spec.action, Continuous) else None
    if probe is not None and not torch.equal(dist.to_env(probe), probe):
        advice = "train with algorithm.model.bounds=none to export its file"
        raise ConfigError(f"RSL-RL takes the mean as the action: {advice}")
    head = ppo.model.critic.head
    units = head.normalizer if isinstance(head.normalizer, Normalizer) else None
    if units is not None:  # fold the statistics into the last layer
        head.linear.weight.mul_(units.scale)
        head.linear.bias.copy_(units.inverse(head.linear.bias))
    tree = rsl_rl.dump(ppo, iteration)
    if units is not None:
        tree["optimizer_state_dict"]["state"] = {}  # moments were of the layer as it was
    return tree
