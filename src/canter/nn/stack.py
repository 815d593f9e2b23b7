"""Networks with norms and residual blocks, several of one shape in one batched product.

E members (critics of an ensemble), B samples, D features, K atoms of a categorical critic. A single
network is a stack of one member.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from canter.core import distributed
from canter.core.plain import check_range
from canter.core.registry import UserError
from canter.core.specs import EnvSpec, TensorSpec
from canter.core.struct import Obs, State
from canter.functional.layers import batch_norm
from canter.nn.cnn import CNNConfig
from canter.nn.mlp import Activation, Init, activations
from canter.nn.network import Network, NetworkConfig, networks, select_groups
from canter.nn.normalizer import NormalizerConfig

Norm = Literal["none", "layer", "rms", "batch"]


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """Encoders, hidden layers, residual blocks and norms."""

    obs_groups: tuple[str, ...] | None = None
    """Observation groups to read; None reads "policy" (for a critic "critic") or, if missing,
    all."""
    normalize_obs: bool = False
    """Normalise vector observations by running statistics."""
    normalizer: NormalizerConfig = field(default_factory=NormalizerConfig)
    """Epsilon, clipping and prior of that normaliser."""
    cnn: CNNConfig = field(default_factory=CNNConfig)
    """Encoder for image groups (three axes)."""
    hidden: tuple[int, ...] = (256, 256)
    """Width of each layer; with `blocks` the last one is linear, without norm and activation."""
    blocks: int = 0
    """Number of residual blocks after the layers, each two layers with norm and activation."""
    expansion: int = 4
    """Width of the first layer of a block, as a multiple of the last of `hidden`."""
    activation: Activation = "relu"
    """Non-linearity."""
    norm: Norm = "none"
    """Norm before each activation. "batch" needs an algorithm that learns from joint batches:
    sac."""
    input_norm: Norm = "none"
    """Norm of the input of the first layer."""
    output_norm: Norm = "none"
    """Norm of the output of the last layer."""
    init: Init = "default"
    """Weight initialisation: torch's default with or without its random biases, or orthogonal."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of matrix products in layers and blocks."""

    def __post_init__(self) -> None:
        """Raise UserError for layers without width and for an unsupported initialisation."""
        if not self.hidden or any(width < 1 for width in self.hidden):
            raise UserError(f"hidden={self.hidden} must be one or more widths of at least 1")
        if self.init not in ("default", "default_zero_bias", "orthogonal"):
            raise UserError(f"init={self.init}: stacks begin by default, default_zero_bias or orthogonal")
        check_range(self, "must not be negative", "blocks")
        check_range(self, "must be at least 1", "expansion")

    def encoder(self, obs: dict[str, TensorSpec], role: str) -> Network:
        """Build the encoder: normalisers and image encoders, with concatenated outputs."""
        config = NetworkConfig(
            hidden=(),
            activation=self.activation,
            normalize_obs=self.normalize_obs,
            normalizer=self.normalizer,
            cnn=self.cnn,
        )
        return Network(config, select_groups(self.obs_groups, obs, role))


@networks.register("stack")
@dataclass(frozen=True, kw_only=True)
class StackNetworkConfig(StackConfig):
    """A network with norms and residual blocks."""

    def build(self, obs: dict[str, TensorSpec], role: str) -> StackNetwork:
        """Build the network for these observation groups."""
        return StackNetwork(self, self.encoder(obs, role))


class StackedLinear(nn.Module):
    """Linear layer `[E, B, in]` to `[E, B, out]`, one matrix per member in one batched product."""

    def __init__(self, members: int, width: int, out: int, init: Init, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(members, width, out))
        self.bias = nn.Parameter(torch.zeros(members, 1, out)) if bias else None
        if init == "orthogonal":
            for matrix in self.weight:
                nn.init.orthogonal_(matrix)
        else:  # torch's initialisation of a linear layer
            nn.init.uniform_(self.weight, -1 / math.sqrt(width), 1 / math.sqrt(width))
            if self.bias is not None and init == "default":
                nn.init.uniform_(self.bias, -1 / math.sqrt(width), 1 / math.sqrt(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of all members."""
        return torch.bmm(x, self.weight) if self.bias is None else torch.baddbmm(self.bias, x, self.weight)


class StackedRMSNorm(nn.Module):
    """RMS norm of each sample, with a learned scale per member."""

    def __init__(self, members: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(members, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return `[E, B, D]` of `x` `[E, B, D]`."""
        return nn.functional.rms_norm(x, x.shape[-1:], eps=1e-6) * self.weight


class StackedLayerNorm(nn.Module):
    """Layer norm of each sample, with a learned scale and shift per member."""

    def __init__(self, members: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(members, 1, width))
        self.bias = nn.Parameter(torch.zeros(members, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return `[E, B, D]` of `x` `[E, B, D]`."""
        return torch.addcmul(self.bias, nn.functional.layer_norm(x, x.shape[-1:], eps=1e-5), self.weight)


class StackedBatchNorm(StackedLayerNorm):
    """Batch norm by running statistics; inside `batch_statistics` by, and updated with, the batch.

    Unlike torch's it does not start in training mode, so that acting never changes a policy.
    """

    eps = 1e-5
    momentum = 0.01

    def __init__(self, members: int, width: int) -> None:
        super().__init__(members, width)
        self.mean = nn.Buffer(torch.zeros(members, 1, width))
        self.var = nn.Buffer(torch.ones(members, 1, width))
        self.train(False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `[E, B, D]`, by statistics over B."""
        if not self.training:
            return torch.addcmul(self.bias, x - self.mean, self.weight * torch.rsqrt(self.var + self.eps)).to(x.dtype)
        y, mean, var = batch_norm(x, self.weight, self.bias, self.eps)
        with torch.no_grad():
            self.mean.lerp_(distributed.mean(mean), self.momentum)
            self.var.lerp_(distributed.mean(var), self.momentum)
        return y


NORMS: dict[str, type[nn.Module]] = {"layer": StackedLayerNorm, "rms": StackedRMSNorm, "batch": StackedBatchNorm}


def make_norm(kind: Norm, members: int, width: int) -> nn.Module:
    """Build a norm; the identity for "none"."""
    return nn.Identity() if kind == "none" else NORMS[kind](members, width)


def has_batch_norm(module: nn.Module) -> bool:
    """Return True if the output for a sample may depend on the other samples of the batch."""
    return any(isinstance(part, StackedBatchNorm) for part in module.modules())


@contextmanager
def batch_statistics(module: nn.Module) -> Iterator[None]:
    """Let batch norms normalise by the batch and update their running statistics."""
    module.train()
    yield
    module.train(False)


def _layer(config: StackConfig, members: int, width: int, out: int) -> list[nn.Module]:
    """Return a linear layer, its norm and its activation."""
    bias = config.norm in ("none", "rms")  # norms that subtract the mean have a bias
    linear = StackedLinear(members, width, out, config.init, bias)
    return [linear, make_norm(config.norm, members, out), activations[config.activation]()]


class Block(nn.Module):
    """Residual block: a wide layer and one back, each with norm and activation."""

    def __init__(self, config: StackConfig, members: int, width: int) -> None:
        super().__init__()
        wide = config.expansion * width
        self.layers = nn.Sequential(*_layer(config, members, width, wide), *_layer(config, members, wide, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return `[E, B, D]` of `x` `[E, B, D]`."""
        return x + self.layers(x)


class Stack(nn.Module):
    """Layers, residual blocks and norms: `[E, B, in]` to `[E, B, hidden[-1]]`."""

    def __init__(self, config: StackConfig, members: int, width: int) -> None:
        super().__init__()
        self.in_bfloat16 = config.precision == "bfloat16"
        layers: list[nn.Module] = [make_norm(config.input_norm, members, width)]
        for out in config.hidden[:-1] if config.blocks else config.hidden:
            layers += _layer(config, members, width, out)
            width = out
        last = config.hidden[-1]
        if config.blocks:
            layers.append(StackedLinear(members, width, last, config.init))
        layers += [Block(config, members, last) for _ in range(config.blocks)]
        self.layers = nn.Sequential(*layers, make_norm(config.output_norm, members, last))

    def forward(self, x: Tensor) -> Tensor:
        """Return float32 features, for any precision of the layers' products."""
        if not self.in_bfloat16:
            return self.layers(x)
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.layers(x).float()


class StackNetwork(nn.Module):
    """Network of one member: observation groups to features."""

    def __init__(self, config: StackNetworkConfig, encoder: Network) -> None:
        super().__init__()
        self.encoder = encoder
        self.groups = encoder.groups
        self.features = config.hidden[-1]
        self.stack = Stack(config, 1, encoder.features)

    def forward(self, obs: Obs, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return features `[L, B, features]` of `obs` `[L, B, ...]`, and the unchanged state."""
        encoded = self.encoder.encode(obs)
        features = self.stack(encoded.reshape(1, -1, encoded.shape[-1]))
        return features.view(*encoded.shape[:-1], self.features), state

    unroll = forward

    def initial_state(self, num_envs: int) -> State:
        """Return `()`: the network is feed-forward."""
        return ()

    def update_statistics(self, obs: Obs, valid: Tensor) -> None:
        """Update the observation statistics with the valid samples of `obs` `[T, N, ...]`."""
        self.encoder.update_statistics(obs, valid)


@dataclass(frozen=True, kw_only=True)
class CriticConfig(StackConfig):
    """Number of critics, their predictions and their layers."""

    members: int = 2
    """Number of critics in the ensemble."""
    atoms: int = 1
    """1: each critic predicts the mean return. More: its distribution over evenly spaced
    returns."""
    support: tuple[float, float] = (-5.0, 5.0)
    """Lowest and highest return of the atoms, in the units of scaled rewards."""

    def __post_init__(self) -> None:
        """Raise UserError for a value outside its range."""
        super().__post_init__()
        check_range(self, "must be at least 1", "members", "atoms")
        if not self.support[0] < self.support[1]:
            raise UserError(f"support={self.support} must be a lower and a higher return")

    def build(self, spec: EnvSpec, action_dim: int) -> Critics:
        """Build the critics for observations of `spec` and actions of `action_dim` components."""
        return Critics(self, spec, action_dim)


class Critics(nn.Module):
    """Ensemble of action-value critics: a shared encoder, and one network per critic."""

    def __init__(self, config: CriticConfig, spec: EnvSpec, action_dim: int) -> None:
        super().__init__()
        self.members = config.members
        self.atoms = config.atoms
        self.ends = config.support
        self.encoder = config.encoder(spec.obs, "critic")
        self.stack = Stack(config, config.members, self.encoder.features + action_dim)
        self.head = StackedLinear(config.members, config.hidden[-1], config.atoms, config.init)
        self.support = nn.Buffer(torch.linspace(*config.support, config.atoms))

    def forward(self, obs: Obs, action: Tensor) -> Tensor:
        """Return values `[E, B]`, or logits `[E, B, K]`; actions are in -1..1."""
        x = torch.cat([self.encoder.encode(obs), action], -1)
        out = self.head(self.stack(x.expand(self.members, *x.shape)))
        return out.squeeze(-1) if self.atoms == 1 else out

    def values(self, out: Tensor) -> Tensor:
        """Return mean returns `[E, B]` from the output of a call."""
        return out if self.atoms == 1 else (out.softmax(-1) * self.support).sum(-1)
