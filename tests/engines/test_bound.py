import math

import pytest
import torch

from canter.algorithms.ppo import PPOConfig
from canter.engines.base import BoundLossConfig
from canter.envs.tensor import CartPole, Pendulum
from canter.nn.actor_critic import ModelConfig
from canter.nn.distributions import Beta, Categorical, DiagGaussian, TanhGaussian
from canter.training.collector import Collector

CPU = torch.device("cpu")


def loss(mean, *, low=(-1.0, -1.0), high=(1.0, 1.0), bounds="rescale", **settings):
    distribution = DiagGaussian(2, low, high, bounds)
    params = torch.cat([torch.tensor(mean), torch.zeros(2)])
    return BoundLossConfig(**settings).build(distribution, CPU)(params).item()


def test_the_soft_bound_counts_only_what_is_beyond_the_limit():
    assert loss([1.1, -1.1]) == 0.0
    assert loss([0.0, 0.5]) == 0.0
    assert loss([1.6, -1.2]) == pytest.approx(0.5**2 + 0.1**2)
    assert loss([1.6, -1.2], limit=1.5) == pytest.approx(0.1**2, rel=1e-4)


def test_regularisation_is_the_sum_of_squares():
    assert loss([0.5, -2.0], form="regularisation") == pytest.approx(4.25)


def test_means_that_are_not_rescaled_are_measured_in_units_of_their_bounds():
    low, high = (0.0, -10.0), (4.0, 10.0)
    # Centre 2 and half-width 2: a mean of 6 is twice as far out as the bound.
    assert loss([6.0, 0.0], low=low, high=high, bounds="clip") == pytest.approx(0.9**2)
    assert loss([2.0, 0.0], low=low, high=high, bounds="clip", form="regularisation") == 0.0
    assert loss([6.0, 0.0], low=low, high=high, bounds="none") == pytest.approx(0.9**2)
    # A rescaled one is in these units already.
    assert loss([6.0, 0.0], low=low, high=high) == pytest.approx(4.9**2)


def test_components_without_bounds_count_as_they_are():
    low, high = (-math.inf, -10.0), (math.inf, 10.0)
    assert loss([2.1, 0.0], low=low, high=high, bounds="clip") == pytest.approx(1.0)
    params = torch.tensor([2.1, 0.0, 0.0, 0.0])
    assert BoundLossConfig().build(DiagGaussian(2), CPU)(params).item() == pytest.approx(1.0)


@pytest.mark.parametrize(
    "distribution",
    [TanhGaussian((-1.0,), (1.0,)), Beta((-1.0,), (1.0,)), Categorical(2)],
    ids=lambda d: type(d).__name__,
)
def test_other_distributions_are_refused_by_name(distribution):
    with pytest.raises(
        ValueError, match=f"bound_loss is for a Gaussian policy.*; {type(distribution).__name__} cannot"
    ):
        BoundLossConfig().build(distribution, CPU)


def test_ppo_refuses_it_for_discrete_actions_and_says_what_to_do():
    with pytest.raises(ValueError, match="Categorical cannot: set bound_loss=null"):
        PPOConfig(bound_loss=BoundLossConfig()).build(CartPole(4).spec, 0)


@pytest.mark.parametrize(("settings", "message"), [({"coef": -1.0}, "coef=-1.0"), ({"limit": 0.0}, "limit=0.0")])
def test_settings_out_of_range_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        BoundLossConfig(**settings)


def test_it_is_a_term_of_the_loss_with_its_weight():
    def total(bound_loss):
        env = Pendulum(4)
        algorithm = PPOConfig(horizon=8, num_minibatches=1, bound_loss=bound_loss).build(env.spec, 0)
        with torch.no_grad():
            algorithm.model.actor.head.mean.bias.fill_(3.1)
        batch, _ = algorithm.prepare_batch(Collector(env, algorithm, 0).collect())
        algorithm.use_engine("autograd")
        return algorithm.engine.evaluate(batch, algorithm.coefs)

    plain, bounded = total(None), total(BoundLossConfig(coef=0.5))
    expected = bounded.metrics["loss/bound"]
    assert expected.item() == pytest.approx(4.0, abs=0.2)
    assert bounded.loss.item() == pytest.approx(plain.loss.item() + 0.5 * expected.item(), rel=1e-5)
    assert "loss/bound" not in plain.metrics


def test_it_brings_a_mean_back_that_is_far_out():
    env = Pendulum(8)
    config = PPOConfig(
        horizon=8, epochs=10, num_minibatches=1, bound_loss=BoundLossConfig(coef=10.0), model=ModelConfig()
    )
    algorithm = config.build(env.spec, 0)
    with torch.no_grad():
        algorithm.model.actor.head.mean.bias.fill_(3.0)
    collector = Collector(env, algorithm, 0)
    first = algorithm.update(collector.collect())["loss/bound"].item()
    for _ in range(60):
        metrics = algorithm.update(collector.collect())
    assert metrics["loss/bound"].item() < 0.2 * first
