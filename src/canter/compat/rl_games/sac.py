"""rl_games' `sac` over Canter's SAC: training, files and playing.

Its own files are not read: rl_games squashes the deviation by a tanh and Canter does not, so that the policy in them
would be another one here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from canter.algorithms.sac import SACConfig
from canter.compat.pickled_file import CheckpointRefused, number, read_pickled
from canter.compat.rl_games.agent import Agent, with_suffix
from canter.compat.rl_games.player import PpoPlayer
from canter.config import TrainConfig
from canter.nn.actor_critic import Policy
from canter.specs import EnvSpec


def read_sac(path: Path) -> dict[str, Any]:
    """What `SacAgent` wrote, without running anything in it."""
    tree = read_pickled(path)
    if "canter_sac" not in tree:
        raise CheckpointRefused(
            path, f"no file of this class: it has {', '.join(map(str, list(tree)[:8]))}. rl_games' SAC is not read"
        )
    return tree


class SacAgent(Agent):
    """What `algo_factory` makes for `sac`. Files have no remembered transitions: a restored agent collects anew."""

    def _tree(self) -> dict[str, Any]:
        counts = {"epoch": self.epoch_num, "frame": self.frame, "last_mean_rewards": float(self.last_mean_rewards)}
        return {"canter_sac": self.algorithm.state_dict(), **counts}

    def _load(self, path: Path) -> int:
        tree = read_sac(path)
        self.algorithm.load_state_dict(tree["canter_sac"])
        return int(number(tree, "epoch", 0))


class SacPlayer(PpoPlayer):
    """What `player_factory` makes for `sac`."""

    def _build(self, config: TrainConfig, spec: EnvSpec) -> Policy:
        assert isinstance(config.algorithm, SACConfig)
        policy = config.algorithm.model().build_policy(spec)
        policy.actor.to(spec.device)
        return policy

    def restore(self, fn: str) -> None:
        """Take the policy from a file, without running anything in it."""
        self.policy.actor.load_state_dict(read_sac(with_suffix(fn))["canter_sac"]["modules"]["actor"])
