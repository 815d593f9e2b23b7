"""What PPO tells about itself to consoles, reports, the check before a run and the run folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from canter.algorithms.base import Declared, Headline, RolloutPlan
from canter.storage.policy_file import FINAL_CRITIC, ValueFunction, save_critic

HEADLINES = (
    Headline(
        metric="policy/clip_fraction",
        label="clip fraction",
        topic="policy",
        title="Clip fraction",
        text="rows whose ratio left the clip range",
        percent=True,
        block="mean_clipped_ratio",
    ),
    Headline(
        metric="policy/kl",
        label="KL",
        topic="policy",
        title="KL divergence",
        text="how far an update moves the policy",
        line="KL",
        block="approx_kl",
    ),
    Headline(
        metric="policy/entropy",
        label="entropy",
        topic="policy",
        title="Entropy",
        text="how much of the choice is left to chance",
        line="entropy",
    ),
    Headline(
        metric="policy/std",
        label="std",
        topic="policy",
        title="Standard deviation",
        text="of the actions, before any rescaling",
    ),
    Headline(
        metric="loss/policy",
        label="policy loss",
        topic="learning",
        title="Policy loss",
        text="the surrogate, to be minimised",
    ),
    Headline(
        metric="loss/value",
        label="value loss",
        topic="learning",
        title="Value loss",
        text="error of the critic, in the units it learns in",
    ),
    Headline(
        metric="value/explained_variance",
        label="explained var.",
        topic="learning",
        title="Explained variance",
        text="1: the critic foresees all returns; 0: none",
        floor=-1.0,
        line="explained variance",
    ),
    Headline(
        metric="optim/learning_rate",
        label="learning rate",
        topic="learning",
        title="Learning rate",
        text="step size of the optimiser",
    ),
    Headline(metric="optim/grad_norm", label="gradient norm", topic="", title="Gradient norm", text="before clipping"),
    Headline(
        metric="value/mean",
        label="mean value",
        topic="",
        title="Mean value",
        text="the return that the critic expects",
    ),
)


class PPODeclared:
    """The declarations of PPO's settings."""

    declared: ClassVar[Declared] = Declared(
        headlines=HEADLINES,
        settings={"clip_range": "clip_ratio"},
        optimizer_steps="optim/minibatch_updates",
        counters={"optim/nonfinite_steps": "Steps skipped for NaN or infinity"},
    )

    def plan(self: Any) -> RolloutPlan:
        """How a rollout is cut up and how far returns look ahead; an average reward is not discounted."""
        return RolloutPlan(
            horizon=self.horizon,
            epochs=self.epochs,
            num_minibatches=self.num_minibatches,
            gamma=1.0 if self.objective == "average" else self.gamma,
            gae_lambda=self.gae_lambda,
        )


class LeavesCritic:
    """What an algorithm with a critic leaves at the end of a run."""

    def artefacts(self: Any) -> dict[str, Callable[..., None]]:
        """The critic, usable alone."""
        critic = ValueFunction(self.model.critic, self.policy.config, self.policy.spec)
        return {FINAL_CRITIC: lambda path, **about: save_critic(path, critic, **about)}
