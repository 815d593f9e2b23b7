"""Rules about SAC: scales, the number of updates, the critics, and the weight of the entropy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from canter.algorithms.doctor.findings import Finding, Rules, Signals, median

SAC_RULES = Rules()
LAST = 3
"""Rows whose median counts."""
REWARDS = (0.01, 1000.0)
"""Suitable sizes of the largest reward if rewards are not scaled."""
WARM_UP = 0.5
"""Share of the run in which random actions leave too little to learn."""
FEW_UPDATES = 20_000
"""Updates of a whole run below which fewer than `RATIO` for each transition are a finding."""
RATIO = 0.25
EARLY = 0.2
"""Fraction of the run before which nothing is concluded from a return that does not rise."""
SLACK = 0.5
"""Share of the largest possible value by which values may exceed it."""
NATS = 0.25
"""Entropy per action below the uniform distribution's, up to which a policy counts as random."""
MISSED = 0.5
"""Entropy per action below its target, from which the target is out of reach."""
DETERMINISTIC = -3.0
"""Entropy per action of a normal distribution with a std of 0.012, in -1..1."""
LOW = 0.01
"""Temperature, in differences between the best and the worst reward, that pays nothing for exploration."""
AT_BOUND = 0.8
TEMPERATURE = "algorithm.temperature"
TARGETS = (f"{TEMPERATURE}.target_entropy", f"{TEMPERATURE}.target_std")


def _rewards(signals: Signals) -> tuple[float, float]:
    """Return the lowest and the highest reward so far; NaN while unknown."""
    low = signals.known("doctor/reward_min")
    high = signals.known("doctor/reward_max")
    return (float(low.min()), float(high.max())) if len(low) and len(high) else (math.nan, math.nan)


def _unit(signals: Signals) -> float:
    """Return the divisor of rewards."""
    units = signals.known("reward/unit")
    return float(units[-1]) if len(units) else 1.0


def _dim(signals: Signals) -> float:
    """Return the number of action components; NaN while unknown."""
    limit = signals.recent("doctor/entropy_limit", 1)
    return float(limit[-1]) / math.log(2.0) if len(limit) else math.nan


@SAC_RULES.rule("scales", "Rewards have an unsuitable scale", unless=("solved",))
def sac_reward_scale(signals: Signals) -> Finding | None:
    """Rewards are huge or tiny beside the entropy, and nothing scales them."""
    low, high = _rewards(signals)
    largest = max(high, -low)
    if signals.setting("algorithm.scale_rewards") or not largest > 0:
        return None
    if REWARDS[0] <= largest <= REWARDS[1]:
        return None
    limit = REWARDS[0] if largest < REWARDS[0] else REWARDS[1]
    return Finding(
        (signals.evidence("doctor/reward_max" if high >= -low else "doctor/reward_min", largest, limit),),
        "The temperature starts at about 1 and moves slowly: beside it tiny rewards count for nothing, and huge ones "
        "leave the entropy without weight.",
        {"algorithm.scale_rewards": True},
    )


@SAC_RULES.rule("settings", "The random warm-up has an unsuitable length")
def warm_up(signals: Signals) -> Finding | None:
    """Random actions take most of the run, or end before there is a batch to learn from."""
    steps = signals.number("algorithm.warmup_steps")
    batch = signals.number("algorithm.batch_size")
    total = signals.number("total_steps")
    if steps > WARM_UP * total:
        value, limit, change = steps, WARM_UP * total, 0.05 * total
        why = "Until then actions are random and nothing is learned."
    elif steps < batch and signals.fraction >= EARLY and not signals.learns:
        value, limit, change = steps, batch, 5_000
        why = "The first updates saw the same few transitions again and again, and the networks keep what they fitted."
    else:
        return None
    return Finding(
        (signals.evidence("algorithm.warmup_steps", value, limit),),
        why,
        {"algorithm.warmup_steps": int(max(change, batch))},
    )


@SAC_RULES.rule("settings", "There are too few updates", after=EARLY, unless=("learns",))
def few_updates(signals: Signals) -> Finding | None:
    """The run makes too few updates to learn."""
    total = signals.number("total_steps")
    ratio = signals.number("algorithm.updates_per_transition")
    change: dict[str, Any] = {"algorithm.updates_per_transition": 1.0}
    by_step = signals.number("algorithm.updates_per_step")
    if math.isfinite(by_step):
        envs = signals.number("env.num_envs", 1.0)
        ratio = by_step / envs
        change = {"algorithm.updates_per_step": math.ceil(4 * RATIO * envs)}
    if not ratio * total < FEW_UPDATES or ratio >= RATIO:
        return None
    return Finding(
        (signals.evidence("updates per transition", ratio, RATIO),),
        f"The whole run makes {ratio * total:,.0f} of them; SAC learns from each transition many times.",
        change,
    )


@SAC_RULES.rule("settings", "Values diverge", unless=("learns",))
def impossible_values(signals: Signals) -> Finding | None:
    """The critics expect more than the best rewards could sum up to, or less than the worst."""
    values = signals.known("value/mean")
    low, high = _rewards(signals)
    far = 1.0 / (1.0 - signals.number("algorithm.gamma"))
    returns = signals.known("return")
    if len(values) < LAST or not math.isfinite(low) or not len(returns):
        return None
    entropy = median(signals.recent("policy/entropy", LAST)) * median(signals.recent("policy/temperature", LAST))
    slack = SLACK * far * max(high, -low) + far * abs(entropy) * _unit(signals)
    highest = max(far * high, float(returns.max()), 0.0) + slack
    lowest = min(far * low, float(returns.min()), 0.0) - slack
    lasting = np.sort([values[:-2], values[1:-1], values[2:]], 0)[LAST // 2]
    value = float(lasting[np.abs(lasting).argmax()]) * _unit(signals)
    if lowest <= value <= highest:
        return None
    return Finding(
        (signals.evidence("value/mean", value, highest if value > highest else lowest),),
        "No policy has such a return with the rewards so far: the critics learn from their own errors.",
        {
            "algorithm.tau": 0.005,
            "algorithm.pessimism": "min",
            "algorithm.critic.members": 2,
            **_slower_critics(signals),
        },
    )


def _slower_critics(signals: Signals) -> dict[str, Any]:
    """Return the change to the default learning rate if that of the critics is larger than 1e-3."""
    name = "algorithm.critic_optimizer.learning_rate"
    if math.isnan(signals.number(name)):
        name = "algorithm.optimizer.learning_rate"
    return {name: 3e-4} if signals.number(name) > 1e-3 else {}


@SAC_RULES.rule("settings", "Returns exceed the support of the critics", unless=("solved",))
def narrow_support(signals: Signals) -> Finding | None:
    """Returns lie beyond the atoms of the critics."""
    low, high = signals.setting("algorithm.critic.support", (-5.0, 5.0))
    reward = signals.recent("rollout_reward", LAST)
    length = signals.recent("length", 1)
    atoms = signals.number("algorithm.critic.atoms", 1.0)
    if not atoms > 1 or signals.setting("algorithm.scale_rewards") or not len(reward) or not len(length):
        return None
    value = median(reward) * min(1.0 / (1.0 - signals.number("algorithm.gamma")), float(length[-1]))
    if low <= value <= high:
        return None
    return Finding(
        (signals.evidence("discounted return", value, low if value < low else high),),
        "Critics with atoms cannot predict a return beyond their support, so all good actions look alike.",
        {"algorithm.scale_rewards": True},
    )


@SAC_RULES.rule("settings", "The entropy outweighs the rewards", after=EARLY, unless=("learns",))
def high_temperature(signals: Signals) -> Finding | None:
    """A nat of entropy is worth more than any reward, and the policy is random or short of its target."""
    entropy = signals.recent("policy/entropy", LAST)
    temperature = signals.recent("policy/temperature", LAST)
    target = signals.recent("doctor/target_entropy", 1)
    low, high = _rewards(signals)
    if not len(entropy) or not len(target):
        return None
    limit = (high - low) / _unit(signals)
    dim = _dim(signals)
    random = median(entropy) > dim * (math.log(2.0) - NATS)
    missed = median(entropy) < target[-1] - dim * MISSED
    if not median(temperature) > limit or not limit > 0 or not (random or missed):
        return None
    change: dict[str, Any] = {f"{TEMPERATURE}.initial": float(f"{0.1 * limit:.1g}"), f"{TEMPERATURE}.learned": True}
    if target[-1] > dim * (math.log(2.0) - NATS) or missed:  # no policy that does anything useful has it
        change = {
            f"{TEMPERATURE}.target_entropy": None,
            f"{TEMPERATURE}.target_std": None,
            "algorithm.std.maximum": 7.4,
        }
    return Finding(
        (
            signals.evidence("policy/temperature", median(temperature), limit),
            signals.evidence("policy/entropy", median(entropy), float(target[-1])),
        ),
        "A nat of entropy is worth more than the best action of a step.",
        change,
    )


@SAC_RULES.rule("settings", "Exploration has ended early", unless=("learns",))
def low_temperature(signals: Signals) -> Finding | None:
    """The policy has become deterministic, and has learned little."""
    entropy = signals.recent("policy/entropy", LAST)
    temperature = signals.recent("policy/temperature", LAST)
    dim = _dim(signals)
    low, high = _rewards(signals)
    limit = LOW * (high - low) / _unit(signals)
    if not len(entropy) or not median(entropy) < DETERMINISTIC * dim:
        return None
    if not median(temperature) < limit:
        return None
    change: dict[str, Any] = dict.fromkeys(TARGETS)
    if not signals.setting(f"{TEMPERATURE}.learned", True) or not any(map(signals.setting, change)):
        change = {f"{TEMPERATURE}.initial": float(f"{10 * limit:.1g}"), f"{TEMPERATURE}.learned": True}
    return Finding(
        (
            signals.evidence("policy/entropy", median(entropy), DETERMINISTIC * dim),
            signals.evidence("policy/temperature", median(temperature), limit),
        ),
        "Nearly the same action is taken in every try: the target of the entropy, or the temperature, is too low.",
        change,
    )


@SAC_RULES.rule("settings", "Actions are stuck at their bounds", unless=("learns",))
def saturated_actions(signals: Signals) -> Finding | None:
    """Nearly all actions lie at a bound, where the squashing has no slope."""
    shares = signals.recent("doctor/action_at_bound", 2)
    if not len(shares) or np.min(shares) < AT_BOUND or not len(signals.known("value/mean")):
        return None
    rate = signals.number("algorithm.optimizer.learning_rate")
    return Finding(
        (signals.evidence("doctor/action_at_bound", shares[-1], AT_BOUND),),
        "There the squashing has no slope, so the policy cannot learn to leave them.",
        {"algorithm.optimizer.learning_rate": 3e-4} if rate > 1e-3 else {},
        "bound the action space to what the task needs",
    )
