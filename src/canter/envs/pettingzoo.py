"""PettingZoo's parallel environments, with one row per agent.

E environments, A possible agents in each, N = E x A rows: row `environment * A + agent`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from torch import Tensor

from canter.core.declarations import OwnArrays
from canter.core.registry import UserError, nearest
from canter.core.specs import ACTION_MASK, EnvSpec, Step, TensorSpec, UnsupportedSpace
from canter.core.struct import Obs, tree_map
from canter.envs.gymnasium import env_seeds
from canter.envs.spaces import ObsBuffer, ObsReader, action_codec

CRITIC = "critic"
"""The observation group that holds the joint state."""

ParallelEnv = Any
"""A `pettingzoo.ParallelEnv`, which is an optional dependency."""


class PettingZooEnv:
    """E copies of a `pettingzoo.ParallelEnv` with equal spaces for all agents, for one policy.

    A row is valid while its agent is alive: an agent may die before its environment ends, and may
    join late. An environment without agents is reset within the same step. Observations, actions
    and masks are treated like Gymnasium's; a mask may also be in an agent's info.

    With `joint_state` the group "critic" holds the result of `state()` or, if the environment has
    no `state_space`, the observations of all agents side by side (0 for the dead), followed by the
    agent's index as a one-hot vector. Critics read it by default (MAPPO); a critic set to read the
    agent's own groups sees what its agent sees (IPPO).
    """

    _closed = False
    seeds_by_row = True

    def __init__(
        self,
        make_env: Callable[[], ParallelEnv],
        num_envs: int,
        *,
        joint_state: bool = True,
        device: torch.device | str = "cpu",
        env_id: str = "",
    ) -> None:
        if num_envs < 1:
            raise UserError(f"num_envs={num_envs} must be at least 1")
        self._envs = [make_env() for _ in range(num_envs)]
        first = self._envs[0]
        env_id = env_id or str(first)
        # PettingZoo's API leaves `possible_agents` and `state_space` out of environments that do
        # not have them.
        self._agents = list(getattr(first, "possible_agents", ()))
        if not self._agents:
            raise UserError(f"{env_id} does not declare possible_agents, and rows need a fixed set of agents")
        self._rows = [(env, agent) for env in range(num_envs) for agent in self._agents]
        self._action = action_codec(_common(first.action_space, self._agents, f"{env_id}: action"))
        space = _common(first.observation_space, self._agents, f"{env_id}: observation")
        self._reader = ObsReader(space, len(self._rows), self._action.spec)
        self._mask_in_info = self._reader.add_mask(first.reset()[1].values)
        self._own = [name for name in self._reader.specs if name != ACTION_MASK]
        self._has_state = getattr(first, "state_space", None) is not None
        specs = self._reader.specs | ({CRITIC: self._joint_spec(env_id)} if joint_state else {})
        self.spec = EnvSpec(
            obs=specs,
            action=self._action.spec,
            own_arrays=OwnArrays(self._action.array, self._reader.choices),
            num_envs=len(self._rows),
            device=torch.device(device),
            env_id=env_id,
            num_agents=len(self._agents),
            durations=False,
        )
        """Shapes, dtypes, bounds and conventions of one agent."""
        self._obs = ObsBuffer(specs, len(self._rows))
        self._final = ObsBuffer(specs, len(self._rows))
        self._alive = np.zeros(len(self._rows), dtype=bool)

    def reset(self, seed: int | None = None) -> Obs:
        """Reset every environment with a different seed; return observations `[N, ...]`."""
        seeds = [None] * len(self._envs) if seed is None else env_seeds(seed, len(self._envs))
        self._reset_envs(dict(enumerate(seeds)))
        return self._to_device(self._obs.tensors)

    def step(self, action: Tensor) -> Step:
        """Apply the living agents' actions: `[N, A]` float32, `[N]` int64 or `[N, K]` int64."""
        actions = self._action.encode(action)
        valid = self._alive.copy()
        results = []
        for index, env in enumerate(self._envs):
            alive = [row for row in self._rows_of(index) if valid[row]]
            results.append(env.step({self._rows[row][1]: actions[row] for row in alive}))
        reward = self._column(results, 1, valid)
        terminated = self._column(results, 2, valid) != 0
        truncated = (self._column(results, 3, valid) != 0) & ~terminated
        self._update_alive()
        self._check(results, left=valid & ~self._alive & ~terminated & ~truncated, shown=self._alive | truncated)
        self._write(self._final, {index: (raw, info) for index, (raw, _, _, _, info) in enumerate(results)})
        for name, array in self._obs.arrays.items():
            array[:] = self._final.arrays[name]
        self._reset_envs({index: None for index, env in enumerate(self._envs) if not env.agents})
        step = Step(
            obs=dict(self._obs.tensors),
            reward=torch.from_numpy(reward.astype(np.float32)),
            terminated=torch.from_numpy(terminated),
            truncated=torch.from_numpy(truncated),
            valid=torch.from_numpy(valid),
            final_obs=dict(self._final.tensors),
        )
        return self._to_device(step)

    def close(self) -> None:
        """Close every environment; calling it twice is fine."""
        if not self._closed:
            self._closed = True
            for env in self._envs:
                env.close()

    def _rows_of(self, index: int) -> range:
        return range(index * len(self._agents), (index + 1) * len(self._agents))

    def _column(self, results: list[Any], part: int, valid: np.ndarray) -> np.ndarray:
        """Return numbers `[N]` of the living agents from the dicts of all steps; 0 for others."""
        rows = enumerate(self._rows)
        return np.array([float(results[env][part][agent]) if valid[row] else 0.0 for row, (env, agent) in rows])

    def _reset_envs(self, seeds: dict[int, int | None]) -> None:
        """Reset the environments of these numbers and write their first observations."""
        results = {index: self._envs[index].reset(seed=seed) for index, seed in seeds.items()}
        self._update_alive()
        self._write(self._obs, results)
        if ACTION_MASK in self._obs.arrays:
            self._reader.mask_rule.check_(self._obs.arrays[ACTION_MASK], ended=~self._alive)

    def _update_alive(self) -> None:
        self._alive[:] = [agent in self._envs[env].agents for env, agent in self._rows]

    def _write(self, target: ObsBuffer, results: dict[int, tuple[dict[Any, Any], dict[Any, Any]]]) -> None:
        """Write the observations of whole environments; absent agents get 0 and a full mask."""
        own = np.empty(len(self._rows), dtype=object)
        present = np.zeros(len(self._rows), dtype=bool)
        for index, (raw, infos) in results.items():
            for row in self._rows_of(index):
                agent = self._rows[row][1]
                for name in self._reader.specs:
                    target.arrays[name][row] = name == ACTION_MASK
                if agent in raw:
                    own[row] = raw[agent]
                    present[row] = True
                if self._mask_in_info and ACTION_MASK in infos.get(agent, {}):
                    target.arrays[ACTION_MASK][row] = np.asarray(infos[agent][ACTION_MASK]).reshape(-1) != 0
        self._reader.write_final(target, own, present)
        if CRITIC in target.arrays:
            self._write_joint(target, results)

    def _write_joint(self, target: ObsBuffer, indices: Iterable[int]) -> None:
        num_agents = len(self._agents)
        for index in indices:
            rows = self._rows_of(index)
            own = [target.arrays[name][rows].reshape(-1) for name in self._own]
            state = np.asarray(self._envs[index].state()).reshape(-1) if self._has_state else np.concatenate(own)
            target.arrays[CRITIC][rows, :-num_agents] = state
            target.arrays[CRITIC][rows, -num_agents:] = np.eye(num_agents)

    def _joint_spec(self, env_id: str) -> TensorSpec:
        parts = [self._reader.specs[name] for name in self._own] * len(self._agents)
        if self._has_state:
            state = torch.as_tensor(np.asarray(self._envs[0].state()))
            parts = [TensorSpec(tuple(state.shape), state.dtype)]
        images = [part.shape for part in parts if len(part.shape) == 3 and part.dtype == torch.uint8]
        if images:
            raise UnsupportedSpace(
                f"{env_id}: the joint state would be made of images {images[0]}; with joint_state=False critics read "
                "what their agent sees"
            )
        return TensorSpec((sum(math.prod(part.shape) for part in parts) + len(self._agents),))

    def _check(self, results: list[Any], left: np.ndarray, shown: np.ndarray) -> None:
        """Raise UserError for agents that `left` without a flag, or should be `shown`."""
        env_id = self.spec.env_id
        for row, (env, agent) in enumerate(self._rows):
            if left[row]:
                raise UserError(f"{env_id}: agent {agent!r} left without being terminated or truncated")
            if shown[row] and agent not in results[env][0]:
                raise UserError(f"{env_id}: step() returned no observation of agent {agent!r}, which is alive")

    def _to_device(self, tree: Any) -> Any:
        device = self.spec.device
        return tree if device.type == "cpu" else tree_map(lambda leaf: leaf.to(device), tree)


def make_pettingzoo(
    env_id: str,
    num_envs: int,
    *,
    joint_state: bool = True,
    max_episode_steps: int | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> PettingZooEnv:
    """PettingZoo's parallel environments: pettingzoo:sisl/pursuit-v5 (canter[pettingzoo]).

    E copies of an environment of PettingZoo's registry; `kwargs` go to each.
    `max_episode_steps` is what PettingZoo calls `max_cycles`. See `PettingZooEnv` for the rest.
    """
    try:
        import pettingzoo
        from pettingzoo.env_registry.exceptions import FailedToImport
    except ImportError as error:
        raise ImportError(f'{env_id} needs PettingZoo: pip install "canter[pettingzoo]"') from error
    if env_id not in pettingzoo.parallel_registry:
        raise UserError(f"unknown PettingZoo environment {env_id!r}: {nearest(env_id, pettingzoo.parallel_registry)}")
    make_env = partial(pettingzoo.make, "parallel", env_id, max_cycles=max_episode_steps, **kwargs)
    try:
        return PettingZooEnv(make_env, num_envs, joint_state=joint_state, device=device, env_id=f"pettingzoo:{env_id}")
    except FailedToImport as error:
        raise ImportError(f"{error} ({error.__cause__})") from error


def _common(space_of: Callable[[Any], Space], agents: list[Any], name: str) -> Space:
    """Return the space that all agents share, or raise UnsupportedSpace."""
    common = space_of(agents[0])
    for agent in agents:
        if space_of(agent) != common:
            raise UnsupportedSpace(
                f"{name} space of {agents[0]!r} is {common} and that of {agent!r} is {space_of(agent)}; a shared "
                "policy needs them to be the same, so pad them with SuperSuit's pad_observations_v0 and "
                "pad_action_space_v0"
            )
    return common
