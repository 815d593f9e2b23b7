"""A drop-in replacement for rl_games' Runner: scripts change one import.

from canter.compat.rl_games import Runner
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch

from canter.compat.rl_games.agent import OBJECTS, Agent, AmpAgent, SacAgent, plain
from canter.compat.rl_games.hooks import DefaultAlgoObserver, IsaacGymAmp, refuse_overrides, refuse_rl_games_agents
from canter.compat.rl_games.player import PpoPlayer, SacPlayer
from canter.compat.settings.rl_games import NO_POPULATIONS, is_rl_games
from canter.core.plain import ConfigError
from canter.core.registry import nearest
from canter.nn.actor_critic import Policy
from canter.nn.heads import GaussianHead


class ObjectFactory:
    """Builders by name, as in rl_games."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.builders = dict[str, Callable[..., Any]]()

    def register_builder(self, name: str, builder: Callable[..., Any]) -> None:
        """Register a builder under a name."""
        self.builders[name] = builder

    def create(self, name: str, **arguments: Any) -> Any:
        """Call the builder of a name."""
        if name not in self.builders:
            advice = nearest(name, self.builders)
            raise ConfigError(f"algo.name={name!r}: there is no {self.what} of that name, {advice}")
        return self.builders[name](**arguments)


BUILDERS = (
    ("a2c_continuous", Agent, PpoPlayer),
    ("a2c_discrete", Agent, PpoPlayer),
    ("amp_continuous", AmpAgent, PpoPlayer),
    ("amp", AmpAgent, PpoPlayer),
    ("sac", SacAgent, SacPlayer),
)
"""Agent and player of each algorithm, by rl_games' names."""


class Runner:
    """Trains and plays by rl_games' settings; `parity` of agents and players keeps its numbers.

    `ignore` are keys to leave out though they are refused, such as `params.config.pbt_idx`.
    """

    def __init__(self, algo_observer: Any = None, *, ignore: Sequence[str] = ()) -> None:
        self.algo_observer = algo_observer or DefaultAlgoObserver()
        self.ignore = ignore
        self.algo_factory = ObjectFactory("agent")
        self.player_factory = ObjectFactory("player")
        for name, agent, player in BUILDERS:
            self.algo_factory.register_builder(name, agent)
            self.player_factory.register_builder(name, player)
        self.params: dict[str, Any] = {}
        self.agent: Any = None

    def reset(self) -> None:
        """Do nothing: there is no state to reset."""

    def load(self, yaml_config: Mapping[str, Any]) -> None:
        """Load settings, `{"params": ...}`; they are copied and never changed."""
        if not is_rl_games(yaml_config):
            raise ConfigError(f"load({yaml_config!r:.60}): expected {{'params': {{'algo': ..., 'config': ...}}}}")
        if (yaml_config.get("pbt") or {}).get("enabled"):  # Isaac Lab's: it would start rl_games itself again
            raise ConfigError(f"pbt.enabled=True: {NO_POPULATIONS}", "pbt.enabled")
        self.default_config = _copied(yaml_config["params"])
        self.load_config(_copied(yaml_config["params"]))

    def load_config(self, params: dict[str, Any]) -> None:
        """Load `params` and seed everything, as rl_games does."""
        self.params = params
        self.algo_name = params["algo"]["name"]
        seed = params.get("seed")
        self.seed = int(time.time()) if seed is None or seed == -1 else int(seed)
        params["seed"] = self.seed
        own = self.seed + int(os.environ.get("RANK", "0"))  # what environments draw differs, as in rl_games
        torch.manual_seed(own)
        np.random.seed(own % 2**32)
        random.seed(own)
        given = params["config"].get("features") or {}
        params["config"]["features"] = {**given, "observer": self.algo_observer, "ignore": self.ignore}

    def run(self, args: Mapping[str, Any]) -> Any:
        """Train, or play if `play` is True and `train` is not.

        `checkpoint` is a file to restore, `sigma` the log of a std, and with `load_critic_only` the file
        gives the central value alone.
        """
        if args.get("play") and not args.get("train"):
            return self.run_play(args)
        return self.run_train(args)

    def run_train(self, args: Mapping[str, Any]) -> Any:
        """Build the agent, restore it from a given file, and train.

        Return the best mean reward and the epochs.
        """
        try:
            with refuse_rl_games_agents():
                self.agent = self.algo_factory.create(self.algo_name, base_name="run", params=self.params)
        except IsaacGymAmp:
            self.agent = AmpAgent("run", self.params)
        if not isinstance(self.agent, Agent):
            refuse_overrides(type(self.agent))
        self._prepare(self.agent, args)
        return self.agent.train()

    def run_play(self, args: Mapping[str, Any]) -> Any:
        """Build a player, restore it and let it play."""
        player = self.create_player()
        self._prepare(player, args)
        return player.run()

    def create_player(self) -> Any:
        """Return a player that is still to be restored."""
        return self.player_factory.create(self.algo_name, params=self.params)

    def _prepare(self, made: Any, args: Mapping[str, Any]) -> None:
        if args.get("checkpoint") and args.get("train") and args.get("load_critic_only"):
            made.restore_central_value_function(args["checkpoint"])
        elif args.get("checkpoint"):
            made.restore(args["checkpoint"])
        if args.get("sigma") is not None:
            policy = made.policy if isinstance(made, PpoPlayer) else made.algorithm.policy
            set_sigma(policy, float(args["sigma"]))


@torch.no_grad()
def set_sigma(policy: Policy, log_std: float) -> None:
    """Set the std of a policy, as rl_games' `sigma` does; it must not depend on the observation."""
    head = policy.actor.head
    if not isinstance(head, GaussianHead) or not isinstance(head.raw_std, torch.Tensor):
        raise ConfigError(f"sigma={log_std}: the policy's std is no parameter that could be set")
    own = head.log_std.form in ("log", "softplus", "linear")  # the number is rl_games' parameter
    raw = torch.tensor(log_std)
    head.raw_std.copy_(raw if own else head.log_std.inverse(raw.exp()))


def _copied(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the plain settings, with the objects that scripts put there."""
    config = params["config"]
    own = {name: config[name] for name in OBJECTS if name in config}
    copied = deepcopy(plain(params))
    copied["config"] |= own
    return copied
