"""Every probe must be solved on every seed: a probe that fails names what is broken."""

import pytest
import torch

from canter.algorithms.ppo import PPOConfig
from canter.envs.probes import PROBES
from canter.envs.tensor import tensor_envs
from canter.nn.actor_critic import ModelConfig
from canter.nn.network import NetworkConfig
from canter.nn.optimizer import OptimizerConfig
from canter.nn.schedules import Linear
from canter.training.collector import Collector

GAMMA = 0.99
SEEDS = [(0, 1), pytest.param((2, 3), marks=pytest.mark.long)]
ITERATIONS = 40
NEEDS_MEMORY = {"recall"}
NEVER_ENDS = {"cycle"}
"""Judged by average reward, see `test_average_reward.py`."""


def solve(name, seed, model=None, iterations=ITERATIONS):
    """Train on a probe; return the algorithm and the probe's checks."""
    env = tensor_envs[f"probe-{name}"](32)
    config = PPOConfig(
        horizon=8,
        epochs=4,
        num_minibatches=1,
        gamma=GAMMA,
        optimizer=OptimizerConfig(learning_rate=Linear(2e-2)),
        model=model or ModelConfig(policy=NetworkConfig(hidden=(16,))),
    )
    algorithm = config.build(env.spec, seed)
    collector = Collector(env, algorithm, seed)
    for iteration in range(iterations):
        algorithm.set_progress(iteration / iterations)
        algorithm.update(collector.collect())
    return algorithm, env.checks(GAMMA)


def assert_solved(name, seed, algorithm, checks):
    """The policy's modes are the right actions and the values are right to a twentieth of the largest."""
    largest = max((check.value.abs().max().item() for check in checks if check.value is not None), default=1.0)
    # 10.90 +- 0.15 for the truncation probe, whose nearest wrong answer is 11.67.
    tolerance = 0.15 if name == "truncation" else 0.05 * largest
    for check in checks:
        if check.action is not None:
            action, _ = algorithm.policy.act(check.obs)
            error = (action - check.action).abs().max()
            assert error <= (0.1 if action.is_floating_point() else 0), (name, seed, action, check.action)
        if check.value is not None:
            with torch.no_grad():
                obs = {group: rows.unsqueeze(0) for group, rows in check.obs.items()}
                normalised, _ = algorithm.model.critic(obs, (), None)
            value = algorithm.model.critic.head.normalizer.inverse(normalised)[0]
            assert (value - check.value).abs().max() <= tolerance, (name, seed, value, check.value)


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
@pytest.mark.parametrize("name", sorted(set(PROBES) - NEEDS_MEMORY - NEVER_ENDS))
def test_ppo_solves_the_probe_on_every_seed(name, seeds):
    for seed in seeds:
        assert_solved(name, seed, *solve(name, seed))


def test_a_feed_forward_policy_cannot_solve_recall():
    algorithm, checks = solve("recall", seed=0)
    asked = checks[-1]
    action, _ = algorithm.policy.act(asked.obs)
    assert not torch.equal(action, asked.action)


@pytest.mark.long
@pytest.mark.parametrize("distribution", ["tanh_gaussian", "beta"])
@pytest.mark.parametrize("name", ["action-continuous", "obs-action-continuous"])
def test_bounded_distributions_solve_the_continuous_probes(name, distribution):
    model = ModelConfig(policy=NetworkConfig(hidden=(16,)), distribution=distribution)
    for seed in range(3):
        # A beta distribution starts nearly uniform; its mode means something only once it has become narrow.
        assert_solved(name, seed, *solve(name, seed, model, iterations=3 * ITERATIONS))
