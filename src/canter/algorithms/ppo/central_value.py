"""Settings of a critic with a phase of its own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from canter.engines.base import PPOLoss, ValueLoss
from canter.optim import OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class CentralValueConfig:
    """A critic that is trained in a phase of its own; its network is the model's `critic`."""

    epochs: int = 5
    """Passes over each rollout."""
    num_minibatches: int = 4
    """Minibatches per pass; must divide the number of rows, with memory of sequences."""
    value_loss: ValueLoss | None = None
    """Its error; null takes PPO's."""
    value_clip: float | None = None
    """How far a value may move; null takes PPO's."""
    value_coef: float | None = None
    """Weight of its loss; null takes PPO's."""
    actor_value: bool = False
    """Train a value head on the policy's own features too, by PPO's value loss and towards the same returns. Nothing is
    judged by it; it shapes the features."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Its optimiser. An adaptive learning rate follows the KL that the policy's phase found."""

    def __post_init__(self) -> None:
        """Refuse phases that do nothing."""
        for name in ("epochs", "num_minibatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("value_clip", "value_coef"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0, or null")

    def loss_of(self, loss: PPOLoss) -> PPOLoss:
        """The critic's part of PPO's loss, with what is set otherwise here."""
        own = {name: getattr(self, name) for name in ("value_loss", "value_clip", "value_coef")}
        changed = {name: value for name, value in own.items() if value is not None}
        alone = replace(loss, surrogate=None, bound=None, advantage="given", moving_kl=None)
        return replace(alone, **changed)
