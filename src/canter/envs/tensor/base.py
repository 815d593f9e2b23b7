"""Base class of environments written in torch, which restart in place, without the host.

`Picture`, at the end, draws environments in the plane with numpy alone.
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
from canter.core.seeding import MemberStreams, draw_for_rank
from canter.core.specs import ActionSpec, Continuous, Discrete, EnvSpec, Step, TensorSpec, TrainingProgress
from canter.core.struct import Obs

EnvState = dict[str, Tensor]
"""The simulated state of N environments: tensors `[N, ...]` by name."""


@dataclass(frozen=True)
class Outcome:
    """Result of one step of the dynamics, before ended environments restart."""

    state: EnvState
    """State after the step, also of environments that ended."""
    reward: Tensor
    """Reward `[N]`, of any real dtype."""
    terminated: Tensor
    """Terminations `[N]`, bool."""
    truncated: Tensor | None = None
    """Truncations `[N]` by the dynamics, bool; those by the time limit are added."""
    info: dict[str, Tensor] = field(default_factory=dict)
    """`Step.info`."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """`Step.metrics`, 0-d each."""


class TensorEnv(ABC):
    """N environments in torch; ended ones restart within the same step.

    Nothing waits for the device and every shape is static, so a whole rollout can be captured in a
    CUDA graph that knows `generator`. The state is kept in buffers at fixed addresses. A concrete
    environment is final and defines three pure functions: `_sample_state`, `_advance` and
    `_observe`. Draw with `_uniform` and `_integers`, or with `canter.core.seeding.draw_for_rank`:
    the generator is the same on every rank, and these return the draws of this rank's environments.

    `max_episode_steps` truncates episodes. `random_start` lets the first episodes of a training begin
    with random step counts, so that the environments of a large batch do not all end together. `truncates`
    declares truncations by `_advance` in the spec; None derives it from `max_episode_steps`. `more`
    are further fields of the spec, such as `symmetries`.
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
        self.generator: torch.Generator | MemberStreams = torch.Generator(self.device)
        self.generator.seed()
        self.seeds_by_row = True
        truncates = max_episode_steps is not None if truncates is None else truncates
        self.spec = EnvSpec(
            obs, action, num_envs, self.device, truncates=truncates, env_id=env_id, durations=durations, **more
        )
        """Shapes, dtypes, bounds and conventions."""
        parts = action.low if isinstance(action, Continuous) else action.nvec
        self._action_shape = (num_envs,) if isinstance(action, Discrete) else (num_envs, len(parts))
        self._limit = torch.iinfo(torch.int64).max if max_episode_steps is None else max_episode_steps
        self._random_start = random_start
        self._spread = False
        self._step_count = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self._valid = torch.ones(num_envs, dtype=torch.bool, device=self.device)
        self._state: EnvState = {}

    @abstractmethod
    def _sample_state(self) -> EnvState:
        """Return the first states of N new episodes, drawn from `generator` only."""

    @abstractmethod
    def _advance(self, state: EnvState, action: Tensor) -> Outcome:
        """Return the result of one step of the dynamics, without writing to `state`."""

    @abstractmethod
    def _observe(self, state: EnvState) -> Obs:
        """Return observations `[N, ...]`: new tensors, as the next step overwrites `state`."""

    def reset(self, seed: int | None = None) -> Obs:
        """Restart every environment; without a seed the random stream continues."""
        if seed is not None:
            self.generator.manual_seed(seed)
        fresh = self._sample_state()
        self._allocate(fresh)
        for name, buffer in self._state.items():
            buffer.copy_(fresh[name])
        self._step_count.zero_()
        self._spread = self._random_start
        return self.observe()

    def set_progress(self, progress: TrainingProgress) -> None:
        """Draw the first step counts of a training; evaluations have whole episodes."""
        if self._spread:
            self._step_count.copy_(self._integers(self._limit))
            self._spread = False

    def observe(self) -> Obs:
        """Return the present observations, also after `load_state_dict`."""
        return self._observe(self._state)

    def step(self, action: Tensor) -> Step:
        """Apply one action per environment; `Step.final_obs` is set in every row, ended or not."""
        if action.shape != self._action_shape:
            raise UserError(f"action has shape {tuple(action.shape)}, {self.spec.env_id} needs {self._action_shape}")
        if not self._state:
            raise RuntimeError(f"{self.spec.env_id} has no state yet; call reset() before step()")
        outcome = self._advance(self._state, action)
        if "duration" in outcome.info and not self.spec.durations:
            raise UserError(f"{self.spec.env_id} returns durations: construct it with durations=True")
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
        """Return the random generators of a step, which a CUDA graph must know."""
        return self.generator.generators if isinstance(self.generator, MemberStreams) else [self.generator]

    def close(self) -> None:  # noqa: B027 - part of the Env protocol
        """Do nothing: there is nothing to free."""

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the state, the step counts and the generator's state."""
        if not self._state:
            raise RuntimeError(f"{self.spec.env_id} has no state yet; call reset() before state_dict()")
        return {
            "state": {name: buffer.clone() for name, buffer in self._state.items()},
            "step_count": self._step_count.clone(),
            "generator": self.generator.get_state(),
            "spread": self._spread,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state; continuing is exact with equal options, device kind and torch."""
        self._allocate(self._sample_state())
        own = {**self._state, "step_count": self._step_count}
        saved = {**state["state"], "step_count": state["step_count"]}
        different = [name for name in own.keys() | saved.keys() if _layout(own, name) != _layout(saved, name)]
        if different:
            raise UserError(
                f"the saved state does not fit {self.spec.env_id} with num_envs={self.num_envs} and these options; "
                f"these tensors differ in shape or dtype: {', '.join(sorted(different))}"
            )
        for name, buffer in own.items():
            buffer.copy_(saved[name])
        self.generator.set_state(state["generator"].cpu())
        self._spread = state.get("spread", False)

    def _allocate(self, fresh: EnvState) -> None:
        if not self._state:
            self._state = {name: torch.empty(t.shape, dtype=t.dtype, device=t.device) for name, t in fresh.items()}

    def _restart_(self, done: Tensor, after: EnvState) -> None:
        # All N states are sampled and most are discarded: their number would have to be read on the
        # host otherwise.
        fresh = self._sample_state()
        for name, buffer in self._state.items():
            mask = done.view(-1, *[1] * (buffer.dim() - 1))
            torch.where(mask, fresh[name], after[name], out=buffer)
        self._step_count.masked_fill_(done, 0)

    def _uniform(self, low: float, high: float, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Draw `[N, *shape]` uniformly from `[low, high)`."""
        size = (self.num_envs, *shape)
        drawn = draw_for_rank(torch.rand, size, generator=self.generator, device=self.device, dtype=dtype)
        return drawn * (high - low) + low

    def _integers(self, high: int, *shape: int) -> Tensor:
        """Draw `[N, *shape]` int64 uniformly from 0..high-1."""
        size = (self.num_envs, *shape)
        return draw_for_rank(partial(torch.randint, high), size, generator=self.generator, device=self.device)


def _layout(tensors: dict[str, Tensor], name: str) -> tuple[torch.Size, torch.dtype] | None:
    return (tensors[name].shape, tensors[name].dtype) if name in tensors else None


Colour = tuple[int, int, int]
WHITE = (255, 255, 255)
GREY = (225, 228, 232)
BLACK = (40, 44, 52)
BLUE = (52, 101, 164)
RED = (204, 60, 50)
GREEN = (60, 160, 90)


class Picture:
    """An image `[H, W, 3]` of the plane around `centre`, `span` units wide; y points up."""

    def __init__(self, centre: tuple[float, float], span: float, width: int = 480, height: int = 320) -> None:
        self.pixel = span / width
        x = centre[0] + (np.arange(width) + 0.5 - width / 2) * self.pixel
        y = centre[1] - (np.arange(height) + 0.5 - height / 2) * self.pixel
        self.x = x[None, :]
        self.y = y[:, None]
        self.image = np.full((height, width, 3), WHITE, dtype=np.float64)

    def line(self, points: np.ndarray, thickness: float, colour: Colour) -> None:
        """Draw straight segments between consecutive points `[K, 2]`, with round ends."""
        distances = [self._distance(start, end) for start, end in pairwise(points)]
        self._fill(np.minimum.reduce(distances), thickness / 2, colour)

    def disc(self, point: np.ndarray, radius: float, colour: Colour) -> None:
        """Draw a filled circle."""
        self._fill(self._distance(point, point), radius, colour)

    def box(self, low: tuple[float, float], high: tuple[float, float], colour: Colour) -> None:
        """Draw a filled rectangle."""
        inside = (self.x >= low[0]) & (self.x <= high[0]) & (self.y >= low[1]) & (self.y <= high[1])
        self.image[inside] = colour

    def grid(self, step: float, colour: Colour = GREY) -> None:
        """Draw lines at all multiples of `step`, which make movement visible."""
        for axis in (self.x, self.y):
            near = np.abs((axis + step / 2) % step - step / 2) < 0.6 * self.pixel
            self.image[np.broadcast_to(near, self.image.shape[:2])] = colour

    def pixels(self) -> np.ndarray:
        """Return the image `[H, W, 3]`, uint8."""
        return self.image.round().astype(np.uint8)

    def _distance(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Return the distance `[H, W]` of every pixel from a line segment."""
        along = end - start
        length2 = float(along @ along)
        share = ((self.x - start[0]) * along[0] + (self.y - start[1]) * along[1]) / (length2 or 1.0)
        share = np.clip(share, 0.0, 1.0)
        return np.hypot(self.x - start[0] - share * along[0], self.y - start[1] - share * along[1])

    def _fill(self, distance: np.ndarray, radius: float, colour: Colour) -> None:
        # A pixel at the edge is covered partly.
        cover = np.clip((radius - distance) / self.pixel + 0.5, 0.0, 1.0)[..., None]
        self.image = (1 - cover) * self.image + cover * np.array(colour)
