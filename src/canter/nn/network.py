"""Networks that map observation groups to features.

L is the sequence length (1 for feed-forward networks), B the number of sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from canter.core.plain import check_range, check_settings
from canter.core.registry import Registry, UserError, nearest
from canter.core.specs import ACTION_MASK, TensorSpec
from canter.core.struct import Obs, State, tree_map
from canter.envs.imports import PYTHON, find_object, name_for_import, parameters_of
from canter.nn.cnn import CNNConfig
from canter.nn.mlp import D2RL, MLP, Activation, Init, NormPosition
from canter.nn.normalizer import AnyNormalizer, IdentityNormalizer, NormalizerConfig
from canter.nn.rnn import RNN, AnyRNN, IdentityRNN, RNNConfig


class AnyNetwork(Protocol):
    """Interface of a network: observation groups to features."""

    groups: tuple[str, ...]
    """Observation groups that the network reads."""
    features: int
    """Width of the output."""

    def __call__(self, obs: Obs, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return features `[L, B, features]` of `obs` `[L, B, ...]`, and the last state.

        `state` is the state before the first step; `reset` `[L, B]` marks steps that start a new
        episode, None means that there are none.
        """
        ...

    def unroll(self, obs: Obs, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return the same features, and the states after each step, `[L, B, ...]`."""
        ...

    def initial_state(self, num_envs: int) -> State:
        """Return the state at the start of an episode; `()` for feed-forward networks."""
        ...

    def update_statistics(self, obs: Obs, valid: Tensor) -> None:
        """Update the observation statistics with the valid samples of `obs` `[T, N, ...]`."""
        ...


class NetworkFactory(Protocol):
    """Settings (frozen) that build a network."""

    @property
    def init(self) -> Init:
        """Weight initialisation of the layer after the network."""
        ...

    def build(self, obs: dict[str, TensorSpec], role: str) -> AnyNetwork:
        """Build the network, a `torch.nn.Module`; `role` is "policy" or "critic"."""
        ...


networks: Registry[type[NetworkFactory]] = Registry("network", check_settings, default="standard")
"""Network settings by the `kind` of config files."""

AnyNetworkConfig = Annotated[NetworkFactory, networks]


@networks.register("standard")
@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """Normaliser, encoders and hidden layers of one network."""

    obs_groups: tuple[str, ...] | None = None
    """Observation groups to read; None reads "policy" (for a critic "critic") or, if missing,
    all."""
    hidden: tuple[int, ...] = (64, 64)
    """Width of each hidden layer."""
    activation: Activation = "tanh"
    """Non-linearity between layers."""
    layer_norm: bool = False
    """Layer norm in each hidden layer."""
    layer_norm_position: NormPosition = "before_activation"
    """Place of the layer norm in the layer."""
    layer_norm_layers: Literal["all", "first"] = "all"
    """Hidden layers with a layer norm."""
    d2rl: bool = False
    """Concatenate the input to the input of every hidden layer after the first (D2RL)."""
    init: Init = "orthogonal"
    """Weight initialisation: orthogonal, torch's default with or without its random biases, or
    Glorot's or He's rules (variance_scaling: a truncated normal of variance `gain^2 / inputs`)."""
    init_gain: float = math.sqrt(2)
    """Gain of the initial hidden weights."""
    normalize_obs: bool = True
    """Normalise vector observations by running statistics."""
    normalizer: NormalizerConfig = field(default_factory=NormalizerConfig)
    """Epsilon, clipping and prior of that normaliser."""
    cnn: CNNConfig = field(default_factory=CNNConfig)
    """Encoder for image groups (three axes) and, with `sequences`, for groups of two axes."""
    rnn: RNNConfig | None = None
    """Recurrent layers; None for a feed-forward network."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of matrix products in encoders and hidden layers. Weights, statistics, recurrent
    layers and the last layer stay float32."""

    def __post_init__(self) -> None:
        """Raise UserError for layers without width, and for weights that could never be trained."""
        check_range(self, "must be widths of at least 1", "hidden")
        check_range(self, "must be above 0", "init_gain")
        if self.d2rl and self.layer_norm_layers == "first":
            raise UserError("layer_norm_layers=first is for sequential layers, not for d2rl")

    def build(self, obs: dict[str, TensorSpec], role: str) -> Network:
        """Build the network for these observation groups; `role` is "policy" or "critic"."""
        return Network(self, select_groups(self.obs_groups, obs, role))


def select_groups(names: tuple[str, ...] | None, obs: dict[str, TensorSpec], role: str) -> dict[str, TensorSpec]:
    """Return the groups to read: those named, or the role's, or the policy's, or all."""
    usable = {name: spec for name, spec in obs.items() if name != ACTION_MASK}
    if names is None:
        preferred = next(((name,) for name in (role, "policy") if name in usable), None)
        names = preferred or tuple(name for name in usable if name != "critic")
    for name in names:
        if name not in usable:
            raise UserError(f"{role} network: obs_groups names {name!r}: {nearest(name, usable)}")
    return {name: usable[name] for name in names}


class _ObsNetwork(nn.Module):
    """A network with a normalizer for each observation group."""

    groups: tuple[str, ...]
    normalizers: nn.ModuleList

    def update_statistics(self, obs: Obs, valid: Tensor) -> None:
        """Add the valid samples `[T, N, ...]` to the statistics of the normalizers."""
        for name, normalizer in zip(self.groups, self.normalizers, strict=True):
            cast(AnyNormalizer, normalizer).update(obs[name], valid)


class Network(_ObsNetwork):
    """Normalises and encodes its observation groups and returns features `[L, B, features]`."""

    def __init__(self, config: NetworkConfig, groups: dict[str, TensorSpec]) -> None:
        super().__init__()
        self.groups = tuple(groups)
        self.in_bfloat16 = config.precision == "bfloat16"
        self.normalizers = nn.ModuleList()
        self.encoders = nn.ModuleList()
        width = 0
        for spec in groups.values():
            is_image = len(spec.shape) == 3
            dim = math.prod(spec.shape)
            if is_image or (len(spec.shape) == 2 and config.cnn.sequences):
                encoder = config.cnn.build(spec.shape, config.activation, config.init, config.init_gain)
                self.encoders.append(encoder)
                dim = encoder.features
            else:
                self.encoders.append(nn.Flatten(-len(spec.shape)) if len(spec.shape) > 1 else nn.Identity())
            normalize = config.normalize_obs and not is_image
            self.normalizers.append(config.normalizer.build(spec.shape) if normalize else IdentityNormalizer())
            width += dim
        rnn = config.rnn
        # The name `memory` is part of the keys in checkpoints and policy files.
        self.memory: AnyRNN = IdentityRNN()
        self.rnn_first = rnn is None or rnn.position == "before_mlp"
        self.concat_input = rnn is not None and rnn.concat_input
        extra = width if self.concat_input else 0
        mlp_input = width
        if rnn is not None and self.rnn_first:
            self.memory = RNN(rnn, width, config.init)
            mlp_input = rnn.hidden + extra
        self.features = [mlp_input, *config.hidden][-1]
        if rnn is not None and not self.rnn_first:
            self.memory = RNN(rnn, self.features + extra, config.init)
            self.features = rnn.hidden
        build = D2RL if config.d2rl else MLP
        self.hidden = build(
            mlp_input,
            config.hidden,
            config.activation,
            config.init,
            config.init_gain,
            config.layer_norm_position if config.layer_norm else None,
            config.layer_norm_layers == "first",
        )

    def forward(self, obs: Obs, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return features `[L, B, features]` of `obs` `[L, B, ...]`, and the last state.

        `state` is the state before the first step; `reset` `[L, B]` marks steps that start a new
        episode, None means that there are none.
        """
        features, states = self.unroll(obs, state, reset)
        return features, tree_map(lambda steps: steps[-1], states)

    def unroll(self, obs: Obs, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return the same features, and the states after each step, `[L, B, ...]`."""
        encoded = self._at_precision(self.encode, obs)
        if self.rnn_first:
            features, states = self.memory(encoded, state, reset)
            return self._at_precision(self.hidden, self._join(features, encoded)), states
        hidden = self._at_precision(self.hidden, encoded)
        return self.memory(self._join(hidden, encoded), state, reset)

    def encode(self, obs: Obs) -> Tensor:
        """Return all observation groups, normalised, encoded and concatenated: `[L, B, width]`."""
        columns = zip(self.groups, self.normalizers, self.encoders, strict=True)
        parts = [encode(normalize(obs[name])) for name, normalize, encode in columns]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def _at_precision(self, layers: Callable[[Any], Tensor], x: Obs | Tensor) -> Tensor:
        """Return `layers(x)` in float32, for any precision of the layers' products."""
        if not self.in_bfloat16:
            return layers(x)
        device = (x if isinstance(x, Tensor) else x[self.groups[0]]).device
        with torch.autocast(device.type, torch.bfloat16):
            return layers(x).float()

    def _join(self, features: Tensor, encoded: Tensor) -> Tensor:
        """Return the input of the second of recurrent and hidden layers."""
        return torch.cat([features, encoded], dim=-1) if self.concat_input else features

    def initial_state(self, num_envs: int) -> State:
        """Return the state at the start of an episode; `()` for feed-forward networks."""
        return self.memory.initial_state(num_envs)


@networks.register("module")
@dataclass(frozen=True, kw_only=True)
class ModuleConfig:
    """Any torch module as a network; `canter.network` makes these settings of a class."""

    module: str = ""
    """`module.path:NAME` of a class or function that makes the module; its import must be
    allowed."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class or function."""
    obs_groups: tuple[str, ...] | None = None
    """Observation groups to read, as in the standard network."""
    normalize_obs: bool = True
    """Normalise vector observations by running statistics."""
    normalizer: NormalizerConfig = field(default_factory=NormalizerConfig)
    """Epsilon, clipping and prior of that normaliser."""
    init: Init = "orthogonal"
    """Weight initialisation of the layer after the network; the module has its own."""

    def build(self, obs: dict[str, TensorSpec], role: str) -> ModuleNetwork:
        """Build the network for these observation groups; `role` is "policy" or "critic"."""
        return ModuleNetwork(self, select_groups(self.obs_groups, obs, role))


class ModuleNetwork(_ObsNetwork):
    """A module `[B, inputs] -> [B, features]`, or `[B, *shape] -> [B, features]` of one image, as a network."""

    def __init__(self, config: ModuleConfig, groups: dict[str, TensorSpec]) -> None:
        super().__init__()
        self.groups = tuple(groups)
        shapes: list[tuple[int, ...]] = [spec.shape for spec in groups.values()]
        inputs = (sum(map(math.prod, shapes)),)
        is_image = len(shapes) == 1 and len(shapes[0]) > 1
        if is_image:
            [inputs] = shapes
        self.normalizers = nn.ModuleList(
            config.normalizer.build(shape) if config.normalize_obs and len(shape) < 3 else IdentityNormalizer()
            for shape in shapes
        )
        self.input_dims = 0 if is_image else 1
        self.module = _make_module(config, inputs if is_image else inputs[0])
        self.features = _count_features(config.module, self.module, inputs)

    def forward(self, obs: Obs, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return features `[L, B, features]` of `obs` `[L, B, ...]`, and the state `()`."""
        parts: list[Tensor] = []
        for name, normalize in zip(self.groups, self.normalizers, strict=True):
            group = obs[name]
            scaled = group / 255 if group.dtype == torch.uint8 else group.float()
            parts.append(normalize(scaled).flatten(2) if self.input_dims else normalize(scaled))
        x = torch.cat(parts, dim=-1) if self.input_dims else parts[0]
        features = self.module(x.flatten(0, 1))
        return features.unflatten(0, x.shape[:2]), ()

    def unroll(self, obs: Obs, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return the same: there is no state."""
        return self(obs, state, reset)

    def initial_state(self, num_envs: int) -> State:
        """Return `()`: the network is feed-forward."""
        return ()


_modules: dict[str, Callable[..., nn.Module]] = {}
"""Classes and functions of the running program by name."""


def network(
    module: Callable[..., nn.Module],
    *,
    obs_groups: tuple[str, ...] | None = None,
    normalize_obs: bool = True,
    **arguments: Any,
) -> ModuleConfig:
    """Return settings of a network that is any torch module, for `ModelConfig(policy=...)`.

        canter.ModelConfig(policy=canter.network(MyModule, width=256))

    `module` is a class or function that makes a module of `[B, inputs] -> [B, features]`. Its first
    parameter receives the number of inputs if it has no default, or the shape of an image; further
    ones are `arguments`. Policy and critic build one each, and a last layer follows.
    """
    if isinstance(module, nn.Module):
        raise UserError(
            f"network: {type(module).__name__}(...) is one module; pass its class, so that each can be built"
        )
    if not callable(module):
        raise UserError(f"network: {module!r} is no class or function that makes a torch.nn.Module")
    found = name_for_import(module)
    name = f"{PYTHON}:{getattr(module, '__name__', 'module')}" if found is None else found[0]
    while found is None and _modules.get(name, module) is not module:  # such as another lambda
        name += "_"
    _modules[name] = module
    return ModuleConfig(module=name, arguments=arguments, obs_groups=obs_groups, normalize_obs=normalize_obs)


def _make_module(config: ModuleConfig, inputs: int | tuple[int, ...]) -> nn.Module:
    """Make the module with its number of inputs, or the shape of its image, if it requires a positional argument."""
    factory = _modules.get(config.module) or find_object(config.module, "algorithm.model.policy.module")
    required = [
        parameter
        for name, parameter in parameters_of(factory).items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and name not in config.arguments
    ]
    try:
        module = factory(*([inputs] if required else []), **config.arguments)
    except TypeError as error:
        raise UserError(f"network {config.module}: {error}; its first parameter receives {inputs}") from error
    if not isinstance(module, nn.Module):
        raise UserError(f"network {config.module}: returned {type(module).__name__}, expected a torch.nn.Module")
    return module


def _count_features(name: str, module: nn.Module, inputs: tuple[int, ...]) -> int:
    """Return the width of a module's output, from a pass of two samples of zeros."""
    training = module.training
    module.train(False)  # so that no statistics change
    try:
        with torch.no_grad():
            features = module(torch.zeros(2, *inputs))
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise UserError(f"network {name}: it fails with observations {[2, *inputs]}: {error}") from error
    module.train(training)
    if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != 2:
        shape = list(features.shape) if isinstance(features, Tensor) else type(features).__name__
        hint = "; recurrent layers are rnn of the standard network" if isinstance(features, tuple) else ""
        given = f"observations {[2, *inputs]}"
        raise UserError(f"network {name}: it returned {shape} for {given}, expected [2, features]{hint}")
    return features.shape[1]
