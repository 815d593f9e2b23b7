"""From observation groups to features.

L is the sequence length (1 without memory), B the number of sequences.
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
from canter.nn.cnn import CNNConfig
from canter.nn.mlp import D2RL, MLP, Activation, Init, NormPosition
from canter.nn.normalizer import AnyNormalizer, IdentityNormalizer, NormalizerConfig
from canter.nn.rnn import AnyMemory, Memory, NoMemory, RNNConfig


class AnyNetwork(Protocol):
    """Observation groups to features: what an actor and a critic need of a module."""

    groups: tuple[str, ...]
    """Observation groups that it reads."""
    features: int
    """Width of what it gives."""

    def __call__(self, obs: Obs, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Features `[L, B, features]` of observations `[L, B, ...]`, and the state after the last row.

        `state` is the state before the first row; `reset` `[L, B]` marks rows that begin a new episode, None says that
        there are none.
        """
        ...

    def unroll(self, obs: Obs, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """As a call, but with the states after each row, `[L, B, ...]`."""
        ...

    def initial_state(self, num_envs: int) -> State:
        """State at the start of an episode, `()` without memory."""
        ...

    def update_statistics(self, obs: Obs, valid: Tensor) -> None:
        """Move the observation statistics by the valid rows of `obs` `[T, N, ...]`."""
        ...


class BuildsNetwork(Protocol):
    """Frozen settings that build a network."""

    @property
    def init(self) -> Init:
        """How the weights of the layer behind the network begin."""
        ...

    def build(self, obs: dict[str, TensorSpec], role: str) -> AnyNetwork:
        """The network for these observation groups, a `torch.nn.Module`; `role` is "policy" or "critic"."""
        ...


networks: Registry[type[BuildsNetwork]] = Registry("network", check_settings, default="standard")
"""Settings of networks by the name that `kind` has in settings files."""

AnyNetworkConfig = Annotated[BuildsNetwork, networks]


@networks.register("standard")
@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """Normaliser, encoders and hidden layers of one network."""

    obs_groups: tuple[str, ...] | None = None
    """Observation groups to read; None takes "policy" (for a critic: "critic") or, failing that, all that there are."""
    hidden: tuple[int, ...] = (64, 64)
    """Width of each hidden layer."""
    activation: Activation = "tanh"
    """Non-linearity between layers."""
    layer_norm: bool = False
    """Layer norm in each hidden layer."""
    layer_norm_position: NormPosition = "before_activation"
    """Where in the layer it stands."""
    layer_norm_layers: Literal["all", "first"] = "all"
    """Which hidden layers have it."""
    d2rl: bool = False
    """Let every hidden layer after the first read the input beside what the layer before it gave."""
    init: Init = "orthogonal"
    """How weights begin: orthogonal, torch's default with or without its random biases, or by Glorot's or He's rules
    (variance_scaling: a normal distribution, cut off, of variance `gain^2 / inputs`)."""
    init_gain: float = math.sqrt(2)
    """Scale of the initial hidden weights."""
    normalize_obs: bool = True
    """Standardise vector observations by running statistics."""
    normalizer: NormalizerConfig = field(default_factory=NormalizerConfig)
    """How that is done."""
    cnn: CNNConfig = field(default_factory=CNNConfig)
    """Encoder for image groups (three axes) and, if it says so, for groups of two."""
    memory: RNNConfig | None = None
    """Recurrent layers; None is a network without memory."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the products in encoders and hidden layers. Weights, statistics, memory and the last layer stay float32."""

    def __post_init__(self) -> None:
        """Refuse layers without width, and weights that begin at zero and so never change."""
        if any(width < 1 for width in self.hidden):
            raise UserError(f"hidden={self.hidden} must be widths of at least 1")
        check_range(self, "must be above 0", "init_gain")
        if self.d2rl and self.layer_norm_layers == "first":
            raise UserError("layer_norm_layers=first is for layers in a row, not for d2rl")

    def build(self, obs: dict[str, TensorSpec], role: str) -> Network:
        """The network for these observation groups; `role` is "policy" or "critic"."""
        return Network(self, select_groups(self.obs_groups, obs, role))


def select_groups(names: tuple[str, ...] | None, obs: dict[str, TensorSpec], role: str) -> dict[str, TensorSpec]:
    """The groups that a network reads: those it names, or its role's own, or the policy's, or all that there are."""
    usable = {name: spec for name, spec in obs.items() if name != ACTION_MASK}
    if names is None:
        preferred = next(((name,) for name in (role, "policy") if name in usable), None)
        names = preferred or tuple(name for name in usable if name != "critic")
    for name in names:
        if name not in usable:
            raise UserError(f"{role} network: obs_groups names {name!r}: {nearest(name, usable)}")
    return {name: usable[name] for name in names}


class Network(nn.Module):
    """Reads its observation groups, normalises and encodes them and gives features `[L, B, features]`."""

    def __init__(self, config: NetworkConfig, groups: dict[str, TensorSpec]) -> None:
        super().__init__()
        self.groups, self.in_bfloat16 = tuple(groups), config.precision == "bfloat16"
        self.normalizers, self.encoders = nn.ModuleList(), nn.ModuleList()
        width = 0
        for spec in groups.values():
            is_image, dim = len(spec.shape) == 3, math.prod(spec.shape)
            if is_image or (len(spec.shape) == 2 and config.cnn.sequences):
                encoder = config.cnn.build(spec.shape, config.activation, config.init, config.init_gain)
                self.encoders.append(encoder)
                dim = encoder.features
            else:
                self.encoders.append(nn.Flatten(-len(spec.shape)) if len(spec.shape) > 1 else nn.Identity())
            normalize = config.normalize_obs and not is_image
            self.normalizers.append(config.normalizer.build(spec.shape) if normalize else IdentityNormalizer())
            width += dim
        memory, reads = config.memory, width
        self.memory: AnyMemory = NoMemory()
        self.memory_first = memory is None or memory.position == "before_mlp"
        self.concat_input = memory is not None and memory.concat_input
        beside = width if self.concat_input else 0
        if memory is not None and self.memory_first:
            self.memory, reads = Memory(memory, width, config.init), memory.hidden + beside
        self.features = [reads, *config.hidden][-1]
        if memory is not None and not self.memory_first:
            self.memory, self.features = Memory(memory, self.features + beside, config.init), memory.hidden
        norm = config.layer_norm_position if config.layer_norm else None
        settings = (config.activation, config.init, config.init_gain, norm, config.layer_norm_layers == "first")
        self.hidden = (D2RL if config.d2rl else MLP)(reads, config.hidden, *settings)

    def forward(self, obs: Obs, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Features `[L, B, features]` of observations `[L, B, ...]`, and the state after the last row.

        `state` is the state before the first row; `reset` `[L, B]` marks rows that begin a new episode, None says that
        there are none.
        """
        features, states = self.unroll(obs, state, reset)
        return features, tree_map(lambda rows: rows[-1], states)

    def unroll(self, obs: Obs, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """As `forward`, but with the states after each row, `[L, B, ...]`."""
        encoded = self._at_precision(self.encode, obs)
        if self.memory_first:
            features, states = self.memory(encoded, state, reset)
            return self._at_precision(self.hidden, self._join(features, encoded)), states
        return self.memory(self._join(self._at_precision(self.hidden, encoded), encoded), state, reset)

    def encode(self, obs: Obs) -> Tensor:
        """All observation groups, normalised, encoded and side by side: `[L, B, width]`."""
        columns = zip(self.groups, self.normalizers, self.encoders, strict=True)
        parts = [encode(normalize(obs[name])) for name, normalize, encode in columns]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def _at_precision(self, layers: Callable[[Any], Tensor], x: Obs | Tensor) -> Tensor:
        """`layers(x)` in float32, whatever the layers multiply in."""
        if not self.in_bfloat16:
            return layers(x)
        device = (x if isinstance(x, Tensor) else x[self.groups[0]]).device
        with torch.autocast(device.type, torch.bfloat16):
            return layers(x).float()

    def _join(self, features: Tensor, encoded: Tensor) -> Tensor:
        """What the second of memory and hidden layers reads."""
        return torch.cat([features, encoded], dim=-1) if self.concat_input else features

    def initial_state(self, num_envs: int) -> State:
        """State at the start of an episode, `()` without memory."""
        return self.memory.initial_state(num_envs)

    def update_statistics(self, obs: Obs, valid: Tensor) -> None:
        """Move the observation statistics by the valid rows of `obs` `[T, N, ...]`."""
        for name, normalizer in zip(self.groups, self.normalizers, strict=True):
            cast(AnyNormalizer, normalizer).update(obs[name], valid)
