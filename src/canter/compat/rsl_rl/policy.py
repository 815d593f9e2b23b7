"""A trained policy for RSL-RL's scripts: called with observations, and exported as one module.

N environments, D concatenated observations, A action components.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from canter.compat.rsl_rl.exported import ExportedLSTM, ExportedPolicy, ExportedRNN, JoinedNormalizer
from canter.compat.rsl_rl.own_model import OwnModel
from canter.compat.weights import network_of
from canter.core.plain import ConfigError
from canter.core.struct import Obs, State, tree_map
from canter.nn.actor_critic import Policy, ValueFunction
from canter.nn.heads import GaussianHead
from canter.nn.normalizer import Normalizer
from canter.nn.rnn import RNN


class InferenceModel(nn.Module):
    """A network that is called with observations; it keeps the recurrent state until `reset`."""

    def __init__(self, model: Policy | ValueFunction, groups: Callable[[Any], Obs]) -> None:
        super().__init__()
        self.groups = groups
        self.new_state = model.initial_state
        self.state: State | None = None
        self.is_recurrent = model.initial_state(1) != ()

    def read(self, obs: Any) -> tuple[Obs, State]:
        """Return the groups of a TensorDict, a mapping or a single group, and the recurrent state."""
        groups = self.groups(obs)
        if self.state is None:
            self.state = self.new_state(next(iter(groups.values())).shape[0])
        return groups, self.state

    def reset(self, dones: Tensor | None = None) -> None:
        """Reset the recurrent state, everywhere or where `dones` `[N]` is True."""
        if dones is None or self.state is None:
            self.state = None
            return
        begins = dones.bool().reshape(-1)
        self.state = tree_map(lambda part: part.masked_fill(begins.to(part.device).unsqueeze(-1), 0.0), self.state)


class InferenceCritic(InferenceModel):
    """Maps observations to values `[N, 1]`, as `alg.critic` since 4.0."""

    def __init__(self, critic: ValueFunction, groups: Callable[[Any], Obs]) -> None:
        super().__init__(critic, groups)
        self.critic = critic
        self.network = critic.critic

    def forward(self, obs: Any) -> Tensor:
        """Return values `[N, 1]`."""
        value, self.state = self.critic.value(*self.read(obs))
        return value.unsqueeze(-1)


class InferencePolicy(InferenceModel):
    """Maps observations to deterministic actions."""

    def __init__(self, policy: Policy, groups: Callable[[Any], Obs]) -> None:
        super().__init__(policy, groups)
        self.policy = policy
        self.network = policy.actor
        self.device: str | None = None
        """Device of the actions; None for that of the networks."""

    @torch.no_grad()
    def forward(self, obs: Any, *, stochastic_output: bool = False) -> Tensor:
        """Return actions `[N, A]`."""
        action, self.state = self.policy.act(*self.read(obs), deterministic=not stochastic_output)
        return action if self.device is None else action.to(self.device)

    @property
    def output_std(self) -> Tensor:
        """Return the std `[A]` if it does not depend on the observation."""
        head = self.network.head
        if not isinstance(head, GaussianHead) or not isinstance(head.raw_std, Tensor):
            raise ConfigError("the std depends on the observation: see policy.params")
        return head.log_std(head.raw_std).exp().detach()

    # Names up to 3.x.
    std = action_std = output_std
    act_inference = forward

    @property
    def actor(self) -> nn.Sequential:
        """Return a copy of the layers, which scripts for RSL-RL before 4.0 export."""
        return exported(self.policy).layers

    @property
    def actor_obs_normalization(self) -> bool:
        """Return True if any observation group is normalized."""
        return any(isinstance(part, Normalizer) for part in network_of(self.policy.actor, "actor").normalizers)

    @property
    def actor_obs_normalizer(self) -> nn.Module:
        """Return a copy of the normalizer of concatenated observations, for these scripts."""
        return exported(self.policy).normalizer

    @property
    def memory_a(self) -> Any:
        """Return a copy of the recurrent layers, for the same scripts.

        Only a recurrent policy has them: scripts call `hasattr`.
        """
        return SimpleNamespace(rnn=exported(self.policy).rnn)

    def as_jit(self) -> nn.Module:
        """Return a module for TorchScript: concatenated observations `[1, D]` to the mean `[1, A]`, and `reset()`."""
        own = self._own_model()
        return exported(self.policy) if own is None else own.as_jit()

    def as_onnx(self, verbose: bool = False) -> nn.Module:
        """Return a module for ONNX, with the recurrent state as input and output."""
        own = self._own_model()
        return OnnxPolicy(exported(self.policy)) if own is None else own.as_onnx(verbose)

    def _own_model(self) -> Any:
        """Return the user's model, which exports itself; None for a network of Canter's."""
        network = self.policy.actor.network
        return network.model if isinstance(network, OwnModel) else None


def exported(policy: Policy) -> ExportedPolicy | ExportedRNN:
    """Return the deterministic policy as one module of torch's own layers, on the CPU."""
    network = network_of(policy.actor, "actor")
    head = policy.actor.head
    if not isinstance(head, GaussianHead):
        raise ConfigError("RSL-RL's exports are of Gaussian policies; canter.export_policy takes any")
    if any(not isinstance(encoder, nn.Identity) for encoder in network.encoders):
        raise ConfigError("RSL-RL's exports are of vector observations; canter.export_policy takes images too")
    if not isinstance(network.hidden, nn.Sequential):
        raise ConfigError("RSL-RL's exports are of layers in a row; canter.export_policy takes d2rl too")
    layers = nn.Sequential(*_copied(network.hidden), _linear(head.mean))
    normalizer = JoinedNormalizer(policy)
    if not isinstance(network.memory, RNN):
        return ExportedPolicy(normalizer, layers)
    if not network.rnn_first or network.concat_input or not isinstance(network.memory.norm, nn.Identity):
        raise ConfigError("RSL-RL's exports have recurrent layers first; canter.export_policy takes any")
    kind = ExportedLSTM if network.memory.is_lstm else ExportedRNN
    return kind(normalizer, _fused(network.memory), layers)


def _linear(layer: nn.Linear) -> nn.Linear:
    own = nn.Linear(layer.in_features, layer.out_features)
    own.load_state_dict({name: tensor.detach().cpu() for name, tensor in layer.state_dict().items()})
    return own


def _copied(layers: nn.Sequential) -> list[nn.Module]:
    return [_linear(layer) if isinstance(layer, nn.Linear) else layer for layer in layers]


def _fused(memory: RNN) -> nn.LSTM | nn.GRU:
    """Return torch's own recurrent layers with the cells' weights."""
    kind = nn.LSTM if memory.is_lstm else nn.GRU
    own = kind(memory.cells[0].input_size, memory.hidden, len(memory.cells))
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    cells = enumerate(memory.cells)
    own.load_state_dict({f"{n}_l{k}": getattr(cell, n).detach().cpu() for k, cell in cells for n in names})
    return own


class OnnxPolicy(nn.Module):
    """The module that RSL-RL exports to ONNX.

    `obs -> actions`, with `h_in, c_in -> h_out, c_out` if recurrent.
    """

    def __init__(self, policy: ExportedPolicy | ExportedRNN) -> None:
        super().__init__()
        self.policy = policy
        self.input_size = int(policy.normalizer.shift.shape[0])
        rnn = policy.rnn if isinstance(policy, ExportedRNN) else None
        parts = [] if rnn is None else ["h", "c"] if isinstance(rnn, nn.LSTM) else ["h"]
        self.input_names = ["obs", *(f"{part}_in" for part in parts)]
        self.output_names = ["actions", *(f"{part}_out" for part in parts)]
        self.rnn = rnn

    def get_dummy_inputs(self) -> tuple[Tensor, ...]:
        """Return zeros of the right shapes, for one robot."""
        obs = torch.zeros(1, self.input_size)
        if self.rnn is None:
            return (obs,)
        zero = torch.zeros(self.rnn.num_layers, 1, self.rnn.hidden_size)
        return (obs, *[zero] * (len(self.input_names) - 1))

    def forward(self, obs: Tensor, *state: Tensor) -> Any:
        """Return actions, and the next recurrent state."""
        x = self.policy.normalizer(obs)
        if self.rnn is None:
            return self.policy.layers(x)
        given = state if len(state) == 2 else state[0]
        x, after = self.rnn(x.unsqueeze(0), given)
        after = after if isinstance(after, tuple) else (after,)
        return (self.policy.layers(x.squeeze(0)), *after)
