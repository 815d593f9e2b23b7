"""Actor, critic and policy: units, masks, modes and the owners of parameters."""

import torch

from canter.core.specs import ACTION_MASK, Discrete, EnvSpec, TensorSpec
from canter.nn.actor_critic import ActorCritic, ModelConfig
from canter.nn.network import NetworkConfig
from canter.nn.rnn import RNNConfig

NETWORK = NetworkConfig(hidden=(8,))
OBS = {"policy": torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))}
"""`[L, B, 4]`."""


def build(policy=NETWORK, obs=None, **settings):
    torch.manual_seed(0)
    spec = EnvSpec({"policy": TensorSpec((4,))} | (obs or {}), Discrete(3), 5)
    return ActorCritic(ModelConfig(policy=policy, **settings), spec)


def test_unrolled_values_are_in_the_units_of_the_reward():
    model = build()
    model.critic.head.update_statistics(torch.tensor([3.0, 7.0]), torch.ones(2) > 0)  # mean 5, std 2
    normalised, _ = model.critic(OBS, (), None)
    values, states = model.critic.unroll(OBS, (), None)
    assert states == ()
    torch.testing.assert_close(values, 2.0 * normalised + 5.0)


def test_the_next_state_is_that_after_the_last_step():
    model = build(policy=NetworkConfig(hidden=(8,), rnn=RNNConfig(hidden=6)))
    network = model.actor.network
    start = network.initial_state(5)
    _, states = network.unroll(OBS, start, None)
    _, last = model.actor(OBS, start, None)
    assert torch.equal(last[0][0], states[0][0][2])
    assert not torch.equal(last[0][0], states[0][0][0])


def test_a_shared_trunk_belongs_to_the_policy_alone():
    for shared, own in ((True, 2), (False, 4)):  # weight and bias of the head, and of the hidden layer
        model = build(shared_trunk=shared)
        policy = {id(parameter) for parameter in model.policy_parameters()}
        critic = {id(parameter) for parameter in model.critic_parameters()}
        assert len(critic) == own
        assert not policy & critic
        assert policy | critic == {id(parameter) for parameter in model.parameters()}


def test_forbidden_actions_have_no_probability():
    model = build(obs={ACTION_MASK: TensorSpec((3,), torch.bool)})
    mask = torch.tensor([True, False, True]).expand(3, 5, 3)
    params, _ = model.actor(OBS | {ACTION_MASK: mask}, (), None)
    probabilities = torch.softmax(params, -1)
    assert (probabilities[..., 1] == 0).all()
    assert (probabilities[..., [0, 2]] > 0.1).all()


def test_a_policy_samples_unless_it_is_deterministic():
    policy = build(policy_gain=1.0).policy
    obs = {"policy": OBS["policy"][0]}
    mode = policy.distribution.mode(policy.params(obs, ())[0])
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        assert torch.equal(policy.act(obs, generator=generator)[0], mode)
    sampled = [policy.act(obs, deterministic=False, generator=generator)[0] for _ in range(50)]
    assert all((torch.stack(sampled)[:, number] != mode[number]).any() for number in range(5))
