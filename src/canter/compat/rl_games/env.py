"""rl_games' vectorised environments behind Canter's contract.

N environments times agents; a world's agents are rows beside each other in both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from canter.compat.adapter import ParentEnv
from canter.core.plain import ConfigError
from canter.core.specs import ACTION_MASK, ActionSpec, Continuous, Discrete, MultiDiscrete, Step, TrainingProgress
from canter.core.struct import Obs

Hook = Callable[[Any, Tensor], Any]
"""Called with the infos of a step and the rows that ended."""


class RlGamesEnv(ParentEnv):
    """An `IVecEnv`: `obs` for the policy, `states` for the critic, masks, time-outs and what it says of itself.

    Without `states` the critic gets none: rl_games shows them to a central value alone.
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
        self.masks, self.states = masks, states
        self.info = env.get_env_info() if info is None else info
        self.hook: Hook | None = None
        """What looks at the infos of every step, if anybody wants to; it waits for the device."""
        self.algo: Any = None
        self.agents = int(self.info.get("agents", 1))
        if int(self.info.get("value_size", 1)) != 1:
            raise ConfigError(f"value_size={self.info['value_size']}: Canter learns from one reward, so add them up")
        self.first = self.env.reset()
        self.tensors = isinstance(_any_of(self.first), Tensor)
        action, rows = action_spec(self.info["action_space"], clip_actions), num_actors * self.agents
        self.spec = self.describe(self.groups(self.first), action, rows, num_agents=self.agents)

    def groups(self, obs: Any) -> Obs:
        """Observations as groups: `policy`, and `critic` where there are states; groups inside keep their names."""
        named = dict(obs) if isinstance(obs, Mapping) else {"obs": obs}
        found = _by_name(named.pop("obs", None), "policy")
        states = named.pop("states", None)
        found |= _by_name(states, "critic") if self.states else {}
        groups = {str(name): self.tensor(group) for name, group in (found | named).items()}
        if self.masks:
            mask = torch.as_tensor(np.asarray(self.env.get_action_masks())).bool()
            groups[ACTION_MASK] = mask.reshape(next(iter(groups.values())).shape[0], -1).to(self.device)
        return groups

    def tensor(self, value: Any) -> Tensor:
        """On the learner's device, float32 unless it is an image of bytes."""
        tensor = torch.as_tensor(value).to(self.device)
        return tensor if tensor.dtype in (torch.uint8, torch.bool) else tensor.float()

    def reset(self, seed: int | None = None) -> Obs:
        """The first observations, once; later calls reset."""
        first, self.first = self.first, None
        return self.groups(self.env.reset() if first is None else first)

    def step(self, action: Tensor) -> Step:
        """Apply one action per row."""
        given = action if self.tensors else action.cpu().numpy()
        obs, reward, done, infos = self.env.step(given)
        told = infos if isinstance(infos, Mapping) else {}
        if self.hook is not None:
            self.hook(infos, self.flags(done).nonzero(as_tuple=False))
        return self.stepped(self.groups(obs), self.tensor(reward), done, told.get("time_outs"), told.get("episode"))

    def set_progress(self, progress: TrainingProgress) -> None:
        """Tell the simulator how far training is, as rl_games does once an epoch."""
        tell = getattr(self.env, "set_train_info", None)
        if tell is not None:
            tell(progress.env_steps, self.algo)


def action_spec(space: Any, clip_actions: bool) -> ActionSpec:
    """Canter's description of an action space; without `clip_actions` rl_games knows no bounds."""
    if isinstance(space, gymnasium.spaces.Discrete) or type(space).__name__ == "Discrete":
        return Discrete(int(space.n))
    if type(space).__name__ == "Tuple":
        return MultiDiscrete(tuple(int(part.n) for part in space))
    if type(space).__name__ == "MultiDiscrete":
        return MultiDiscrete(tuple(int(n) for n in space.nvec))
    low, high = (np.asarray(bound, dtype=float).reshape(-1) for bound in (space.low, space.high))
    if not clip_actions:
        low, high = np.full_like(low, -np.inf), np.full_like(high, np.inf)
    return Continuous(tuple(low.tolist()), tuple(high.tolist()))


def _by_name(part: Any, name: str) -> dict[str, Any]:
    """The groups of a part of an observation; one that is not in groups has the name given."""
    return {} if part is None else dict(part) if isinstance(part, Mapping) else {name: part}


def _any_of(obs: Any) -> Any:
    """One of the arrays or tensors of an observation."""
    while isinstance(obs, Mapping):
        obs = next(iter(obs.values()))
    return obs
