"""What SAC tells about itself to consoles and reports."""

from __future__ import annotations

from canter.algorithms.base import Declared, Headline

DECLARED = Declared(
    headlines=(
        Headline("policy/entropy", "entropy", "policy", "Entropy", "of actions in -1..1", line="entropy"),
        Headline("policy/temperature", "temperature", "policy", "Temperature", "what entropy is worth", line="alpha"),
        Headline("policy/std", "std", "policy", "Standard deviation", "of the actions, before squashing"),
        Headline("loss/policy", "policy loss", "learning", "Policy loss", "temperature x log-probability - value"),
        Headline("loss/critic", "critic loss", "learning", "Critic loss", "error of the critics", line="critic loss"),
        Headline("value/mean", "mean value", "learning", "Mean value", "the return that the critics expect", line="Q"),
        Headline("value/target_std", "target std", "", "Spread of the targets", "of the critics, in one batch"),
        Headline("reward/unit", "reward unit", "", "Unit of rewards", "what rewards are divided by"),
        Headline("optim/learning_rate", "learning rate", "learning", "Learning rate", "step size of the optimisers"),
        Headline("replay/rows", "remembered", "", "Transitions remembered", "that may be drawn"),
    ),
    settings={"batch_size": "batch_size"},
    optimizer_steps="optim/minibatch_updates",
    counters={
        "optim/nonfinite_steps": "Steps skipped for NaN or infinity",
        "replay/lost": "Share of drawn rows whose last observation was given up",
    },
)
