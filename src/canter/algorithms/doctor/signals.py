"""Signals of a rollout that the log does not have, as tensors on the device.

`rollout_signals` is called in a few iterations of a run, once the rollout is complete; it reads the
rollout and changes nothing. T steps, N environments, D components of an observation group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from canter.core.data.rollout import Rollout
from canter.core.specs import ACTION_MASK, Continuous
from canter.core.struct import Metrics, Obs, tree_map
from canter.nn.actor_critic import Policy
from canter.nn.distributions import Categorical

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


@torch.no_grad()
def rollout_signals(rollout: Rollout[Any]) -> Metrics:
    """Return the signals of rewards, observations and single environments; {} for short rollouts."""
    if rollout.valid.numel() < MIN_TRANSITIONS:
        return {}
    valid = rollout.valid
    reward = torch.where(valid, rollout.reward, 0.0)
    signals = {
        "reward_min": torch.where(valid, rollout.reward, torch.inf).amin(),
        "reward_max": torch.where(valid, rollout.reward, -torch.inf).amax(),
        "reward_nonzero": (reward != 0).sum() / valid.sum().clamp(min=1),
        **_observations(first_environments(rollout)),
        **_exception(reward.sum(0) / valid.sum(0).clamp(min=1)),
    }
    return finite(signals)


@torch.no_grad()
def transition_signals(obs: Obs, action: Tensor, reward: Tensor) -> Metrics:
    """Return the signals of rewards, observations and actions in -1..1 of single transitions `[B, ...]`."""
    signals = {
        "reward_min": reward.amin(),
        "reward_max": reward.amax(),
        "reward_nonzero": (reward != 0).float().mean(),
        "action_at_bound": (action.abs() > SATURATED).float().mean(),
        **_ranges([group for group in obs.values() if group.is_floating_point() and group.ndim == 2]),
    }
    return finite(signals)


def first_environments(rollout: Rollout[Any]) -> Rollout[Any]:
    """Return views of the environments that have `ENOUGH_TRANSITIONS` together."""
    return rollout[:, : -(-ENOUGH_TRANSITIONS // rollout.horizon)]


def finite(signals: Mapping[str, Tensor]) -> Metrics:
    """Return signals under their names in the log, without NaN and infinity."""
    if not signals:
        return {}
    values = torch.stack([value.float() for value in signals.values()])
    values = values.nan_to_num(nan=0.0, posinf=LARGEST, neginf=-LARGEST)
    return {PREFIX + name: value for name, value in zip(signals, values.unbind(), strict=True)}


def _observations(rollout: Rollout[Any]) -> Metrics:
    """Return the largest amount, the share of constant components, and how often final ones are lost.

    A final observation that equals the first of the next episode was read after the reset.
    """
    groups = {
        name: group
        for name, group in rollout.obs.items()
        if group.is_floating_point() and group.ndim == 3 and name != ACTION_MASK
    }
    signals = _ranges([group.flatten(0, 1) for group in groups.values()])
    if groups and rollout.final_obs is not None:
        obs = torch.cat(list(groups.values()), -1)
        final = torch.cat([rollout.final_obs[name] for name in groups], -1)
        ends = rollout.truncated & rollout.valid
        lost = ends & (final == obs[1:]).all(-1)
        signals["final_is_reset"] = lost.sum() / ends.sum().clamp(min=1)
    return signals


def _ranges(groups: Sequence[Tensor]) -> Metrics:
    """Return the largest amount and the share of constant components of observations `[B, D]`."""
    if not groups:
        return {}
    obs = torch.cat(list(groups), -1)
    low = obs.amin(0)
    high = obs.amax(0)
    return {
        "obs_largest": torch.maximum(high.abs(), low.abs()).amax(),
        "obs_constant": (high == low).float().mean(),
    }


def _exception(gain: Tensor) -> Metrics:
    """Return which environment's mean reward `[N]` lies farthest from the others, and how far.

    The distance is in robust standard deviations (1.4826 times the median distance).
    """
    if len(gain) < MIN_ENVS:
        return {}
    distance = (gain - gain.median()).abs()
    spread = 1.4826 * distance.median()
    worst = distance.argmax()
    return {"env_worst": worst, "env_distance": distance[worst] / spread.clamp(min=1e-6 * gain.abs().amax() + 1e-12)}


@torch.no_grad()
def policy_signals(policy: Policy, rollout: Rollout[Any]) -> Metrics:
    """Return the error of the first ratio, the share of actions at a bound, and their effect.

    The ratio compares the policy that is about to learn with the recorded one, in the first step.
    The record has `action` and `dist_params` `[T, N, ...]`.
    """
    rollout = first_environments(rollout)
    record = rollout.record
    distribution = policy.distribution
    space = policy.spec.action
    params, _ = policy.params(rollout.obs_at(0), tree_map(lambda x: x[0], rollout.state), rollout.reset[0])
    action = record.action[0]
    change = distribution.log_prob(params, action) - distribution.log_prob(record.dist_params[0], action)
    signals = {"ratio_error": torch.where(rollout.valid[0], change.exp() - 1.0, 0.0).abs().mean()}
    if isinstance(space, Continuous):
        sent = distribution.to_env(record.action)
        at_bound = (sent <= sent.new_tensor(space.low)) | (sent >= sent.new_tensor(space.high))
        signals["action_at_bound"] = at_bound.float().mean()
        noise = record.action - distribution.mode(record.dist_params)
        std = distribution.std(record.dist_params)
        noise = noise if std is None else noise / std
        signals |= action_effect(torch.cat([noise, noise.abs()], -1), rollout)
    elif isinstance(distribution, Categorical):
        chosen = one_hot(record.action, distribution.n)
        signals |= action_effect(chosen - record.dist_params.softmax(-1), rollout)
    return finite(signals)


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
    usable = (rollout.valid & ~rollout.done).reshape(-1, 1)
    count = usable.sum().clamp(min=2)
    columns = [noise, *(group[1:] - group[:-1] for group in obs), rollout.reward.unsqueeze(-1)]
    values = torch.where(usable, torch.cat(columns, -1).reshape(len(usable), -1).float(), 0.0)
    values = torch.where(usable, values - values.sum(0) / count, 0.0)
    values = values / (values.square().sum(0) / count).sqrt().clamp(min=1e-12)
    noise, change = values.split([noise.shape[-1], values.shape[-1] - noise.shape[-1]], -1)
    change = change.clamp(-OUTLIER, OUTLIER)  # a rare jump would count as an effect by chance
    change = torch.cat([change, change.abs()], -1)
    variance = change.square().sum(0) / count - (change.sum(0) / count).square()
    covariance = noise.t() @ change / count  # the mean of the noise is 0
    correlation = covariance * variance.clamp(min=1e-12).rsqrt()
    chance = math.sqrt(2.0 * math.log(2.0 * correlation.numel()))
    return {"action_effect": correlation.abs().amax() * count.sqrt() / chance}


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
