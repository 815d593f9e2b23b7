"""Rules about the environment and the task, for every algorithm."""

from __future__ import annotations

import numpy as np

from canter.algorithms.doctor.findings import Finding, Rules, Signals, median

TASK_RULES = Rules()
LOOKS = 3
"""Looks of the doctor that must agree."""
EARLY = 0.05
"""Fraction of the run before which nothing is concluded from what is absent."""
LONG_EPISODE = 50
SAME_LENGTH = 0.3
"""Share of terminated episodes with the largest length: chance gives a few per cent."""
SHORTER = 0.7
GOAL_BY = 0.3
"""Fraction of the run in which a goal with a constant cost per step should have been reached."""
EXCEPTION = 6.0
"""Robust standard deviations by which a broken environment differs from the others, as a median."""
FAR_SIGHT = 10.0
FELL = 0.5
NOTHING = 0.4
"""Fraction of the run after which no gain at all is a finding."""
LEARNED_BEFORE = 5.0
"""Gain of the best return, in standard deviations of untrained episodes, from which it may fall."""
WORTH_EVALUATING = 2.0
"""Gain in training from which three evaluations of a few episodes can show that half of it is lost."""
HALF = 0.5
"""Share of that gain, and of the run: the mean of a policy that has just begun may fail where its noise succeeds."""


@TASK_RULES.rule("environment", "No reward so far", after=EARLY)
def no_reward(signals: Signals) -> Finding | None:
    """Every reward so far was 0, and nothing else drives exploration."""
    rewards = signals.known("rollout_reward")
    measured = [signals.known(name) for name in ("doctor/reward_min", "doctor/reward_max")]
    returns = signals.known("rollout_return")
    if not len(returns) or np.any(rewards) or any(map(np.any, measured)) or np.any(returns):
        return None
    if signals.extension("rnd"):
        return None
    return Finding(
        (signals.evidence("rollout_reward", 0.0, 0.0),),
        f"All rewards of {int(signals.steps[-1]):,} steps were 0, so no action is better than another.",
        advice="reward progress on the way to the goal, start nearer to it, or explore by curiosity: "
        "--algorithm.extensions '[{kind: rnd}]'",
    )


@TASK_RULES.rule("environment", "The reward depends on nothing", after=2 * EARLY)
def constant_reward(signals: Signals) -> Finding | None:
    """Every step is rewarded alike, and no episode terminates."""
    low = signals.known("doctor/reward_min")
    high = signals.known("doctor/reward_max")
    terminated = signals.known("terminated_rate")
    if len(low) < LOOKS or not len(terminated) or terminated.any():
        return None
    if np.ptp(np.concatenate([low, high])) > 0 or low[0] == 0:
        return None
    if low[0] < 0 and signals.fraction < GOAL_BY:
        return None
    return Finding(
        (signals.evidence("doctor/reward_max", high[-1], low[-1]), signals.evidence("terminated_rate", 0.0, 0.0)),
        f"Every step was rewarded with {low[0]:g} and no episode terminated, so all policies earn the same.",
        advice="check the reward function of the environment",
    )


@TASK_RULES.rule("environment", "Observations never change", unless=("one_step", "self_play"))
def blind(signals: Signals) -> Finding | None:
    """No component of the observations varies."""
    constant = signals.recent("doctor/obs_constant", LOOKS)
    if not len(constant) or constant.min() < 1.0:
        return None
    return Finding(
        (signals.evidence("doctor/obs_constant", constant[-1], 1.0),),
        "All components were constant over whole rollouts, so the policy cannot tell states apart.",
        advice="check what the environment returns as observation: canter check",
    )


@TASK_RULES.rule("environment", "One environment differs from all others")
def broken_env(signals: Signals) -> Finding | None:
    """One environment is rewarded unlike all others, at every look."""
    looks = 2 * LOOKS
    worst = signals.recent("doctor/env_worst", looks)
    distance = signals.recent("doctor/env_distance", looks)
    if not len(worst) or np.ptp(worst) > 0 or distance.min() < 4.0 or median(distance) < EXCEPTION:
        return None
    return Finding(
        (signals.evidence("doctor/env_distance", median(distance), EXCEPTION),),
        f"Its mean reward was the farthest from the median at each of {looks} looks, by that many robust standard "
        "deviations.",
        advice=f"step environment {int(worst[-1])} alone and compare",
        title=f"Environment {int(worst[-1])} differs from all others",
    )


@TASK_RULES.rule("environment", "A time limit is reported as a termination")
def deadline_terminates(signals: Signals) -> Finding | None:
    """Episodes terminate at one length, which is a time limit."""
    share = signals.recent("doctor/longest_share", LOOKS)
    longest = signals.recent("doctor/longest", LOOKS)
    if not len(share) or share.min() < SAME_LENGTH or longest.min() < LONG_EPISODE or np.ptp(longest) > 0:
        return None
    if signals.setting("env.finite_horizon"):
        return None
    return Finding(
        (signals.evidence("doctor/longest_share", share[-1], SAME_LENGTH),),
        f"That share of terminated episodes has exactly {int(longest[-1])} steps, and the critic learns that nothing "
        "follows.",
        advice="report `truncated` in place of `terminated` at the time limit; if the deadline is part of the task and "
        "the observation has the time: --env.finite-horizon true",
    )


@TASK_RULES.rule("environment", "Final observations are lost")
def final_obs(signals: Signals) -> Finding | None:
    """The last observation of truncated episodes is that of the next one."""
    lost = signals.known("doctor/final_is_reset")
    lost = lost[lost > 0]
    if len(lost) < 2 or lost[-2:].min() < 0.9 or signals.known("doctor/obs_constant")[-1] == 1.0:
        return None
    return Finding(
        (signals.evidence("doctor/final_is_reset", lost[-1], 0.9),),
        "At truncations the final observation is the first of the next episode, so the wrong value is bootstrapped.",
        advice="let the environment return the observation before the reset as `final_obs`",
    )


@TASK_RULES.rule("environment", "Ending the episode pays", unless=("self_play",))
def dying_pays(signals: Signals) -> Finding | None:
    """Episodes get shorter while the negative return rises."""
    lengths = signals.known("rollout_length")
    rewards = signals.known("rollout_reward")
    terminated = signals.known("terminated_rate")
    if len(lengths) < 8 or signals.setting("success.ending") in ("terminated", "any"):
        return None
    now = median(lengths[-4:])
    ends = terminated.min() >= 0.95
    better = signals.current_gain > 0 and rewards[-1] < 0
    if not ends or not better or now > SHORTER * lengths[0] or now < 1.5:
        return None
    return Finding(
        (
            signals.evidence("rollout_length", now, SHORTER * float(lengths[0])),
            signals.evidence("rollout_reward", rewards[-1], 0.0),
        ),
        "Steps cost on average and episodes get shorter: the policy learns to end them. If that is the goal, set "
        "success.ending=terminated.",
        advice="check the sign of the reward, or reward every step in which nothing has failed",
    )


@TASK_RULES.rule("settings", "The discount is short", after=EARLY, unless=("solved",))
def short_discount(signals: Signals) -> Finding | None:
    """The discount forgets most of an episode."""
    gamma = signals.number("algorithm.gamma")
    lengths = signals.known("length")
    if not gamma <= 0.8 or signals.setting("algorithm.objective") == "average" or not len(lengths):
        return None
    sight = 1.0 / (1.0 - gamma)
    if lengths[-1] < FAR_SIGHT * sight:
        return None
    return Finding(
        (signals.evidence("length", lengths[-1], FAR_SIGHT * sight),),
        f"gamma={gamma:g} looks {sight:.2g} steps ahead, and later consequences of an action count for nothing.",
        {"algorithm.gamma": 0.99},
    )


@TASK_RULES.rule("symptoms", "Evaluations are far worse than training", after=HALF)
def eval_differs(signals: Signals) -> Finding | None:
    """Evaluations without noise earn far less than training."""
    evaluations = signals.recent("eval/return", LOOKS)
    returns = signals.known("return")
    if not len(evaluations) or signals.current_gain < WORTH_EVALUATING or signals.start is None:
        return None
    limit = signals.start[0] + HALF * (returns[-1] - signals.start[0])
    if evaluations.max() > limit:
        return None
    return Finding(
        (signals.evidence("eval/return", evaluations[-1], limit),),
        "Either the noise is a part of the solution, or the policy sees other statistics when it is evaluated.",
        advice="compare `canter eval RUN --stochastic` with `canter eval RUN`; if the noise matters, let the std fall",
    )


@TASK_RULES.rule("symptoms", "The return fell after its best", after=0.2, unless=("solved",))
def fell(signals: Signals) -> Finding | None:
    """The return fell far below its best, for a tenth of the run."""
    returns = signals.known("return", since=max(signals.fraction - 0.1, 0.0))
    best = signals.known("return")
    if len(returns) < 4 or signals.gain(float(best.max())) < LEARNED_BEFORE:
        return None
    limit = best[0] + FELL * (best.max() - best[0])
    if returns.max() > limit:
        return None
    step = signals.steps[int(np.nanargmax(signals.column("return")))]
    return Finding(
        (signals.evidence("return", returns[-1], limit), signals.evidence("return", best.max(), limit, step)),
        "Late updates destroyed what was learned; the best policy is kept.",
        {
            "algorithm.optimizer.learning_rate.kind": "linear",
            "algorithm.optimizer.learning_rate.start": signals.number("algorithm.optimizer.learning_rate"),
        },
    )


@TASK_RULES.rule("symptoms", "Nothing is learned", after=NOTHING, unless=("solved", "return_misleads"))
def nothing_learned(signals: Signals) -> Finding | None:
    """The return is still that of the untrained policy, and no rule tells why."""
    if signals.start is None:
        return None
    latest = signals.gain(median(signals.recent("rollout_return", 3)))  # `return` is late where episodes are few
    if signals.gain(float(signals.known("return").max())) > 1.0 or signals.current_gain > 0.5 or latest > 1.0:
        return None
    # With motion clips the return of the task is not all that is learned.
    if signals.setting("until.mean_return") is not None or signals.extension("amp"):
        return None
    returns = signals.known("return")
    return Finding(
        (signals.evidence("return", returns[-1], signals.start[0] + 0.5 * signals.start[1]),),
        "The return is within half a standard deviation of the untrained policy's.",
        advice="in this order: canter check, a reward that shows partial success, scales, a larger learning rate",
    )
