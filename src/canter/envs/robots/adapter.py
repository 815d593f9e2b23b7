"""Adapter of manager-based simulators (mjlab, Isaac Lab) to Canter's environment protocol.

N environments, A action components. Both simulators have named observation groups, a step that
returns five values, `extras["log"]` for their metrics, and counters that curricula read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from canter.core.specs import Continuous, EnvSpec, Step, TensorSpec, TrainingProgress
from canter.core.struct import Obs
from canter.envs.robots.interface import read_interface

FinalObsOption = Literal["exact", "approximate"]


@runtime_checkable
class DescribedStep(Protocol):
    """A replacement of a simulator's step that can say how it is run."""

    def about(self) -> str:
        """Return how a step is run."""
        ...


class ManagerEnv:
    """N environments of one simulator.

    `clip_actions` bounds every action component on both sides, `clip_observations` every observed
    number. If `resets_itself` is false, the simulator does not reset ended environments within its
    step, and this class does it once it has the final observations. `final_obs` is described at
    `EnvSpec`. `step` replaces the simulator's own step. With `random_start`, the first episodes of
    a training run begin at random lengths, so that time limits do not end all of them at once.
    """

    resumes = "partial"

    def __init__(
        self,
        env: Any,
        env_id: str,
        *,
        clip_actions: float | None = None,
        clip_observations: float | None = None,
        resets_itself: bool = True,
        final_obs: Literal["separate", "unknown"] = "unknown",
        random_start: bool = True,
        step: Callable[[Tensor], Any] | None = None,
    ) -> None:
        self.env = env
        self.clip_actions = clip_actions
        self.clip_observations = clip_observations
        self.resets_itself = resets_itself
        self.random_start = random_start
        self.device = torch.device(env.device)
        self._step = step or env.step
        self._last_log: Mapping[str, Any] | None = None
        self._episode_lengths: Tensor | None = None
        """Lengths `[N]` of the present episodes in the saved state; None if nothing was loaded."""
        self._restored: dict[str, Any] = {}
        self._has_trained = False
        self._closed = False
        self._seed = 0
        self._first_levels = None if self._terrain is None else self._terrain.terrain_levels.clone()
        self._finite_horizon = bool(getattr(env.cfg, "is_finite_horizon", False))
        obs = flatten_groups(env.reset(seed=0)[0])
        infinity = (float("inf"),) * int(env.single_action_space.shape[0])
        self.spec = EnvSpec(
            {name: TensorSpec(tuple(group.shape[1:]), group.dtype) for name, group in obs.items()},
            Continuous(tuple(-bound for bound in infinity), infinity),
            int(env.num_envs),
            self.device,
            final_obs=final_obs,
            truncates=not self._finite_horizon,
            env_id=env_id,
            interface=read_interface(env, obs, clip_actions, clip_observations),
        )
        """Shapes and conventions; actions have no bounds, as samples are clipped in `step`."""

    @property
    def reset_is_clean(self) -> bool:
        """`reset(seed)` leaves no trace, as no run has trained here and advanced a curriculum."""
        return not self._has_trained

    @property
    def _terrain(self) -> Any:
        """Terrain, if environments have levels on it."""
        terrain = getattr(getattr(self.env, "scene", None), "terrain", None)
        return None if getattr(terrain, "terrain_levels", None) is None else terrain

    def about(self) -> str:
        """Return how a step is run, for `canter check`."""
        return self._step.about() if isinstance(self._step, DescribedStep) else "a step runs eagerly"

    def reset(self, seed: int | None = None) -> Obs:
        """Restart every environment; counters begin at 0, or at their loaded values."""
        restored = self._restored
        self._restored = {}
        self.env.common_step_counter = int(restored.get("common_step_counter", 0))
        self._set_levels(restored.get("terrain_levels", self._first_levels))
        self._episode_lengths = restored.get("episode_length")
        self._last_log = None
        self._seed = self._seed if seed is None else seed
        with _frozen_curricula(getattr(self.env, "curriculum_manager", None)):
            return self._to_obs(self.env.reset(seed=None if seed is None else seed % 2**31)[0])

    def set_progress(self, progress: TrainingProgress) -> None:
        """Set the lengths of the episodes before the first rollout: restored or random."""
        lengths = self._episode_lengths
        self._episode_lengths = None
        if lengths is None and self.random_start and not self._has_trained:
            generator = torch.Generator(self.device).manual_seed(self._seed)
            limit = int(self.env.max_episode_length)
            lengths = torch.randint(limit, (self.spec.num_envs,), generator=generator, device=self.device)
        if lengths is not None:
            self.env.episode_length_buf.copy_(lengths)
        self._has_trained = True

    def step(self, action: Tensor) -> Step:
        """Apply one action per environment; only resets by hand wait for the device."""
        if self.clip_actions is not None:
            action = action.clamp(-self.clip_actions, self.clip_actions)
        groups, reward, terminated, truncated, extras = self._step(action)
        obs = self._to_obs(groups)
        terminated = terminated.bool()
        truncated = truncated.bool()
        log = extras.get("log")
        final_obs = extras.get("final_obs")
        if not self.resets_itself:
            ended = (terminated | truncated).nonzero().squeeze(-1)
            if len(ended):
                terminated = terminated.clone()  # the reset overwrites the simulator's buffers
                truncated = truncated.clone()
                reward = reward.clone()
                final_obs = obs
                obs = self._to_obs(self.env.reset(env_ids=ended)[0])
                log = {**(log or {}), **self.env.extras.get("log", {})}
        if self._finite_horizon:
            terminated = terminated | truncated
            truncated = torch.zeros_like(truncated)
        return Step(
            obs=obs,
            reward=reward.float(),
            terminated=terminated,
            truncated=truncated & ~terminated,
            valid=torch.ones_like(terminated),
            final_obs=None if final_obs is None else self._to_obs(final_obs),
            metrics=self._to_metrics(log),
        )

    def _to_obs(self, groups: Any) -> Obs:
        obs = flatten_groups(groups)
        bound = self.clip_observations
        if bound is None:
            return obs
        return {name: group.clamp(-bound, bound) if group.is_floating_point() else group for name, group in obs.items()}

    def _to_metrics(self, log: Mapping[str, Any] | None) -> dict[str, Tensor]:
        """Return the simulator's metrics once: Isaac Lab keeps the same mapping until a reset."""
        if not log or log is self._last_log:
            return {}
        self._last_log = log
        return scalars(log, self.device)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that outlives episodes: curricula and episode lengths."""
        state: dict[str, Any] = {
            "common_step_counter": int(self.env.common_step_counter),
            "episode_length": self.env.episode_length_buf.clone(),
        }
        return state if self._terrain is None else state | {"terrain_levels": self._terrain.terrain_levels.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state; the next reset applies it."""
        self._restored = dict(state)

    def _set_levels(self, levels: Tensor | None) -> None:
        terrain = self._terrain
        if terrain is not None and levels is not None:
            terrain.terrain_levels.copy_(levels)
            if getattr(terrain, "terrain_origins", None) is not None:
                terrain.env_origins.copy_(terrain.terrain_origins[terrain.terrain_levels, terrain.terrain_types])

    @property
    def render_fps(self) -> float:
        """Frames per second that show the task at its own speed."""
        return 1 / float(self.env.step_dt)

    def render(self) -> list[Any]:
        """Return a frame `[H, W, 3]` of the first environment; needs `render_mode` rgb_array."""
        frame = self.env.render()
        return [] if frame is None else [frame]

    def close(self) -> None:
        """Free the simulator; further calls do nothing."""
        if not self._closed:
            self._closed = True
            self.env.close()


@contextmanager
def _frozen_curricula(curricula: Any) -> Iterator[None]:
    """Reset without advancing curricula: the start of a run is not the end of an episode."""
    if curricula is None:
        yield
        return
    compute = curricula.compute
    curricula.compute = lambda env_ids=None: None
    try:
        yield
    finally:
        curricula.compute = compute


def flatten_groups(groups: Any) -> Obs:
    """Return the tensors of a mapping or TensorDict; a nested one is named `group/term`."""
    obs: Obs = {}
    for name in groups.keys():  # noqa: SIM118 - a TensorDict iterates over its first dimension
        group = groups[name]
        if isinstance(group, Tensor):
            obs[str(name)] = group
        else:
            obs |= {f"{name}/{term}": tensor for term, tensor in flatten_groups(group).items()}
    return obs


def scalars(log: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
    """Return the numbers of a log as 0-d tensors on the device, without waiting for it."""
    numbers = {str(name): float(value) for name, value in log.items() if isinstance(value, int | float)}
    tensors = {
        str(name): value.detach().to(device, torch.float32, non_blocking=True)
        for name, value in log.items()
        if isinstance(value, Tensor) and value.numel()
    }
    # The mean of a single number would launch a kernel for each of about twenty tensors in every
    # step.
    metrics = {name: value.mean() if value.numel() > 1 else value.reshape(()) for name, value in tensors.items()}
    if numbers:
        row = torch.tensor(list(numbers.values()))
        row = row.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else row
        metrics |= dict(zip(numbers, row.unbind(), strict=True))
    return metrics
