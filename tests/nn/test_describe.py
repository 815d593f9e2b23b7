"""The description of a model lists every layer once, and names the settings behind what it finds."""

import pytest
import torch
from torch import nn

from canter.core.specs import Continuous, EnvSpec, TensorSpec
from canter.nn.actor_critic import ModelConfig
from canter.nn.describe import describe
from canter.nn.heads import StdConfig
from canter.nn.network import NetworkConfig

SPEC = EnvSpec({"policy": TensorSpec((7,)), "critic": TensorSpec((3,))}, Continuous((-1.0,) * 2, (1.0,) * 2), 4)
NETWORK = NetworkConfig(hidden=(16, 9), activation="elu", layer_norm=True)


def layers_of(**settings):
    return describe(ModelConfig(policy=NETWORK, **settings).build(SPEC))


def texts(layers):
    return [feature.text for layer in layers for feature in layer.features]


def test_layers_come_from_the_inputs_to_the_heads_with_their_modules():
    layers = [layer for layer in layers_of() if layer.kind not in ("network", "parameters")]
    assert [(layer.network, layer.kind) for layer in layers] == [
        *[("policy", kind) for kind in ("input", "hidden", "hidden", "output", "std")],
        *[("critic", kind) for kind in ("input", "hidden", "hidden", "value")],
    ]
    hidden = [layer for layer in layers if layer.kind == "hidden"]
    assert [layer.module.out_features for layer in hidden] == [16, 9, 16, 9]
    assert all(layer.activation == "elu" and isinstance(layer.norm, nn.LayerNorm) for layer in hidden)
    assert [layer.group for layer in layers if layer.kind == "input"] == ["policy", "critic"]
    assert layers[3].module.out_features == 2 and layers[-1].module.out_features == 1
    assert layers[4].module is None  # the std is a parameter


def test_the_value_head_of_a_shared_trunk_belongs_to_the_policys_network():
    layers = layers_of(shared_trunk=True)
    assert {layer.network for layer in layers} == {"policy", "model"}
    assert [layer.kind for layer in layers].count("hidden") == 2
    assert [layer.network for layer in layers if layer.kind == "value"] == ["policy"]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "model.policy.activation=elu"),
        ({"critic": NetworkConfig(activation="mish")}, "model.critic.activation=mish"),
        ({"critic": NetworkConfig(precision="bfloat16")}, "model.critic.precision=bfloat16"),
        ({"critic": NetworkConfig(d2rl=True)}, "model.critic.d2rl=true"),
        ({"std": StdConfig(kind="network")}, "model.std.kind=network"),
        ({"std": StdConfig(learn=False)}, "model.std.learn=false"),
        ({"std": StdConfig(floor=0.1)}, "model.std.floor=0.1"),
        ({"distribution": "beta"}, "model.distribution=beta"),
    ],
)
def test_features_name_the_setting_and_its_value(settings, text):
    assert any(found.startswith(text) for found in texts(layers_of(**settings)))


def test_activations_with_other_arguments_appear_as_they_print():
    model = ModelConfig(policy=NETWORK).build(SPEC)
    model.actor.network.hidden[2] = nn.ELU(alpha=0.5)
    assert "model.policy.activation=ELU(alpha=0.5)" in texts(describe(model))


def test_frozen_parameters_hooks_and_dtypes_are_described():
    model = ModelConfig(policy=NETWORK).build(SPEC)
    model.actor.head.mean.bias.requires_grad_(False)
    model.critic.register_forward_hook(lambda module, given, output: output)
    model.critic.to(torch.float64)
    found = " ".join(texts(describe(model)))
    assert "parameter actor.head.mean.bias with requires_grad=False" in found
    assert "a hook or a replaced forward method on critic" in found
    assert "parameters of torch.float32 and torch.float64" in found
