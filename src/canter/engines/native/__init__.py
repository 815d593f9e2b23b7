"""The CPU's own engine."""

from __future__ import annotations

from canter.engines.autograd import AutogradEngine as NativeEngine
from canter.engines.base import PPOLoss
from canter.nn.actor_critic import ActorCritic

__all__ = ["NativeEngine", "declines"]


def declines(loss: PPOLoss, model: ActorCritic) -> str | None:
    """Why this engine does not compute a loss; None if it does."""
    return "it is not built yet"
