"""Exponential moving averages: of numbers, and of a policy's weights.

What a policy maximises: the discounted return, or the average reward per unit of time.

T steps, N environments.

Values, advantages and returns of a rollout.

T steps, N environments, L sequence length.

The critic does not act: values are computed after collection, in one batched pass over the rollout with the weights
that collected it. That is the same numbers for a fraction of the work.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from canter.core.data.rollout import Rollout
from canter.core.plain import check_range
from canter.core.struct import Metrics, State, TensorStruct, tree_copy_, tree_map
from canter.engines.base import Engine
from canter.functional.returns import average_reward_gae, gae, successor_values
from canter.functional.statistics import moments
from canter.nn.actor_critic import ActorCritic, Policy
from canter.nn.heads import ValueHead


class MovingAverage(nn.Module):
    """Exponentially weighted mean of what it was shown, in float64; moved only by an explicit `update`.

    Weights add up to one from the first update on, so it starts at the first value instead of being biased towards 0.
    """

    def __init__(self, step: float, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.step = step
        self.value = nn.Buffer(torch.zeros(shape, dtype=torch.float64))
        self.weight = nn.Buffer(torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def update(self, x: Tensor, count: Tensor) -> None:
        """Move towards `x`, the mean of `count` samples; NaN, infinity and a count of 0 move nothing."""
        weight = self.weight + self.step * (1.0 - self.weight)
        value = self.value + self.step / weight * (x - self.value)
        usable = torch.isfinite(value).all() & (count > 0)
        self.value.copy_(torch.where(usable, value, self.value))
        self.weight.copy_(torch.where(usable, weight, self.weight))


class AveragedPolicy:
    """A copy of a policy with the mean weights of recent iterations, which circle less than the last ones do.

    Where two learn against each other, as policy and discriminator do, they tend to go round what they should reach;
    the mean lies inside (Yazici et al., 2019). Of the mean so far, `decay` stays when weights are added; at first all
    that were added count alike. Statistics are those of the latest.
    """

    def __init__(self, policy: Policy, decay: float) -> None:
        self.of, self.decay = policy, decay
        self.policy = copy.copy(policy)
        self.policy.actor = copy.deepcopy(policy.actor).requires_grad_(False)
        self.count = torch.zeros((), device=policy.spec.device)

    @torch.no_grad()
    def add_(self) -> None:
        """Take the weights as they are now into the mean."""
        self.count += 1
        share = (1 / self.count).clamp(min=1 - self.decay)
        for mean, weight in zip(self.policy.actor.parameters(), self.of.actor.parameters(), strict=True):
            mean.lerp_(weight, share)
        for mean, statistic in zip(self.policy.actor.buffers(), self.of.actor.buffers(), strict=True):
            mean.copy_(statistic)

    def living(self) -> dict[str, Tensor]:
        """All that goes on after a stop, where it lives."""
        return {"count": self.count, **self.policy.actor.state_dict()}


Per = Literal["step", "time"]


def discount(rollout: Rollout[Any], gamma: float, per: Per) -> float | Tensor:
    """The discount of each row: `gamma` a step, or `gamma` a unit of time `[T, N]`."""
    return gamma if per == "step" else gamma**rollout.duration


class Discounted(nn.Module):
    """The discounted sum of rewards; there is nothing to estimate beside the values."""

    def __init__(self, gamma: float, per: Per, gae_lambda: float) -> None:
        super().__init__()
        self.gamma, self.gae_lambda = gamma, gae_lambda
        self.per: Per = per

    def observe(self, rollout: Rollout[Any], value: Tensor, next_value: Tensor) -> None:
        """Nothing."""

    def advantages(self, rollout: Rollout[Any], value: Tensor, next_value: Tensor) -> tuple[Tensor, Tensor]:
        """Advantages and returns `[T, N]`."""
        return gae(
            reward=rollout.reward,
            value=value,
            next_value=next_value,
            terminated=rollout.terminated,
            done=rollout.done,
            gamma=discount(rollout, self.gamma, self.per),
            gae_lambda=self.gae_lambda,
        )

    def centre_(self, head: ValueHead, return_: Tensor, valid: Tensor) -> None:
        """Nothing: rewards alone say how large values are."""

    def metrics(self) -> Metrics:
        """None."""
        return {}


class AverageReward(nn.Module):
    """The long-run average reward per unit of time; values tell how much better than average the future is.

    The rate is a moving average of `r + V(s') - V(s)` over one of the duration, and not of the reward alone. In the
    long run both are the same, since values cancel along an episode. But a rollout that begins with short queues and
    ends with long ones, or a reset to a good state, makes rewards alone look too good, and values know by how much.

    Advantages leave the level of values open, and an error of the rate makes it drift. So after each rollout the critic
    as a whole is shifted towards a mean of 0: its differences, and with them the advantages, stay as they are.

    An episode that terminates counts as one that goes on in a state of value 0, as good as the average.
    """

    def __init__(self, step: float, gae_lambda: float) -> None:
        super().__init__()
        self.step, self.gae_lambda = step, gae_lambda
        self.gain_and_time = MovingAverage(step, (2,))

    @property
    def rate(self) -> Tensor:
        """Reward per unit of time, 0-d float64; 0 at first."""
        gain, time = self.gain_and_time.value.unbind()
        return torch.where(time > 0, gain / torch.where(time > 0, time, 1.0), 0.0)

    def observe(self, rollout: Rollout[Any], value: Tensor, next_value: Tensor) -> None:
        """Move the rate to include a new rollout; `value` and `next_value` are `[T, N]`."""
        gain = rollout.reward + next_value.masked_fill(rollout.terminated, 0.0) - value
        count, means, _ = moments(torch.stack([gain, rollout.duration], dim=-1), rollout.valid)
        self.gain_and_time.update(means, count)

    def advantages(self, rollout: Rollout[Any], value: Tensor, next_value: Tensor) -> tuple[Tensor, Tensor]:
        """Advantages and differential returns `[T, N]`."""
        return average_reward_gae(
            reward=rollout.reward,
            value=value,
            next_value=next_value,
            terminated=rollout.terminated,
            done=rollout.done,
            reward_rate=self.rate.to(value.dtype),
            gae_lambda=self.gae_lambda,
            duration=rollout.duration,
        )

    def centre_(self, head: ValueHead, return_: Tensor, valid: Tensor) -> None:
        """Shift the critic towards a mean of 0 over the states that were visited."""
        _, mean, _ = moments(return_, valid)
        head.shift_(-self.step * torch.where(torch.isfinite(mean), mean, 0.0))

    def metrics(self) -> Metrics:
        """The rate, in the units of the transformed reward."""
        return {"value/reward_rate": self.rate}


Objective = Discounted | AverageReward


@dataclass(frozen=True, kw_only=True)
class BonusValueConfig:
    """A second value head, for the bonuses of an extension such as `rnd`, with a discount of its own."""

    gamma: float = 0.99
    """Discount of the bonuses, of a step."""
    gae_lambda: float = 0.95
    """As that of the reward."""
    episodic: bool = False
    """Whether only bonuses of the same episode count. Otherwise they count beyond its end, so that none is forgone by
    ending it early."""
    advantage_coef: float = 1.0
    """Weight of the bonuses' advantage, beside that of the reward."""
    value_coef: float = 1.0
    """Weight of this head's loss."""

    def __post_init__(self) -> None:
        """Refuse values outside their range, by name."""
        check_range(self, "must lie in 0..1", "gamma", "gae_lambda")
        check_range(self, "must be above 0", "advantage_coef", "value_coef")
        if not (self.gamma < 1 or self.episodic):
            raise ValueError(f"gamma={self.gamma} must be below 1, or episodic=true: the bonuses never end")


@dataclass
class Judgement(TensorStruct):
    """Values, advantages and returns `[T, N]` in the units of the reward."""

    value: Tensor
    advantage: Tensor
    return_: Tensor
    state: State
    """`[T / L, N, ...]` the critic's memory before rows 0, L, 2L, ...; `()` without memory."""
    last_state: State
    """`[N, ...]` the critic's memory after the last step."""
    bonus_value: Tensor | None = None
    """`[T, N]` values of the bonuses in their own units; None without a second head."""
    bonus_return: Tensor | None = None


class Judge:
    """Values every step of a rollout, and keeps the critic's memory from one rollout to the next."""

    engine: Engine
    """Computes the values."""

    def __init__(
        self,
        model: ActorCritic,
        objective: Objective,
        num_envs: int,
        sequence_length: int,
        bootstrap: bool = True,
        bonus: BonusValueConfig | None = None,
    ) -> None:
        self.model, self.objective, self.sequence_length, self.bonus = model, objective, sequence_length, bonus
        self.bootstrap = bootstrap
        """Whether truncated episodes are valued as going on."""
        self.state = model.critic.network.initial_state(num_envs)

    @torch.no_grad()
    def __call__(self, rollout: Rollout[Any], *, new: bool = False) -> Judgement:
        """Judge by the critic as it is now; the same rollout may be judged several times.

        `new` says that it is the first time: the objective's estimates then move to include this rollout.
        """
        if not self.bootstrap:
            cut = torch.zeros_like(rollout.truncated)
            rollout = replace(rollout, terminated=rollout.done, truncated=cut, final_obs=None)
        start = tree_map(lambda x: x[0], rollout.state) if self.model.shared_trunk else self.state
        values, after = self.engine.values(rollout.obs, start, rollout.reset)
        value, final_value = values[:-1], _final_values(rollout, after, self.engine.values)
        next_value = successor_values(values, rollout.done, rollout.reset, final_value)
        if new:
            self.objective.observe(rollout, value, next_value)
        advantage, return_ = self.objective.advantages(rollout, value, next_value)
        length, last = self.sequence_length, rollout.horizon - 1
        judged = Judgement(
            value,
            advantage,
            return_,
            # The memory before row t is the memory after row t - 1.
            state=tree_map(lambda x, rows: torch.cat([x.unsqueeze(0), rows[length - 1 : last : length]]), start, after),
            last_state=tree_map(lambda rows: rows[last], after),
        )
        return judged if self.bonus is None else self._with_bonus(self.bonus, rollout, judged, start, after)

    def advance(self, judged: Judgement) -> None:
        """Carry the critic's memory after the last step over to the next rollout."""
        tree_copy_(self.state, judged.last_state)

    def _with_bonus(
        self, config: BonusValueConfig, rollout: Rollout[Any], judged: Judgement, start: State, after: State
    ) -> Judgement:
        """The same with values of the bonuses, and with their advantage added to that of the reward."""
        assert rollout.bonus is not None
        values = self.model.bonus_values(rollout.obs, start, rollout.reset)
        next_value, terminated, done = values[1:], rollout.terminated, rollout.done
        if config.episodic:
            final = _final_values(rollout, after, lambda *args: (self.model.bonus_values(*args[:3]), ()))
            next_value = successor_values(values, done, rollout.reset, final)
        else:
            terminated = done = torch.zeros_like(done)
        advantage, return_ = gae(
            rollout.bonus, values[:-1], next_value, terminated, done, config.gamma, config.gae_lambda
        )
        total = judged.advantage + config.advantage_coef * advantage
        return replace(judged, advantage=total, bonus_value=values[:-1], bonus_return=return_)


def _final_values(rollout: Rollout[Any], after: State, values: Callable[..., tuple[Tensor, State]]) -> Tensor | None:
    """Values `[T, N]` of true final observations, each read with the memory of the episode that it ended."""
    if rollout.final_obs is None:
        return None
    # Every row is a sequence of its own.
    obs, needed = tree_map(lambda x: x.flatten(0, 1).unsqueeze(0), (rollout.final_obs, rollout.done))
    states = tree_map(lambda x: x[:-1].flatten(0, 1), after)
    return values(obs, states, None, needed)[0].view_as(rollout.reward)
