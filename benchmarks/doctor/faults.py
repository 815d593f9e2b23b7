"""Faults to plant: wrong settings, and environments that misbehave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from canter import Continuous, Discrete, Env, Step

BROKEN_ENV = 3


class FaultyEnv:
    """An environment whose actions and steps pass through two functions; it remembers the true returns."""

    def __init__(self, env: Env, fault: Fault, goal: float) -> None:
        self.env = env
        self.spec = env.spec
        self.close = env.close
        self.fault = fault
        self.goal = goal
        self.returns = torch.zeros(env.spec.num_envs)
        self.steps = 0
        self.episodes: list[tuple[int, int, float]] = []
        """Step of all environments at the end, environment and undiscounted true return of each episode."""

    def reset(self, seed: int | None = None) -> dict[str, Tensor]:
        """Start an episode in every environment."""
        self.returns.zero_()
        obs = self.env.reset(seed)
        flags = torch.zeros(self.spec.num_envs, dtype=torch.bool)
        step = Step(obs=obs, reward=flags.float(), terminated=flags, truncated=flags, valid=~flags)
        return self.fault.step(step).obs

    def step(self, action: Tensor) -> Step:
        """Apply the changed actions and return the changed step."""
        if self.steps >= self.fault.action_from:
            action = self.fault.action(self.env, action)
        step = self.env.step(action)
        self.steps += self.spec.num_envs
        self.returns += step.reward * step.valid
        ended = step.terminated | step.truncated
        success = (ended & (self.returns >= self.goal)).float()
        if ended.any():
            self.episodes += [(self.steps, i, float(self.returns[i])) for i in ended.nonzero().flatten().tolist()]
        self.returns[ended] = 0.0
        if self.fault.sparse:
            step = replace(step, reward=success)
        return self.fault.step(step)


@dataclass(frozen=True)
class Fault:
    """One planted fault, and the rules that name it."""

    rules: tuple[str, ...]
    """The rule that names the cause, then its aliases; one of them must be found. () for a healthy run."""
    settings: dict[str, Any] = field(default_factory=dict)
    action: Callable[[Env, Tensor], Tensor] = lambda env, action: action
    step: Callable[[Step], Step] = lambda step: step
    rate: float = 1.0
    """Factor of the learning rate."""
    sparse: bool = False
    """Reward only the last step of an episode whose return reaches the goal."""
    lost_statistics: bool = False
    """Evaluate with the statistics of an untrained normaliser; the return of evaluations counts."""
    one_env: bool = False
    """The return of environment `BROKEN_ENV` counts."""
    repair: bool = False
    """True if a setting can repair it."""
    action_from: int = 0
    """Steps after which actions are changed."""
    resumed: dict[str, Any] = field(default_factory=dict)
    """Settings with which the run is resumed after half of its budget."""
    amp: dict[str, Any] = field(default_factory=dict)
    """Settings of the extension."""
    refused: bool = False
    """Training refuses to start, and names the setting."""


def random_action(env: Env, action: Tensor) -> Tensor:
    """Return actions that have nothing to do with those of the policy."""
    space = env.spec.action
    if isinstance(space, Discrete):
        return torch.randint(space.n, action.shape)
    assert isinstance(space, Continuous)
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
STUCK = {"learning_rate": {"kind": "constant", "value": 1e-12}}
TINY_STD = {"algorithm.model.std.initial": 0.01, "algorithm.model.std.minimum": 0.001}
UNSCALED = {"algorithm.model.policy.normalize_obs": False}
HEALTHY = "healthy"
FAULTS = {
    HEALTHY: Fault(()),
    "reward sign": Fault(("dying_pays", "success_from_start"), step=rewards(-1.0)),
    "deadline terminates": Fault(("deadline_terminates",), step=deadline_terminates),
    "obs constant": Fault(("blind",), step=scaled_obs(0.0)),
    "obs x1e4": Fault(("obs_scale",), UNSCALED, step=scaled_obs(1e4), repair=True),
    "action ignored": Fault(("no_effect",), action=random_action),
    "rate x30": Fault(("large_updates",), rate=30.0, repair=True),
    "rate /100": Fault(("small_updates",), rate=0.01, repair=True),
    "entropy bonus": Fault(("entropy_bonus",), {"algorithm.entropy_coef": 0.3}, repair=True),
    "gamma 1": Fault((), {"algorithm.gamma": 1.0}, refused=True),
    "lost statistics": Fault(("eval_differs",), {"algorithm.model.policy.normalize_obs": True}, lost_statistics=True),
    "broken env": Fault(("broken_env",), step=one_broken_env, one_env=True),
    "reward x1e4": Fault(("reward_scale",), RAW, step=rewards(1e4), repair=True),
    "reward x1e-4": Fault(("reward_scale",), RAW, step=rewards(1e-4), repair=True),
    "critic blind": Fault(("blind_critic",), {"algorithm.critic_optimizer": STUCK}, repair=True),
    "discount short": Fault(("short_discount",), {"algorithm.gamma": 0.3}, repair=True),
    "epochs 40": Fault(("large_updates",), {"algorithm.epochs": 40}, repair=True),
    "clip 5": Fault(("large_updates",), {"algorithm.clip_ratio": 5.0}, repair=True),
    "sparse": Fault(("no_reward",), sparse=True),
    "reward constant": Fault(("constant_reward",), step=constant_reward),
    "final obs lost": Fault(("final_obs",), step=lost_final_obs),
    "std tiny": Fault(("small_std", "collapse"), TINY_STD, repair=True),
}
CONTINUOUS = ("std tiny",)
"""Faults of continuous actions."""
DISCRETE = ("CartPole-v1", "Acrobot-v1", "tensor:cartpole")
