"""Which engine computes a loss: the first that knows every part of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from canter.core.registry import UserError
from canter.engines import native
from canter.engines.autograd import AutogradEngine
from canter.engines.base import Engine, PPOLoss
from canter.engines.native.soft import SoftEngine, SoftModel, declines_soft
from canter.engines.triton.kernels import has_triton, load_kernels
from canter.nn.actor_critic import ActorCritic
from canter.nn.optimizer import Optimizer

EngineName = Literal["auto", "autograd", "native", "triton", "triton_layers"]
FAST = {"cpu": ("native",), "cuda": ("triton", "triton_layers")}
"""Engines that are asked before the definition, by the kind of device."""


@dataclass(frozen=True)
class Choice:
    """An engine, and why each that was asked before it declined."""

    engine: Engine
    declined: dict[str, str] = field(default_factory=dict)

    def in_words(self) -> str:
        """One line for a log."""
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.declined.items())
        return self.engine.name + (f" ({reasons})" if reasons else "")


def choose(loss: PPOLoss, model: ActorCritic, optimizer: Optimizer, wanted: EngineName = "auto") -> Choice:
    """The fastest engine for this loss, model and device; the one that is `wanted`, if it does not decline."""
    device = next(model.parameters()).device.type
    if device == "cuda":
        load_kernels()
    declined: dict[str, str] = {}
    asked = FAST.get(device, ()) if wanted == "auto" else () if wanted == "autograd" else (wanted,)
    for name in asked:
        answer = _ask(name, device, loss, model, optimizer)
        if not isinstance(answer, str):
            return Choice(answer, declined)
        declined[name] = answer
    if wanted not in ("auto", "autograd"):
        raise UserError(f"execution.engine={wanted} cannot be used here: {declined[wanted]}; use auto or autograd")
    return Choice(AutogradEngine(loss, model, optimizer), declined)


def choose_soft(model: SoftModel, wanted: EngineName = "auto") -> tuple[SoftEngine | None, str]:
    """What computes SAC's gradients beside the definition, if anything, and one line for a log."""
    on_cpu = model.spec.device.type == "cpu"
    if wanted == "autograd" or (wanted == "auto" and not on_cpu):
        return None, "autograd"
    known = wanted in ("auto", "native")
    reason = "it does not know sac" if not known else declines_soft(model) if on_cpu else "it is for a CPU"
    if reason is None:
        return SoftEngine(model), SoftEngine.name
    if wanted != "auto":
        raise UserError(f"execution.engine={wanted} cannot be used here: {reason}; use auto or autograd")
    return None, f"autograd (native: {reason})"


def _ask(name: str, device: str, loss: PPOLoss, model: ActorCritic, optimizer: Optimizer) -> Engine | str:
    """The engine of that name, or why it declines."""
    if name == "native":
        reason = "it is for a CPU" if device != "cpu" else native.declines(loss, model)
        return reason or native.NativeEngine(loss, model, optimizer)
    if device != "cuda":
        return "it is for a GPU"
    if not has_triton():
        return "Triton is not installed"
    from canter.engines.triton.engine import (
        LayersEngine,
        NetworksEngine,
        unsupported_by_layers,
        unsupported_by_networks,
    )

    if name == "triton":
        return unsupported_by_networks(loss, model) or NetworksEngine(loss, model, optimizer)
    return unsupported_by_layers(loss, model) or LayersEngine(loss, model, optimizer)
