"""Losses with gradients of their own against the plain loss and autograd, within PPO."""

from dataclasses import replace

import pytest
import torch

from canter.algorithms.ppo import PPO, PPOConfig
from canter.envs.tensor import tensor_envs
from canter.kernels import host_threads
from canter.nn.actor_critic import ModelConfig
from canter.nn.network import NetworkConfig
from canter.optim import OptimizerConfig
from canter.schedules import AdaptiveKL, Constant
from canter.training.collector import Collector

SETTINGS = {
    "gaussian": ("pendulum", {}),
    "categorical": ("cartpole", {}),
    "clipped value": ("pendulum", {"value_loss": "clipped"}),
    "two optimisers": ("cartpole", {"critic_optimizer": OptimizerConfig(learning_rate=Constant(1e-3))}),
}


def build(env, **settings):
    model = ModelConfig(policy=NetworkConfig(hidden=(16, 16)))
    given = {"horizon": 16, "epochs": 2, "num_minibatches": 4, "entropy_coef": Constant(0.01), "model": model}
    adaptive = OptimizerConfig(learning_rate=AdaptiveKL(1e-3, every="minibatch"))
    return PPOConfig(**{"optimizer": adaptive} | given | settings).build(env.spec, 0)


@pytest.fixture
def set_threads(monkeypatch):
    """Lets so many threads share rows, however few there are."""
    before = torch.get_num_threads()
    monkeypatch.setattr(host_threads, "MUCH", 1)
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_loss_by_hand_and_its_gradients_are_those_of_the_plain_loss(name, threads, set_threads):
    set_threads(threads)
    env_name, settings = SETTINGS[name]
    env = tensor_envs[env_name](8, "cpu", max_episode_steps=6)
    algorithm = build(env, **settings)
    collector = Collector(env, algorithm, 0)
    algorithm.update(collector.collect())
    batch, _ = algorithm.targets(collector.collect())
    batch = replace(batch, valid=torch.rand(batch.valid.shape) > 0.3)
    # What is not valid must not come through, whatever it is.
    spoiled = {name: torch.where(batch.valid, getattr(batch, name), torch.nan) for name in ("advantage", "return_")}
    obs = {name: torch.where(batch.valid[..., None], group, torch.nan) for name, group in batch.obs.items()}
    plain = algorithm.loss(batch)
    ready = replace(batch, **spoiled, obs=algorithm.by_hand.read_rows(obs))
    quick, ours = algorithm.quick_loss(ready), algorithm.phases["policy"].optimizer.gradients
    parameters = list(algorithm.model.parameters())
    exact = torch.autograd.grad(plain.loss, parameters)
    assert quick.loss is None and set(ours) == set(parameters)
    torch.testing.assert_close(quick.metrics, {key: plain.metrics[key].detach() for key in quick.metrics})
    for parameter, gradient in zip(parameters, exact, strict=True):
        torch.testing.assert_close(ours[parameter], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", SETTINGS)
def test_runs_with_either_loss_learn_the_same(name):
    env_name, settings = SETTINGS[name]
    results = []
    for plain in (False, True):
        env = tensor_envs[env_name](8, "cpu", max_episode_steps=6)
        algorithm = build(env, **settings)
        assert algorithm.by_hand is not None
        algorithm.by_hand = None if plain else algorithm.by_hand
        collector = Collector(env, algorithm, 0)
        metrics = algorithm.update(collector.collect())
        weights = torch.cat([parameter.detach().reshape(-1) for parameter in algorithm.model.parameters()])
        results.append((metrics, weights))
    torch.testing.assert_close(*(metrics for metrics, _ in results), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(*(weights for _, weights in results), rtol=1e-4, atol=1e-5)


def test_threads_that_share_rows_give_the_same_bits_every_time(set_threads):
    set_threads(3)
    weights = []
    for _ in range(3):
        env = tensor_envs["pendulum"](8)
        algorithm = build(env)
        collector = Collector(env, algorithm, 0)
        for _ in range(3):
            algorithm.update(collector.collect())
        weights.append(torch.cat([parameter.detach().reshape(-1) for parameter in algorithm.model.parameters()]))
    assert len(algorithm.by_hand.into) == 3
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(
    "settings",
    [{"surrogate": "smooth_clipped"}, {"value_loss": "huber"}, {"advantage_normalization": "minibatch"}],
)
def test_other_losses_are_left_to_autograd(settings):
    assert build(tensor_envs["pendulum"](8), **settings).by_hand is None


def test_a_loss_of_ones_own_is_left_to_autograd():
    class Mine(PPO):
        """May change what the loss is made of."""

    env = tensor_envs["pendulum"](8)
    config = PPOConfig(horizon=16, num_minibatches=4)
    assert config.build(env.spec, 0).by_hand is not None
    assert Mine(config, env.spec, 0).by_hand is None
