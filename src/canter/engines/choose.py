"""Which engine computes a loss: the first that knows every part of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from canter.engines import native
from canter.engines.autograd import AutogradEngine
from canter.engines.base import Engine, PPOLoss
from canter.engines.native.soft import SoftEngine, SoftModel, declines_soft
from canter.kernels import has_triton, load_kernels
from canter.nn.actor_critic import ActorCritic
from canter.optim import Optimizer

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
    device = next(model.parameters()).device
    if device.type == "cuda":
        load_kernels()
    declined: dict[str, str] = {}
    for name in FAST.get(device.type, ()) if wanted == "auto" else (wanted,):
        if name == "autograd":
            break
        reason = _declines(name, loss, model, device)
        if reason is None:
            return Choice(_build(name, loss, model, optimizer), declined)
        declined[name] = reason
    if wanted not in ("auto", "autograd"):
        raise ValueError(f"execution.engine={wanted} cannot be used here: {declined[wanted]}; use auto or autograd")
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
        raise ValueError(f"execution.engine={wanted} cannot be used here: {reason}; use auto or autograd")
    return None, f"autograd (native: {reason})"


def _declines(name: str, loss: PPOLoss, model: ActorCritic, device: torch.device) -> str | None:
    if name == "native":
        return "it is for a CPU" if device.type != "cpu" else native.declines(loss, model)
    if device.type != "cuda":
        return "it is for a GPU"
    if not has_triton():
        return "Triton is not installed"
    from canter.engines.triton import layers, networks

    return (networks if name == "triton" else layers).declines(loss, model)


def _build(name: str, loss: PPOLoss, model: ActorCritic, optimizer: Optimizer) -> Engine:
    if name == "native":
        return native.NativeEngine(loss, model, optimizer)
    from canter.engines.triton import layers, networks

    engine = networks.NetworksEngine if name == "triton" else layers.LayersEngine
    return engine(loss, model, optimizer)
