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
    """Normalizes all groups, concatenated to `[..., D]`."""

    shift: Tensor
    inverse_scale: Tensor

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        network = network_of(policy.actor, "actor")
        shifts = []
        scales = []
        self.clip = float("inf")
        for name, part in zip(network.groups, network.normalizers, strict=True):
            width = policy.spec.obs[name].shape[0]
            known = isinstance(part, Normalizer)
            shifts.append(part.shift.cpu() if known else torch.zeros(width))
            scales.append(part.inverse_scale.cpu() if known else torch.ones(width))
            self.clip = part.clip if known and part.clip is not None else self.clip
        self.register_buffer("shift", torch.cat(shifts))
        self.register_buffer("inverse_scale", torch.cat(scales))

    def forward(self, obs: Tensor) -> Tensor:
        """Return normalized observations, clipped if there is a limit."""
        return torch.clamp((obs - self.shift) * self.inverse_scale, -self.clip, self.clip)


class ExportedPolicy(nn.Module):
    """Normalizer and layers."""

    def __init__(self, normalizer: JoinedNormalizer, layers: nn.Sequential) -> None:
        super().__init__()
        self.normalizer = normalizer
        self.layers = layers

    def forward(self, obs: Tensor) -> Tensor:
        """Return the actions `[N, A]` of observations `[N, D]`."""
        return self.layers(self.normalizer(obs))

    @torch.jit.export
    def reset(self) -> None:
        """Do nothing: there is no recurrent state."""


class ExportedRNN(nn.Module):
    """Normalizer, recurrent layers and hidden layers, for one robot.

    The recurrent state is a buffer.
    """

    hidden_state: Tensor

    def __init__(self, normalizer: JoinedNormalizer, rnn: nn.LSTM | nn.GRU, layers: nn.Sequential) -> None:
        super().__init__()
        self.normalizer = normalizer
        self.rnn = rnn
        self.layers = layers
        self.register_buffer("hidden_state", torch.zeros(rnn.num_layers, 1, rnn.hidden_size))

    def forward(self, obs: Tensor) -> Tensor:
        """Return the action `[1, A]` of an observation `[1, D]`."""
        x, hidden = self.rnn(self.normalizer(obs).unsqueeze(0), self.hidden_state)
        self.hidden_state[:] = hidden
        return self.layers(x.squeeze(0))

    @torch.jit.export
    def reset(self) -> None:
        """Zero the recurrent state."""
        self.hidden_state[:] = 0.0


class ExportedLSTM(ExportedRNN):
    """The recurrent module with a cell state."""

    cell_state: Tensor

    def __init__(self, normalizer: JoinedNormalizer, rnn: nn.LSTM | nn.GRU, layers: nn.Sequential) -> None:
        super().__init__(normalizer, rnn, layers)
        self.register_buffer("cell_state", torch.zeros_like(self.hidden_state))

    def forward(self, obs: Tensor) -> Tensor:
        """Return the action `[1, A]` of an observation `[1, D]`."""
        x, (hidden, cell) = self.rnn(self.normalizer(obs).unsqueeze(0), (self.hidden_state, self.cell_state))
        self.hidden_state[:] = hidden
        self.cell_state[:] = cell
        return self.layers(x.squeeze(0))

    @torch.jit.export
    def reset(self) -> None:
        """Zero the recurrent state."""
        self.hidden_state[:] = 0.0
        self.cell_state[:] = 0.0
