"""The actions of agents without a network, which fit every kind of action space."""

import math

import torch

from canter.core.specs import ACTION_MASK, Continuous, Discrete, EnvSpec, MultiDiscrete, TensorSpec
from canter.play.player import AGENTS, zero_actions


def spec_of(action, num_envs=3):
    return EnvSpec({"policy": TensorSpec((1,))}, action, num_envs)


def test_zero_is_within_the_bounds_or_the_first_allowed_action():
    bounds = Continuous((-1.0, 0.5, -math.inf), (1.0, 2.0, math.inf))
    assert zero_actions(spec_of(bounds), {}).tolist() == [[0.0, 0.5, 0.0]] * 3
    assert zero_actions(spec_of(Discrete(4)), {}).tolist() == [0, 0, 0]
    mask = torch.tensor([[False, True, True], [True, True, True], [False, False, True]])
    assert zero_actions(spec_of(Discrete(3)), {ACTION_MASK: mask}).tolist() == [1, 0, 2]
    pair = torch.tensor([[False, True, False, False, True]])
    assert zero_actions(spec_of(MultiDiscrete((2, 3)), 1), {ACTION_MASK: pair}).tolist() == [[1, 2]]


def test_random_agents_of_equal_seeds_act_alike():
    one, same, other = (AGENTS["random"](spec_of(Continuous((-2.0,), (2.0,)), 50), seed) for seed in (0, 0, 1))
    actions = [agent.act({}, (), None, deterministic=True, generator=None)[0] for agent in (one, same, other)]
    assert torch.equal(actions[0], actions[1]) and not torch.equal(actions[0], actions[2])
    assert actions[0].shape == (50, 1) and actions[0].abs().max() <= 2.0
