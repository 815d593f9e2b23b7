"""Settings of a critic with a phase of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

from canter.optim import OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class CentralValueConfig:
    """A critic that is trained in a phase of its own; its network is the model's `critic`."""

    epochs: int = 5
    """Passes over each rollout."""
    num_minibatches: int = 4
    """Minibatches per pass; must divide the number of rows, with memory of sequences."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Its optimiser. An adaptive learning rate follows the KL that the policy's phase found."""

    def __post_init__(self) -> None:
        """Refuse phases that do nothing."""
        for name in ("epochs", "num_minibatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
