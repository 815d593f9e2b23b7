"""Signals of a rollout that the log does not have, as tensors on the device.

`measure` is called in a few iterations of a run, once the rollout is complete; it reads the rollout,
changes nothing and never waits for the device. T steps, N environments, D components of an observation group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from canter.core.data.rollout import Rollout
from canter.core.specs import Continuous
from canter.core.struct import Metrics, Obs, tree_map
from canter.nn.actor_critic import Policy
from canter.nn.distributions import Categorical, constant

PREFIX = "doctor/"
MIN_TRANSITIONS = 64
"""Rollouts with fewer have no statistics worth reading."""
ENOUGH_TRANSITIONS = 4096
"""Observations and actions of more are not measured: the first environments have as many."""
MIN_ENVS = 8
"""With fewer environments none can be called an exception."""
OUTLIER = 3.0
"""Standard deviations beyond which a change of observations counts no more."""
SATURATED = 0.999
"""Amount of a squashed action from which it lies at its bound."""
LARGEST = 1e30
"""Signals are cut off here, since the log has finite numbers only."""


def rollout_signals(rollout: Rollout[Any], few: Rollout[Any]) -> Metrics:
    """Return the signals of rewards, observations and single environments; {} for short rollouts.

    Observations are those of `few`, the first environments of the rollout.
    """
    if rollout.valid.numel() < MIN_TRANSITIONS:
        return {}
    valid = rollout.valid
    invalid = ~valid
    return {
        "reward_min": rollout.reward.masked_fill(invalid, torch.inf).amin(),
        "reward_max": rollout.reward.masked_fill(invalid, -torch.inf).amax(),
        **_observations(few),
        **_exception(rollout.reward.masked_fill(invalid, 0.0).sum(0) / valid.sum(0).clamp(min=1)),
    }


def transition_signals(obs: Obs, action: Tensor, reward: Tensor) -> Metrics:
    """Return the signals of rewards, observations and actions in -1..1 of single transitions `[B, ...]`."""
    groups = [group for group in obs.values() if group.is_floating_point() and group.ndim == 2]
    return {
        "reward_min": reward.amin(),
        "reward_max": reward.amax(),
        "action_at_bound": (action.abs() > SATURATED).float().mean(),
        **(_ranges(torch.cat(groups, -1)) if groups else {}),
    }


@torch.no_grad()
def measure(rollout: Rollout[Any], own_signals: Callable[[Rollout[Any]], Metrics]) -> Metrics:
    """Return the signals of a rollout and an algorithm's own under their names in the log, without NaN and infinity."""
    few = rollout[:, : -(-ENOUGH_TRANSITIONS // rollout.horizon)]
    signals = rollout_signals(rollout, few) | own_signals(few)
    if not signals:
        return {}
    values = torch.stack([value.float() for value in signals.values()])
    values = values.nan_to_num(nan=0.0, posinf=LARGEST, neginf=-LARGEST)
    return {PREFIX + name: value for name, value in zip(signals, values.unbind(), strict=True)}


def _observations(rollout: Rollout[Any]) -> Metrics:
    """Return the largest amount, the share of constant components, and how often final ones are lost.

    A final observation that equals the first of the next episode was read after the reset.
    """
    names = [name for name, group in rollout.obs.items() if group.is_floating_point() and group.ndim == 3]
    if not names:
        return {}
    obs = torch.cat([rollout.obs[name] for name in names], -1)
    signals = _ranges(obs.flatten(0, 1))
    if rollout.final_obs is not None:
        final = torch.cat([rollout.final_obs[name] for name in names], -1)
        ends = rollout.truncated & rollout.valid
        lost = ends & (final == obs[1:]).all(-1)
        signals["final_is_reset"] = lost.sum() / ends.sum().clamp(min=1)
    return signals


def _ranges(obs: Tensor) -> Metrics:
    """Return the largest amount and the share of constant components of observations `[B, D]`."""
    low, high = obs.aminmax(dim=0)
    return {"obs_largest": torch.maximum(high, -low).amax(), "obs_constant": (high == low).float().mean()}


def _largest(values: Tensor) -> Tensor:
    """Return the largest amount."""
    return torch.linalg.vector_norm(values, math.inf)


def _exception(gain: Tensor) -> Metrics:
    """Return which environment's mean reward `[N]` lies farthest from the others, and how far.

    The distance is in robust standard deviations (1.4826 times the median distance).
    """
    if len(gain) < MIN_ENVS:
        return {}
    distance = (gain - gain.median()).abs()
    spread = 1.4826 * distance.median()
    largest, worst = distance.max(0)
    return {"env_worst": worst, "env_distance": largest / spread.clamp(min=1e-6 * _largest(gain) + 1e-12)}


def policy_signals(policy: Policy, rollout: Rollout[Any]) -> Metrics:
    """Return the error of the first ratio, the share of actions at a bound, and their effect.

    The ratio compares the policy that is about to learn with the recorded one, in the first step.
    The record has `action` and `dist_params` `[T, N, ...]`.
    """
    record = rollout.record
    distribution = policy.distribution
    space = policy.spec.action
    params, _ = policy.params(rollout.obs_at(0), tree_map(lambda x: x[0], rollout.state), rollout.reset[0])
    both = torch.stack([params, record.dist_params[0]])
    learning, acting = distribution.log_prob(both, record.action[0].expand(2, *record.action[0].shape))
    signals = {"ratio_error": torch.where(rollout.valid[0], (learning - acting).expm1(), 0.0).abs().mean()}
    if isinstance(space, Continuous):
        sent = distribution.to_env(record.action)
        at_bound = (sent <= constant(space.low, sent)) | (sent >= constant(space.high, sent))
        signals["action_at_bound"] = at_bound.float().mean()
        noise = record.action - distribution.mode(record.dist_params)
        std = distribution.std(record.dist_params)
        noise = noise if std is None else noise / std
        signals |= action_effect(torch.cat([noise, noise.abs()], -1), rollout)
    elif isinstance(distribution, Categorical):
        chosen = one_hot(record.action, distribution.n)
        signals |= action_effect(chosen - record.dist_params.softmax(-1), rollout)
    return signals


def action_effect(noise: Tensor, rollout: Rollout[Any]) -> Metrics:
    """Return how surely the exploration noise `[T, N, A]` moves the next observation or the reward.

    The value is the largest t statistic of a correlation between a component of the noise and one
    of the change of observations, or its amount, over what chance gives for as many pairs. The
    noise is independent of the state, so a correlation is an effect. Amounts of the noise (more
    components) and of the change show effects that have no sign, as of a squared action.
    """
    obs = [group for group in rollout.obs.values() if group.is_floating_point() and group.ndim == 3]
    if not obs or rollout.valid.numel() < MIN_TRANSITIONS:
        return {}
    usable = (rollout.valid > rollout.done).reshape(-1, 1)  # valid, and not the last of its episode
    count = usable.sum().clamp(min=2)
    root = count.sqrt()
    columns = [noise, *(group[1:] - group[:-1] for group in obs), rollout.reward.unsqueeze(-1)]
    values = torch.where(usable, torch.cat(columns, -1).reshape(len(usable), -1).float(), 0.0)
    values = torch.where(usable, values - values.sum(0) / count, 0.0)
    values = normalize(values, dim=0)
    noise, change = values.split([noise.shape[-1], values.shape[-1] - noise.shape[-1]], -1)
    limit = OUTLIER / root
    change = change.clamp(-limit, limit)  # a rare jump would count as an effect by chance
    change = torch.cat([change, change.abs()], -1)
    variance = change.square().sum(0) - change.sum(0).square() / count
    correlation = noise.t() @ change * variance.clamp(min=1e-12).rsqrt()  # the mean of the noise is 0
    chance = math.sqrt(2.0 * math.log(2.0 * correlation.numel()))
    return {"action_effect": _largest(correlation) * root / chance}


def episode_signals(episodes: Sequence[tuple[float, int, bool]]) -> dict[str, float]:
    """Return the spread of returns, and the share of terminated episodes that have the largest length.

    Episodes are (return, length, terminated).
    """
    if len(episodes) < 2:
        return {}
    returns = torch.tensor([return_ for return_, _, _ in episodes], dtype=torch.float64)
    lengths = [length for _, length, terminated in episodes if terminated]
    longest = max(length for _, length, _ in episodes)
    share = sum(length == longest for length in lengths) / len(lengths) if lengths else 0.0
    return {
        f"{PREFIX}return_std": min(float(returns.std()), LARGEST),
        f"{PREFIX}longest_share": share,
        f"{PREFIX}longest": float(longest),
    }
