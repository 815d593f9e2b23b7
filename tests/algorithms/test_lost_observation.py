"""Simulators that reset within the step and lose the last observation (`final_obs: unknown`)."""

import logging
from dataclasses import replace

import pytest
import torch

import canter
from canter.algorithms.ppo import PPOConfig
from canter.envs.tensor import CartPole, Pendulum
from canter.functional.returns import gae
from canter.nn.actor_critic import ModelConfig
from canter.nn.network import NetworkConfig
from canter.nn.rnn import RNNConfig
from canter.training.collector import Collector
from canter.training.trainer import train


class Lost:
    """An environment whose last observations nobody sees."""

    def __init__(self, env, truncates=True):
        self.env, self.spec = env, replace(env.spec, final_obs="unknown", truncates=truncates)
        self.reset, self.close, self.generators = env.reset, env.close, env.generators

    def step(self, action):
        return replace(self.env.step(action), final_obs=None)


@pytest.mark.parametrize("memory", [None, RNNConfig(hidden=4)])
def test_a_truncated_row_is_valued_by_its_own_observation_and_never_by_the_next_episode(memory):
    env = Lost(Pendulum(3, max_episode_steps=5))
    model = ModelConfig(policy=NetworkConfig(hidden=(8,), rnn=memory))
    lengths = {"horizon": 15, "sequence_length": 5, "num_minibatches": 1}
    config = PPOConfig(**lengths, gamma=0.9, gae_lambda=0.8, model=model)
    algorithm = config.build(env.spec, 0)
    rollout = Collector(env, algorithm, 0).collect()
    targets = algorithm.estimator(rollout)
    assert rollout.truncated.sum() == 9
    assert torch.equal(rollout.reset[1:], rollout.truncated)
    following = torch.where(rollout.truncated, targets.value, targets.value.roll(-1, 0))  # the last row is an end
    advantage, _ = gae(rollout.reward, targets.value, following, rollout.terminated, rollout.done, 0.9, 0.8)
    torch.testing.assert_close(targets.advantage, advantage)


def test_training_names_the_approximation_once(caplog):
    config = canter.TrainConfig(algorithm=PPOConfig(horizon=16, num_minibatches=2), total_steps=512)
    reports = []
    with caplog.at_level(logging.WARNING):
        train(config, reports.append, env=Lost(CartPole(8, max_episode_steps=10)))
    assert reports[-1].env_steps == 512
    said = [record.message for record in caplog.records if "unknown" in record.message]
    assert said == [
        "tensor:cartpole: the simulator loses the last observation of an episode (final_obs: unknown), so a "
        "truncated episode is bootstrapped from the value of the observation before it"
    ]


def test_nothing_is_approximated_where_episodes_are_never_cut(caplog):
    env = Lost(CartPole(2, max_episode_steps=None), truncates=False)
    with caplog.at_level(logging.WARNING):
        Collector(env, PPOConfig(horizon=4, num_minibatches=1).build(env.spec, 0), 0)
    assert not caplog.records
