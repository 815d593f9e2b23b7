"""Settings that other libraries have decided otherwise, each against what it says by hand."""

from dataclasses import replace

import pytest
import torch

import canter
from canter.algorithms.phase import check_batch
from canter.algorithms.ppo import CentralValueConfig, PPOConfig
from canter.engines.autograd import AutogradEngine
from canter.envs.tensor import CartPole, Pendulum
from canter.functional.returns import gae
from canter.nn.actor_critic import ModelConfig
from canter.nn.distributions import DiagGaussian
from canter.nn.heads import StdConfig, ValueNormalizerConfig
from canter.nn.network import NetworkConfig
from canter.nn.normalizer import NormalizerConfig
from canter.nn.optimizer import OptimizerConfig
from canter.nn.schedules import AdaptiveKL
from canter.training.collector import Collector
from canter.training.trainer import train

RL_GAMES = {
    "shuffle": "none",
    "advantage_std": "sample",
    "kl": "rl_games",
    "obs_statistics": "minibatch",
    "optimizer": OptimizerConfig(learning_rate=AdaptiveKL(1e-3, every="step")),
    "model": ModelConfig(
        policy=NetworkConfig(hidden=(8,), normalizer=NormalizerConfig(eps=1e-5, clip=5.0, prior_count=1.0)),
        std=StdConfig(form="log"),
        value_normalizer=ValueNormalizerConfig(rescale=False, of="values_and_returns", clip=5.0, prior_count=1.0),
    ),
}


def started(env=None, horizon=15, **settings):
    env = env or Pendulum(4, max_episode_steps=5)
    defaults = {"epochs": 2, "num_minibatches": 2, "model": ModelConfig(policy=NetworkConfig(hidden=(8,)))}
    algorithm = PPOConfig(horizon=horizon, **(defaults | settings)).build(env.spec, 0)
    algorithm.use_engine("autograd")
    return algorithm, Collector(env, algorithm, 0)


def test_a_truncation_may_count_as_a_termination():
    algorithm, collector = started(bootstrap_truncated=False, gamma=0.9, gae_lambda=0.8)
    rollout = collector.collect()
    targets = algorithm.estimator(rollout)
    assert rollout.truncated.any() and not rollout.terminated.any()
    following = targets.value.roll(-1, 0)  # the last row is an end
    advantage, _ = gae(rollout.reward, targets.value, following, rollout.done, rollout.done, 0.9, 0.8)
    torch.testing.assert_close(targets.advantage, advantage)
    assert rollout.truncated.any()  # the rollout itself is as it was


def test_gamma_one_is_fine_where_no_cut_is_bootstrapped():
    spec = Pendulum(4, max_episode_steps=5).spec
    PPOConfig(gamma=1.0, bootstrap_truncated=False).build(spec, 0)
    with pytest.raises(ValueError, match="gamma=1"):
        PPOConfig(gamma=1.0).build(spec, 0)


def test_uneven_minibatches_are_refused_or_dropped():
    with pytest.raises(ValueError, match=r"num_minibatches=7 does not divide .* or uneven_minibatches=drop"):
        started(num_minibatches=7)
    algorithm, collector = started(num_minibatches=7, uneven_minibatches="drop")
    metrics = algorithm.update(collector.collect())
    assert metrics["optim/minibatch_updates"].item() == 14
    with pytest.raises(ValueError, match="num_minibatches=61 does not divide"):
        check_batch(15, 4, 61, even=False)


@pytest.mark.parametrize("scope", ["rollout", "minibatch"])
def test_advantages_by_the_unbiased_std(scope):
    algorithm, collector = started(advantage_std="sample", advantage_normalization=scope)
    batch, _ = algorithm.prepare_batch(collector.collect())
    if scope == "rollout":
        assert batch.advantage.std().item() == pytest.approx(1.0, abs=1e-5)
    else:
        assert algorithm.losses["policy"].advantage == "minibatch_sample"


def moved_gaussian():
    algorithm, collector = started(kl="rl_games", num_minibatches=1, epochs=1)
    batch, _ = algorithm.prepare_batch(collector.collect())
    with torch.no_grad():
        for parameter in algorithm.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter, memory_format=torch.preserve_format))
    return algorithm, batch


def test_the_kl_of_rl_games_is_measured_from_where_a_row_was_last_seen():
    torch.manual_seed(0)
    algorithm, batch = moved_gaussian()
    engine = algorithm.engine
    assert isinstance(engine, AutogradEngine)
    before, index = batch.dist_params.clone(), torch.arange(batch.valid.shape[1])
    rows = engine.begin(batch)
    found = engine.gradients(rows, index, algorithm.coefs).kl
    with torch.no_grad():
        now = algorithm.model.actor(batch.obs, (), None)[0]
    (old_mean, old_std), (mean, std) = (((p.chunk(2, -1)[0]), p.chunk(2, -1)[1].exp()) for p in (before, now))
    by_hand = torch.log(old_std / std + 1e-5) - 0.5
    by_hand = by_hand + (std**2 + (old_mean - mean) ** 2) / (2 * (old_std**2 + 1e-5))
    assert found.item() == pytest.approx(by_hand.sum(-1).mean().item(), rel=1e-5)
    # Nothing has moved since, so that only the constants are left: about 1e-5 - 5e-6 / std^2 for each component.
    again = engine.gradients(rows, index, algorithm.coefs).kl.item()
    assert again == pytest.approx((1e-5 - 5e-6 / std[0, 0] ** 2).sum().item(), abs=2e-7)
    assert torch.equal(batch.dist_params, before)  # the record of the rollout stays


def test_the_kl_of_rl_games_nears_the_exact_one_of_the_other_direction():
    torch.manual_seed(0)
    algorithm, batch = moved_gaussian()
    found = algorithm.engine.gradients(algorithm.engine.begin(batch), torch.arange(20), algorithm.coefs).kl
    with torch.no_grad():
        now = algorithm.model.actor(batch.map(lambda x: x[:, :20]).obs, (), None)[0]
    distribution = algorithm.distribution
    assert isinstance(distribution, DiagGaussian)
    exact = distribution.kl(now, batch.dist_params[:, :20]).mean().item()
    assert found.item() == pytest.approx(exact, abs=5e-5)


def test_for_choices_it_is_half_the_squared_change_of_the_log_probability():
    algorithm, collector = started(CartPole(4), kl="rl_games", num_minibatches=1, epochs=1)
    batch, _ = algorithm.prepare_batch(collector.collect())
    with torch.no_grad():
        algorithm.model.actor.head.linear.bias.add_(torch.tensor([0.3, -0.2]))
        now = algorithm.distribution.log_prob(algorithm.model.actor(batch.obs, (), None)[0], batch.action)
    index = torch.arange(batch.valid.shape[1])
    found = algorithm.engine.gradients(algorithm.engine.begin(batch), index, algorithm.coefs).kl
    assert found.item() == pytest.approx(0.5 * (now - batch.log_prob).square().mean().item(), rel=1e-5)


def test_statistics_may_move_with_every_minibatch():
    algorithm, collector = started(obs_statistics="minibatch")
    rollout = collector.collect()
    algorithm.update(rollout)
    rows = rollout.obs["policy"][:-1].flatten(0, 1).double()
    for network in (algorithm.model.actor.network, algorithm.model.critic.network):
        normalizer = network.normalizers[0]
        assert normalizer.count == 2 * len(rows)  # every row in each of two epochs
        assert torch.allclose(normalizer.mean, rows.mean(0))


@pytest.mark.parametrize("shared", [False, True])
def test_on_a_shared_trunk_they_move_once(shared):
    model = ModelConfig(policy=NetworkConfig(hidden=(8,)), shared_trunk=shared)
    algorithm, collector = started(obs_statistics="minibatch", model=model, epochs=1)
    algorithm.update(collector.collect())
    assert algorithm.model.critic.network.normalizers[0].count == 60


def test_a_central_value_and_the_policy_count_their_own_minibatches():
    central = CentralValueConfig(epochs=3, num_minibatches=1, actor_value=True)
    algorithm, collector = started(obs_statistics="minibatch", central_value=central, epochs=2)
    algorithm.update(collector.collect())
    assert algorithm.model.actor.network.normalizers[0].count == 2 * 60
    assert algorithm.model.critic.network.normalizers[0].count == 3 * 60


def test_with_a_central_value_the_policys_value_head_shapes_its_features():
    def policy_after(**central):
        algorithm, collector = started(central_value=CentralValueConfig(**central), value_coef=1.0)
        metrics = algorithm.update(collector.collect())
        assert torch.isfinite(metrics["loss/value"])
        return algorithm, algorithm.model.actor.network.hidden[0].weight

    without, plain = policy_after()
    beside, shaped = policy_after(actor_value=True)
    assert without.model.trunk_value is None
    assert len(beside.model.policy_parameters()) == len(without.model.policy_parameters()) + 2
    assert not torch.equal(plain, shaped)
    # Its values are not used: the critic is the same as without it.
    assert torch.equal(without.model.critic.network.hidden[0].weight, beside.model.critic.network.hidden[0].weight)


def test_a_central_value_may_have_a_separate_loss():
    central = CentralValueConfig(value_loss="clipped", value_clip=0.1, value_coef=2.0)
    algorithm, _ = started(central_value=central, value_loss="mse")
    loss = algorithm.losses["central_value"]
    assert (loss.value_loss, loss.value_clip, loss.value_coef) == ("clipped", 0.1, 2.0)
    assert algorithm.losses["policy"].value_loss is None
    with pytest.raises(ValueError, match="value_coef=0"):
        CentralValueConfig(value_coef=0.0)


@pytest.mark.parametrize("central", [None, CentralValueConfig(actor_value=True)])
def test_a_run_with_these_settings_continues_bit_for_bit(central):
    def run(restore_at=None):
        algorithm, collector = started(central_value=central, **RL_GAMES)
        for iteration in range(4):
            if iteration == restore_at:
                state = algorithm.state_dict()
                algorithm = algorithm.config.build(algorithm.spec, seed=9)
                algorithm.load_state_dict(state)
                collector.algorithm = algorithm
            algorithm.update(collector.collect())
        return algorithm

    straight, resumed = run(), run(restore_at=2)
    for ours, theirs in zip(straight.model.state_dict().values(), resumed.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("engine", [pytest.param("autograd", marks=pytest.mark.long), "auto"])
def test_a_run_with_them_learns(engine):
    config = canter.TrainConfig(
        env=canter.EnvConfig(id="tensor:cartpole", num_envs=16),
        algorithm=replace(PPOConfig(horizon=32, num_minibatches=4, epochs=6), **RL_GAMES),
        total_steps=16 * 32 * 30,
        execution=canter.ExecutionConfig(engine=engine),
    )
    reports = []
    train(config, reports.append)
    assert reports[-1].return_ > 60 > 40 > reports[0].return_  # a random policy balances for 22 steps
