"""Pictures of environments in the plane, by numpy alone.

K points, H x W pixels.

What every environment written in torch shares: rows that restart in place, on one device, without the host.

N is the number of parallel environments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canter.core.registry import UserError
from canter.core.seeding import draw_for_rank
from canter.core.specs import ActionSpec, Continuous, Discrete, EnvSpec, Step, TensorSpec
from canter.core.struct import Obs

Colour = tuple[int, int, int]
WHITE, GREY, BLACK = (255, 255, 255), (225, 228, 232), (40, 44, 52)
BLUE, RED, GREEN = (52, 101, 164), (204, 60, 50), (60, 160, 90)


class Picture:
    """A window on the plane around `centre`, `span` units wide; y points up."""

    def __init__(self, centre: tuple[float, float], span: float, width: int = 480, height: int = 320) -> None:
        self.pixel = span / width
        x = centre[0] + (np.arange(width) + 0.5 - width / 2) * self.pixel
        y = centre[1] - (np.arange(height) + 0.5 - height / 2) * self.pixel
        self.x, self.y = x[None, :], y[:, None]
        self.image = np.full((height, width, 3), WHITE, dtype=np.float64)

    def line(self, points: np.ndarray, thickness: float, colour: Colour) -> None:
        """Straight pieces from each of the points `[K, 2]` to the next, with round ends."""
        distances = [self._distance(start, end) for start, end in pairwise(points)]
        self._fill(np.minimum.reduce(distances), thickness / 2, colour)

    def disc(self, point: np.ndarray, radius: float, colour: Colour) -> None:
        """A filled circle."""
        self._fill(self._distance(point, point), radius, colour)

    def box(self, low: tuple[float, float], high: tuple[float, float], colour: Colour) -> None:
        """A filled rectangle."""
        inside = (self.x >= low[0]) & (self.x <= high[0]) & (self.y >= low[1]) & (self.y <= high[1])
        self.image[inside] = colour

    def grid(self, step: float, colour: Colour = GREY) -> None:
        """Lines at all multiples of `step`, to see movement by."""
        for axis in (self.x, self.y):
            near = np.abs((axis + step / 2) % step - step / 2) < 0.6 * self.pixel
            self.image[np.broadcast_to(near, self.image.shape[:2])] = colour

    def pixels(self) -> np.ndarray:
        """`[H, W, 3]` uint8."""
        return self.image.round().astype(np.uint8)

    def _distance(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Of every pixel `[H, W]` from a piece of a line."""
        along = end - start
        length2 = float(along @ along)
        share = ((self.x - start[0]) * along[0] + (self.y - start[1]) * along[1]) / (length2 or 1.0)
        share = np.clip(share, 0.0, 1.0)
        return np.hypot(self.x - start[0] - share * along[0], self.y - start[1] - share * along[1])

    def _fill(self, distance: np.ndarray, radius: float, colour: Colour) -> None:
        # A pixel at the edge is covered in part.
        cover = np.clip((radius - distance) / self.pixel + 0.5, 0.0, 1.0)[..., None]
        self.image = (1 - cover) * self.image + cover * np.array(colour)


EnvState = dict[str, Tensor]
"""The simulated world of N rows: tensors `[N, ...]` by name."""


@dataclass(frozen=True)
class Outcome:
    """What one step of the dynamics leads to, before any row restarts."""

    state: EnvState
    """The world after the step, in rows that ended as well."""
    reward: Tensor
    """`[N]`, of any real dtype."""
    terminated: Tensor
    """`[N]` bool."""
    truncated: Tensor | None = None
    """`[N]` bool where the dynamics themselves cut episodes; the time limit is added to it."""
    info: dict[str, Tensor] = field(default_factory=dict)
    """Handed on as `Step.info`."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Handed on as `Step.metrics`, 0-d each."""


class TensorEnv(ABC):
    """N environments in torch: a finished row gives its last observation and starts anew within the same step.

    Nothing here waits for the device and every shape is static, so a whole rollout can be captured in a CUDA graph
    (register `generator` with it). The world lives in buffers whose addresses never change. A concrete environment
    is final and says three things, all as pure functions: `_sample_state`, `_advance` and `_observe`. Draw with
    `_uniform` and `_integers`, or by `canter.core.seeding.draw_for_rank`: the generator is the same on every rank,
    and these take what belongs to the rows of this one.

    `max_episode_steps` cuts episodes (truncation, not termination). `random_start` lets the first episodes begin with
    random step counts, so that the rows of a large batch do not all end together. `truncates` tells the spec about
    cuts that `_advance` makes; None takes it from `max_episode_steps`. `more` are further fields of the spec, such as
    `symmetries`.
    """

    def __init__(
        self,
        env_id: str,
        num_envs: int,
        device: torch.device | str,
        obs: dict[str, TensorSpec],
        action: ActionSpec,
        max_episode_steps: int | None = None,
        random_start: bool = False,
        *,
        truncates: bool | None = None,
        durations: bool = False,
        **more: Any,
    ) -> None:
        if num_envs < 1:
            raise UserError(f"num_envs={num_envs} must be at least 1")
        if max_episode_steps is not None and max_episode_steps < 1:
            raise UserError(f"max_episode_steps={max_episode_steps} must be at least 1; None means no limit")
        if random_start and max_episode_steps is None:
            raise UserError("random_start=True needs max_episode_steps, from which the first step counts are drawn")
        # "cuda" and "cuda:0" compare unequal; the device of a tensor always carries its index.
        self.device = torch.empty(0, device=device).device
        self.num_envs = num_envs
        self.generator = torch.Generator(self.device)
        self.generator.seed()
        self.seeds_by_row = True
        truncates = max_episode_steps is not None if truncates is None else truncates
        about = {"truncates": truncates, "env_id": env_id, "durations": durations, **more}
        self.spec = EnvSpec(obs, action, num_envs, self.device, **about)
        """Shapes, dtypes, bounds and conventions."""
        parts = action.low if isinstance(action, Continuous) else action.nvec
        self._action_shape = (num_envs,) if isinstance(action, Discrete) else (num_envs, len(parts))
        self._limit = torch.iinfo(torch.int64).max if max_episode_steps is None else max_episode_steps
        self._random_start = random_start
        self._step_count = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self._valid = torch.ones(num_envs, dtype=torch.bool, device=self.device)
        self._state: EnvState = {}

    @abstractmethod
    def _sample_state(self) -> EnvState:
        """First states of N new episodes, drawn with `generator` only."""

    @abstractmethod
    def _advance(self, state: EnvState, action: Tensor) -> Outcome:
        """One step of the dynamics; must not write into `state`."""

    @abstractmethod
    def _observe(self, state: EnvState) -> Obs:
        """What N rows see; new tensors, never views of `state`, which the next step overwrites."""

    def reset(self, seed: int | None = None) -> Obs:
        """Start every row anew; without a seed the random stream goes on where it is."""
        if seed is not None:
            self.generator.manual_seed(seed)
        fresh = self._sample_state()
        self._allocate(fresh)
        for name, buffer in self._state.items():
            buffer.copy_(fresh[name])
        self._step_count.zero_()
        if self._random_start:
            self._step_count.copy_(self._integers(self._limit))
        return self.observe()

    def observe(self) -> Obs:
        """What every row sees now; the same as the last `Step.obs`, also after `load_state_dict`."""
        return self._observe(self._state)

    def step(self, action: Tensor) -> Step:
        """Apply one action per row; `Step.final_obs` is always given and right in every row, ended or not."""
        if action.shape != self._action_shape:
            raise UserError(f"action has shape {tuple(action.shape)}, {self.spec.env_id} needs {self._action_shape}")
        if not self._state:
            raise RuntimeError(f"{self.spec.env_id} has no state yet; call reset() before step()")
        outcome = self._advance(self._state, action)
        if "duration" in outcome.info and not self.spec.durations:
            raise UserError(f"{self.spec.env_id} tells durations: say so with durations=True when it is made")
        self._step_count.add_(1)
        cut = self._step_count >= self._limit
        if outcome.truncated is not None:
            cut = cut | outcome.truncated
        terminated = outcome.terminated
        truncated = cut & ~terminated
        final_obs = self._observe(outcome.state)
        self._restart_(terminated | truncated, outcome.state)
        return Step(
            obs=self.observe(),
            reward=outcome.reward.to(torch.float32),
            terminated=terminated,
            truncated=truncated,
            valid=self._valid,
            final_obs=final_obs,
            info=outcome.info,
            metrics=outcome.metrics,
        )

    def generators(self) -> list[torch.Generator]:
        """The random streams that a step draws from; a CUDA graph of it must know them."""
        return [self.generator]

    def close(self) -> None:  # noqa: B027 - part of the Env protocol, and there is nothing to do
        """Nothing is held that needs freeing."""

    def state_dict(self) -> dict[str, Any]:
        """Copies of the world, the step counts and the random stream; all tensors."""
        if not self._state:
            raise RuntimeError(f"{self.spec.env_id} has no state yet; call reset() before state_dict()")
        return {
            "state": {name: buffer.clone() for name, buffer in self._state.items()},
            "step_count": self._step_count.clone(),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state, bit for bit, when options, device kind and torch version are the same."""
        self._allocate(self._sample_state())
        own = {**self._state, "step_count": self._step_count}
        saved = {**state["state"], "step_count": state["step_count"]}
        wrong = [name for name in own.keys() | saved.keys() if _row_form(own, name) != _row_form(saved, name)]
        if wrong:
            raise UserError(
                f"the saved state does not fit {self.spec.env_id} with num_envs={self.num_envs} and these options; "
                f"these tensors differ in shape or dtype: {', '.join(sorted(wrong))}"
            )
        for name, buffer in own.items():
            buffer.copy_(saved[name])
        self.generator.set_state(state["generator"].cpu())

    def _allocate(self, fresh: EnvState) -> None:
        if not self._state:
            self._state = {name: torch.empty(t.shape, dtype=t.dtype, device=t.device) for name, t in fresh.items()}

    def _restart_(self, done: Tensor, after: EnvState) -> None:
        # All rows are sampled and most samples thrown away: picking the done rows would need their number on the host.
        fresh = self._sample_state()
        for name, buffer in self._state.items():
            rows = done.view(-1, *[1] * (buffer.dim() - 1))
            torch.where(rows, fresh[name], after[name], out=buffer)
        self._step_count.masked_fill_(done, 0)

    def _uniform(self, low: float, high: float, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """`[N, *shape]` uniform in `[low, high)`."""
        size = (self.num_envs, *shape)
        drawn = draw_for_rank(torch.rand, size, generator=self.generator, device=self.device, dtype=dtype)
        return drawn * (high - low) + low

    def _integers(self, high: int, *shape: int) -> Tensor:
        """`[N, *shape]` int64 uniform in 0..high-1."""
        how = {"generator": self.generator, "device": self.device}
        return draw_for_rank(partial(torch.randint, high), (self.num_envs, *shape), **how)


def _row_form(tensors: dict[str, Tensor], name: str) -> tuple[torch.Size, torch.dtype] | None:
    return (tensors[name].shape, tensors[name].dtype) if name in tensors else None
