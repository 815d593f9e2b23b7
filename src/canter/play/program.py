"""A policy as a flat list of steps and arrays, for targets that run without torch.

Everything that the steps cannot express is refused by name: convolutions, own networks and their
heads, registered activations and distributions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from canter.core.registry import UserError
from canter.core.specs import ACTION_MASK
from canter.core.struct import Obs, State, tree_leaves
from canter.nn.actor_critic import Policy
from canter.nn.describe import DISTRIBUTIONS, activation_name
from canter.nn.distributions import (
    Beta,
    Categorical,
    DiagGaussian,
    Distribution,
    Floats,
    MultiCategorical,
    TanhGaussian,
    interval,
)
from canter.nn.heads import GaussianHead, LinearHead
from canter.nn.mlp import D2RL, MLP, Linear
from canter.nn.network import Network
from canter.nn.normalizer import IdentityNormalizer, Normalizer
from canter.nn.rnn import RNN, IdentityRNN
from canter.runtime import ACTIVATIONS, SCHEMA, hash_arrays
from canter.runtime import Policy as NumpyPolicy

Weights = Literal["float32", "int8"]
"""Number format of the weight matrices of a C header."""
ENCODED, HIDDEN_INPUT = range(2)
"""Slots of vectors that a later step joins to its input."""


Inputs = tuple[Obs, State]
"""Inputs of the exported function: observation groups and recurrent state, all `[B, ...]`."""
Exported = Callable[[Inputs], list[Tensor]]
"""A loaded file: inputs -> the action and the parts of the next recurrent state."""


class ExportError(UserError):
    """A policy that cannot be exported, or a file that does not reproduce the policy."""


@dataclass
class Program:
    """Steps of one call: vectors in, action out."""

    inputs: list[dict[str, Any]] = field(default_factory=list)
    """Observation groups in order, with their normalisation."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """Operations on one vector, as `canter.runtime` runs them."""
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    """Constants by name, float32."""
    state: list[int] = field(default_factory=list)
    """Sizes of the parts of the recurrent state, which are zero at the start of an episode."""

    def constant(self, values: Tensor | Floats) -> str:
        """Store a constant; return its name."""
        name = f"c{len(self.arrays)}"
        array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.array(values)
        self.arrays[name] = array.astype(np.float32)
        return name

    def add(self, op: str, **fields: Any) -> None:
        """Append a step; tensors are stored as constants."""
        stored = {name: self.constant(v) if isinstance(v, Tensor | tuple) else v for name, v in fields.items()}
        self.steps.append({"op": op, **stored})


def make_program(policy: Policy) -> Program:
    """Return the steps of a deterministic policy; raise ExportError for a part without a step."""
    program = Program()
    network = policy.actor.network
    if type(network) is not Network:
        raise _refusal(f"the network {type(network).__name__}", "a network of kind standard")
    _add_inputs(program, policy, network)
    if network.concat_input:
        program.add("save", slot=ENCODED)
    first, second = (_add_rnn, _add_hidden) if network.rnn_first else (_add_hidden, _add_rnn)
    first(program, network)
    if network.concat_input:
        program.add("join", slot=ENCODED)
    second(program, network)
    head = policy.actor.head
    if type(head) is GaussianHead:
        _add_layer(program, head.mean)
    elif type(head) is LinearHead:
        _add_layer(program, head.linear)
    else:
        raise _refusal(f"the policy head {type(head).__name__}", "a head of Canter")
    _add_distribution(program, policy.distribution)
    return program


def _refusal(what: str, expected: str) -> ExportError:
    return ExportError(f"{what} has no form in C or NumPy, expected {expected}; ONNX and torch.export have one")


def _add_inputs(program: Program, policy: Policy, network: Network) -> None:
    for name, normalizer, encoder in zip(network.groups, network.normalizers, network.encoders, strict=True):
        spec = policy.spec.obs[name]
        if type(encoder) not in (nn.Identity, nn.Flatten):
            raise _refusal(f"observation group {name!r} with the encoder {type(encoder).__name__}", "a vector")
        if spec.dtype != torch.float32:
            raise _refusal(f"observation group {name!r} of {spec.dtype}", "float32")
        entry: dict[str, Any] = {"group": name, "size": math.prod(spec.shape)}
        if type(normalizer) is Normalizer:
            entry |= {
                "shift": program.constant(normalizer.shift.reshape(-1)),
                "inverse_scale": program.constant(normalizer.inverse_scale.reshape(-1)),
                "clip": normalizer.clip,
            }
        elif type(normalizer) is not IdentityNormalizer:
            raise _refusal(f"observation group {name!r} with {type(normalizer).__name__}", "a running normalizer")
        program.inputs.append(entry)
    if policy.actor.masked:
        program.inputs.append({"group": ACTION_MASK, "size": math.prod(policy.spec.obs[ACTION_MASK].shape)})


def _add_hidden(program: Program, network: Network) -> None:
    hidden = network.hidden
    if type(hidden) is D2RL:
        program.add("save", slot=HIDDEN_INPUT)
        for number, layers in enumerate(hidden):
            if number:
                program.add("join", slot=HIDDEN_INPUT)
            for layer in layers.children():
                _add_layer(program, layer)
        return
    if type(hidden) is not MLP:
        raise _refusal(f"hidden layers {type(hidden).__name__}", "MLP or D2RL")
    for layer in hidden:
        _add_layer(program, layer)


def _add_layer(program: Program, layer: nn.Module) -> None:
    if type(layer) in (nn.Linear, Linear) and isinstance(layer, nn.Linear) and layer.bias is not None:
        program.add("linear", weight=layer.weight, bias=layer.bias)
    elif type(layer) is nn.LayerNorm and layer.elementwise_affine and len(layer.normalized_shape) == 1:
        program.add("layer_norm", weight=layer.weight, bias=layer.bias, eps=layer.eps)
    elif (name := activation_name(layer)) in ACTIVATIONS:
        program.add("activation", name=name)
    elif type(layer) is not nn.Identity:
        raise _refusal(f"the layer {layer}", f"linear, layer norm or one of {', '.join(ACTIVATIONS)}")


def _add_rnn(program: Program, network: Network) -> None:
    rnn = network.memory
    if type(rnn) is IdentityRNN:
        return
    if type(rnn) is not RNN:
        raise _refusal(f"the recurrent layers {type(rnn).__name__}", "LSTM or GRU cells")
    for cell in rnn.cells:
        assert isinstance(cell, nn.LSTMCell | nn.GRUCell)
        parts = 2 if isinstance(cell, nn.LSTMCell) else 1
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        program.add(
            "lstm" if parts == 2 else "gru", state=len(program.state), **{n: cell._parameters[n] for n in names}
        )
        program.state += [cell.hidden_size] * parts
    _add_layer(program, rnn.norm)


def _add_distribution(program: Program, distribution: Distribution) -> None:
    if type(distribution) not in DISTRIBUTIONS:
        raise _refusal(f"the distribution {type(distribution).__name__}", "one of Canter's")
    match distribution:
        case DiagGaussian():
            _add_affine(program, distribution.interval())
        case TanhGaussian(low, high):
            program.add("activation", name="tanh")
            _add_affine(program, interval(low, high))
        case Beta(low, high):
            program.add("beta_mode")
            _add_affine(program, interval(low, high))
        case Categorical(n):
            program.add("argmax", nvec=[n])
        case MultiCategorical(nvec):
            program.add("argmax", nvec=list(nvec))


def _add_affine(program: Program, transform: tuple[Floats, Floats, Floats, Floats]) -> None:
    scale, offset, low, high = transform
    program.add("affine", scale=scale, offset=offset, low=low, high=high)


def write_numpy(program: Program, contract: dict[str, Any], path: Path) -> None:
    """Write the file that `canter.runtime` loads."""
    document = {
        "schema": SCHEMA,
        "contract": contract,
        "inputs": program.inputs,
        "steps": program.steps,
        "state": program.state,
    }
    text = json.dumps(document, allow_nan=False).encode()
    arrays = program.arrays | {"document": np.frombuffer(text, np.uint8)}
    stored: dict[str, Any] = arrays | {"sha256": np.frombuffer(hash_arrays(arrays), np.uint8)}
    np.savez(path, **stored)


def load_numpy(path: Path, contract: dict[str, Any]) -> Exported:
    """Load a file with `canter.runtime`; return its function from observations and states."""
    policy = NumpyPolicy(path)
    policy.selftest()

    def run(inputs: Inputs) -> list[Tensor]:
        obs, state = inputs
        rows: list[list[np.ndarray]] = []
        for index in range(len(next(iter(obs.values())))):
            policy.state = [part[index].numpy() for part in tree_leaves(state)]
            action = policy.step({name: group[index].numpy() for name, group in obs.items()})
            rows.append([action, *policy.state])
        action, *parts = [torch.as_tensor(np.stack(column)) for column in zip(*rows, strict=True)]
        return [shape_action(action, contract), *parts]

    return run


def shape_action(action: Tensor, contract: dict[str, Any]) -> Tensor:
    """Return actions `[B, A]` as the policy does: a single discrete action is `[B]`, int64."""
    kind = contract["action"]["kind"]
    if kind == "continuous":
        return action
    return action.long().squeeze(-1) if kind == "discrete" else action.long()


@torch.no_grad()
def quantize_(actor: nn.Module) -> None:
    """Round every weight matrix to 8 bits, in place: integers from -127 to 127 times one scale a row."""
    for parameter in actor.parameters():
        if parameter.ndim == 2:
            scale = quantization_scale(parameter)
            parameter.copy_((parameter / scale).round() * scale)


def quantization_scale(weight: Tensor) -> Tensor:
    """Return the step between two neighbouring values of each row, `[out, 1]`."""
    return weight.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
