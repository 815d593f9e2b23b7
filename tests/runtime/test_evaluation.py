import pytest
import torch

from canter.algorithms.ppo import PPOConfig
from canter.envs.tensor import CartPole
from canter.runtime.evaluation import evaluate
from canter.specs import Discrete, EnvSpec, Step, TensorSpec


class Uneven:
    """Environment i has episodes of i + 1 steps that pay i + 1 in all; a filler row follows each in odd ones."""

    def __init__(self, num_envs):
        self.spec = EnvSpec({"policy": TensorSpec((1,))}, Discrete(2), num_envs, separate_final_obs=False)
        self.lengths = torch.arange(num_envs) + 1

    def reset(self, seed=None):
        self.t = torch.zeros_like(self.lengths)
        return {"policy": torch.zeros(len(self.lengths), 1)}

    def step(self, action):
        filler = self.t == self.lengths
        self.t = torch.where(filler, 0, self.t + 1)
        done = self.t == self.lengths
        reward = torch.where(filler, 100.0, 1.0)
        return Step({"policy": torch.zeros(len(done), 1)}, reward, done, torch.zeros_like(done), ~filler)

    def close(self):
        pass


def policy_for(env):
    return PPOConfig(horizon=4, num_minibatches=1).build(env.spec, seed=0).policy


def test_every_environment_contributes_its_first_episodes_so_short_ones_are_not_favoured():
    env = Uneven(4)
    result = evaluate(policy_for(env), env, episodes=10, seed=0)
    assert sorted(result.length) == [1, 1, 1, 2, 2, 2, 3, 3, 4, 4]
    assert result.return_ == [float(length) for length in result.length]  # filler rows pay nothing
    assert result.mean == sum(result.length) / 10


def test_evaluation_is_repeatable_and_moves_no_statistics():
    env = CartPole(4)
    algorithm = PPOConfig(horizon=4, num_minibatches=1).build(env.spec, seed=0)
    before = {name: value.clone() for name, value in algorithm.model.state_dict().items()}
    results = [evaluate(algorithm.policy, env, 8, seed=3, deterministic=False) for _ in range(2)]
    assert results[0] == results[1]
    for name, value in algorithm.model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_episodes_that_never_end_are_reported():
    env = Uneven(2)
    with pytest.raises(RuntimeError, match="after 3 steps only 3 of 4 episodes had ended"):
        evaluate(policy_for(env), env, episodes=4, seed=0, max_steps=3)
