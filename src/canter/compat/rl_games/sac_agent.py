"""rl_games' `sac` over Canter's SAC: training, files and playing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from canter.algorithms.sac import SACConfig
from canter.compat.rl_games import sac
from canter.compat.rl_games.agent import Agent, with_suffix
from canter.compat.rl_games.player import PpoPlayer
from canter.config import TrainConfig
from canter.nn.actor_critic import Policy
from canter.specs import EnvSpec


class SacAgent(Agent):
    """What `algo_factory` makes for `sac`. Files have no remembered transitions: a restored agent collects anew."""

    parity = True  # the files' deviation has no other form

    def _tree(self) -> dict[str, Any]:
        return sac.dump(self.algorithm, self.epoch_num, self.frame, float(self.last_mean_rewards))

    def _load(self, path: Path) -> int:
        weights = sac.read_weights(path)
        sac.load(self.algorithm, weights)
        return weights.iteration


class SacPlayer(PpoPlayer):
    """What `player_factory` makes for `sac`."""

    parity = True

    def _build(self, config: TrainConfig, spec: EnvSpec) -> Policy:
        assert isinstance(config.algorithm, SACConfig)
        policy = config.algorithm.model().build_policy(spec)
        policy.actor.to(spec.device)
        return policy

    def restore(self, fn: str) -> None:
        """Take the policy from a file, without running anything in it."""
        weights = sac.read_weights(with_suffix(fn))
        sac.load_networks({"actor": self.policy.actor}, weights)
