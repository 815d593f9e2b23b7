"""Values, advantages and returns of a rollout.

The critic does not act: its values are computed after collection, in one batched pass over the
rollout with the weights that collected it. These are the same numbers as step by step, for a
fraction of the work.

An objective turns rewards and values into advantages and returns: `Discounted` by GAE,
`AverageReward` by its differential form. `AdvantageEstimator` computes the values and adds the
bonuses of a second value head.

T steps, N environments, L sequence length (1 for feed-forward critics).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from canter.algorithms.ppo.rewards import MovingAverage, Per, discount
from canter.core.data.rollout import Rollout
from canter.core.plain import check_range
from canter.core.registry import UserError
from canter.core.specs import EnvSpec
from canter.core.struct import Metrics, State, TensorStruct, tree_copy_, tree_map
from canter.engines.base import Engine, PPOBatch, PPOLoss, ValueLoss
from canter.functional.returns import average_reward_gae, gae, successor_values
from canter.functional.statistics import moments
from canter.nn.actor_critic import ActorCritic
from canter.nn.heads import ValueHead
from canter.nn.optimizer import OptimizerConfig


class Discounted(nn.Module):
    """The discounted sum of rewards; its only estimates are the values."""

    def __init__(self, gamma: float, per: Per, gae_lambda: float) -> None:
        super().__init__()
        self.gamma = gamma
        self.per: Per = per
        self.gae_lambda = gae_lambda

    def update(self, rollout: Rollout[Any], value: Tensor, next_value: Tensor) -> None:
        """Do nothing: there are no estimates to update."""

    def advantages(self, rollout: Rollout[Any], value: Tensor, next_value: Tensor) -> tuple[Tensor, Tensor]:
        """Return advantages and returns `[T, N]`."""
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
        """Do nothing: rewards alone determine the level of the values."""

    def metrics(self) -> Metrics:
        """Return no metrics."""
        return {}


class AverageReward(nn.Module):
    """The average reward per unit of time; values say how much better than average the future is.

    The rate is a moving average of `r + V(s') - V(s)`, divided by a moving average of the duration.
    In the long run this equals the average of the reward alone, since values cancel along an
    episode. But a rollout that begins with short queues and ends with long ones, or a reset to a
    good state, makes rewards alone look too good, and values correct for it.

    Advantages do not determine the level of the values, and an error of the rate makes it drift. So
    the critic as a whole is shifted towards a mean of 0 after each rollout; value differences, and
    with them advantages, do not change.

    An episode that terminates counts as one that goes on in a state of value 0, as good as the
    average.
    """

    def __init__(self, step: float, gae_lambda: float) -> None:
        super().__init__()
        self.step = step
        self.gae_lambda = gae_lambda
        self.gain_and_time = MovingAverage(step, (2,))

    @property
    def rate(self) -> Tensor:
        """Reward per unit of time, 0-d float64; 0 before the first update."""
        gain, time = self.gain_and_time.value.unbind()
        return torch.where(time > 0, gain / torch.where(time > 0, time, 1.0), 0.0)

    def update(self, rollout: Rollout[Any], value: Tensor, next_value: Tensor) -> None:
        """Update the rate with a new rollout; `value` and `next_value` are `[T, N]`."""
        gain = rollout.reward + next_value.masked_fill(rollout.terminated, 0.0) - value
        count, means, _ = moments(torch.stack([gain, rollout.duration], dim=-1), rollout.valid)
        self.gain_and_time.update(means, count)

    def advantages(self, rollout: Rollout[Any], value: Tensor, next_value: Tensor) -> tuple[Tensor, Tensor]:
        """Return advantages and differential returns `[T, N]`."""
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
        """Shift the critic towards a mean of 0 over the visited states."""
        _, mean, _ = moments(return_, valid)
        head.shift_(-self.step * torch.where(torch.isfinite(mean), mean, 0.0))

    def metrics(self) -> Metrics:
        """Return the rate, in the units of the transformed reward."""
        return {"value/reward_rate": self.rate}


Objective = Discounted | AverageReward
Recurrence = Literal["exact", "rl_games"]


@dataclass(frozen=True, kw_only=True)
class BonusValueConfig:
    """A second value head for the bonuses of an extension such as `rnd`, with its own discount."""

    gamma: float = 0.99
    """Discount of the bonuses per step."""
    gae_lambda: float = 0.95
    """Bias-variance trade-off of their advantage estimate, like that of the reward."""
    episodic: bool = False
    """Count only bonuses of the same episode. Otherwise they count beyond its end, so that ending
    an episode early does not forgo any."""
    advantage_coef: float = 1.0
    """Weight of the bonuses' advantage, which is added to that of the reward."""
    value_coef: float = 1.0
    """Weight of this head's loss."""

    def __post_init__(self) -> None:
        """Refuse values out of range, by name."""
        check_range(self, "must lie in 0..1", "gamma", "gae_lambda")
        check_range(self, "must be above 0", "advantage_coef", "value_coef")
        if not (self.gamma < 1 or self.episodic):
            raise UserError(f"gamma={self.gamma} must be below 1, or episodic=true: the bonuses never end")


@dataclass(frozen=True, kw_only=True)
class CentralValueConfig:
    """A critic that is trained in a separate phase; its network is the model's `critic`."""

    epochs: int = 5
    """Passes over each rollout."""
    num_minibatches: int = 4
    """Minibatches per pass; must divide `horizon * num_envs`, or the number of sequences if
    recurrent."""
    value_loss: ValueLoss | None = None
    """Error of the critic; null takes PPO's."""
    value_clip: float | None = None
    """Clip range of the value; null takes PPO's."""
    value_coef: float | None = None
    """Weight of the value loss; null takes PPO's."""
    actor_value: bool = False
    """Also train a value head on the policy's own features, by PPO's value loss and towards the
    same returns. Its values are not used; it shapes the features."""
    agents: Literal["all", "first"] = "all"
    """With several agents to a world: train on the samples of all of them or, as in rl_games, of
    the first one."""
    recurrence: Recurrence = "exact"
    """Recurrent state of the critic: one step per observation or, as in rl_games, a second step on
    the observation after each rollout. With a feed-forward policy rl_games also never clears the
    state for values, and trains every sequence from zeros. With several agents to a world it
    trains world w by the episode ends of environment w."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimiser of the critic. An adaptive learning rate follows the KL of the policy's phase."""

    def __post_init__(self) -> None:
        """Refuse phases that do nothing."""
        check_range(self, "must be at least 1", "epochs", "num_minibatches")
        check_range(self, "must be above 0", "value_clip", "value_coef")

    def stride(self, spec: EnvSpec) -> int:
        """Return the distance between environments that are trained on."""
        return spec.num_agents if self.agents == "first" else 1

    def select(self, batch: PPOBatch, spec: EnvSpec) -> PPOBatch:
        """Return the samples `[L, S, ...]` that are trained on."""
        stride = self.stride(spec)
        own = tree_map(lambda x: x[:, ::stride].contiguous(), batch)
        if stride == 1 or self.recurrence == "exact":
            return own
        chunks = batch.reset.unflatten(1, (-1, spec.num_envs))
        return replace(own, reset=chunks[:, :, : spec.num_envs // stride].flatten(1))

    def loss_of(self, loss: PPOLoss) -> PPOLoss:
        """Return the critic's part of PPO's loss, with the settings that are overridden here."""
        own = {name: getattr(self, name) for name in ("value_loss", "value_clip", "value_coef")}
        changed = {name: value for name, value in own.items() if value is not None}
        changed["update_obs_stats_per_minibatch"] = loss.update_obs_stats_per_minibatch and "minibatch"
        return replace(loss, surrogate=None, bound=None, advantage="given", moving_kl=None, **changed)


@dataclass
class RolloutValues(TensorStruct):
    """The critic's pass over a rollout, in the units of the reward."""

    value: Tensor
    """`[T, N]`."""
    next_value: Tensor
    """`[T, N]` values of the successors; at truncations those of the true final observations."""
    start: State
    """`[N, ...]` the critic's recurrent state before the first step; `()` if feed-forward."""
    after: State
    """`[T + 1, N, ...]` the critic's recurrent state after each observation."""


@dataclass
class ValueTargets(TensorStruct):
    """Values, advantages and returns `[T, N]` in the units of the reward."""

    value: Tensor
    advantage: Tensor
    return_: Tensor
    state: State
    """`[T / L, N, ...]` the critic's recurrent state before steps 0, L, 2L, ...; `()` if
    feed-forward."""
    last_state: State
    """`[N, ...]` the critic's recurrent state after the last step; as in rl_games, after the
    observation that follows it."""
    bonus_value: Tensor | None = None
    """`[T, N]` values of the bonuses in their own units; None without a second head."""
    bonus_return: Tensor | None = None


@dataclass
class AdvantageEstimator:
    """Evaluates rollouts with the critic and carries its recurrent state to the next rollout."""

    engine: Engine = field(init=False)
    """Computes the values; set by `PPO.use_engine`."""
    model: ActorCritic
    objective: Objective
    state: State
    """Recurrent state of the critic at the start of the next rollout."""
    sequence_length: int
    bootstrap: bool = True
    """Bootstrap the value of truncated episodes; otherwise they count as terminated."""
    bonus: BonusValueConfig | None = None
    recurrence: Recurrence = "exact"

    def __call__(self, rollout: Rollout[Any]) -> ValueTargets:
        """Return values, advantages and returns by the critic as it is now; nothing is updated."""
        return self.targets(rollout, self.values(rollout))

    @torch.no_grad()
    def values(self, rollout: Rollout[Any]) -> RolloutValues:
        """Return the values of every step and of its successor, by one pass of the critic."""
        rollout = self._with_episode_ends(rollout)
        # A shared trunk has one recurrent state, and the policy's was recorded.
        start = tree_map(lambda x: x[0], rollout.state) if self.model.shared_trunk else self.state
        values, after = self.engine.values(rollout.obs, start, self._resets(rollout))
        final_value = _final_values(rollout, after, self.engine.values)
        next_value = successor_values(values, rollout.done, rollout.reset, final_value)
        return RolloutValues(values[:-1], next_value, start, after)

    @torch.no_grad()
    def update(self, rollout: Rollout[Any], values: RolloutValues) -> None:
        """Update the objective's estimates with a new rollout, once and before `targets`."""
        self.objective.update(self._with_episode_ends(rollout), values.value, values.next_value)

    @torch.no_grad()
    def targets(self, rollout: Rollout[Any], values: RolloutValues) -> ValueTargets:
        """Return advantages and returns by these values."""
        rollout = self._with_episode_ends(rollout)
        advantage, return_ = self.objective.advantages(rollout, values.value, values.next_value)
        # The state before step t is the state after step t - 1.
        length = self.sequence_length
        last = rollout.horizon - 1
        states = tree_map(
            lambda start, after: torch.cat([start.unsqueeze(0), after[length - 1 : last : length]]),
            values.start,
            values.after,
        )
        if self.recurrence == "rl_games":
            last = rollout.horizon
            states = states if rollout.state else tree_map(torch.zeros_like, states)
        last_state = tree_map(lambda after: after[last], values.after)
        targets = ValueTargets(values.value, advantage, return_, states, last_state)
        return targets if self.bonus is None else self._with_bonus(self.bonus, rollout, values, targets)

    def advance(self, targets: ValueTargets) -> None:
        """Start the next rollout from the critic's recurrent state after the last step."""
        tree_copy_(self.state, targets.last_state)

    def _resets(self, rollout: Rollout[Any]) -> Tensor:
        """Return where values clear the recurrent state, `[T + 1, N]` bool.

        Rl_games clears it after a step, before the second step on the last observation, and never
        with a feed-forward policy.
        """
        if self.recurrence == "exact":
            return rollout.reset
        never = torch.zeros_like(rollout.reset)
        return torch.cat([never[:1], rollout.reset[1:]]) if rollout.state else never

    def _with_episode_ends(self, rollout: Rollout[Any]) -> Rollout[Any]:
        """Return the rollout; without `bootstrap`, with truncations changed to terminations."""
        if self.bootstrap:
            return rollout
        never = torch.zeros_like(rollout.truncated)
        return replace(rollout, terminated=rollout.done, truncated=never, final_obs=None)

    def _with_bonus(
        self, config: BonusValueConfig, rollout: Rollout[Any], values: RolloutValues, targets: ValueTargets
    ) -> ValueTargets:
        """Add values and returns of the bonuses, and their advantage to that of the reward."""
        assert rollout.bonus is not None
        bonus_values = self.model.bonus_values(rollout.obs, values.start, rollout.reset)
        if config.episodic:
            terminated = rollout.terminated
            done = rollout.done
            final_value = _final_values(rollout, values.after, lambda *args: (self.model.bonus_values(*args[:3]), ()))
            next_value = successor_values(bonus_values, done, rollout.reset, final_value)
        else:
            terminated = done = torch.zeros_like(rollout.done)
            next_value = bonus_values[1:]
        advantage, return_ = gae(
            rollout.bonus, bonus_values[:-1], next_value, terminated, done, config.gamma, config.gae_lambda
        )
        total = targets.advantage + config.advantage_coef * advantage
        return replace(targets, advantage=total, bonus_value=bonus_values[:-1], bonus_return=return_)


def _final_values(rollout: Rollout[Any], after: State, values: Callable[..., tuple[Tensor, State]]) -> Tensor | None:
    """Return values `[T, N]` of true final observations, by the recurrent state of each episode."""
    if rollout.final_obs is None:
        return None
    # Every step is a separate sequence.
    obs, needed = tree_map(lambda x: x.flatten(0, 1).unsqueeze(0), (rollout.final_obs, rollout.done))
    states = tree_map(lambda x: x[:-1].flatten(0, 1), after)
    return values(obs, states, None, needed)[0].view_as(rollout.reward)
