"""Rules about adversarial motion priors: the discriminator and the weight of the style."""

from __future__ import annotations

import numpy as np

from canter.algorithms.doctor.findings import Finding, Rules, Signals, median

AMP_RULES = Rules()
ROWS = 20
"""Rows of the log whose median counts."""
EARLY = 0.1
"""Fraction of the run in which an untrained policy is told apart easily."""
WON = 0.98
"""Accuracy on clips and policy from which the discriminator has won."""
VANISHED = 0.2
"""Share of the first style reward, at which the discriminator guessed."""
CHANCE = 0.55
"""Accuracy that guessing has, and a little more."""
NEARER = 0.7
"""Share of the first pose error below which the policy has come near the clips."""
SMALL = 0.02
"""Share of the task's reward below which a style counts for nothing."""
SECTION = "of the amp extension"


@AMP_RULES.rule("settings", "The discriminator is blind", after=EARLY)
def blind_discriminator(signals: Signals) -> Finding | None:
    """The discriminator has never told policy and clips apart, though they differ."""
    accuracy = _accuracies(signals).mean(0)
    if len(accuracy) < ROWS or accuracy.max() > CHANCE or _nearer(signals):
        return None
    return Finding(
        (signals.evidence("amp/accuracy_agent", accuracy[-1], CHANCE),),
        "It never told policy and clips apart, so the style reward is the same for all motion.",
        advice=f"{SECTION}: gradient_penalty 5, input_noise 0, optimizer.learning_rate 1e-4; else check that columns "
        "and units of the clips are those of the observations",
    )


@AMP_RULES.rule("settings", "The discriminator has won", after=EARLY)
def discriminator_wins(signals: Signals) -> Finding | None:
    """The discriminator is always right, and the style reward has vanished."""
    accuracy = _accuracies(signals).min(0)
    style = signals.known("amp/style_reward")
    if len(accuracy) < ROWS or median(accuracy[-ROWS:]) < WON:
        return None
    if median(style[-ROWS:]) > VANISHED * style[0]:
        return None
    return Finding(
        (
            signals.evidence("amp/accuracy_agent", median(accuracy[-ROWS:]), WON),
            signals.evidence("amp/style_reward", median(style[-ROWS:]), VANISHED * float(style[0])),
        ),
        "It tells policy and clips apart without error, so no change of the policy earns style.",
        advice=f"{SECTION}: twice the gradient_penalty, a third of optimizer.learning_rate, or input_noise 0.2",
    )


@AMP_RULES.rule("settings", "The style counts for nothing", after=EARLY)
def style_ignored(signals: Signals) -> Finding | None:
    """The style is worth nothing beside the reward of the task."""
    style = signals.recent("amp/style_reward", ROWS)
    task = signals.recent("rollout_reward", ROWS)
    settings = signals.extension("amp")
    if not len(style) or not len(task) or not settings or _nearer(signals):
        return None
    value = settings["style_weight"] * median(style)
    limit = SMALL * settings["task_weight"] * median(np.abs(task))
    if not 0 < value < limit:
        return None
    return Finding(
        (signals.evidence("amp/style_reward", value, limit),),
        "Beside the reward of the task the style reward, weights included, is too small to be followed.",
        advice=f"{SECTION}: a larger style_weight, or a smaller task_weight",
    )


def _accuracies(signals: Signals) -> np.ndarray:
    """Return the accuracies on policy and clips `[2, rows]`."""
    agent = signals.known("amp/accuracy_agent")
    demo = signals.known("amp/accuracy_demo")
    rows = min(len(agent), len(demo))
    return np.stack([agent[:rows], demo[:rows]])


def _nearer(signals: Signals) -> bool:
    """Return whether the policy has come nearer to the clips."""
    error = signals.known("amp/pose_error")
    return len(error) > 0 and median(error[-5:]) < NEARER * median(error[:5])
