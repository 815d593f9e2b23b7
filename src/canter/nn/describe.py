"""Description of a model as a flat list of layers, for engines that do not run its modules.

`describe` names every property that an engine must support, next to the setting that chose it, and
hands out the modules that hold the parameters. A module that is not listed here appears under its
class name, so that an engine refuses it instead of computing something else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from canter.core.specs import ACTION_MASK, EnvSpec, TensorSpec
from canter.nn.actor_critic import Actor, ActorCritic, Critic
from canter.nn.distributions import Beta, Categorical, DiagGaussian, Distribution, MultiCategorical, TanhGaussian
from canter.nn.heads import FlooredLogStd, GaussianHead, LinearHead, LogStd, ValueHead
from canter.nn.mlp import ACTIVATIONS, MLP, Linear
from canter.nn.network import Network
from canter.nn.normalizer import IdentityNormalizer, Normalizer
from canter.nn.rnn import RNN, IdentityRNN
from canter.nn.stack import NORMS, Block, Critics, Stack, StackedLinear

ABSENT = "none"
"""Value of a property that a model does not have; every engine supports it."""


class Feature(NamedTuple):
    """A property that an engine must support to compute a model or a loss."""

    name: str
    value: Any
    text: str
    """Setting and value, or the part of the model, as a refusal names it."""


Kind = Literal["network", "input", "recurrent", "hidden", "output", "std", "value", "parameters"]


@dataclass(frozen=True)
class LayerSpec:
    """One layer of a model: its modules, and the properties an engine must support."""

    network: str
    """Network that the layer belongs to, "policy" or "critic"; "model" for properties of all
    parameters."""
    kind: Kind
    """An input is an observation group, a recurrent layer an LSTM or a GRU; hidden, output, std and
    value layers are linear."""
    features: tuple[Feature, ...]
    module: Any = None
    """Encoder of an input, cell of a recurrent layer, linear layer of the others; None where there
    is none."""
    norm: nn.LayerNorm | None = None
    """Layer norm between the linear layer and its activation, or on the output of a recurrent
    layer."""
    activation: str = "identity"
    group: str = ""
    """Name of the observation group of an input."""
    normalizer: Any = None
    """Normalizer of an input."""
    reset_on_end: bool = True
    """The state of a recurrent layer is reset at the start of episodes."""


@dataclass(frozen=True)
class SACModel:
    """The networks of SAC."""

    spec: EnvSpec
    actor: Actor
    critics: Critics
    target_critics: Critics
    """Slowly following copy of the critics, without gradients."""


def describe(model: ActorCritic | SACModel) -> tuple[LayerSpec, ...]:
    """Return the layers of a model, from the inputs of the policy to the value head."""
    if isinstance(model, SACModel):
        return (
            *_actor_layers(model.actor, model.spec.obs, None, ""),
            *_critics_layers(model.critics, model.spec.obs),
            _parameters(nn.ModuleDict({"actor": model.actor, "critics": model.critics})),
        )
    if type(model) is not ActorCritic:
        features = (Feature("model", type(model).__name__, f"the model {type(model).__name__}"),)
        return (LayerSpec("model", "network", features), _parameters(model))
    obs = model.policy.spec.obs
    critic = _critic_layers(model, "model.policy" if model.policy.config.critic is None else "model.critic")
    return (*_actor_layers(model.actor, obs, model.policy.distribution, "model."), *critic, _parameters(model))


def _class_feature(name: str, part: Any, expected: type) -> Feature:
    value = "standard" if type(part) is expected else type(part).__name__
    return Feature(name, value, f"the {name} {type(part).__name__}")


def _setting(name: str, value: Any, prefix: str) -> Feature:
    return Feature(name, value, f"{prefix}{name}={value}")


# Networks of PPO and the policy of SAC


DISTRIBUTIONS: dict[type, str] = {
    DiagGaussian: "gaussian",
    TanhGaussian: "tanh_gaussian",
    Beta: "beta",
    Categorical: "categorical",
    MultiCategorical: "multi_categorical",
}


def _actor_layers(
    actor: Actor, obs: Mapping[str, TensorSpec], distribution: Distribution | None, prefix: str
) -> Iterator[LayerSpec]:
    yield from _network_layers("policy", actor.network, obs, f"{prefix}policy")
    features = [_class_feature("actor", actor, Actor)]
    if distribution is not None:
        name = DISTRIBUTIONS.get(type(distribution), type(distribution).__name__)
        features.append(Feature("distribution", name, f"{prefix}distribution={name}"))
    mask = str(obs[ACTION_MASK].dtype) if actor.masked else ABSENT
    features.append(Feature("action mask", mask, f"an action mask of {mask}"))
    head: Any = actor.head
    expected = LinearHead if isinstance(distribution, Beta | Categorical | MultiCategorical) else GaussianHead
    features.append(_class_feature("policy head", head, expected))
    if not isinstance(head, GaussianHead):
        linear = head.linear if isinstance(head, LinearHead) else None
        yield LayerSpec("policy", "output", (*features, _linear_feature(linear)), linear)
        return
    yield LayerSpec("policy", "output", (*features, _linear_feature(head.mean)), head.mean)
    yield _std_layer(head, f"{prefix}std.")


def _std_layer(head: GaussianHead, prefix: str) -> LayerSpec:
    """Return the standard deviation of a Gaussian.

    Its module is None where it does not depend on the observation.
    """
    log_std = head.log_std
    floor = log_std.floor if type(log_std) is FlooredLogStd else ABSENT
    features = [_setting("floor", floor, prefix), _setting("form", log_std.form, prefix)]
    if type(log_std) not in (LogStd, FlooredLogStd):
        features.append(_class_feature("std", log_std, LogStd))
    if not isinstance(head.raw_std, Tensor):
        features += [Feature("std kind", "network", f"{prefix}kind=network"), _linear_feature(head.raw_std)]
        return LayerSpec("policy", "std", tuple(features), head.raw_std)
    learns = isinstance(head.raw_std, nn.Parameter)
    text = f"{prefix}kind=parameter" if learns else f"{prefix}learn=false"
    features.append(Feature("std kind", "parameter" if learns else "constant", text))
    return LayerSpec("policy", "std", tuple(features))


def _critic_layers(model: ActorCritic, prefix: str) -> Iterator[LayerSpec]:
    """Yield the critic's own network, unless the trunk is shared, and its head."""
    if not model.shared_trunk:
        yield from _network_layers("critic", model.critic.network, model.policy.spec.obs, prefix)
    head = model.critic.head
    linear = head.linear if isinstance(head, ValueHead) else None
    features = (
        _class_feature("critic", model.critic, Critic),
        _class_feature("value head", head, ValueHead),
        _linear_feature(linear),
    )
    yield LayerSpec("policy" if model.shared_trunk else "critic", "value", features, linear)


def _network_layers(name: str, network: Any, obs: Mapping[str, TensorSpec], prefix: str) -> Iterator[LayerSpec]:
    """Yield the properties of a network as a whole, its inputs and its hidden layers."""
    standard = Feature("network", "standard", f"{prefix}.kind=standard")
    if type(network) is not Network:
        kind = type(network).__name__
        yield LayerSpec(name, "network", (Feature("network", kind, f"{prefix}.kind: the network {kind}"),))
        return
    yield LayerSpec(name, "network", (standard, *_whole_network(network, f"{prefix}.")))
    yield from _input_layers(name, network, obs, prefix)
    recurrent = _recurrent_layers(name, network.memory, f"{prefix}.rnn.")
    hidden = _hidden_layers(name, network.hidden, f"{prefix}.") if type(network.hidden) is MLP else iter(())
    yield from chain(recurrent, hidden) if network.rnn_first else chain(hidden, recurrent)


def _whole_network(network: Network, prefix: str) -> list[Feature]:
    recurrent = {IdentityRNN: ABSENT, RNN: "standard"}.get(type(network.memory), type(network.memory).__name__)
    precision = "bfloat16" if network.in_bfloat16 else "float32"
    hidden: Any = network.hidden
    kind = type(hidden).__name__
    layers = Feature("hidden layers", kind if len(hidden) else "empty", f"{prefix}hidden={kind}")
    if kind == "D2RL":
        layers = Feature("hidden layers", kind, f"{prefix}d2rl=true: D2RL")
    return [
        _setting("precision", precision, prefix),
        Feature("rnn", recurrent, f"{prefix}rnn: a recurrent network"),
        _setting("concat_input", network.concat_input or ABSENT, f"{prefix}rnn."),
        Feature("observation groups", len(network.groups), f"{prefix}obs_groups: {len(network.groups)} groups"),
        layers,
    ]


def _input_layers(name: str, network: Network, obs: Mapping[str, TensorSpec], prefix: str) -> Iterator[LayerSpec]:
    normalizers: dict[type, str] = {IdentityNormalizer: ABSENT, Normalizer: "running"}
    encoders: dict[type, str] = {nn.Identity: "identity", nn.Flatten: "flatten"}
    for group, normalizer, encoder in zip(network.groups, network.normalizers, network.encoders, strict=True):
        kind = type(encoder).__name__
        normalizer_kind = type(normalizer).__name__
        dtype = str(obs[group].dtype)
        where = f"{prefix}.obs_groups: observation group {group!r}"
        features = (
            Feature("encoder", encoders.get(type(encoder), kind), f"{where} with the encoder {kind}"),
            Feature(
                "normalizer", normalizers.get(type(normalizer), normalizer_kind), f"{where} with {normalizer_kind}"
            ),
            Feature("observation dtype", dtype, f"{where} of {dtype}"),
        )
        yield LayerSpec(name, "input", features, encoder, group=group, normalizer=normalizer)


# Recurrent layers


CELLS: dict[type, str] = {nn.LSTMCell: "lstm", nn.GRUCell: "gru"}


def _recurrent_layers(name: str, rnn: Any, prefix: str) -> Iterator[LayerSpec]:
    """Yield recurrent layers; the norm on their output belongs to the last one."""
    if type(rnn) is not RNN:
        return
    for number, cell in enumerate(rnn.cells, 1):
        kind = CELLS.get(type(cell), type(cell).__name__)
        norm: Any = rnn.norm if number == len(rnn.cells) and type(rnn.norm) is not nn.Identity else None
        features = (
            _setting("cell", kind if cell.bias else f"{kind} without bias", prefix),
            _setting("layers", number, prefix),
            _norm_feature(norm, "before_activation", prefix),
        )
        yield LayerSpec(name, "recurrent", features, cell, norm, reset_on_end=rnn.reset_on_end)


# Hidden layers


_PLAIN_ACTIVATIONS = {name: kind() for name, kind in ACTIVATIONS.items() if kind is not nn.Identity}


def activation_name(module: nn.Module) -> str:
    """Return the name of an activation with its default arguments, such as "tanh".

    Otherwise how it prints.
    """
    for name, plain in _PLAIN_ACTIVATIONS.items():
        if type(module) is type(plain) and repr(module) == repr(plain):
            return name
    return repr(module)


def _linear_feature(linear: Any) -> Feature:
    if type(linear) in (nn.Linear, Linear, StackedLinear):
        if linear.bias is not None:
            return Feature("layer", "linear", "a linear layer")
        return Feature("layer", "linear without bias", "a linear layer without bias")
    return Feature("layer", type(linear).__name__, f"the layer {linear}")


def _norm_feature(norm: Any, position: str, prefix: str) -> Feature:
    """Return the kind and place of a layer norm; None is none."""
    if norm is None:
        return Feature("layer norm", ABSENT, f"{prefix}layer_norm=false")
    usual = type(norm) is nn.LayerNorm and norm.eps == 1e-5 and norm.bias is not None
    if not usual or len(norm.normalized_shape) != 1:
        return Feature("layer norm", str(norm), f"the norm {norm}")
    text = f"{prefix}layer_norm=true" if position == "before_activation" else f"{prefix}layer_norm_position={position}"
    return Feature("layer norm", position, text)


@dataclass
class _HiddenLayer:
    """A linear layer and what follows it up to the next one."""

    linear: nn.Module
    norm: Any = None
    norm_position: str = "before_activation"
    activation: nn.Module | None = None

    @property
    def activation_name(self) -> str:
        return "identity" if self.activation is None else activation_name(self.activation)


def _split_layers(modules: Iterable[nn.Module], norms: tuple[type, ...]) -> list[_HiddenLayer]:
    """Cut a sequence of modules at its linear layers.

    A module out of order becomes a layer by itself.
    """
    layers: list[_HiddenLayer] = []
    for module in modules:
        last = layers[-1] if layers else None
        if isinstance(module, nn.Linear | StackedLinear) or last is None:
            layers.append(_HiddenLayer(module))
        elif isinstance(module, norms) and last.norm is None:
            last.norm = module
            last.norm_position = "before_activation" if last.activation is None else "after_activation"
        elif last.activation is None:
            last.activation = module
        else:
            layers.append(_HiddenLayer(module))
    return layers


def _hidden_layers(name: str, hidden: MLP, prefix: str) -> Iterator[LayerSpec]:
    for layer in _split_layers(hidden, (nn.LayerNorm,)):
        features = (
            _linear_feature(layer.linear),
            _norm_feature(layer.norm, layer.norm_position, prefix),
            _setting("activation", layer.activation_name, prefix),
        )
        yield LayerSpec(name, "hidden", features, layer.linear, layer.norm, layer.activation_name)


# Critics of SAC


def _critics_layers(critics: Critics, obs: Mapping[str, TensorSpec]) -> Iterator[LayerSpec]:
    """Yield encoder, layers and heads of stacked critics.

    A linear layer holds the weights of all members.
    """
    yield from _network_layers("critic", critics.encoder, obs, "critic")
    stack: Any = critics.stack
    if type(critics) is not Critics or type(stack) is not Stack:
        features = (_class_feature("critics", critics, Critics), _class_feature("stack", stack, Stack))
        yield LayerSpec("critic", "network", features)
        return
    norms = {kind: name for name, kind in NORMS.items()}
    modules = [module for module in stack.layers if type(module) is not nn.Identity]
    blocks = sum(isinstance(module, Block) for module in modules)
    layers = _split_layers((module for module in modules if not isinstance(module, Block)), tuple(norms))
    features = [
        _setting("atoms", critics.atoms, "critic."),
        _setting("members", critics.members, "critic."),
        _setting("precision", "bfloat16" if stack.in_bfloat16 else "float32", "critic."),
        _setting("blocks", blocks or ABSENT, "critic."),
    ]
    for layer in layers:
        if type(layer.linear) in norms:
            features.append(Feature("critic norm", "input", f"critic.input_norm={norms[type(layer.linear)]}"))
        elif layer.norm is not None:
            name = "norm" if layer.norm_position == "before_activation" else "output_norm"
            features.append(Feature("critic norm", name, f"critic.{name}={norms[type(layer.norm)]}"))
    yield LayerSpec("critic", "network", tuple(features))
    for layer in layers:
        activation = layer.activation_name
        own = (_linear_feature(layer.linear), _setting("activation", activation, "critic."))
        yield LayerSpec("critic", "hidden", own, layer.linear, activation=activation)
    yield LayerSpec("critic", "value", (_linear_feature(critics.head),), critics.head)


# Parameters


def _parameters(model: nn.Module) -> LayerSpec:
    """Return dtypes, devices, frozen parameters, and hooks that an engine would not call."""
    dtypes = sorted({str(parameter.dtype) for parameter in model.parameters()})
    features = [Feature("parameter dtype", " and ".join(dtypes), f"parameters of {' and '.join(dtypes)}")]
    for name, parameter in model.named_parameters():
        device = parameter.device.type
        features.append(Feature("device", device, f"parameter {name} on {device}"))
        if not parameter.requires_grad:
            features.append(Feature("frozen parameter", name, f"parameter {name} with requires_grad=False"))
    for name, module in model.named_modules():
        hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
        if hooked or "forward" in vars(module):
            features.append(Feature("hook", name, f"a hook or a replaced forward method on {name}"))
    return LayerSpec("model", "parameters", tuple(features))
