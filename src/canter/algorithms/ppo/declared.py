"""What PPO tells about itself to consoles, reports, the check before a run and the run folder."""

from __future__ import annotations

from canter.algorithms.base import Declared, Headline

HEADLINES = (
    Headline(
        "policy/clip_fraction",
        "clip fraction",
        "policy",
        "Clip fraction",
        "rows whose ratio left the clip range",
        percent=True,
        block="mean_clipped_ratio",
    ),
    Headline(
        "policy/kl", "KL", "policy", "KL divergence", "how far an update moves the policy", line="KL", block="approx_kl"
    ),
    Headline(
        "policy/entropy", "entropy", "policy", "Entropy", "how much of the choice is left to chance", line="entropy"
    ),
    Headline("policy/std", "std", "policy", "Standard deviation", "of the actions, before any rescaling"),
    Headline("loss/policy", "policy loss", "learning", "Policy loss", "the surrogate, to be minimised"),
    Headline("loss/value", "value loss", "learning", "Value loss", "error of the critic, in the units it learns in"),
    Headline(
        "value/explained_variance",
        "explained var.",
        "learning",
        "Explained variance",
        "1: the critic foresees all returns; 0: none; below: worse than their mean, cut off at -1",
        floor=-1.0,
        line="explained variance",
    ),
    Headline("optim/learning_rate", "learning rate", "learning", "Learning rate", "step size of the optimiser"),
    Headline("optim/grad_norm", "gradient norm", "", "Gradient norm", "before clipping"),
    Headline("value/mean_absolute_error", "value error", "", "Error of values", "mean absolute, in units of returns"),
    Headline("value/mean", "mean value", "", "Mean value", "the return that the critic expects"),
)

DECLARED = Declared(
    headlines=HEADLINES,
    settings={"clip_range": "clip_ratio"},
    optimizer_steps="optim/minibatch_updates",
    counters={"optim/nonfinite_steps": "Steps skipped for NaN or infinity"},
)
