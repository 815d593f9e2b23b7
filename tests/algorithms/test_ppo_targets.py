"""Targets of PPO, by hand."""

from dataclasses import replace

import pytest
import torch

from canter.algorithms.ppo import PPOConfig
from canter.envs.tensor import Pendulum
from canter.training.collector import Collector


@pytest.mark.parametrize(("std", "divisor"), [("population", (8 / 3) ** 0.5), ("sample", 2.0)])
def test_advantages_are_normalised_over_the_valid_steps(std, divisor):
    env = Pendulum(2)
    algorithm = PPOConfig(horizon=2, num_minibatches=1, advantage_std=std).build(env.spec, 0)
    rollout = Collector(env, algorithm, 0).collect()
    rollout.valid[1, 1] = False
    targets = replace(algorithm.estimator(rollout), advantage=torch.tensor([[1.0, 3.0], [5.0, 1000.0]]))
    advantage = algorithm.value_targets(rollout, targets)["advantage"]
    torch.testing.assert_close(advantage, torch.tensor([[-2.0, 0.0, 2.0, 0.0]]) / divisor)
