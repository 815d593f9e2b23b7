import math

import pytest
import torch

from canter.core.specs import ACTION_MASK, Discrete, EnvSpec, TensorSpec
from canter.nn.actor_critic import ActorCritic, ModelConfig
from canter.nn.cnn import CNNConfig
from canter.nn.mlp import MLP
from canter.nn.network import NetworkConfig
from canter.nn.rnn import RNNConfig

VECTOR = TensorSpec((4,))


def build(groups, **settings):
    return NetworkConfig(**settings).build(groups, "policy")


def test_a_network_that_names_a_missing_group_lists_the_groups_there_are():
    with pytest.raises(ValueError, match=r"policy network: obs_groups names 'polcy': did you mean policy\?"):
        build({"policy": VECTOR, "critic": VECTOR}, obs_groups=("polcy",))


@pytest.mark.parametrize(
    ("groups", "role", "expected"),
    [
        ({"policy", "critic"}, "policy", {"policy"}),
        ({"policy", "critic"}, "critic", {"critic"}),
        ({"policy"}, "critic", {"policy"}),
        ({"arm", "camera"}, "policy", {"arm", "camera"}),
        ({"arm", "critic"}, "policy", {"arm"}),
        ({"policy", ACTION_MASK}, "policy", {"policy"}),
    ],
)
def test_networks_choose_their_groups_by_role(groups, role, expected):
    network = NetworkConfig().build(dict.fromkeys(groups, VECTOR), role)
    assert set(network.groups) == expected


def test_orthogonal_weights_have_the_requested_gain_and_no_bias():
    layer = build({"policy": VECTOR}, hidden=(16,)).hidden[0]
    assert torch.allclose(layer.weight.T @ layer.weight, 2 * torch.eye(4), atol=1e-5)
    assert torch.equal(layer.bias, torch.zeros(16))


def test_default_weights_scale_with_the_gain():
    def spread(gain):
        torch.manual_seed(0)
        return build({"policy": VECTOR}, hidden=(256,), init="default", init_gain=gain).hidden[0].weight.std().item()

    assert spread(math.sqrt(2) * 3) == pytest.approx(3 * spread(math.sqrt(2)))


@pytest.mark.parametrize(
    ("init", "variance"),
    # Of a layer of 300 inputs and 200 outputs with gain 1.5.
    [
        ("default", 1.5**2 / 2 / (3 * 300)),
        ("default_zero_bias", 1.5**2 / 2 / (3 * 300)),
        ("glorot_normal", 1.5**2 * 2 / 500),
        ("glorot_uniform", 1.5**2 * 2 / 500),
        ("variance_scaling", 0.774 * 1.5**2 / 300),  # a normal distribution cut off at two deviations keeps 77.4 %
    ],
)
def test_initial_weights_have_the_variance_of_their_rule(init, variance):
    torch.manual_seed(0)
    layer = build({"policy": TensorSpec((300,))}, hidden=(200,), init=init, init_gain=1.5).hidden[0]
    assert layer.weight.var().item() == pytest.approx(variance, rel=0.03)  # of 60,000 draws; normal: 0.6 %
    assert (layer.bias == 0).all() == (init != "default")


def test_a_layer_norm_may_stand_behind_the_activation():
    layers = build({"policy": VECTOR}, hidden=(8,), layer_norm=True, layer_norm_position="after_activation").hidden
    assert [type(layer).__name__ for layer in layers] == ["Linear", "Tanh", "LayerNorm"]
    x = torch.randn(5, 4)
    assert torch.allclose(layers(x), layers[2](torch.tanh(layers[0](x))))


def test_only_the_first_layer_may_have_a_layer_norm():
    network = build({"policy": VECTOR}, hidden=(4, 5), layer_norm=True, layer_norm_layers="first")
    kinds = [type(layer).__name__ for layer in network.hidden]
    assert kinds == ["Linear", "LayerNorm", "Tanh", "Linear", "Tanh"]
    with pytest.raises(ValueError, match="d2rl"):
        NetworkConfig(d2rl=True, layer_norm_layers="first")


def test_in_a_d2rl_network_every_later_layer_reads_the_input_too():
    network = build({"policy": VECTOR}, hidden=(8, 6, 5), activation="elu", d2rl=True, normalize_obs=False)
    first, second, third = (block[0] for block in network.hidden)
    x, elu = torch.randn(1, 7, 4), torch.nn.functional.elu
    h = elu(first(x))
    h = elu(second(torch.cat([h, x], -1)))
    h = elu(third(torch.cat([h, x], -1)))
    assert network.features == 5
    assert torch.allclose(network({"policy": x}, (), None)[0], h)


def test_convolutions_with_padding_an_activation_of_their_own_and_no_layer_behind():
    cnn = CNNConfig(layers=((4, 3, 2, 1), (6, 3, 1)), features=None, activation="relu")
    network = build({"camera": TensorSpec((3, 9, 11))}, hidden=(8,), activation="elu", cnn=cnn)
    kinds = [type(layer).__name__ for layer in network.encoders[0].layers]
    assert kinds == ["Conv2d", "ReLU", "Conv2d", "ReLU", "Flatten"]
    assert network.encoders[0].features == 6 * 3 * 4  # 9x11 padded, by two: 5x6; then 3x4
    assert network.hidden[0].in_features == 72
    assert network({"camera": torch.rand(1, 2, 3, 9, 11)}, (), None)[0].shape == (1, 2, 8)


def test_sequences_are_read_by_convolutions_over_time_if_wanted():
    groups, x = {"scan": TensorSpec((2, 10))}, torch.rand(1, 5, 2, 10)
    flat = build(groups, hidden=(8,))
    assert flat.hidden[0].in_features == 20
    network = build(groups, hidden=(8,), cnn=CNNConfig(layers=((4, 3, 2),), features=None, sequences=True))
    assert network.encoders[0].features == 4 * 4
    conv = network.encoders[0].layers[0]
    expected = torch.tanh(torch.nn.functional.conv1d(x[0], conv.weight, conv.bias, stride=2)).flatten(1)
    assert torch.allclose(network.encode({"scan": x})[0], expected)


def test_an_impala_encoder_halves_the_image_in_each_part_and_adds_what_its_blocks_find():
    cnn = CNNConfig(kind="impala", depths=(3, 5), features=None, activation="relu")
    encoder = build({"camera": TensorSpec((16, 13, 3))}, cnn=cnn).encoders[0]
    assert encoder.features == 5 * 4 * 4  # 16x13, 8x7, 4x4
    first, pool, block = encoder.layers[0], encoder.layers[1], encoder.layers[2]
    x = torch.rand(2, 3, 16, 13)
    h = pool(first(x))
    inner = block.layers[1](torch.relu(h))
    assert torch.allclose(block(h), h + block.layers[3](torch.relu(inner)))
    assert encoder(x.movedim(1, -1)).shape == (2, 80)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"layers": ((4, 3),)}, "layers"),
        ({"layers": ((4, 3, 1, -1),)}, "layers"),
        ({"features": 0}, "features=0"),
        ({"depths": (0,)}, "depths"),
        ({"kind": "impala", "sequences": True}, "kind=impala"),
    ],
)
def test_encoders_that_cannot_be_built_are_refused(settings, named):
    with pytest.raises(ValueError, match=named):
        CNNConfig(**settings)


@pytest.mark.parametrize(("shape", "channels"), [((36, 40, 3), 3), ((4, 36, 40), 4), ((1, 36, 36), 1)])
def test_images_of_either_layout_become_features(shape, channels):
    network = build({"camera": TensorSpec(shape, torch.uint8)}, hidden=(8,))
    image = torch.randint(0, 256, (2, 5, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    features, state = network({"camera": image}, (), None)
    assert features.shape == (2, 5, 8)
    assert state == ()
    assert network.encoders[0].layers[0].in_channels == channels


def test_an_image_too_small_for_the_kernels_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"image of \(10, 10, 3\) is too small .* kernel of 4"):
        build({"camera": TensorSpec((10, 10, 3), torch.uint8)}, cnn=CNNConfig(layers=((8, 8, 4), (8, 4, 2))))
    build({"camera": TensorSpec((10, 10, 3), torch.uint8)}, cnn=CNNConfig(layers=((8, 3, 2),)))
    build({"camera": TensorSpec((10, 10, 3), torch.uint8)})  # layers that nobody named are chosen by the size


def test_a_shared_trunk_runs_once_and_equals_separate_passes():
    spec = EnvSpec({"policy": VECTOR}, Discrete(3), 2)
    model = ActorCritic(ModelConfig(shared_trunk=True), spec)
    obs = {"policy": torch.randn(1, 6, 4, generator=torch.Generator().manual_seed(0))}
    params, value = model(obs, (), (), None)
    assert torch.equal(params, model.actor(obs, (), None)[0])
    assert torch.equal(value, model.critic(obs, (), None)[0])
    assert len(model.critic_parameters()) == 2
    model.update_statistics(obs, torch.ones(1, 6, dtype=torch.bool))
    assert model.actor.network.normalizers[0].count == 6


def test_a_shared_trunk_with_a_critic_network_is_refused():
    with pytest.raises(ValueError, match="shared_trunk=True excludes a separate critic"):
        ModelConfig(shared_trunk=True, critic=NetworkConfig())


def test_layers_without_width_are_refused():
    with pytest.raises(ValueError, match=r"hidden=\(64, 0\)"):
        NetworkConfig(hidden=(64, 0))
    with pytest.raises(ValueError, match=r"layers=\(\(8, 0, 1\),\)"):
        CNNConfig(layers=((8, 0, 1),))


def test_groups_may_have_any_name():
    names = {"robot.arm/pos": VECTOR, "keys": VECTOR, "": VECTOR}
    network = build(names)
    obs = {name: torch.zeros(1, 2, 4) for name in names}
    assert network(obs, (), None)[0].shape == (1, 2, 64)


def test_bfloat16_rounds_the_hidden_layers_and_nothing_else():
    torch.manual_seed(0)
    plain, rounded = (build({"policy": VECTOR}, hidden=(32, 32), precision=p) for p in ("float32", "bfloat16"))
    rounded.load_state_dict(plain.state_dict())
    obs = {"policy": torch.randn(1, 50, 4)}
    expected, found = plain(obs, (), None)[0], rounded(obs, (), None)[0]
    assert found.dtype == torch.float32
    assert torch.equal(found, found.bfloat16().float())
    error = (found - expected).abs().max().item()
    assert 1e-5 < error < 0.05
    found.sum().backward()
    assert all(parameter.dtype == parameter.grad.dtype == torch.float32 for parameter in rounded.parameters())


@pytest.mark.parametrize("position", ["before_mlp", "after_mlp"])
def test_recurrent_state_stays_in_float32(position):
    network = build({"policy": VECTOR}, hidden=(16,), rnn=RNNConfig(hidden=8, position=position), precision="bfloat16")
    features, states = network.unroll({"policy": torch.randn(3, 5, 4)}, network.initial_state(5), None)
    assert {leaf.dtype for layer in states for leaf in layer} == {torch.float32}
    assert features.dtype == torch.float32
    assert not torch.equal(states[0][0], states[0][0].bfloat16().float())


def test_images_are_encoded_in_bfloat16_too():
    groups = {"camera": TensorSpec((36, 36, 3), torch.uint8), "policy": VECTOR}
    network = build(groups, obs_groups=("camera", "policy"), precision="bfloat16")
    obs = {"camera": torch.randint(255, (1, 2, 36, 36, 3), dtype=torch.uint8), "policy": torch.randn(1, 2, 4)}
    features, _ = network(obs, (), None)
    assert features.dtype == torch.float32
    assert torch.isfinite(features).all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_layers_can_be_traced():
    """In a trace a result that was computed outside of torch would be a constant."""
    layers = MLP(3, (8,), "tanh", "orthogonal", 1.0)
    with torch.no_grad():
        traced = torch.jit.trace(layers, torch.zeros(2, 3))
        x = torch.randn(2, 3)
        torch.testing.assert_close(traced(x), layers(x))
