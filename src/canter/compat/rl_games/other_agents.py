"""rl_games' `sac` over Canter's SAC, and IsaacGymEnvs' `amp_continuous` over PPO with the extension `amp`."""

from __future__ import annotations

from canter.algorithms.sac import SACConfig
from canter.compat.rl_games import sac
from canter.compat.rl_games.agent import Agent, with_suffix
from canter.compat.rl_games.player import PpoPlayer
from canter.config import TrainConfig
from canter.nn.actor_critic import Policy
from canter.plain import ConfigError
from canter.specs import EnvSpec


class AmpAgent(Agent):
    """What `algo_factory` makes for `amp_continuous`; its clips are named by `config.amp`."""

    def _check_env(self) -> None:
        group, spec = (self.config.get("amp") or {}).get("obs_group") or "amp", self.vec_env.spec
        if group not in spec.obs and spec.motion is None:
            raise ConfigError(
                f"amp_continuous: the environment shows no observation group {group!r}. Give the frame that is "
                f"compared with clips beside obs, as {{'obs': ..., {group!r}: [N, D]}}, and reset within the step: "
                "infos['amp_obs'], fetch_amp_obs_demo and reset_done, which IsaacGymEnvs' agent asks for, are not "
                "asked for here. Clips are named by config.amp.motions"
            )


class SacAgent(Agent):
    """What `algo_factory` makes for `sac`. Files have no remembered transitions: a restored agent collects anew."""

    parity = True  # the files' deviation has no other form
    files = sac


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
