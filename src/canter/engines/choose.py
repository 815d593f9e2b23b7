"""Choice of the engine that computes a loss: the first one that supports every part of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Generic, Literal, TypeVar, overload

from torch import Generator

from canter.core.data.rollout import Rollout
from canter.core.declarations import CompilesRollouts
from canter.core.registry import UserError
from canter.core.specs import Env
from canter.core.struct import Metrics
from canter.engines.autograd import AutogradEngine
from canter.engines.base import Engine, PPOLoss, SACLoss, unsupported_reason
from canter.engines.native import kernels  # noqa: F401  # enters the kernels of the CPU in the dispatch table
from canter.engines.native.engine import NativeEngine
from canter.engines.native.sac import NativeSACEngine
from canter.engines.triton.kernels import has_triton, load_kernels
from canter.nn.actor_critic import ActorCritic
from canter.nn.describe import SACModel
from canter.nn.optimizer import Optimizer

EngineName = Literal["auto", "autograd", "plain", "native", "triton", "triton_layers"]
E = TypeVar("E", covariant=True)


def _triton_engines() -> Any:
    """Import the engines in Triton, which may not be installed."""
    return import_module("canter.engines.triton.engine")


@dataclass(frozen=True)
class Candidate:
    """An engine for one kind of loss and one type of device."""

    name: EngineName
    loss: type
    device: str
    load: Callable[[], Any]
    """Import and return the class of the engine."""


CANDIDATES = (
    Candidate("native", PPOLoss, "cpu", lambda: NativeEngine),
    Candidate("native", SACLoss, "cpu", lambda: NativeSACEngine),
    Candidate("triton", PPOLoss, "cuda", lambda: _triton_engines().NetworksEngine),
    Candidate("triton_layers", PPOLoss, "cuda", lambda: _triton_engines().LayersEngine),
)
"""Engines that are tried before the definition, the fastest first."""


@dataclass(frozen=True)
class Choice(Generic[E]):
    """The chosen engine, and the reason against each one that was tried before."""

    engine: E
    """None is the definition of SAC: its learner."""
    name: str
    unsupported: dict[str, str] = field(default_factory=dict)

    def summary(self) -> str:
        """Return one line for a log."""
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.unsupported.items())
        return self.name + (f" ({reasons})" if reasons else "")


@overload
def choose(
    loss: PPOLoss, model: ActorCritic, optimizer: Optimizer, requested: EngineName = "auto"
) -> Choice[Engine]: ...


@overload
def choose(
    loss: SACLoss, model: SACModel, optimizer: Mapping[str, Optimizer], requested: EngineName = "auto"
) -> Choice[NativeSACEngine | None]: ...


def choose(loss: Any, model: Any, optimizer: Any, requested: EngineName = "auto") -> Choice[Any]:
    """Return the fastest engine for a loss, a model and its device, or the requested one.

    SAC passes its optimizers by name. Raise UserError if the requested engine does not support
    them.
    """
    device = _device_of(model)
    if device == "cuda":
        load_kernels()
    unsupported: dict[str, str] = {}
    for candidate in _candidates(loss, device, requested):
        reason = _unsupported(candidate, device, loss, model)
        if reason is None:
            return Choice(candidate.load()(loss, model, optimizer), candidate.name, unsupported)
        unsupported[candidate.name] = reason
    if requested not in ("auto", "autograd", "plain"):
        reason = unsupported.get(requested, f"it does not support {type(loss).__name__.removesuffix('Loss').lower()}")
        raise UserError(f"execution.engine={requested} cannot be used here: {reason}; use auto or autograd")
    definition = AutogradEngine(loss, model, optimizer) if isinstance(loss, PPOLoss) else None
    return Choice(definition, "plain" if requested == "plain" else "autograd", unsupported)


def compile_rollout(env: Env, model: ActorCritic, rng: Generator) -> Callable[[Rollout[Any]], Metrics]:
    """Return a function that fills rollouts of a simulator in JAX by one XLA program, see `canter.engines.xla`."""
    if not isinstance(env, CompilesRollouts):
        raise UserError(
            f"execution.mode=scan is for simulators in JAX without env.finite_horizon, not for {env.spec.env_id}: "
            "set execution.mode=auto"
        )
    return import_module("canter.engines.xla").XlaRollout(env, model, rng)


def _device_of(model: ActorCritic | SACModel) -> str:
    if isinstance(model, SACModel):
        return model.spec.device.type
    return next(model.parameters()).device.type


def _candidates(loss: PPOLoss | SACLoss, device: str, requested: EngineName) -> list[Candidate]:
    """Return the engines to try: those of the device, or the requested one of any device."""
    fitting = [candidate for candidate in CANDIDATES if isinstance(loss, candidate.loss)]
    if requested == "auto":
        return [candidate for candidate in fitting if candidate.device == device]
    return [candidate for candidate in fitting if candidate.name == requested]


def _unsupported(candidate: Candidate, device: str, loss: Any, model: Any) -> str | None:
    """Return why an engine cannot be used; None if it can."""
    if candidate.device != device:
        return f"it runs on a {'GPU' if candidate.device == 'cuda' else 'CPU'}, and the networks are on {device}"
    if candidate.device == "cuda" and not has_triton():
        return "Triton is not installed"
    return unsupported_reason(candidate.load().capabilities, loss, model)
