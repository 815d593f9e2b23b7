"""rl_games' players: a trained policy without learning.

N environments times agents, L recurrent layers, H units.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from canter.algorithms.ppo import PPOConfig
from canter.algorithms.sac import SACConfig
from canter.compat.own_module import by_layer, stacked
from canter.compat.pickled_file import read_pickled
from canter.compat.rl_games import checkpoint, sac
from canter.compat.rl_games.agent import imported_settings, make_env, number_of_actors, with_suffix
from canter.compat.rl_games.env import RlGamesEnv, call_env
from canter.config import TrainConfig
from canter.core.specs import ACTION_MASK, EnvSpec
from canter.core.struct import Obs, State
from canter.nn.actor_critic import Policy
from canter.play.player import EpisodeCounter, PlayStep
from canter.play.player import Player as Plays

NO_LIMIT = 10**9
"""Number of games for an endless player in rl_games."""


class PpoPlayer:
    """The player of `player_factory`.

    `states`, a list of `[L, N, H]`, may be zeroed in place at episode ends.
    """

    parity = True

    def __init__(self, params: Mapping[str, Any]) -> None:
        self.params = params
        self.config = params["config"]
        self.player_config = dict(self.config.get("player") or {})
        self.device = torch.device(str(self.config.get("device_name", self.config.get("device", "cpu"))))
        if self.device.type == "cuda" and not torch.cuda.is_available():
            self.device = torch.device("cpu")
        count = number_of_actors(self.config)
        own = {"env_config": self.player_config["env_config"]} if "env_config" in self.player_config else {}
        actors = int(self.player_config.get("num_actors", count))
        self.env = make_env({**params, "config": {**self.config, **own}}, actors, str(self.device), self.parity)
        self.num_agents = self.env.spec.num_agents
        spec = replace(self.env.spec, num_envs=count * self.num_agents)
        imported = imported_settings(params, spec, parity=self.parity, num_envs=count, agents=self.num_agents)
        self.policy = self._build(imported.config, spec)
        self.is_rnn = self.policy.initial_state(1) != ()
        self.states: list[Tensor] | None = None
        self.batch_size = 1
        self.has_batch_dimension = False
        misspelt = self.player_config.get("determenistic", True)  # as rl_games reads it too
        self.is_deterministic = bool(self.player_config.get("deterministic", misspelt))
        self.games_num = int(self.player_config.get("games_num", NO_LIMIT))
        self.n_game_life = int(self.player_config.get("n_game_life", 1))
        self.max_steps = 108000 // 4
        self.print_stats = bool(self.player_config.get("print_stats", True))
        self.render_env = bool(self.player_config.get("render", False))

    def _build(self, config: TrainConfig, spec: EnvSpec) -> Policy:
        assert isinstance(config.algorithm, PPOConfig)
        self.ppo = replace(config.algorithm, extensions=()).build(spec, config.seed)  # they learn, and do not play
        return self.ppo.policy

    def restore(self, fn: str) -> None:
        """Load the policy and the environment's state from a file, without running code in it."""
        path = with_suffix(fn)
        tree = read_pickled(path)
        self._load(tree, path)
        if tree.get("env_state") is not None:
            call_env(self.env, "set_env_state", tree["env_state"])

    def _load(self, tree: Mapping[str, Any], path: Path) -> None:
        checkpoint.load(self.ppo, checkpoint.weights_in(tree, path), ("actor", "critic"))

    def reset(self) -> None:
        """Reset the recurrent state."""
        self.init_rnn()

    def init_rnn(self) -> None:
        """Reset the recurrent state for `batch_size` environments."""
        if self.is_rnn:
            self.states = [*stacked(self.policy.initial_state(self.batch_size))]

    def get_batch_size(self, obses: Any, batch_size: int) -> int:
        """Return the number of environments in observations."""
        group = next(iter(self._groups(obses).values()))
        name = next(iter(self.policy.actor.network.groups))
        self.has_batch_dimension = group.dim() > len(self.policy.spec.obs[name].shape)
        self.batch_size = int(group.shape[0]) if self.has_batch_dimension else batch_size
        return self.batch_size

    def obs_to_torch(self, obs: Any) -> Any:
        """Return observations as tensors on the device."""
        obs = obs["obs"] if isinstance(obs, Mapping) and "obs" in obs else obs
        if isinstance(obs, Mapping):
            return {name: torch.as_tensor(value).to(self.device) for name, value in obs.items()}
        return torch.as_tensor(obs).to(self.device).float()

    def _groups(self, obs: Any) -> Obs:
        obs = self.obs_to_torch(obs)
        return dict(obs) if isinstance(obs, Mapping) else {"policy": obs}

    def get_action(self, obs: Any, is_deterministic: bool = False) -> Tensor:
        """Return actions for the environment, `[N, ...]`.

        Without the first axis if the observation has none.
        """
        return self._act(self._groups(obs), is_deterministic)

    def get_masked_action(self, obs: Any, action_masks: Any, is_deterministic: bool = True) -> Tensor:
        """Return actions among those that the mask allows."""
        groups = self._groups(obs)
        mask = torch.as_tensor(action_masks).to(self.device).bool()
        groups[ACTION_MASK] = mask.reshape(*next(iter(groups.values())).shape[:1], -1)
        return self._act(groups, is_deterministic)

    @torch.no_grad()
    def _act(self, groups: Obs, deterministic: bool) -> Tensor:
        known = self.policy.spec.obs
        bare = (group.dim() == len(known[name].shape) for name, group in groups.items() if name in known)
        single = not self.has_batch_dimension and all(bare)
        if single:
            groups = {name: group.unsqueeze(0) for name, group in groups.items()}
        batch_size = next(iter(groups.values())).shape[0]
        if self.is_rnn and self.states is None:
            self.states = [*stacked(self.policy.initial_state(batch_size))]
        state = () if self.states is None else by_layer(self.states)
        action, state = self.policy.act(groups, state, deterministic=deterministic)
        if self.is_rnn:
            self.states = [*stacked(state)]
        return action[0] if single else action

    def env_reset(self, env: Any) -> Any:
        """Start new episodes; return the observations for `get_action`."""
        return self._shown(env.reset(None))

    def env_step(self, env: Any, actions: Tensor) -> tuple[Any, Tensor, Tensor, dict[str, Any]]:
        """Return observations, rewards, ends and infos of a step.

        Rewards and ends on the CPU, for rl_games' loops.
        """
        step = env.step(actions)
        return self._shown(step.obs), step.reward.cpu(), (step.terminated | step.truncated).cpu(), dict(step.info or {})

    def _shown(self, groups: Obs) -> Any:
        return groups["policy"] if set(groups) <= {"policy", "critic"} else dict(groups)

    def run(self) -> float:
        """Play the games by `get_action`, print each that ends and all results; return the mean reward."""
        games = None if self.games_num >= NO_LIMIT else self.games_num * self.n_game_life
        steps = self.max_steps * (games or 1)
        begin = time.perf_counter()
        report = EndedGames(self.env) if self.print_stats else None
        played = Plays(_Acts(self), self.env, deterministic=self.is_deterministic).play(games, steps, report)
        episodes = played.finished or played.unfinished
        rewards = [episode.return_ * self.n_game_life for episode in episodes]
        mean = sum(rewards) / max(len(rewards), 1)
        length = sum(episode.length for episode in episodes) / max(len(episodes), 1)
        best = max(rewards, default=math.nan)
        seconds = time.perf_counter() - begin
        print(f"av reward: {mean:g} av steps: {length:g} games: {len(rewards)} best: {best:g} seconds: {seconds:.1f}")
        return mean

    @property
    def vec_env(self) -> Any:
        """Return the wrapped environment of rl_games, or None."""
        return self.env.env if isinstance(self.env, RlGamesEnv) else self.env


class SacPlayer(PpoPlayer):
    """The player of `sac`."""

    def _build(self, config: TrainConfig, spec: EnvSpec) -> Policy:
        assert isinstance(config.algorithm, SACConfig)
        policy = config.algorithm.model().build_policy(spec)
        policy.actor.to(spec.device)
        return policy

    def _load(self, tree: Mapping[str, Any], path: Path) -> None:
        sac.tensors_of({"actor": self.policy.actor}).load(sac.weights_in(tree, path))


class EndedGames:
    """Prints rl_games' line about the games that end in a step, their means if they are several."""

    def __init__(self, env: Any) -> None:
        self.counter = EpisodeCounter(env, None)

    def __call__(self, played: PlayStep) -> None:
        """Count a step."""
        self.counter.add(played.step)
        ended = [games.pop() for games in self.counter.finished if games]
        if ended:
            reward = sum(game.return_ for game in ended) / len(ended)
            steps = sum(game.length for game in ended) / len(ended)
            print(f"reward: {reward:.2f} steps: {steps:.1f}", flush=True)


class _Acts:
    """A policy for Canter's play loop that calls a player's `get_action`."""

    def __init__(self, player: PpoPlayer) -> None:
        self.player = player

    def initial_state(self, num_envs: int) -> State:
        """Return (): the player keeps the recurrent state."""
        self.player.batch_size = num_envs
        self.player.has_batch_dimension = True
        self.player.init_rnn()
        return ()

    def act(
        self, obs: Obs, state: State, reset: Tensor | None, *, deterministic: bool, generator: torch.Generator | None
    ) -> tuple[Tensor, State]:
        """Return actions, after resetting the recurrent state of new episodes."""
        if reset is not None and self.player.states is not None:
            for part in self.player.states:
                part.masked_fill_(reset.view(1, -1, 1), 0.0)
        if ACTION_MASK not in obs:
            return self.player.get_action(obs, deterministic), state
        others = {name: group for name, group in obs.items() if name != ACTION_MASK}
        return self.player.get_masked_action(others, obs[ACTION_MASK], deterministic), state
