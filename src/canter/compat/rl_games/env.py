"""rl_games' vectorised environments here, and its registries.

`vecenv.register` and `env_configurations.register` are used as before:

    from canter.compat.rl_games import env_configurations, vecenv

N environments times agents; the agents of one environment are neighbours in both libraries.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canter.compat.drop_in import SourceEnv
from canter.core.declarations import MotionSpec
from canter.core.plain import ConfigError
from canter.core.specs import ACTION_MASK, ActionSpec, Continuous, Discrete, Env, MultiDiscrete, Step, TrainingProgress
from canter.core.struct import Obs
from canter.envs import EnvConfig
from canter.envs.imports import registered_id
from canter.nn.network import networks

_types: dict[str, Callable[..., Any]] = {}
_environments: dict[str, Mapping[str, Any]] = {}
_networks: dict[str, Any] = {}
_models: dict[str, Any] = {}


def _theirs(module: str, name: str) -> Mapping[str, Any]:
    """Return a table of rl_games itself; empty if it was not imported."""
    return getattr(sys.modules.get(f"rl_games.common.{module}"), name, None) or {}


def find_environment(name: str) -> Mapping[str, Any] | None:
    """Return an environment's registration, here or in rl_games; None if there is none."""
    return _environments.get(name) or _theirs("env_configurations", "configurations").get(name)


def create_vec_env(name: str, num_actors: int, **options: Any) -> Any:
    """Return a vectorised environment of rl_games by its registered name.

    None if its type is not registered.
    """
    found = find_environment(name)
    if found is None:
        raise ConfigError(f"env_name={name!r}: nobody registered it with env_configurations.register")
    kind = found.get("vecenv_type", "")
    builder = _types.get(kind) or _theirs("vecenv", "vecenv_config").get(kind)
    return None if builder is None else builder(name, num_actors, **options)


KNOWN_NETWORKS = ("actor_critic", "resnet_actor_critic", "rnd_curiosity", "soft_actor_critic", "amp")
"""rl_games' own names of networks, and IsaacGymEnvs' for AMP, which are known here."""


def find_network(name: str) -> Callable[..., Any] | None:
    """Return the registered builder of a user's network, here or in rl_games; None if there is none."""
    if name in KNOWN_NETWORKS or name in networks:
        return None
    theirs = getattr(sys.modules.get("rl_games.algos_torch.model_builder"), "NETWORK_REGISTRY", None) or {}
    return _networks.get(name) or theirs.get(name)


def refuse_user_model(name: str) -> None:
    """Raise ConfigError for a model of the user's, which is written for rl_games' agents."""
    if name in _models and name != "continuous_amp":  # IsaacGymEnvs' own, which is known here
        raise ConfigError(
            f"model {name!r} is a class for rl_games' own agents: write its distribution as one of Canter, "
            f"canter.register('distribution', {name!r}), docs/extending.md"
        )


vecenv = SimpleNamespace(register=_types.__setitem__, vecenv_config=_types, create_vec_env=create_vec_env)
env_configurations = SimpleNamespace(register=_environments.__setitem__, configurations=_environments)
model_builder = SimpleNamespace(register_network=_networks.__setitem__, register_model=_models.__setitem__)


Hook = Callable[[Any, Tensor], Any]
"""Called with the infos of a step and the indices of ended episodes."""


class RlGamesEnv(SourceEnv):
    """An `IVecEnv`: `obs` for the policy, `states` for the critic, masks, time-outs and metrics.

    Without `states` the critic reads none: in rl_games only a central value reads them.
    """

    def __init__(
        self,
        env: Any,
        info: Mapping[str, Any] | None,
        num_actors: int,
        device: str,
        *,
        clip_actions: bool,
        masks: bool,
        states: bool = True,
    ) -> None:
        super().__init__(env, device)
        self.masks = masks
        self.states = states
        self.info = env.get_env_info() if info is None else info
        self.hook: Hook | None = None
        """Called with the infos of every step; it waits for the device."""
        self.algo: Any = None
        self.agents = int(self.info.get("agents", 1))
        if int(self.info.get("value_size", 1)) != 1:
            raise ConfigError(f"value_size={self.info['value_size']}: Canter learns from one reward, so add them up")
        self.first = self.env.reset()
        self.tensors = isinstance(_any_of(self.first), Tensor)
        action = action_spec(self.info["action_space"], clip_actions)
        num_envs = num_actors * self.agents
        self.spec = self.describe(self.groups(self.first), action, num_envs, num_agents=self.agents)

    def apply(self, action: Tensor) -> tuple[Any, Tensor, Tensor, Mapping[str, Any]]:
        """Return observations, rewards, ends `[N]` and infos of one action `[N, A]` per agent."""
        obs, reward, done, infos = self.env.step(action if self.tensors else action.cpu().numpy())
        done = self.flags(done)
        if self.hook is not None:
            self.hook(infos, done.nonzero(as_tuple=False))
        return obs, self.tensor(reward), done, infos if isinstance(infos, Mapping) else {}

    def groups(self, obs: Any) -> Obs:
        """Return observations as groups: `policy`, and `critic` for states.

        Inner groups keep their names.
        """
        named = dict(obs) if isinstance(obs, Mapping) else {"obs": obs}
        found = _by_name(named.pop("obs", None), "policy")
        states = named.pop("states", None)
        found |= _by_name(states, "critic") if self.states else {}
        groups = {str(name): self.tensor(group) for name, group in (found | named).items()}
        if self.agents > 1 and self.states:  # states are of the environment: each of its agents gets them
            rows = next(iter(groups.values())).shape[0]
            for name in _by_name(states, "critic"):
                own = groups[str(name)]
                groups[str(name)] = own if len(own) == rows else own.repeat_interleave(self.agents, 0)
        if self.masks:
            mask = torch.as_tensor(np.asarray(self.env.get_action_masks())).bool()
            groups[ACTION_MASK] = mask.reshape(next(iter(groups.values())).shape[0], -1).to(self.device)
        return groups

    def tensor(self, value: Any) -> Tensor:
        """Return a tensor on the learner's device, float32 unless it holds bytes or flags."""
        tensor = torch.as_tensor(value).to(self.device)
        return tensor if tensor.dtype in (torch.uint8, torch.bool) else tensor.float()

    def reset(self, seed: int | None = None) -> Obs:
        """Return the first observations; later calls reset."""
        first = self.first
        self.first = None
        return self.groups(self.env.reset() if first is None else first)

    def step(self, action: Tensor) -> Step:
        """Apply one action `[N, A]` per agent."""
        obs, reward, done, info = self.apply(action)
        return self.make_step(self.groups(obs), reward, done, info.get("time_outs"), info.get("episode"))

    def set_progress(self, progress: TrainingProgress) -> None:
        """Pass the progress of training to the simulator, as rl_games does once an epoch."""
        tell = getattr(self.env, "set_train_info", None)
        if tell is not None:
            tell(progress.env_steps, self.algo)


class AmpEnv(RlGamesEnv):
    """An environment for IsaacGymEnvs' AMP agent, which resets it and asks it for transitions of clips.

    `infos["amp_obs"]` `[N, W]` is the transition of a step; `fetch_amp_obs_demo(count)` returns
    random ones of clips. As many as `buffer` are kept, of which every rollout replaces `batch`.
    """

    def __init__(self, env: Any, *arguments: Any, batch: int, buffer: int, **options: Any) -> None:
        self.task = env.env
        self.fetch: Callable[[int], Tensor] = self.task.fetch_amp_obs_demo
        self.batch = batch
        self.transition: Tensor | None = None
        """Transitions of the last step; None before it."""
        rows = [self.fetch(batch).clone() for _ in range(max(1, buffer // batch))]
        super().__init__(env, *arguments, **options)
        self.kept = torch.cat(rows).to(self.device)
        self.next = 0
        motion = MotionSpec(0.0, {}, demonstrations=lambda: self.kept)
        self.spec = replace(self.spec, motion=motion, final_obs="separate")

    def groups(self, obs: Any) -> Obs:
        """Return observations as groups, with the transition as the group `amp`; zeros before a step."""
        groups = super().groups(obs)
        if self.transition is None:
            width = self.info["amp_observation_space"].shape[0]
            self.transition = torch.zeros(len(next(iter(groups.values()))), width, device=self.device)
        return {name: group.clone() for name, group in groups.items()} | {AMP: self.transition}

    def reset(self, seed: int | None = None) -> Obs:
        """Return the first observations, of environments that the task resets now."""
        super().reset(seed)
        return self.groups(self.task.reset_done()[0])

    def step(self, action: Tensor) -> Step:
        """Apply one action per environment, then reset those whose episode has ended."""
        obs, reward, done, info = self.apply(action)
        self.transition = self.tensor(info["amp_obs"]).clone()
        cut = ~self.flags(info["terminate"])
        final = self.groups(obs)
        step = self.make_step(self.groups(self.task.reset_done()[0]), reward, done, cut, info.get("episode"))
        return replace(step, final_obs=final)

    def set_progress(self, progress: TrainingProgress) -> None:
        """Pass the progress of training on, and replace some of the transitions of clips."""
        super().set_progress(progress)
        rows = torch.arange(self.next, self.next + self.batch, device=self.device) % len(self.kept)
        self.kept[rows] = self.tensor(self.fetch(self.batch))
        self.next = (self.next + self.batch) % len(self.kept)


def call_env(env: Env, name: str, *arguments: Any) -> Any:
    """Call a method of rl_games' environment; return None without it."""
    method = getattr(env.env, name, None) if isinstance(env, RlGamesEnv) else None
    return None if method is None else method(*arguments)


def registered_env(config: Mapping[str, Any], num_actors: int, device: str) -> Env | None:
    """Return the environment that a script passes or has registered under the settings' name; None without one."""
    if config.get("vec_env") is not None:
        return wrapped(config["vec_env"], config.get("env_info"), config, num_actors, device)
    name = str(config.get("env_name", ""))
    found = find_environment(name)
    if found is None:
        return None
    options = dict(config.get("env_config") or {})
    made = create_vec_env(name, num_actors, **options)
    if made is not None:
        return wrapped(made, None, config, num_actors, device)
    options.pop("seed", None)
    env_id = registered_id(f"rl_games:{name}", found["env_creator"])
    return EnvConfig(id=env_id, num_envs=num_actors, options=options).build(device)


def wrapped(env: Any, info: Any, config: Mapping[str, Any], num_actors: int, device: str) -> RlGamesEnv:
    """Return rl_games' environment as one of Canter's, by `params.config`."""
    read = {
        "clip_actions": bool(config.get("clip_actions", True)),
        "masks": bool(config.get("use_action_masks", False)),
        "states": bool(config.get("central_value_config")),
    }
    clips = (config.get("amp") or {}).get("motions")
    if "amp_batch_size" not in config or clips or not hasattr(getattr(env, "env", None), "fetch_amp_obs_demo"):
        return RlGamesEnv(env, info, num_actors, device, **read)
    batch = int(config["amp_batch_size"])
    buffer = int(config.get("amp_obs_demo_buffer_size", batch))
    return AmpEnv(env, info, num_actors, device, batch=batch, buffer=buffer, **read)


AMP = "amp"
"""Observation group of the transitions that the discriminator reads."""


def action_spec(space: Any, clip_actions: bool) -> ActionSpec:
    """Return Canter's description of an action space.

    Without `clip_actions` it has no bounds, as in rl_games.
    """
    kinds = {cls.__name__ for cls in type(space).__mro__}  # of gymnasium, or of the older gym
    if "Discrete" in kinds:
        return Discrete(int(space.n))
    if "Tuple" in kinds:
        return MultiDiscrete(tuple(int(part.n) for part in space))
    if "MultiDiscrete" in kinds:
        return MultiDiscrete(tuple(int(n) for n in space.nvec))
    low, high = (np.asarray(bound, dtype=float).reshape(-1) for bound in (space.low, space.high))
    if not clip_actions:
        low, high = np.full_like(low, -np.inf), np.full_like(high, np.inf)
    return Continuous(tuple(low.tolist()), tuple(high.tolist()))


def _by_name(part: Any, name: str) -> dict[str, Any]:
    """Return the groups of a part of an observation; a single tensor gets the given name."""
    return {} if part is None else dict(part) if isinstance(part, Mapping) else {name: part}


def _any_of(obs: Any) -> Any:
    """Return one of the arrays or tensors of an observation."""
    while isinstance(obs, Mapping):
        obs = next(iter(obs.values()))
    return obs
