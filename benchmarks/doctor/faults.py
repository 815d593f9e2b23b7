"""Faults to plant: wrong settings, and environments that misbehave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from canter import Discrete, Env, Step

BROKEN_ENV = 3


class FaultyEnv:
    """An environment whose actions and steps pass through two functions."""

    def __init__(self, env: Env, action: Callable[[Env, Tensor], Tensor], step: Callable[[Step], Step]) -> None:
        self.env = env
        self.spec = env.spec
        self.close = env.close
        self.change_action = action
        self.change_step = step

    def reset(self, seed: int | None = None) -> dict[str, Tensor]:
        """Start an episode in every environment."""
        obs = self.env.reset(seed)
        flags = torch.zeros(self.spec.num_envs, dtype=torch.bool)
        step = Step(obs=obs, reward=flags.float(), terminated=flags, truncated=flags, valid=~flags)
        return self.change_step(step).obs

    def step(self, action: Tensor) -> Step:
        """Apply the changed actions and return the changed step."""
        return self.change_step(self.env.step(self.change_action(self.env, action)))


@dataclass(frozen=True)
class Fault:
    """One planted fault, and the rules that name it."""

    rules: tuple[str, ...]
    """Rules of which one must be found; () for a healthy run."""
    settings: dict[str, Any] = field(default_factory=dict)
    action: Callable[[Env, Tensor], Tensor] = lambda env, action: action
    step: Callable[[Step], Step] = lambda step: step
    rate: float = 1.0
    """Factor of the learning rate."""

    @property
    def in_env(self) -> bool:
        """True if the environment misbehaves, and not a setting."""
        defaults = Fault(())
        return self.action is not defaults.action or self.step is not defaults.step


def random_action(env: Env, action: Tensor) -> Tensor:
    """Return actions that have nothing to do with those of the policy."""
    space = env.spec.action
    if isinstance(space, Discrete):
        return torch.randint(space.n, action.shape)
    low = torch.tensor(space.low).clamp(min=-1.0)
    high = torch.tensor(space.high).clamp(max=1.0)
    return low + (high - low) * torch.rand(action.shape)


def scaled_obs(factor: float) -> Callable[[Step], Step]:
    """Return a function that multiplies observations."""

    def change(step: Step) -> Step:
        final = step.final_obs and {name: group * factor for name, group in step.final_obs.items()}
        return replace(step, obs={name: group * factor for name, group in step.obs.items()}, final_obs=final)

    return change


def lost_final_obs(step: Step) -> Step:
    """Return the observation after the reset in place of the final one."""
    return replace(step, final_obs=step.final_obs and dict(step.obs))


def one_broken_env(step: Step) -> Step:
    """Freeze the sensors of one environment at 0, and its reward at the worst of all."""
    obs = {name: group.clone() for name, group in step.obs.items()}
    for group in obs.values():
        group[BROKEN_ENV] = 0.0
    reward = step.reward.clone()
    reward[BROKEN_ENV] = step.reward.min() - 1.0
    return replace(step, obs=obs, reward=reward)


def constant_reward(step: Step) -> Step:
    """Reward every step alike, and let no end count."""
    ended = step.terminated | step.truncated
    never = torch.zeros_like(ended)
    return replace(step, reward=torch.ones_like(step.reward), terminated=never, truncated=ended)


def rewards(factor: float) -> Callable[[Step], Step]:
    """Return a function that multiplies rewards."""
    return lambda step: replace(step, reward=step.reward * factor)


def deadline_terminates(step: Step) -> Step:
    """Report a time limit as a termination."""
    return replace(step, terminated=step.terminated | step.truncated, truncated=torch.zeros_like(step.truncated))


RAW = {"algorithm.model.normalize_value": False}
NO_RATE = {"learning_rate": {"kind": "constant", "value": 1e-12}}
HEALTHY = "healthy"
FAULTS = {
    HEALTHY: Fault(()),
    "reward sign": Fault(("dying_pays",), step=rewards(-1.0)),
    "deadline terminates": Fault(("deadline_terminates",), step=deadline_terminates),
    "obs constant": Fault(("blind",), step=scaled_obs(0.0)),
    "obs x1e4": Fault(("obs_scale",), {"algorithm.model.policy.normalize_obs": False}, step=scaled_obs(1e4)),
    "action ignored": Fault(("no_effect",), action=random_action),
    "rate x30": Fault(("large_updates",), rate=30.0),
    "rate /100": Fault(("small_updates",), rate=0.01),
    "entropy bonus": Fault(("entropy_bonus",), {"algorithm.entropy_coef": 0.3}),
    "gamma 1": Fault((), {"algorithm.gamma": 1.0}),
    "broken env": Fault(("broken_env",), step=one_broken_env),
    "reward x1e4": Fault(("reward_scale",), RAW, step=rewards(1e4)),
    "reward x1e-4": Fault(("reward_scale",), RAW, step=rewards(1e-4)),
    "critic blind": Fault(("blind_critic",), {"algorithm.critic_optimizer": NO_RATE}),
    "discount short": Fault(("short_discount",), {"algorithm.gamma": 0.3}),
    "epochs 40": Fault(("large_updates",), {"algorithm.epochs": 40}),
    "clip 5": Fault(("large_updates",), {"algorithm.clip_ratio": 5.0}),
    "reward zero": Fault(("no_reward",), step=rewards(0.0)),
    "reward constant": Fault(("constant_reward",), step=constant_reward),
    "final obs lost": Fault(("final_obs",), step=lost_final_obs),
    "std tiny": Fault(
        ("small_std", "collapse"), {"algorithm.model.std.initial": 0.01, "algorithm.model.std.minimum": 0.001}
    ),
}
