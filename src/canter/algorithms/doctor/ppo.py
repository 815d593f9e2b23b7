"""Rules about PPO: the size of updates, the critic, exploration and scales."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from canter.algorithms.doctor.findings import ALWAYS, Finding, Rules, Signals, median

PPO_RULES = Rules()
UPDATES = 5
"""Consecutive updates whose median counts."""
LARGE_KL = 0.05
HUGE_KL = 0.5
"""KL that is too large even while the return rises."""
LARGE_CLIP = 0.4
CRASH_KL = 1.0
"""KL of a single update that ends exploration at once."""
MANY_EPOCHS = 25
WIDE_CLIP = 1.0
GOOD_KL = 0.01
"""KL of an update to aim at; large ones grow with the square of the learning rate, small ones with the rate."""
SMALL_KL = 5e-4
SMALL_CLIP = 0.002
TINY_KL = 1e-4
"""KL of a policy that has not moved, whatever its critic says."""
EXPLAINED = 0.3
NO_EFFECT = 1.3
"""`doctor/action_effect` is about 1 if actions change nothing, and 5 to 15 otherwise."""
RATIO_ERROR = 0.03
"""Rounding of kernels in reduced precision stays far below."""
SPREAD = (0.05, 1e3)
"""Suitable standard deviations of returns if values are not normalised."""
NORMALIZED_SPREAD = 0.001
"""Suitable ones if they are: the critic starts with errors of order one."""
SMALL_STD = 0.05
"""Std of actions in -1..1, or share of the first entropy."""
RUNAWAY = 2.0
"""Factor of the std above its lowest."""
SMALL_MINIBATCH = 512
"""Samples from which the KL of a minibatch is exact enough to follow."""
JUMP = 1.5
"""Mean factor between the rates of two rows; one change of the schedule by default."""
RATE = "algorithm.optimizer.learning_rate"
MINIBATCHES = "algorithm.num_minibatches"


@PPO_RULES.rule("settings", "Acting and learning disagree")
def acting_differs(signals: Signals) -> Finding | None:
    """The policy that learns is not the one that acted."""
    error = signals.recent("doctor/ratio_error", 3)
    if not len(error) or median(error) < RATIO_ERROR or signals.setting("algorithm.obs_statistics") != "update":
        return None
    return Finding(
        (signals.evidence("doctor/ratio_error", error[-1], RATIO_ERROR),),
        "Before the first step of an update the probability ratio must be 1; the network answers differently when it "
        "learns.",
        advice="look for dropout, batch statistics or a recurrent state in your own network; else please report it",
    )


@PPO_RULES.rule("environment", "Actions have no effect", unless=("solved", "has_learned"))
def no_effect(signals: Signals) -> Finding | None:
    """Exploration noise changes neither the next observation nor the reward."""
    effect = signals.known("doctor/action_effect")
    entropy = signals.known("policy/entropy")
    blind = signals.recent("doctor/obs_constant", 1).sum() == 1.0
    std = signals.known("policy/std")
    if len(std):
        noisy = std[-1] >= 0.1
    else:
        noisy = len(entropy) > 0 and entropy[-1] > 0.2 * entropy[0]
    if len(effect) < 4 or effect.max() > NO_EFFECT or effect.max() == 0.0 or blind or not noisy:
        return None
    return Finding(
        (signals.evidence("doctor/action_effect", effect.max(), NO_EFFECT),),
        "The random part of the actions is uncorrelated with the next observation and with the reward.",
        advice="check that step() uses the action that it receives, in the order and scale of the action space",
    )


@PPO_RULES.rule("settings", "The learning rate jumped")
def rate_jump(signals: Signals) -> Finding | None:
    """The learning rate jumped up, as after a resume, and the return fell."""
    name = _rate_name(signals)
    rate = signals.column(name)
    returns = signals.column("return")
    if signals.setting(f"{RATE}.kind") in ("adaptive_kl", "step") or len(rate) < 4 * UPDATES:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        jumps = (np.flatnonzero(rate[1:] > 3.0 * rate[:-1]) + 1).tolist()
    if not jumps or jumps[-1] < UPDATES or len(rate) - jumps[-1] < UPDATES:
        return None
    jump: int = jumps[-1]
    before = float(returns[jump - 1])
    after = float(returns[-1])
    slow = float(rate[jump - 1])
    if signals.gain(before) < 3.0 or signals.gain(after) > 0.5 * signals.gain(before):
        return None
    return Finding(
        (signals.evidence(name, float(rate[jump]), 3.0 * slow, float(signals.steps[jump])),),
        "A resumed run with a larger budget follows its schedule from a higher rate, and the return fell since.",
        {RATE: _short(median(rate[:jump]))},
    )


@PPO_RULES.rule("settings", "Updates are too large", unless=("solved",))
def large_updates(signals: Signals) -> Finding | None:
    """Updates change the policy too much; those of a policy that has learned only if they do now."""
    rows = UPDATES if signals.learned else None
    kl = _sustained(signals, "policy/kl", rows)
    clipped = _sustained(signals, "policy/clip_fraction", rows)
    epochs = signals.number("algorithm.epochs")
    limit = signals.number("algorithm.clip_ratio")
    harmful = limit >= WIDE_CLIP or not (signals.rising or signals.return_misleads)
    many = epochs >= MANY_EPOCHS and clipped is not None and clipped[0] > LARGE_CLIP / 3
    largest = signals.known("policy/kl").max(initial=0.0)
    measure = f"By the median of {UPDATES} updates"
    if largest > CRASH_KL and _exploration(signals) <= SMALL_STD and not signals.learned:
        kl = (float(largest), float(signals.steps[np.nanargmax(signals.column("policy/kl"))]))
        evidence = signals.evidence("policy/kl", kl[0], CRASH_KL, kl[1])
        measure = "In a single update"
    elif kl is not None and kl[0] > (LARGE_KL if harmful else HUGE_KL):
        evidence = signals.evidence("policy/kl", kl[0], LARGE_KL if harmful else HUGE_KL, kl[1])
    elif clipped is not None and (many or (clipped[0] > LARGE_CLIP and harmful)):
        evidence = signals.evidence("policy/clip_fraction", clipped[0], LARGE_CLIP / (3 if many else 1), clipped[1])
    else:
        return None
    change = {**_rate(signals, _slower(kl)), "algorithm.target_kl": 0.02}
    if limit >= WIDE_CLIP:
        change = {"algorithm.clip_ratio": 0.2}
    elif epochs >= MANY_EPOCHS:
        change = {"algorithm.epochs": 10}
    return Finding(
        (evidence,),
        f"{measure} the policy left the region in which its samples say something about it.",
        change,
    )


def _slower(kl: tuple[float, float] | None) -> float:
    """Return the factor of the learning rate that brings the KL to about `GOOD_KL`."""
    return min(max(math.sqrt(GOOD_KL / max(0.0 if kl is None else kl[0], 1e-9)), 1 / 30), 1 / 3)


@PPO_RULES.rule("settings", "Updates are too small", after=0.1, unless=("learned", "return_misleads"))
def small_updates(signals: Signals) -> Finding | None:
    """Updates hardly change the policy."""
    kl = signals.known("policy/kl")
    clipped = signals.known("policy/clip_fraction")
    if len(kl) < 2 * UPDATES:
        return None
    # Schedules fall to 0 in the end, where small updates are intended.
    early = max(int(len(kl) * min(0.7 / signals.fraction, 1.0)), UPDATES)
    if median(kl[:early]) > SMALL_KL or median(clipped[:early]) > SMALL_CLIP or kl[:UPDATES].max() > 0.01:
        return None
    return Finding(
        (signals.evidence("policy/kl", median(kl[:early]), SMALL_KL),),
        "The policy hardly changes from update to update, and the return is not better than at the start.",
        _rate(signals, min(GOOD_KL / max(median(kl[:early]), 1e-9), 100.0)),
    )


@PPO_RULES.rule("scales", "Returns have an unsuitable scale", unless=("solved", "return_misleads"))
def reward_scale(signals: Signals) -> Finding | None:
    """Returns are huge or tiny, and nothing normalises them; or too tiny even for normalised values."""
    spread = signals.known("doctor/return_std")
    if not len(spread) or signals.setting("algorithm.reward.normalize"):
        return None
    normalized = signals.setting("algorithm.model.normalize_value", True)
    tiny, huge = (NORMALIZED_SPREAD, math.inf) if normalized else SPREAD
    alike = normalized and np.abs(signals.known("return")).max(initial=0.0) > 100 * NORMALIZED_SPREAD
    if spread[-1] == 0.0 or alike or tiny <= spread[-1] <= huge:
        return None
    change: dict[str, Any] = {"algorithm.model.normalize_value": True}
    if spread[-1] < tiny:  # an untrained critic errs by far more, and its errors are unlearned slowly
        scale = signals.number("algorithm.reward.scale", 1.0)
        change["algorithm.reward.scale"] = scale * 10.0 ** round(1 - math.log10(spread[-1]))
    return Finding(
        (signals.evidence("doctor/return_std", spread[-1], tiny if spread[-1] < tiny else huge),),
        "The error of the critic dominates the gradient if rewards are huge, and vanishes in it if they are tiny.",
        change,
    )


@PPO_RULES.rule("scales", "Observations are large", unless=("solved",))
def obs_scale(signals: Signals) -> Finding | None:
    """Observations are huge, and nothing normalises them."""
    largest = signals.recent("doctor/obs_largest", 2)
    if signals.setting("algorithm.model.policy.normalize_obs", True) is not False or not len(largest):
        return None
    if largest.min() < 100.0:
        return None
    return Finding(
        (signals.evidence("doctor/obs_largest", largest[-1], 100.0),),
        "Networks learn from inputs of order one, and normalize_obs is off.",
        {"algorithm.model.policy.normalize_obs": True},
    )


@PPO_RULES.rule("settings", "The policy stays random", after=0.1, unless=("solved", "self_play"))
def entropy_bonus(signals: Signals) -> Finding | None:
    """The entropy bonus outweighs the advantages, or the std grows without end."""
    coef = signals.number("algorithm.entropy_coef", 0.0)
    entropy = signals.known("policy/entropy")
    std = signals.known("policy/std")
    if len(entropy) < 2 * UPDATES:
        return None
    grown = len(std) > 0 and median(std[-UPDATES:]) > 1.3 * std[0]
    random = not len(std) and entropy[0] > 0 and median(entropy[-UPDATES:]) > 0.8 * entropy[0]
    runaway = len(std) > 0 and median(std[-UPDATES:]) > 4.0 * std[0]
    if not (runaway or (coef >= 0.05 and (grown or random))):
        return None
    metric, value, limit = "policy/entropy", entropy[-1], 0.8 * entropy[0]
    if len(std):
        metric, value, limit = "policy/std", std[-1], (1.3 if coef >= 0.05 else 4.0) * std[0]
    return Finding(
        (signals.evidence(metric, value, limit),),
        "The entropy bonus pays more than better actions." if coef else "Nothing in the loss limits the noise.",
        {"algorithm.entropy_coef": _short(coef / 30)} if coef else {"algorithm.model.std.maximum": _short(2 * std[0])},
    )


@PPO_RULES.rule("settings", "The noise of the actions grows", after=0.2, unless=("solved",))
def std_runaway(signals: Signals) -> Finding | None:
    """The std fell and has been growing since, while the return falls."""
    coef = max(signals.number("algorithm.entropy_coef", 0.0), signals.number("algorithm.entropy_coef.end", 0.0))
    std = signals.known("policy/std")
    returns = signals.known("return")
    if len(std) < 4 * UPDATES or not coef > 0:
        return None
    windows = std[len(std) % UPDATES :].reshape(-1, UPDATES).mean(1)
    grows = np.all(np.diff(windows[-3:]) > 0)
    if not grows or windows[-1] < RUNAWAY * windows.min() or returns[-1] > 0.9 * returns.max() + 0.1 * returns[0]:
        return None
    return Finding(
        (signals.evidence("policy/std", windows[-1], RUNAWAY * float(windows.min())),),
        "The entropy bonus outweighs what is left to learn, and the noise now costs return.",
        {"algorithm.entropy_coef": 0.0, "algorithm.model.std.maximum": _short(std[0])},
    )


@PPO_RULES.rule("settings", "The adaptive learning rate follows noise", unless=("learned",))
def noisy_rate(signals: Signals) -> Finding | None:
    """The adaptive learning rate follows the noise of small minibatches: up and down, or down to its lower bound."""
    name = _rate_name(signals)
    rate = signals.recent(name, 2 * UPDATES)
    size = signals.number("algorithm.horizon") * signals.number("env.num_envs") / signals.number(MINIBATCHES)
    if signals.setting(f"{RATE}.kind") != "adaptive_kl" or not len(rate) or not size < SMALL_MINIBATCH:
        return None
    jumps = np.diff(np.log(rate))
    jump = math.exp(float(np.abs(jumps).mean()))
    lowest = 2.0 * signals.number(f"{RATE}.minimum")
    at_bound = median(rate) < lowest and median(signals.known("policy/kl")) > signals.number(f"{RATE}.target_kl")
    trend = abs(jumps.sum()) > 0.25 * np.abs(jumps).sum()
    if not (at_bound or (jump > JUMP and not trend)):
        return None
    evidence = signals.evidence("change of the learning rate per row", jump, JUMP)
    return Finding(
        (signals.evidence(name, median(rate), lowest) if at_bound else evidence,),
        f"The KL of minibatches of {size:.0f} samples says little about the update.",
        {MINIBATCHES: max(int(signals.number(MINIBATCHES) * size / SMALL_MINIBATCH), 1), f"{RATE}.every": "update"},
    )


@PPO_RULES.rule("settings", "The untrained policy succeeds", after=0.05)
def success_from_start(signals: Signals) -> Finding | None:
    """The untrained policy always succeeds by its return."""
    limit = signals.number("success.min_return")
    if math.isnan(limit) or not signals.succeeds_untrained:
        return None
    rate = signals.known("success_rate")[0]
    return Finding(
        (signals.evidence("success_rate", rate, ALWAYS, float(signals.steps[0])),),
        f"All episodes met success.min_return={limit:g} before anything was learned: the sign or the scale of the "
        "reward, or that limit, is wrong.",
        advice="check the sign of the reward: is the return larger if the agent does better? Then raise "
        "success.min_return",
    )


@PPO_RULES.rule("scales", "Exploration is too small", unless=("learned",))
def small_std(signals: Signals) -> Finding | None:
    """The noise of the actions was tiny from the start."""
    std = signals.known("policy/std")
    if len(std) < UPDATES or std[0] >= SMALL_STD:
        return None
    return Finding(
        (signals.evidence("policy/std", std[0], SMALL_STD, float(signals.steps[0])),),
        "The initial std lets all tries look alike, and small steps of the mean are large changes of the policy.",
        {"algorithm.model.std.initial": 0.5},
    )


@PPO_RULES.rule("symptoms", "The critic predicts nothing", after=0.1, unless=("solved", "one_step"))
def blind_critic(signals: Signals) -> Finding | None:
    """The critic explains nothing of the returns."""
    explained = signals.known("value/explained_variance", since=0.05)
    kl = signals.known("policy/kl")
    if len(explained) < 2 * UPDATES or signals.extension("amp"):  # its reward changes with the discriminator
        return None
    spread = signals.known("doctor/return_std")
    varies = len(spread) > 0 and spread[-1] > 0.01 * abs(signals.known("return")[-1])
    if explained.max() > EXPLAINED or not varies or median(kl) < TINY_KL:
        return None
    return Finding(
        (signals.evidence("value/explained_variance", explained.max(), EXPLAINED),),
        "Its explained variance was never above that, so advantages are as noisy as returns.",
        {"algorithm.model.normalize_value": True, "algorithm.critic_optimizer": None},
        "check that the observations contain what the rewards depend on",
    )


@PPO_RULES.rule("symptoms", "Exploration has ended early", unless=("learned", "return_misleads"))
def collapse(signals: Signals) -> Finding | None:
    """The policy is nearly deterministic early, and has learned little."""
    value = _exploration(signals)
    if value > SMALL_STD:
        return None
    name = "policy/std" if len(signals.known("policy/std")) else "policy/entropy"
    return Finding(
        (signals.evidence(name, value, SMALL_STD),),
        "Nearly the same action is taken in every try, so better ones are not found.",
        {"algorithm.entropy_coef": 0.01},
    )


def _exploration(signals: Signals) -> float:
    """Return the recent std, or of discrete actions the entropy as a share of its start; infinity while unknown."""
    std = signals.known("policy/std")
    entropy = signals.known("policy/entropy")
    if len(entropy) < UPDATES:
        return math.inf
    return median(std[-UPDATES:]) if len(std) else median(entropy[-UPDATES:]) / max(float(entropy[0]), 1e-9)


def _sustained(signals: Signals, name: str, rows: int | None = None) -> tuple[float, float] | None:
    """Return the largest median of a metric over `UPDATES` rows in a row, and the step of the last of them.

    With `rows`, of that many last rows only.
    """
    values = signals.column(name)
    finite = np.flatnonzero(np.isfinite(values))[-(rows or len(values)) :]
    known = values[finite]
    if len(known) < UPDATES:
        return None
    windows = [known[i : len(known) - UPDATES + 1 + i] for i in range(UPDATES)]
    kept = np.sort(windows, 0)[UPDATES // 2]
    place = int(kept.argmax())
    return float(kept[place]), float(signals.steps[finite][place + UPDATES - 1])


def _rate_name(signals: Signals) -> str:
    """Return the name of the first learning rate in the log; "" without one."""
    return next((name for name in signals.rows[-1] if name.startswith("optim/learning_rate")), "")


def _rate(signals: Signals, factor: float) -> dict[str, float]:
    """Return the setting that multiplies the learning rate, whatever its schedule."""
    part = {"linear": ".start", "adaptive_kl": ".start"}.get(str(signals.setting(f"{RATE}.kind")), "")
    return {f"{RATE}{part}": _short(signals.number(RATE) * factor)}


def _short(value: float) -> float:
    """Return a value with two digits."""
    return float(f"{value:.2g}")
