"""What the engine in C knows. Everything else it declines, with a sentence that names it.

All lists are of what is known: a new setting or a user's module is declined until somebody enters it here.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from canter.core.specs import ACTION_MASK, EnvSpec
from canter.engines.base import PPOLoss, unknown_part
from canter.nn.actor_critic import Actor, ActorCritic, Critic
from canter.nn.distributions import Categorical, DiagGaussian, MultiCategorical
from canter.nn.heads import GaussianHead, LinearHead, LogStd, ValueHead
from canter.nn.mlp import MLP, Linear
from canter.nn.network import Network
from canter.nn.normalizer import IdentityNormalizer, Normalizer
from canter.nn.rnn import NoMemory

_native: ModuleType | None
try:
    from canter.engines.native import _native  # pyright: ignore[reportAttributeAccessIssue]
except ImportError:
    _native = None

AVAILABLE = _native is not None
"""Whether the form in C could be built."""

SURROGATES = (None, "clipped", "smooth_clipped", "vanilla")
VALUE_LOSSES = (None, "mse", "clipped", "huber")
BOUND_FORMS = (None, "soft", "regularisation")
"""By the numbers that they have in C."""
ADVANTAGES = ("given", "minibatch", "minibatch_sample")
MOST_GROUPS = 16

LOSS: dict[str, Callable[[Any], bool]] = {
    "surrogate": lambda x: x in SURROGATES,
    "value_loss": lambda x: x in VALUE_LOSSES,
    "advantage": lambda x: x in ADVANTAGES,
    "bound": lambda x: x is None or x.config.form in BOUND_FORMS,
    "clip_ratio": lambda x: isinstance(x, float | int),
    "value_clip": lambda x: isinstance(x, float | int),
    "value_coef": lambda x: isinstance(x, float | int),
}
"""Fields of a `PPOLoss` and the values that are known. Others must be None or empty."""
STD_FORMS = ("bounded", "log", "scalar", "softplus")
"""From learned numbers to a log-std, by their names in C."""

LAYERS: dict[type[nn.Module], Callable[[Any], bool]] = {
    nn.Linear: lambda layer: layer.bias is not None,
    Linear: lambda layer: layer.bias is not None,
    nn.LayerNorm: lambda norm: norm.eps == 1e-5 and norm.bias is not None and len(norm.normalized_shape) == 1,
    nn.Tanh: lambda _: True,
    nn.ReLU: lambda _: True,
    nn.ELU: lambda elu: elu.alpha == 1.0,
    nn.SiLU: lambda _: True,
    nn.GELU: lambda gelu: gelu.approximate == "none",
    nn.LeakyReLU: lambda relu: relu.negative_slope == 0.01,
}
"""Modules of hidden layers, and whether their settings are known."""
ACTIVATION_NAMES: dict[type[nn.Module], str] = {
    nn.Tanh: "tanh",
    nn.ReLU: "relu",
    nn.ELU: "elu",
    nn.SiLU: "silu",
    nn.GELU: "gelu",
    nn.LeakyReLU: "leaky_relu",
}
"""Activations, by their names in C."""


def compiled() -> ModuleType:
    """The module in C; raises RuntimeError where it was not built."""
    if _native is None:
        raise RuntimeError("the native engine was not built: install Canter again where there is a C compiler")
    return _native


def declines(loss: PPOLoss, model: nn.Module) -> str | None:
    """Why the engine cannot compute this loss (`PPOLoss`) of this model; None where it can."""
    if not AVAILABLE:
        return "it was not built: there was no C compiler when Canter was installed"
    unknown = unknown_part(loss, LOSS)
    if unknown is not None:
        return unknown
    if type(model) is not ActorCritic:
        return f"it does not know the model {type(model).__name__}"
    if loss.bound is not None and (loss.surrogate is None or type(model.policy.distribution) is not DiagGaussian):
        return "it knows a bound loss beside the surrogate of a Gaussian policy only"
    reason = _declines_heads(model)
    for name, network in (("policy", model.actor.network), ("critic", model.critic.network)):
        reason = reason or declines_network(name, network, model.policy.spec)
    spec = model.policy.spec
    if not reason and model.actor.masked and spec.obs[ACTION_MASK].dtype != torch.bool:
        return f"it takes an action mask of bools, not of {spec.obs[ACTION_MASK].dtype}"
    return reason or declines_tensors(model)


def _declines_heads(model: ActorCritic) -> str | None:
    actor, critic, distribution = model.actor, model.critic, model.policy.distribution
    heads = {DiagGaussian: GaussianHead, Categorical: LinearHead, MultiCategorical: LinearHead}
    if type(distribution) not in heads:
        return f"it does not know the distribution {type(distribution).__name__}"
    for part, kind in ((actor, Actor), (critic, Critic), (critic.head, ValueHead)):
        if type(part) is not kind:
            return f"it does not know {type(part).__name__}"
    if type(actor.head) is not heads[type(distribution)]:
        return f"it does not know the head {type(actor.head).__name__}"
    linears: list[Any] = [critic.head.linear]
    if isinstance(actor.head, GaussianHead):
        if not knows_std(actor.head.log_std):
            return f"it does not know the std {type(actor.head.log_std).__name__}"
        linears += [actor.head.mean, *([actor.head.raw_std] if isinstance(actor.head.raw_std, nn.Module) else [])]
    else:
        linears.append(actor.head.linear)  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    return declines_last(linears)


def knows_std(log_std: nn.Module) -> bool:
    """Whether it knows a form of the standard deviation."""
    return type(log_std) is LogStd and log_std.form in STD_FORMS


def declines_last(linears: list[Any]) -> str | None:
    """Why it does not know one of the last layers."""
    strange = next((layer for layer in linears if type(layer) not in (Linear, nn.Linear) or layer.bias is None), None)
    return None if strange is None else f"it does not know the last layer {strange}"


def declines_network(name: str, network: Any, spec: EnvSpec) -> str | None:
    """Why it does not know one of the two networks."""
    if type(network) is not Network:
        return f"it does not know the {name} network {type(network).__name__}"
    if network.in_bfloat16:
        return f"it does not multiply in bfloat16, as the {name} network does"
    if type(network.memory) is not NoMemory:
        return f"it has no memory, and the {name} network has one"
    if len(network.groups) > MOST_GROUPS:
        return f"it reads {MOST_GROUPS} observation groups at most; the {name} network reads more"
    for group, normalizer, encoder in zip(network.groups, network.normalizers, network.encoders, strict=True):
        if type(encoder) not in (nn.Identity, nn.Flatten):
            return f"it does not know {type(encoder).__name__}, which the {name} network reads {group!r} by"
        if type(normalizer) not in (Normalizer, IdentityNormalizer):
            return f"it does not know the normaliser {type(normalizer).__name__}"
        dtype = spec.obs[group].dtype
        if dtype != torch.float32:
            return f"it reads float32 observations, and {group!r} is {dtype}"
    if type(network.hidden) is not MLP:
        return f"it does not know {type(network.hidden).__name__}, which the {name} network has"
    for layer in network.hidden:
        if type(layer) not in LAYERS or not LAYERS[type(layer)](layer):
            return f"it does not know {layer}, which the {name} network has"
    return None if _in_order(network.hidden) else f"it does not know the {name} network's order of layers"


def _in_order(hidden: MLP) -> bool:
    """Whether the modules are a linear layer, perhaps a layer norm, and an activation, again and again."""
    kinds = ["linear" if isinstance(layer, nn.Linear) else type(layer) for layer in hidden]
    while kinds:
        size = 3 if kinds[1:2] == [nn.LayerNorm] else 2
        if kinds[0] != "linear" or len(kinds) < size or kinds[size - 1] not in ACTIVATION_NAMES:
            return False
        kinds = kinds[size:]
    return True


def declines_tensors(model: nn.Module) -> str | None:
    """Why it cannot take the parameters as they are, or would miss what somebody hung on a module."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.float64}:
        return f"it computes in float32 or float64, not in {sorted(map(str, dtypes))}"
    for name, parameter in model.named_parameters():
        if parameter.device.type != "cpu":
            return f"it is a CPU's, and {name} is on {parameter.device}"
        if not parameter.requires_grad:
            return f"it learns all parameters, and {name} is not to be learned"
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or "forward" in vars(module):
            return f"it would not call what was hung on {name}"
    return None
