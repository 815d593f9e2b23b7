"""Models differentiated by hand against the modules and autograd that define them."""

import itertools

import numpy as np
import pytest
import torch

from canter.distributions import Categorical, DiagGaussian, TanhGaussian
from canter.nn.actor_critic import ModelConfig
from canter.nn.by_hand import ACTOR_INPUT, CRITIC_INPUT, by_hand
from canter.nn.choice import choice
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


def hand_of(model):
    gradients = {parameter: torch.full_like(parameter, torch.nan) for parameter in model.parameters()}
    return by_hand(model, gradients), gradients


def observations(groups, rows, dtype=torch.float32):
    return {name: torch.randn(*rows, *spec.shape, dtype=dtype) * 3 + 1 for name, spec in groups.items()}


@pytest.mark.parametrize("activation", ["tanh", "relu", "elu"])
@pytest.mark.parametrize("action", ACTIONS)
def test_outputs_values_and_gradients_are_those_of_the_model(action, activation):
    groups = {"policy": TensorSpec((5,)), "critic": TensorSpec((7,))}
    critic = NetworkConfig(hidden=(8,), activation=activation, obs_groups=("policy", "critic"), normalize_obs=False)
    model = build(action, groups, critic, NetworkConfig(hidden=(16, 8), activation=activation)).double()
    model.update_statistics(observations(groups, (40, 6), torch.float64), torch.ones(40, 6, dtype=torch.bool))
    obs, (hand, ours) = observations(groups, (1, 200), torch.float64), hand_of(model)
    params, value = model(obs, (), (), None)
    read = {name: rows[0].numpy() for name, rows in hand.read_rows(obs).items()}
    actor, critic = hand.actor.run(read[ACTOR_INPUT]), hand.critic.run(read[CRITIC_INPUT])
    output, log_std = (params, None) if hand.std is None else params.chunk(2, -1)
    d_output, d_value = torch.randn_like(output), torch.randn_like(value)
    parameters = list(model.parameters())
    wanted, given = [output, value], [d_output, d_value]
    if log_std is not None:
        np.testing.assert_allclose(hand.std(), log_std[0, 0].detach().numpy(), rtol=1e-12)
        wanted, given = [*wanted, log_std], [*given, torch.randn_like(log_std)]
        hand.std.descend(given[2].sum((0, 1)).numpy(), hand.std.into)
    np.testing.assert_allclose(actor[-1], output[0].detach().numpy(), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(critic[-1][:, 0], value[0].detach().numpy(), rtol=1e-12, atol=1e-12)
    hand.actor.descend(actor, d_output[0].numpy(), hand.actor.into)
    hand.critic.descend(critic, d_value[0].numpy()[:, None], hand.critic.into)
    for parameter, gradient in zip(parameters, torch.autograd.grad(wanted, parameters, given), strict=True):
        torch.testing.assert_close(ours[parameter], gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 16, 300])
@pytest.mark.parametrize("action", ACTIONS)
def test_actions_are_drawn_as_the_policy_draws_them(action, rows):
    model = build(action)
    obs, (hand, _) = observations(GROUPS, (rows,)), hand_of(model)
    for_env, drawn, params = hand.act(obs, torch.Generator().manual_seed(1))
    with torch.no_grad():
        exact, _ = model.policy.params(obs, ())
    distribution = model.policy.distribution
    torch.testing.assert_close(params, exact)
    torch.testing.assert_close(drawn, distribution.sample(params, torch.Generator().manual_seed(1)))
    torch.testing.assert_close(for_env, distribution.to_env(drawn))
    assert for_env.dtype == distribution.to_env(drawn).dtype and drawn.dtype == distribution.sample(params).dtype


BOUNDS = {"low": (-2.0, -1.0, 0.0), "high": (2.0, float("inf"), 0.5)}


@pytest.mark.parametrize(
    "distribution",
    [
        *(DiagGaussian(3, bounds=bounds, **BOUNDS) for bounds in ("rescale", "clip", "none")),
        DiagGaussian(3, bounds="clip"),
        Categorical(4),
    ],
)
def test_what_is_drawn_in_numpy_is_what_the_distribution_draws(distribution):
    params = torch.randn(500, distribution.param_dim)
    for_env, drawn = choice(distribution)(params.numpy(), torch.Generator().manual_seed(2))
    exact = distribution.sample(params, torch.Generator().manual_seed(2))
    torch.testing.assert_close(torch.from_numpy(drawn), exact)
    torch.testing.assert_close(torch.from_numpy(for_env), distribution.to_env(exact))
    if isinstance(distribution, DiagGaussian) and distribution.bounds == "rescale":
        assert (for_env[:, 0] >= -2.0).all() and (for_env[:, 0] <= 2.0).all()


def test_no_other_distribution_is_drawn_from():
    assert choice(TanhGaussian((-1.0,), (1.0,))) is None


def test_weights_and_statistics_are_seen_as_they_change():
    model = build()
    obs, (hand, _) = observations(GROUPS, (6,)), hand_of(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
        model.update_statistics({"policy": obs["policy"][None]}, torch.ones(1, 6, dtype=torch.bool))
        torch.testing.assert_close(hand.act(obs, torch.Generator())[2], model.policy.params(obs, ())[0])


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
        {"distribution": "tanh_gaussian"},
        {"shared_trunk": True},
        {"groups": {"policy": TensorSpec((3, 64, 64), torch.uint8)}},
        {"groups": {"policy": TensorSpec((5, 2))}},
        {"action": "categorical", "groups": {**GROUPS, ACTION_MASK: TensorSpec((4,), torch.bool)}},
    ],
)
def test_other_models_are_left_to_autograd(settings):
    assert hand_of(build(**settings))[0] is None


def test_the_log_std_is_that_of_the_head_to_the_last_bits():
    model = build()
    head, (hand, _) = model.actor.head, hand_of(model)
    with torch.no_grad():
        for scale, offset in itertools.product((0.1, 10.0), (-3.0, 0.0, 3.0)):
            head.raw_std.copy_(scale * torch.randn(3) + offset)
            torch.testing.assert_close(torch.from_numpy(hand.std()), head.bound(head.raw_std), rtol=3e-7, atol=3e-7)
            assert hand.std().dtype == np.float32
