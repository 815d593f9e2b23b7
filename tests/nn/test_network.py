import math

import pytest
import torch

from canter.nn.actor_critic import ActorCritic, ModelConfig
from canter.nn.cnn import CNNConfig
from canter.nn.mlp import MLP
from canter.nn.network import NetworkConfig
from canter.nn.rnn import RNNConfig
from canter.specs import ACTION_MASK, Discrete, EnvSpec, TensorSpec

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


def test_orthogonal_weights_have_the_asked_gain_and_no_bias():
    layer = build({"policy": VECTOR}, hidden=(16,)).hidden[0]
    assert torch.allclose(layer.weight.T @ layer.weight, 2 * torch.eye(4), atol=1e-5)
    assert torch.equal(layer.bias, torch.zeros(16))


def test_default_weights_scale_with_the_gain():
    def spread(gain):
        torch.manual_seed(0)
        return build({"policy": VECTOR}, hidden=(256,), init="default", init_gain=gain).hidden[0].weight.std().item()

    assert spread(math.sqrt(2) * 3) == pytest.approx(3 * spread(math.sqrt(2)))


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
        build({"camera": TensorSpec((10, 10, 3), torch.uint8)})
    build({"camera": TensorSpec((10, 10, 3), torch.uint8)}, cnn=CNNConfig(layers=((8, 3, 2),)))


def test_a_shared_trunk_is_passed_once_and_gives_what_the_parts_give():
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
    with pytest.raises(ValueError, match="shared_trunk=True leaves no room"):
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
def test_memory_stays_in_float32(position):
    network = build(
        {"policy": VECTOR}, hidden=(16,), memory=RNNConfig(hidden=8, position=position), precision="bfloat16"
    )
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
    layers = MLP(3, (8,), "tanh", "orthogonal", 1.0, False)
    with torch.no_grad():
        traced = torch.jit.trace(layers, torch.zeros(2, 3))
        x = torch.randn(2, 3)
        torch.testing.assert_close(traced(x), layers(x))
