"""A parent's checkpoint as a run folder, to play, evaluate, export and train further."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from canter.algorithms.ppo import PPO
from canter.algorithms.sac import SAC
from canter.compat.pickled_file import CheckpointRefused, read_pickled
from canter.compat.rl_games import checkpoint as rl_games
from canter.compat.rl_games import sac as rl_games_sac
from canter.compat.rsl_rl import checkpoint as rsl_rl
from canter.config import TrainConfig
from canter.config.files import dump_config
from canter.core.plain import ConfigError
from canter.runs.run_folder import RunFolder
from canter.training.trainer import Trainer


def import_run(path: str | Path, config: TrainConfig, folder: str | Path) -> int:
    """Write a new run folder that begins where a checkpoint of rl_games or RSL-RL ends; gives its iteration.

    `config` are the settings that it was trained with, imported with parity: the file holds none. Iterations that
    the settings ask for are counted from here.
    """
    path, folder = Path(path), Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: a checkpoint becomes a run of its own")
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
