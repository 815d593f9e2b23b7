"""A loss that keeps the mean of a Gaussian policy near the bounds of the action.

A sample outside is cut off, so beyond the bounds the reward says nothing about where the mean is, and it drifts away.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from canter.distributions import DiagGaussian, Distribution
from canter.functional.losses import BOUND_LOSSES
from canter.plain import check_range


@dataclass(frozen=True, kw_only=True)
class BoundLossConfig:
    """A loss on the mean of a Gaussian policy, in units in which the bounds are -1 and 1."""

    form: Literal["soft", "regularisation"] = "soft"
    """The squared distance beyond `limit`, or the square of the mean."""
    coef: float = 1e-3
    """Weight of the loss."""
    limit: float = 1.1
    """For `form="soft"`: how far from the centre the mean may be without cost."""

    def __post_init__(self) -> None:
        """Refuse values outside their range, by name."""
        check_range(self, "must not be negative", "coef")
        check_range(self, "must be above 0", "limit")

    def build(self, distribution: Distribution, device: torch.device) -> BoundLoss:
        """The loss for a distribution; raises ValueError for one whose actions cannot leave the bounds."""
        if not isinstance(distribution, DiagGaussian):
            raise ValueError(
                f"bound_loss is for a Gaussian policy, whose mean can leave the bounds; {type(distribution).__name__} "
                "cannot: set bound_loss=null, or model.distribution=gaussian for a continuous action"
            )
        return BoundLoss(self, distribution, device)


class BoundLoss:
    """Distribution parameters `[..., 2A]` to a loss `[...]`."""

    def __init__(self, config: BoundLossConfig, distribution: DiagGaussian, device: torch.device) -> None:
        self.config, self.distribution = config, distribution
        half, centre = (1.0,) * distribution.dim, (0.0,) * distribution.dim
        if distribution.bounds != "rescale":  # else the mean is in the right units already
            half, centre, *_ = replace(distribution, bounds="rescale").interval()
        self.half, self.centre = torch.tensor([half, centre], device=device)

    def __call__(self, params: Tensor) -> Tensor:
        """The loss of each row."""
        mean = (self.distribution.mode(params) - self.centre) / self.half
        return BOUND_LOSSES[self.config.form](mean, self.config.limit)
