import math
from dataclasses import replace

import pytest
import torch

from canter.algorithms.phase import check_batch
from canter.algorithms.ppo import PPOConfig
from canter.algorithms.ppo.advantages import AdvantageEstimator
from canter.core.specs import ACTION_MASK, Continuous, Discrete, EnvSpec, MultiDiscrete, Step, TensorSpec
from canter.engines.base import PPOBatch
from canter.envs.tensor import Pendulum
from canter.nn.actor_critic import ModelConfig
from canter.nn.heads import StdConfig
from canter.nn.network import NetworkConfig
from canter.nn.optimizer import OptimizerConfig
from canter.nn.schedules import AdaptiveKL, Constant, Linear
from canter.training.collector import Collector


class RandomEnv:
    """Random observations, rewards and endings with any action spec; masks where the actions allow them."""

    def __init__(self, action, num_envs=6, mask=False, obs=None):
        groups = dict(obs or {"policy": TensorSpec((5,))})
        self.choices = action.n if isinstance(action, Discrete) else sum(getattr(action, "nvec", ()))
        self.mask = mask
        if mask:
            groups[ACTION_MASK] = TensorSpec((self.choices,), torch.bool)
        self.spec = EnvSpec(groups, action, num_envs, truncates=True, env_id="random")
        self.generator = torch.Generator().manual_seed(0)
        self.actions = []

    def rand(self, *shape):
        return torch.rand((self.spec.num_envs, *shape), generator=self.generator)

    def observe(self):
        obs = {}
        for name, spec in self.spec.obs.items():
            if spec.dtype == torch.uint8:
                obs[name] = (self.rand(*spec.shape) * 255).to(torch.uint8)
            elif name != ACTION_MASK:
                obs[name] = self.rand(*spec.shape) * 20 + 5  # far from normalised
        if self.mask:
            mask = self.rand(self.choices) < 0.6
            heads = self.spec.action.nvec if isinstance(self.spec.action, MultiDiscrete) else (self.choices,)
            mask[:, [sum(heads[:i]) for i in range(len(heads))]] = True
            obs[ACTION_MASK] = mask
        return obs

    def reset(self, seed=None):
        return self.observe()

    def step(self, action):
        self.actions.append(action.clone())
        terminated, truncated = self.rand() < 0.1, self.rand() < 0.1
        valid = torch.ones_like(terminated)
        return Step(self.observe(), self.rand() * 100, terminated, truncated & ~terminated, valid, self.observe())

    def close(self):
        pass


BOUNDED = Continuous((-2.0, 0.0, -1.0), (2.0, 1.0, 5.0))
FREE = Continuous((-math.inf,) * 2, (math.inf,) * 2)
CASES = {
    "gaussian": (FREE, {}, False),
    "gaussian state-dependent std": (FREE, {"std": StdConfig(kind="network", initial=0.5)}, False),
    "gaussian clipped": (BOUNDED, {"bounds": "clip"}, False),
    "tanh": (BOUNDED, {"distribution": "tanh_gaussian"}, False),
    "beta": (BOUNDED, {"distribution": "beta"}, False),
    "categorical": (Discrete(4), {}, False),
    "categorical masked": (Discrete(4), {}, True),
    "multi-categorical": (MultiDiscrete((3, 2)), {}, False),
    "multi-categorical masked": (MultiDiscrete((3, 2)), {}, True),
}


def collected(action, model, *, mask=False, obs=None, iterations=0, **settings):
    env = RandomEnv(action, mask=mask, obs=obs)
    defaults = {"horizon": 16, "epochs": 2, "num_minibatches": 4}
    algorithm = PPOConfig(model=model, **(defaults | settings)).build(env.spec, seed=1)
    collector = Collector(env, algorithm, seed=0)
    for _ in range(iterations):
        algorithm.update(collector.collect())
    return env, algorithm, collector


@pytest.mark.parametrize("normalize", [True, False], ids=["normalised", "raw"])
@pytest.mark.parametrize("case", CASES)
def test_the_first_ratio_of_every_update_is_one(case, normalize):
    action, settings, mask = CASES[case]
    network = NetworkConfig(hidden=(16,), normalize_obs=normalize)
    model = ModelConfig(policy=network, normalize_value=normalize, **settings)
    # After two updates statistics have moved and weights have learned: the ratio must still be one.
    _, algorithm, collector = collected(action, model, mask=mask, iterations=2)
    rollout = collector.collect()
    batch, _ = algorithm.prepare_batch(rollout)
    params, _ = algorithm.model(batch.obs, (), (), None)
    ratio = torch.exp(algorithm.distribution.log_prob(params, batch.action) - batch.log_prob)
    # The recorded numbers come from batches of 6 rows, these from 96: only the rounding of log-probabilities differs.
    assert (ratio - 1).abs().max() <= 2e-6
    assert algorithm.distribution.kl(batch.dist_params, params).abs().max() <= 1e-5


@pytest.mark.parametrize("case", ["gaussian", "tanh", "beta", "categorical masked", "multi-categorical"])
def test_the_first_ratio_is_one_in_bfloat16_as_well(case):
    action, settings, mask = CASES[case]
    model = ModelConfig(policy=NetworkConfig(hidden=(16, 16), precision="bfloat16"), **settings)
    _, algorithm, collector = collected(action, model, mask=mask, iterations=2)
    rollout = collector.collect()
    batch, _ = algorithm.prepare_batch(rollout)
    params, value = algorithm.model(batch.obs, (), (), None)
    ratio = torch.exp(algorithm.distribution.log_prob(params, batch.action) - batch.log_prob)
    assert (params.dtype, value.dtype, ratio.dtype, rollout.record.dist_params.dtype) == (torch.float32,) * 4
    assert (ratio - 1).abs().max() <= 1e-3


def test_an_action_sent_to_the_environment_is_within_bounds_and_the_stored_one_is_raw():
    model = ModelConfig(bounds="clip", std=StdConfig(initial=5.0))
    env, _, collector = collected(BOUNDED, model)
    rollout = collector.collect()
    sent = torch.stack(env.actions)
    assert (sent >= torch.tensor(BOUNDED.low)).all()
    assert (sent <= torch.tensor(BOUNDED.high)).all()
    assert rollout.record.action.abs().max() > 5
    assert torch.equal(sent, rollout.record.action.clamp(torch.tensor(BOUNDED.low), torch.tensor(BOUNDED.high)))


def test_forbidden_actions_are_never_taken():
    env, _, collector = collected(Discrete(4), ModelConfig(), mask=True)
    rollout = collector.collect()
    allowed = rollout.obs[ACTION_MASK][:-1].gather(-1, rollout.record.action.unsqueeze(-1))
    assert allowed.all()
    assert len(env.actions) == 16


def hand_batch(**changes):
    """Two rows of a Gaussian policy in one dimension; the second is not valid."""
    batch = {
        "obs": {"policy": torch.zeros(1, 2, 5)},
        "action": torch.tensor([[[0.5], [9.0]]]),
        "log_prob": torch.tensor([[-1.0, 5.0]]),
        "dist_params": torch.zeros(1, 2, 2),
        "value": torch.zeros(1, 2),
        "return_": torch.tensor([[2.0, 99.0]]),
        "advantage": torch.tensor([[1.5, 99.0]]),
        "valid": torch.tensor([[True, False]]),
        "reset": torch.zeros(1, 2, dtype=torch.bool),
        "policy_state": (),
        "critic_state": (),
    }
    return PPOBatch(**(batch | changes))


def test_the_loss_is_the_sum_of_its_terms_over_valid_samples_by_hand():
    network = NetworkConfig(hidden=(), normalize_obs=False)
    one_real = Continuous((-math.inf,), (math.inf,))
    _, algorithm, _ = collected(
        one_real, ModelConfig(policy=network, normalize_value=False), value_coef=0.7, entropy_coef=Constant(0.1)
    )
    algorithm.use_engine("autograd")
    output = algorithm.engine.evaluate(hand_batch(), algorithm.coefs)
    # Zero observations and zero biases: mean 0, std 1, value 0.
    log_prob = -0.5 * 0.5**2 - 0.5 * math.log(2 * math.pi)
    ratio = math.exp(log_prob + 1.0)
    entropy = 0.5 * math.log(2 * math.pi * math.e)
    policy = max(-1.5 * ratio, -1.5 * min(max(ratio, 0.8), 1.2))
    assert output.metrics["loss/policy"].item() == pytest.approx(policy, rel=1e-5)
    assert output.metrics["loss/value"].item() == pytest.approx(0.5 * 2.0**2)
    assert output.metrics["policy/entropy"].item() == pytest.approx(entropy, rel=1e-5)
    assert output.kl.item() == pytest.approx(0.0, abs=1e-6)
    assert output.loss.item() == pytest.approx(policy + 0.7 * 2.0 - 0.1 * entropy, rel=1e-5)


def test_value_targets_bootstrap_truncation_from_the_final_observation_and_termination_from_nothing():
    network = NetworkConfig(hidden=(8,), normalize_obs=False)
    _, algorithm, collector = collected(
        FREE, ModelConfig(policy=network, normalize_value=False), gae_lambda=0.0, gamma=0.9
    )
    rollout = collector.collect()
    batch, _ = algorithm.prepare_batch(rollout)
    return_ = batch.return_.view(16, 6)
    with torch.no_grad():
        value = algorithm.model.critic(rollout.obs, (), None)[0]
        final = algorithm.model.critic(rollout.final_obs, (), None)[0]
    for t in range(16):
        for n in range(6):
            expected = rollout.reward[t, n].item()
            if rollout.truncated[t, n]:
                expected += 0.9 * final[t, n].item()
            elif not rollout.terminated[t, n]:
                expected += 0.9 * value[t + 1, n].item()
            assert return_[t, n].item() == pytest.approx(expected, rel=1e-5)
    assert rollout.truncated.any()
    assert rollout.terminated.any()


def test_values_and_returns_share_one_set_of_statistics_and_predictions_do_not_move():
    _, algorithm, collector = collected(FREE, ModelConfig())
    rollout = collector.collect()
    head = algorithm.model.critic.head
    with torch.no_grad():
        before = head.normalizer.inverse(algorithm.model.critic(rollout.obs, (), None)[0])
    batch, _ = algorithm.prepare_batch(rollout)
    with torch.no_grad():
        normalised = algorithm.model.critic(rollout.obs, (), None)[0]
    after = head.normalizer.inverse(normalised)
    assert head.normalizer.scale > 2  # rewards are in the tens
    assert torch.allclose(after, before, rtol=1e-4, atol=1e-3)
    # The old values of the batch are the network's own outputs under the new statistics.
    assert torch.allclose(batch.value.view(16, 6), normalised[:-1], atol=1e-5)
    assert batch.return_.mean().item() == pytest.approx(0.0, abs=1e-5)
    assert batch.return_.std(correction=0).item() == pytest.approx(1.0, abs=1e-4)


def test_observation_statistics_come_from_the_rollout_that_was_optimised_and_only_after_it():
    _, algorithm, collector = collected(FREE, ModelConfig())
    normalizer = algorithm.model.actor.network.normalizers[0]
    rollout = collector.collect()
    assert normalizer.count == 0
    algorithm.update(rollout)
    rows = rollout.obs["policy"][:-1].reshape(-1, 5).double()
    assert normalizer.count == 16 * 6
    assert torch.allclose(normalizer.mean, rows.mean(0))
    assert torch.allclose(normalizer.m2 / normalizer.count, rows.var(0, correction=0))


def test_recomputed_advantages_are_those_of_the_critic_as_it_is_now(monkeypatch):
    settings = {"epochs": 2, "num_minibatches": 1, "advantage_normalization": "none", "recompute_advantage": True}
    _, algorithm, collector = collected(FREE, ModelConfig(), **settings)
    rollout = collector.collect()
    algorithm.use_engine("autograd")
    seen, learn = [], algorithm.engine.evaluate
    algorithm.engine.evaluate = lambda batch, coefs: seen.append(batch) or learn(batch, coefs)
    values = AdvantageEstimator.values
    monkeypatch.setattr(AdvantageEstimator, "values", lambda *a, **k: seen.append("values") or values(*a, **k))
    algorithm.update(rollout)
    assert [entry if entry == "values" else "epoch" for entry in seen] == ["values", "epoch", "values", "epoch"]
    # Rows come in different orders; as multisets the advantages must differ because the critic has learned.
    first, second = (seen[i].advantage.sort().values for i in (1, 3))
    assert (first - second).abs().max() > 1e-3
    # The value statistics count the rollout once.
    assert algorithm.model.critic.head.normalizer.count == 16 * 6


@pytest.mark.parametrize("scope", ["rollout", "minibatch", "none"])
def test_advantages_are_normalised_over_the_chosen_samples(scope):
    _, algorithm, collector = collected(FREE, ModelConfig(), advantage_normalization=scope)
    batch, _ = algorithm.prepare_batch(collector.collect())
    standardised = abs(batch.advantage.mean().item()) < 1e-5 and abs(batch.advantage.std().item() - 1) < 0.02
    assert standardised == (scope == "rollout")


def test_adaptive_policy_with_constant_critic_learning_rate():
    settings = {
        "optimizer": OptimizerConfig(learning_rate=AdaptiveKL(1e-3, target_kl=1e-9, every="minibatch")),
        "critic_optimizer": OptimizerConfig(learning_rate=Constant(2e-3)),
    }
    _, algorithm, collector = collected(FREE, ModelConfig(), **settings)
    metrics = algorithm.update(collector.collect())
    assert metrics["optim/learning_rate/policy"].item() < 1e-4
    assert metrics["optim/learning_rate/critic"].item() == pytest.approx(2e-3)


@pytest.mark.parametrize("clipping", ["joint", "per_network"])
@pytest.mark.parametrize("shared", [True, False])
def test_every_parameter_is_trained_exactly_once(shared, clipping):
    model = ModelConfig(shared_trunk=shared)
    _, algorithm, collector = collected(FREE, model, gradient_clipping=clipping)
    trained = [p for group in algorithm.phases["policy"].optimizer.groups.values() for p in group.parameters]
    assert {id(p) for p in trained} == {id(p) for p in algorithm.model.parameters()}
    assert len(trained) == len({id(p) for p in trained})
    before = [p.detach().clone() for p in trained]
    algorithm.update(collector.collect())
    assert all(not torch.equal(old, p) for old, p in zip(before, trained, strict=True))


def test_linear_schedules_follow_the_progress_of_the_run():
    settings = {
        "optimizer": OptimizerConfig(learning_rate=Linear(1e-3)),
        "entropy_coef": Linear(0.01, 0.002),
    }
    _, algorithm, collector = collected(FREE, ModelConfig(), **settings)
    algorithm.set_progress(0.25)
    metrics = algorithm.update(collector.collect())
    assert metrics["optim/learning_rate/model"].item() == pytest.approx(7.5e-4)
    assert algorithm.coefs.entropy.item() == pytest.approx(0.008)


def test_images_vectors_and_masks_compose():
    obs = {"camera": TensorSpec((36, 36, 3), torch.uint8), "speed": TensorSpec((2,)), "grid": TensorSpec((2, 3))}
    env, algorithm, collector = collected(MultiDiscrete((3, 2)), ModelConfig(), mask=True, obs=obs)
    metrics = algorithm.update(collector.collect())
    assert all(math.isfinite(value) for value in metrics.values())
    assert set(algorithm.model.actor.network.groups) == {"camera", "speed", "grid"}
    assert len(env.actions) == 16


def test_the_critic_reads_its_own_group_where_there_is_one():
    obs = {"policy": TensorSpec((5,)), "critic": TensorSpec((7,))}
    _, algorithm, collector = collected(FREE, ModelConfig(), obs=obs)
    assert algorithm.model.actor.network.groups == ("policy",)
    assert algorithm.model.critic.network.groups == ("critic",)
    algorithm.update(collector.collect())


def test_a_restored_algorithm_continues_bit_for_bit():
    def run(iterations, restore_at=None):
        env = Pendulum(4)
        config = PPOConfig(horizon=8, num_minibatches=4, optimizer=OptimizerConfig(learning_rate=AdaptiveKL(1e-3)))
        algorithm = config.build(env.spec, seed=0)
        collector = Collector(env, algorithm, seed=0)
        for iteration in range(iterations):
            if iteration == restore_at:
                state = algorithm.state_dict()
                algorithm = config.build(env.spec, seed=99)
                algorithm.load_state_dict(state)
                collector.algorithm = algorithm
            algorithm.update(collector.collect())
        return algorithm

    straight, resumed = run(5), run(5, restore_at=3)
    for ours, theirs in zip(straight.model.state_dict().values(), resumed.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(straight.policy_rng.get_state(), resumed.policy_rng.get_state())


def test_minibatches_that_do_not_come_out_even_are_refused_with_numbers_that_do():
    with pytest.raises(
        ValueError, match=r"num_minibatches=7 does not divide horizon \* num_envs = 24 \* 10 = 240"
    ) as e:
        check_batch(24, 10, 7)
    assert "use num_minibatches=6 or 8, or horizon=28" in str(e.value)
    check_batch(28, 10, 7)
    check_batch(24, 10, 8)


def test_gamma_one_is_refused_where_episodes_are_truncated_and_warned_about_where_nobody_knows():
    spec = EnvSpec({"policy": TensorSpec((3,))}, Discrete(2), 4, truncates=True, env_id="Pendulum-v1")
    config = PPOConfig(gamma=1.0)
    with pytest.raises(ValueError, match=r"gamma=1 on Pendulum-v1.*no fixed point"):
        config.build(spec, 0)
    with pytest.warns(UserWarning, match="gamma=1"):
        config.build(replace(spec, truncates=None), 0)
    config.build(replace(spec, truncates=False), 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gamma": 1.5}, "gamma=1.5 must lie in 0..1"),
        ({"horizon": 0}, "horizon=0 must be at least 1"),
        ({"clip_ratio": -0.1}, "clip_ratio=-0.1 must be above 0"),
        ({"target_kl": 0.0}, "target_kl=0.0 must be above 0"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        PPOConfig(**settings)
