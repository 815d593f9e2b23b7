"""A policy as one module of torch's own layers, which TorchScript can read.

That reads annotations as they are, so this file has no `from __future__ import annotations`.
D observed numbers side by side, A action components.
"""

import torch
from torch import Tensor, nn

from canter.compat.weights import network_of
from canter.nn.actor_critic import Policy
from canter.nn.normalizer import Normalizer


class JoinedNormalizer(nn.Module):
    """All groups side by side `[..., D]`, standardised as each is alone."""

    shift: Tensor
    inverse_scale: Tensor

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        network = network_of(policy.actor, "actor")
        shifts, scales, self.clip = [], [], float("inf")
        for name, part in zip(network.groups, network.normalizers, strict=True):
            width = policy.spec.obs[name].shape[0]
            known = isinstance(part, Normalizer)
            shifts.append(part.shift.cpu() if known else torch.zeros(width))
            scales.append(part.inverse_scale.cpu() if known else torch.ones(width))
            self.clip = part.clip if known and part.clip is not None else self.clip
        self.register_buffer("shift", torch.cat(shifts))
        self.register_buffer("inverse_scale", torch.cat(scales))

    def forward(self, obs: Tensor) -> Tensor:
        """Standardised, within the limit if there is one."""
        return torch.clamp((obs - self.shift) * self.inverse_scale, -self.clip, self.clip)


class Deployed(nn.Module):
    """Normaliser and layers."""

    def __init__(self, normalizer: JoinedNormalizer, layers: nn.Sequential) -> None:
        super().__init__()
        self.normalizer, self.layers = normalizer, layers

    def forward(self, obs: Tensor) -> Tensor:
        """`[N, D]` to `[N, A]`."""
        return self.layers(self.normalizer(obs))

    @torch.jit.export
    def reset(self) -> None:
        """There is nothing to forget."""


class DeployedMemory(nn.Module):
    """Normaliser, memory and layers, for one robot: the memory is inside."""

    hidden_state: Tensor

    def __init__(self, normalizer: JoinedNormalizer, rnn: nn.LSTM | nn.GRU, layers: nn.Sequential) -> None:
        super().__init__()
        self.normalizer, self.rnn, self.layers = normalizer, rnn, layers
        self.register_buffer("hidden_state", torch.zeros(rnn.num_layers, 1, rnn.hidden_size))

    def forward(self, obs: Tensor) -> Tensor:
        """`[1, D]` to `[1, A]`."""
        x, hidden = self.rnn(self.normalizer(obs).unsqueeze(0), self.hidden_state)
        self.hidden_state[:] = hidden
        return self.layers(x.squeeze(0))

    @torch.jit.export
    def reset(self) -> None:
        """Forget."""
        self.hidden_state[:] = 0.0


class DeployedLSTM(DeployedMemory):
    """The same with a cell state besides."""

    cell_state: Tensor

    def __init__(self, normalizer: JoinedNormalizer, rnn: nn.LSTM | nn.GRU, layers: nn.Sequential) -> None:
        super().__init__(normalizer, rnn, layers)
        self.register_buffer("cell_state", torch.zeros_like(self.hidden_state))

    def forward(self, obs: Tensor) -> Tensor:
        """`[1, D]` to `[1, A]`."""
        x, (hidden, cell) = self.rnn(self.normalizer(obs).unsqueeze(0), (self.hidden_state, self.cell_state))
        self.hidden_state[:] = hidden
        self.cell_state[:] = cell
        return self.layers(x.squeeze(0))

    @torch.jit.export
    def reset(self) -> None:
        """Forget."""
        self.hidden_state[:] = 0.0
        self.cell_state[:] = 0.0
