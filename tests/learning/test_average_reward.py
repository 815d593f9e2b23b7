"""The average-reward objective finds the rate, keeps values centred and sees through resets."""

import pytest
import torch

from canter.algorithms.ppo import CentralValueConfig, PPOConfig
from canter.algorithms.ppo.rewards import RewardConfig
from canter.envs import EnvConfig
from canter.nn.actor_critic import ModelConfig
from canter.nn.network import NetworkConfig
from canter.nn.optimizer import OptimizerConfig
from canter.nn.schedules import Linear
from canter.training.collector import Collector
from covering import usual_of


def train(env_config, iterations=100, seed=0, **settings):
    env = env_config.build("cpu")
    defaults = {
        "horizon": 8,
        "epochs": 4,
        "num_minibatches": 1,
        "objective": "average",
        "optimizer": OptimizerConfig(learning_rate=Linear(2e-2)),
        "model": ModelConfig(policy=NetworkConfig(hidden=(16,))),
    }
    algorithm = PPOConfig(**(defaults | settings)).build(env.spec, seed)
    collector = Collector(env, algorithm, seed)
    history = []
    for iteration in range(iterations):
        algorithm.set_progress(iteration / iterations)
        history.append(algorithm.update(collector.collect()))
    return algorithm, history


def cycle_values(algorithm):
    obs = {"policy": torch.tensor([[[0.0], [1.0]]])}
    with torch.no_grad():
        return algorithm.model.critic.unroll(obs, (), None)[0].flatten().tolist()


MODEL = ModelConfig(policy=NetworkConfig(hidden=(16,)), normalize_value=False)
CENTRAL = CentralValueConfig(epochs=4, num_minibatches=1, optimizer=OptimizerConfig(learning_rate=Linear(2e-2)))
CASES = {
    "raw values": {"model": MODEL},
    "recomputed": {"recompute_advantage": True},
    "central value": {"central_value": CENTRAL},
    "one-step": {"gae_lambda": 0.0, "iterations": 200},
}


def assert_solved(algorithm, history):
    assert history[-1]["value/reward_rate"].item() == pytest.approx(1.0, abs=2e-3)
    low, high = cycle_values(algorithm)
    assert high - low == pytest.approx(1.0, abs=0.01)
    assert (low, high) == (pytest.approx(-0.5, abs=0.03), pytest.approx(0.5, abs=0.03))


@pytest.mark.parametrize("reset_steps", [None, 3], ids=["endless", "reset every 3 steps"])
@pytest.mark.parametrize("seed", usual_of(range(3), [0]))
def test_the_two_state_cycle_has_rate_one_and_values_of_a_half(seed, reset_steps):
    env = EnvConfig(id="tensor:probe-cycle", num_envs=32, reset_steps=reset_steps)
    assert_solved(*train(env, seed=seed))


@pytest.mark.parametrize("case", CASES)
def test_and_so_it_has_with_other_critics(case):
    assert_solved(*train(EnvConfig(id="tensor:probe-cycle", num_envs=32), **CASES[case]))


def test_an_odd_number_of_steps_in_one_environment_sees_the_same_rate():
    algorithm, _ = train(EnvConfig(id="tensor:probe-cycle", num_envs=1), horizon=7)
    assert algorithm.objective.rate.item() == pytest.approx(1.0, abs=1e-3)


def test_values_do_not_drift_with_the_size_of_the_reward():
    """An offset of 1,000 on every reward goes into the rate, not into the values."""
    env = EnvConfig(id="tensor:probe-cycle", num_envs=32)
    algorithm, history = train(env, reward=RewardConfig(shift=1000.0))
    assert algorithm.objective.rate.item() == pytest.approx(1001.0, rel=1e-5)
    assert max(abs(metrics["value/mean"].item()) for metrics in history) < 5
    assert cycle_values(algorithm) == pytest.approx([-0.5, 0.5], abs=0.1)
