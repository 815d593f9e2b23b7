"""Models differentiated by hand against the modules and autograd that define them."""

import itertools

import pytest
import torch

from canter.nn.actor_critic import ModelConfig
from canter.nn.by_hand import by_hand
from canter.nn.heads import StdConfig
from canter.nn.network import NetworkConfig
from canter.nn.rnn import RNNConfig
from canter.specs import ACTION_MASK, Continuous, Discrete, EnvSpec, TensorSpec

ACTIONS = {"gaussian": Continuous((-1.0,) * 3, (1.0,) * 3), "categorical": Discrete(4)}
GROUPS = {"policy": TensorSpec((5,))}


def build(action="gaussian", groups=GROUPS, critic=None, network=None, **settings):
    torch.manual_seed(0)
    config = ModelConfig(policy=network or NetworkConfig(hidden=(16, 8)), critic=critic, policy_gain=1.0, **settings)
    return config.build(EnvSpec(groups, ACTIONS[action], 6))


def observations(groups, rows, dtype):
    return {name: torch.randn(*rows, *spec.shape, dtype=dtype) * 3 + 1 for name, spec in groups.items()}


@pytest.mark.parametrize("activation", ["tanh", "relu", "elu"])
@pytest.mark.parametrize("action", ACTIONS)
def test_parameters_values_and_gradients_are_those_of_the_model(action, activation):
    groups = {"policy": TensorSpec((5,)), "critic": TensorSpec((7,))}
    critic = NetworkConfig(hidden=(8,), activation=activation, obs_groups=("policy", "critic"), normalize_obs=False)
    model = build(action, groups, critic, NetworkConfig(hidden=(16, 8), activation=activation)).double()
    model.update_statistics(observations(groups, (40, 6), torch.float64), torch.ones(40, 6, dtype=torch.bool))
    obs, hand = observations(groups, (1, 200), torch.float64), by_hand(model)
    params, value = model(obs, (), (), None)
    d_params, d_value = torch.randn_like(params), torch.randn_like(value)
    parameters = list(model.parameters())
    exact = torch.autograd.grad([params, value], parameters, [d_params, d_value])
    with torch.no_grad():
        made = hand(obs)
        ours = hand.gradients(made, d_params[0].clone(), d_value[0].clone())
    torch.testing.assert_close(made.params, params[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(made.value, value[0], rtol=1e-12, atol=1e-12)
    assert set(ours) == set(parameters)
    for parameter, gradient in zip(parameters, exact, strict=True):
        torch.testing.assert_close(ours[parameter], gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 16, 300])
def test_actions_come_from_the_parameters_of_the_policy(rows):
    model = build()
    obs, hand = observations(GROUPS, (rows,), torch.float32), by_hand(model)
    with torch.no_grad():
        torch.testing.assert_close(hand.params(obs), model.policy.params(obs, ())[0])


def test_weights_and_statistics_are_seen_as_they_change():
    model = build()
    obs, hand = observations(GROUPS, (1, 6), torch.float32), by_hand(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
        model.update_statistics(obs, torch.ones(1, 6, dtype=torch.bool))
        torch.testing.assert_close(hand(obs).params, model(obs, (), (), None)[0][0])


@pytest.mark.parametrize(
    "settings",
    [
        {"network": NetworkConfig(memory=RNNConfig(hidden=8))},
        {"network": NetworkConfig(layer_norm=True)},
        {"network": NetworkConfig(activation="silu")},
        {"network": NetworkConfig(hidden=())},
        {"network": NetworkConfig(precision="bfloat16")},
        {"critic": NetworkConfig(activation="gelu")},
        {"std": StdConfig(kind="network")},
        {"shared_trunk": True},
        {"groups": {"policy": TensorSpec((3, 64, 64), torch.uint8)}},
        {"groups": {"policy": TensorSpec((5, 2))}},
        {"action": "categorical", "groups": {**GROUPS, ACTION_MASK: TensorSpec((4,), torch.bool)}},
    ],
)
def test_other_models_are_left_to_autograd(settings):
    assert by_hand(build(**settings)) is None


def test_every_rounding_of_the_log_std_is_that_of_the_head():
    model = build()
    head, hand = model.actor.head, by_hand(model)
    with torch.no_grad():
        for scale, offset in itertools.product((0.1, 10.0), (-3.0, 0.0, 3.0)):
            head.raw_std.copy_(scale * torch.randn(3) + offset)
            assert torch.equal(hand.std(), head.bound(head.raw_std))
