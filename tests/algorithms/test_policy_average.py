"""The running mean of a policy's weights, which is saved and shown, and the policy that acts and learns."""

from dataclasses import replace

import pytest
import torch

import canter
from canter.algorithms.ppo import PPOConfig
from canter.envs.tensor import CartPole
from canter.training.collector import Collector
from canter.training.trainer import Trainer

PLAIN = PPOConfig(horizon=8, epochs=2, num_minibatches=2)
AVERAGED = replace(PLAIN, policy_average=0.6)
RUN = canter.TrainConfig(
    env=canter.EnvConfig(id="tensor:cartpole", num_envs=4), algorithm=AVERAGED, total_steps=4 * 8 * 6, device="cpu"
)


class Loop:
    """A number of iterations on cart-poles."""

    def __init__(self, config):
        env = CartPole(4)
        self.algorithm = config.build(env.spec, 3)
        self.collector = Collector(env, self.algorithm, 3)

    def go(self, iterations):
        for _ in range(iterations):
            self.algorithm.update(self.collector.collect())
            yield self.algorithm

    def state_dict(self):
        return {"algorithm": self.algorithm.state_dict(), "collector": self.collector.state_dict()}


def weights(policy):
    return torch.cat([parameter.detach().double().flatten() for parameter in policy.actor.parameters()])


def test_all_weights_count_alike_until_decay_is_smaller():
    loop, seen = Loop(AVERAGED), []
    for algorithm in loop.go(4):
        seen.append(weights(algorithm.acting))
    first, second, third, fourth = seen
    mean = 0.6 * (0.6 * (first + second) / 2 + 0.4 * third) + 0.4 * fourth  # 1, 1/2, then 0.4 instead of 1/3 and 1/4
    assert torch.allclose(weights(algorithm.policy), mean, rtol=0, atol=1e-6)
    assert (mean - fourth).abs().max() > 1e-4  # or the test could not fail
    for own, theirs in zip(algorithm.policy.actor.buffers(), algorithm.acting.actor.buffers(), strict=True):
        assert torch.equal(own, theirs)


def test_what_acts_and_learns_is_the_same_with_and_without():
    averaged, plain = Loop(AVERAGED), Loop(PLAIN)
    for one, other in zip(averaged.go(5), plain.go(5), strict=True):
        assert torch.equal(weights(one.acting), weights(other.policy))
    assert plain.algorithm.acting is plain.algorithm.policy


def test_it_continues_after_a_stop():
    straight, first = Loop(AVERAGED), Loop(AVERAGED)
    (*_, expected) = straight.go(7)
    list(first.go(4))
    second = Loop(AVERAGED)
    state = first.state_dict()
    second.algorithm.load_state_dict(state["algorithm"])
    second.collector.load_state_dict(state["collector"])
    (*_, found) = second.go(3)
    assert torch.equal(weights(found.policy), weights(expected.policy))
    assert torch.equal(weights(found.acting), weights(expected.acting))


def test_files_have_the_mean_and_a_run_initialised_by_one_learns_from_it(tmp_path):
    with Trainer(RUN) as trainer:
        trainer.learn(6)
        trainer.algorithm.policy.save(tmp_path / "mean.safetensors")
        mean, last = weights(trainer.algorithm.policy), weights(trainer.algorithm.acting)
    assert not torch.equal(mean, last)
    assert torch.equal(weights(canter.load_policy(tmp_path / "mean.safetensors")), mean)
    env = CartPole(4)
    algorithm = AVERAGED.build(env.spec, 9)
    canter.InitFrom(tmp_path / "mean.safetensors").load(algorithm)
    assert torch.equal(weights(algorithm.acting), mean)


def test_a_mean_that_never_moves_is_refused():
    with pytest.raises(ValueError, match="policy_average=1 must lie in"):
        replace(PLAIN, policy_average=1)
