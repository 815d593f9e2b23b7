"""Environments put together by managers (mjlab, Isaac Lab) behind Canter's contract.

N environments, A action components. Both simulators have the same shape: groups of observations by name, a step of five
parts, `extras["log"]` for what they report, and counters that curricula read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from canter.core.specs import Continuous, EnvSpec, Step, TensorSpec, TrainingProgress
from canter.core.struct import Obs

FinalObsOption = Literal["exact", "approximate"]


class ManagerEnv:
    """N environments of one simulator.

    `clip_actions` bounds each action component on both sides, `clip_observations` each number that is observed.
    `resets_itself` says whether the simulator restarts ended environments within its step; where it does not, this
    does, so that the last observations are known. `final_obs` tells where the others keep them, see `EnvSpec`. `step`
    is called in place of the simulator's own. In training, and only there, the first episodes begin at random lengths,
    so that time limits do not cut all of them at once.
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
        self.env, self.clip_actions, self.resets_itself = env, clip_actions, resets_itself
        self.clip_observations = clip_observations
        self.random_start, self._step = random_start, step or env.step
        self.device = torch.device(env.device)
        self._log: Mapping[str, Any] | None = None
        self._lengths: Tensor | None = None
        """`[N]`: steps that episodes are to have behind them when training goes on."""
        self._restored: dict[str, Any] = {}
        self._trained = self._closed = False
        self._seed = 0
        self._first_levels = None if self._terrain is None else self._terrain.terrain_levels.clone()
        self._finite_horizon = bool(getattr(env.cfg, "is_finite_horizon", False))
        obs = flat_groups(env.reset(seed=0)[0])
        infinite = (float("inf"),) * int(env.single_action_space.shape[0])
        self.spec = EnvSpec(
            {name: TensorSpec(tuple(group.shape[1:]), group.dtype) for name, group in obs.items()},
            Continuous(tuple(-bound for bound in infinite), infinite),
            int(env.num_envs),
            self.device,
            final_obs=final_obs,
            truncates=not self._finite_horizon,
            env_id=env_id,
        )
        """Shapes and conventions; actions have no bounds, as the networks' samples are cut off here."""

    @property
    def reset_is_clean(self) -> bool:
        """Whether `reset(seed)` leaves no trace: until a run has trained here and moved a curriculum."""
        return not self._trained

    @property
    def _terrain(self) -> Any:
        """The terrain, where environments have levels on it."""
        terrain = getattr(getattr(self.env, "scene", None), "terrain", None)
        return None if getattr(terrain, "terrain_levels", None) is None else terrain

    def about(self) -> str:
        """How a step is run, for `canter check`."""
        captured = getattr(self._step, "about", None)
        return "a step runs eagerly" if captured is None else captured()

    def reset(self, seed: int | None = None) -> Obs:
        """Start every environment anew; counters begin at 0, or as they were loaded."""
        restored, self._restored = self._restored, {}
        self.env.common_step_counter = int(restored.get("common_step_counter", 0))
        self._set_levels(restored.get("terrain_levels", self._first_levels))
        self._lengths, self._log = restored.get("episode_length"), None
        self._seed = self._seed if seed is None else seed
        with _still(getattr(self.env, "curriculum_manager", None)):
            return self._groups(self.env.reset(seed=None if seed is None else seed % 2**31)[0])

    def set_progress(self, progress: TrainingProgress) -> None:
        """Before the first rollout, let episodes be of different ages."""
        lengths, self._lengths = self._lengths, None
        if lengths is None and self.random_start and not self._trained:
            generator = torch.Generator(self.device).manual_seed(self._seed)
            shape, limit = (self.spec.num_envs,), int(self.env.max_episode_length)
            lengths = torch.randint(limit, shape, generator=generator, device=self.device)
        if lengths is not None:
            self.env.episode_length_buf.copy_(lengths)
        self._trained = True

    def step(self, action: Tensor) -> Step:
        """Apply one action per environment; nothing here waits for the device, except to restart by hand."""
        if self.clip_actions is not None:
            action = action.clamp(-self.clip_actions, self.clip_actions)
        found, reward, terminated, cut, extras = self._step(action)
        obs = self._groups(found)
        terminated, cut, log = terminated.bool(), cut.bool(), extras.get("log")
        final_obs = extras.get("final_obs")
        if not self.resets_itself:
            ended = (terminated | cut).nonzero().squeeze(-1)
            if len(ended):
                terminated, cut, reward = terminated.clone(), cut.clone(), reward.clone()
                final_obs, obs = obs, self._groups(self.env.reset(env_ids=ended)[0])
                log = {**(log or {}), **self.env.extras.get("log", {})}
        if self._finite_horizon:
            terminated, cut = terminated | cut, torch.zeros_like(cut)
        return Step(
            obs=obs,
            reward=reward.float(),
            terminated=terminated,
            truncated=cut & ~terminated,
            valid=torch.ones_like(terminated),
            final_obs=None if final_obs is None else self._groups(final_obs),
            metrics=self._report(log),
        )

    def _groups(self, found: Any) -> Obs:
        groups, most = flat_groups(found), self.clip_observations
        if most is None:
            return groups
        return {name: part.clamp(-most, most) if part.is_floating_point() else part for name, part in groups.items()}

    def _report(self, log: Mapping[str, Any] | None) -> dict[str, Tensor]:
        """What the simulator says; Isaac Lab leaves the same mapping there until something is reset."""
        if not log or log is self._log:
            return {}
        self._log = log
        return scalars(log, self.device)

    def state_dict(self) -> dict[str, Any]:
        """What outlives episodes: how far curricula are, and the ages of episodes."""
        state: dict[str, Any] = {
            "common_step_counter": int(self.env.common_step_counter),
            "episode_length": self.env.episode_length_buf.clone(),
        }
        return state if self._terrain is None else state | {"terrain_levels": self._terrain.terrain_levels.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it over at the next reset."""
        self._restored = dict(state)

    def _set_levels(self, levels: Tensor | None) -> None:
        terrain = self._terrain
        if terrain is not None and levels is not None:
            terrain.terrain_levels.copy_(levels)
            if getattr(terrain, "terrain_origins", None) is not None:
                terrain.env_origins.copy_(terrain.terrain_origins[terrain.terrain_levels, terrain.terrain_types])

    @property
    def render_fps(self) -> float:
        """Pictures per second that show the task at its own speed."""
        return 1 / float(self.env.step_dt)

    def render(self) -> list[Any]:
        """A picture `[H, W, 3]` of the first environment, where the simulator was made with `render_mode` rgb_array."""
        picture = self.env.render()
        return [] if picture is None else [picture]

    def close(self) -> None:
        """Free the simulator; calling it twice is fine."""
        if not self._closed:
            self._closed = True
            self.env.close()


@contextmanager
def _still(curricula: Any) -> Iterator[None]:
    """Reset without moving a curriculum: it would take the start of a run for the end of an episode."""
    if curricula is None:
        yield
        return
    compute, curricula.compute = curricula.compute, lambda env_ids=None: None
    try:
        yield
    finally:
        curricula.compute = compute


def flat_groups(found: Any) -> Obs:
    """Groups by name, from a mapping or a TensorDict; terms of a group that is not joined become `group/term`."""
    groups: Obs = {}
    for name in found.keys():  # noqa: SIM118 - a TensorDict iterates over rows
        part = found[name]
        if isinstance(part, Tensor):
            groups[str(name)] = part
        else:
            groups |= {f"{name}/{term}": tensor for term, tensor in flat_groups(part).items()}
    return groups


def scalars(log: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
    """Numbers as 0-d tensors on the device, in one copy that nothing waits for; what is no number is left out."""
    numbers = {str(name): float(value) for name, value in log.items() if isinstance(value, int | float)}
    tensors = {
        str(name): value.detach().to(device, torch.float32, non_blocking=True)
        for name, value in log.items()
        if isinstance(value, Tensor) and value.numel()
    }
    # A mean of one number would be a launch for each of some twenty, in every step.
    found = {name: value.mean() if value.numel() > 1 else value.reshape(()) for name, value in tensors.items()}
    if numbers:
        row = torch.tensor(list(numbers.values()))
        row = row.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else row
        found |= dict(zip(numbers, row.unbind(), strict=True))
    return found
