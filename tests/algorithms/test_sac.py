"""SAC in small: what each setting does, what is refused, and that a stopped run goes on to the bit."""

import math
from dataclasses import replace

import pytest
import torch

from canter.algorithms.base import algorithms, unused_settings_of
from canter.algorithms.ppo import PPOConfig
from canter.algorithms.sac import SACConfig, TemperatureConfig
from canter.algorithms.sac.sac import RepeatedNoise, ReturnScale
from canter.core.data.replay import ReplayConfig
from canter.core.data.rollout import Rollout
from canter.core.specs import Continuous, Discrete, EnvSpec, TensorSpec
from canter.core.storage.tree import decode, encode
from canter.envs.tensor import tensor_envs
from canter.nn.actor_critic import ModelConfig
from canter.nn.network import NetworkConfig
from canter.nn.normalizer import NormalizerConfig
from canter.nn.optimizer import OptimizerConfig
from canter.nn.schedules import AdaptiveKL, Linear
from canter.nn.stack import CriticConfig, StackNetworkConfig, batch_statistics
from canter.training.collector import Collector

NETWORK = NetworkConfig(hidden=(16,), activation="relu", init="default", normalize_obs=False)
SMALL = SACConfig(
    horizon=2,
    batch_size=16,
    updates_per_step=1.0,
    warmup_steps=24,
    policy=NETWORK,
    critic=CriticConfig(hidden=(16, 16)),
    replay=ReplayConfig(capacity=64),
)
LARGE = replace(
    SMALL,
    policy=StackNetworkConfig(hidden=(8,), blocks=1, norm="batch", input_norm="batch", output_norm="rms"),
    critic=CriticConfig(hidden=(8,), blocks=1, norm="batch", input_norm="batch", output_norm="rms", atoms=11),
    policy_delay=2,
    noise_repeat=4,
    scale_rewards=True,
    n_steps=3,
    updates_per_step=1.5,
    temperature=TemperatureConfig(initial=0.01, target_std=0.15),
    optimizer=OptimizerConfig(learning_rate=Linear(3e-4, 1e-4), eps=1e-8, max_grad_norm=math.inf),
)


class Training:
    def __init__(self, config, seed=0, envs=4):
        self.env = tensor_envs["pendulum"](envs, "cpu", max_episode_steps=7)
        self.algorithm = config.build(self.env.spec, seed)
        self.collector = Collector(self.env, self.algorithm, seed)
        self.done = 0

    def iterate(self, count=1):
        metrics = {}
        for _ in range(count):
            self.algorithm.set_progress(self.done / 40)
            self.algorithm.begin_iteration()
            metrics = self.algorithm.update(self.collector.collect())
            self.done += 1
        return {name: value.clone() for name, value in metrics.items()}

    def weights(self):
        modules = self.algorithm.learner.modules().values()
        return torch.cat([x.double().flatten() for module in modules for x in module.state_dict().values()])


def state_of(run):
    return encode({"algorithm": run.algorithm.state_dict(), "collector": run.collector.state_dict()})


@pytest.mark.parametrize("config", [SMALL, LARGE], ids=["small", "large"])
def test_stopped_after_any_iteration_a_run_continues_bit_for_bit(config):
    run, saved, seen = Training(config), [], []
    for _ in range(14):
        saved.append(state_of(run))
        seen.append(run.iterate())
    final = state_of(run)
    assert run.algorithm.updates > 0 and run.algorithm.replay.head > run.algorithm.replay.slots  # the ring has turned
    for stop in range(14):
        resumed = Training(config, seed=9)
        state = decode(*saved[stop])
        resumed.algorithm.load_state_dict(state["algorithm"])
        resumed.collector.load_state_dict(state["collector"])
        resumed.done = stop
        for iteration in range(stop, 14 if stop % 5 == 0 else min(stop + 2, 14)):
            assert resumed.iterate() == seen[iteration], (stop, iteration)
        assert state_of(resumed) == (final if resumed.done == 14 else saved[resumed.done]), stop


def test_a_ring_that_was_not_saved_is_refilled_by_the_policy_with_a_warning(caplog):
    config = replace(SMALL, replay=ReplayConfig(capacity=64, save=False))
    run = Training(config)
    run.iterate(8)
    resumed = Training(config, seed=5)
    resumed.algorithm.load_state_dict(decode(*encode(run.algorithm.state_dict())))
    assert "holds no replay buffer (replay.save=false): the policy collects 24 transitions" in caplog.text
    updates, weights = resumed.algorithm.updates, resumed.weights()
    resumed.iterate(2)
    assert not resumed.algorithm.stage.random and resumed.algorithm.updates == updates
    assert torch.equal(weights, resumed.weights())
    resumed.iterate(1)  # 24 rows are there
    assert resumed.algorithm.updates == updates + 2 and not torch.equal(weights, resumed.weights())


def test_the_warm_up_is_random_and_learns_nothing():
    run = Training(SMALL)
    before, actions = run.weights(), []
    for _ in range(2):
        assert run.iterate().keys() == {"replay/rows"}
        actions.append(run.collector.rollout.record.action.clone())
    assert torch.equal(before, run.weights()) and run.algorithm.stage.random
    assert torch.cat(actions).abs().max() <= 1
    assert run.iterate()["optim/minibatch_updates"] == 2  # the third rollout makes 24 rows
    run.iterate()
    assert not run.algorithm.stage.random and not torch.equal(before, run.weights())


def test_the_policy_learns_in_every_second_update_only():
    run = Training(replace(SMALL, policy_delay=2, updates_per_step=0.5))  # one update an iteration
    run.iterate(2)
    moved = []
    for _ in range(6):
        before = torch.cat([p.detach().flatten().clone() for p in run.algorithm.policy.actor.parameters()])
        critics = run.algorithm.learner.flat.clone()
        run.iterate()
        after = torch.cat([p.detach().flatten() for p in run.algorithm.policy.actor.parameters()])
        moved.append(not torch.equal(before, after))
        assert not torch.equal(critics, run.algorithm.learner.flat)
    assert moved == [False, True] * 3


def test_slow_copies_follow_by_tau():
    run = Training(SMALL)
    run.iterate(3)
    learner = run.algorithm.learner
    slow = learner.target_flat.clone()
    batch = run.algorithm.replay.sample(16, 1, 0.99, torch.Generator().manual_seed(0))
    learner.update(batch, torch.randn(2, 16, 1), True)
    torch.testing.assert_close(learner.target_flat, slow + 0.005 * (learner.flat - slow))


def test_observation_statistics_count_each_transition_once_and_target_critics_share_them():
    config = replace(
        SMALL,
        policy=replace(NETWORK, normalize_obs=True),
        critic=replace(SMALL.critic, normalize_obs=True),
        updates_per_step=2.0,
    )
    run = Training(config)
    transitions = 0
    for _ in range(5):
        run.iterate()
        transitions += int(run.collector.rollout.valid.sum())
    learner = run.algorithm.learner
    for network in (learner.actor.network, learner.critics.encoder, learner.target_critics.encoder):
        assert network.normalizers[0].count == transitions


def test_transitions_without_a_last_observation_teach_nothing():
    run = Training(SMALL)
    run.iterate(6)
    batch = run.algorithm.replay.sample(16, 1, 0.99, torch.Generator().manual_seed(0))
    weights = []
    for reward in (batch.reward, torch.where(torch.arange(16) < 4, 1e6, batch.reward)):
        other = Training(SMALL)
        valid = torch.arange(16) >= 4
        other.algorithm.learner.learn_critics(replace(batch, reward=reward, valid=valid), torch.zeros(16, 1))
        weights.append(other.weights())
    assert torch.equal(*weights)


def test_batch_norm_uses_joint_batches_to_learn_and_running_statistics_to_act():
    run = Training(LARGE)
    run.iterate(10)
    critics, actor = run.algorithm.learner.critics, run.algorithm.policy.actor
    obs = {"policy": torch.randn(8, 3)}
    first = run.algorithm.policy.params(obs, ())[0]
    torch.testing.assert_close(run.algorithm.policy.params({"policy": obs["policy"][:2]}, ())[0], first[:2])
    assert not actor.training or not any(m.training for m in actor.modules() if hasattr(m, "momentum"))
    norm = next(m for m in critics.modules() if hasattr(m, "momentum"))
    x = 3 + 2 * torch.randn(norm.mean.shape[0], 64, norm.mean.shape[-1])
    before = norm.mean.clone()
    with batch_statistics(critics):
        y = norm(x)
    plain = (x - x.mean(1, keepdim=True)) / (x.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(y, plain * norm.weight + norm.bias)
    torch.testing.assert_close(norm.mean, before + 0.01 * (x.mean(1, keepdim=True) - before))


def test_noise_lasts_as_long_as_the_law_says():
    noise, generator = RepeatedNoise(4, 2000, 1), torch.Generator().manual_seed(0)
    like, before, lengths, current = torch.zeros(2000, 1), None, [], torch.zeros(2000)
    for _ in range(60):
        now = noise(like, generator).clone()
        if before is not None:
            changed = (now != before).squeeze(-1)
            lengths += current[changed].tolist()
            current[changed] = 0
        current += 1
        before = now
    share = torch.tensor(lengths).long().bincount(minlength=5)[1:] / len(lengths)
    weights = torch.tensor([1.0, 1 / 4, 1 / 9, 1 / 16])
    torch.testing.assert_close(share, weights / weights.sum(), atol=0.01, rtol=0)


def test_scale_of_rewards_is_that_of_all_returns_seen():
    spec = EnvSpec({"policy": TensorSpec((1,))}, Continuous((-1.0,), (1.0,)), 2)
    scale, generator = ReturnScale(0.9, 5.0, 2), torch.Generator().manual_seed(0)
    rollout = Rollout.allocate(5, {"policy": torch.zeros(2, 1)}, (), spec)
    returns, running = [], [0.0, 0.0]
    for _ in range(20):
        rollout.reward.copy_(torch.randn(5, 2, generator=generator) * 3)
        rollout.terminated.copy_(torch.rand(5, 2, generator=generator) < 0.2)
        rollout.valid.copy_(torch.rand(5, 2, generator=generator) < 0.9)
        scale.update(rollout)
        for t in range(5):
            for env in range(2):
                if rollout.valid[t, env]:
                    running[env] = 0.9 * running[env] + rollout.reward[t, env].item()
                    returns.append(running[env])
                if rollout.terminated[t, env]:
                    running[env] = 0.0
    returns = torch.tensor(returns, dtype=torch.float64)
    unit = max(returns.std(correction=0).item(), returns.abs().max().item() / 5.0)
    assert scale(torch.tensor(7.0)).item() == pytest.approx(7.0 / unit, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"updates_per_step": 0.3}, r"updates_per_step=0.3 times horizon=2 .*use updates_per_step=0.5"),
        ({"gamma": 1.0}, "gamma=1.0 must lie in 0..1, without 1"),
        ({"tau": 0.0}, "tau=0.0 must lie above 0"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"warmup_steps": 1000}, "warmup_steps=1000 never fit into replay.capacity=64"),
        ({"optimizer": OptimizerConfig(learning_rate=AdaptiveKL(1e-3))}, "optimizer.learning_rate: adaptive_kl"),
    ],
)
def test_values_without_sense_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)
    with pytest.raises(ValueError, match="init=glorot_normal: stacks begin by default"):
        replace(SMALL.critic, init="glorot_normal")
    with pytest.raises(ValueError, match="set only one of them"):
        TemperatureConfig(target_std=0.1, target_entropy=-1.0)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (Discrete(3), r"sac needs continuous actions, and those of Maze are Discrete\(n=3\); use --algorithm ppo"),
        (
            Continuous((-1.0, -math.inf), (1.0, 1.0)),
            "component 1 of Maze has low=-inf, high=1.0: bound the action space",
        ),
    ],
)
def test_actions_that_cannot_be_squashed_are_refused(action, message):
    spec = EnvSpec({"policy": TensorSpec((2,))}, action, 1, env_id="Maze")
    with pytest.raises(ValueError, match=message):
        SMALL.build(spec, 0)


def test_settings_without_effect_are_reported():
    spec = Training(SMALL).env.spec
    assert unused_settings_of(SMALL, spec) == [] and unused_settings_of(SACConfig(), spec) == []
    critic = replace(SMALL.critic, normalizer=NormalizerConfig(clip=5.0))
    temperature = TemperatureConfig(learned=False, target_std=0.2)
    config = replace(SMALL, critic=critic, return_limit=3.0, temperature=temperature)
    lines = "\n".join(unused_settings_of(config, spec))
    assert "algorithm.return_limit=3.0 has no effect here: scale_rewards is off" in lines
    assert "algorithm.temperature.target_std=0.2 has no effect here" in lines
    assert "algorithm.critic.normalizer.clip=5.0 has no effect here: nothing is standardised" in lines
    assert algorithms["sac"] is SACConfig


def test_critics_may_see_more_than_the_policy_and_images_are_read():
    obs = {"policy": TensorSpec((3,)), "critic": TensorSpec((5,))}
    spec = EnvSpec(obs, Continuous((-1.0,), (1.0,)), 2)
    algorithm = SMALL.build(spec, 0)
    assert algorithm.learner.critics.encoder.groups == ("critic",) and algorithm.policy.actor.network.groups == (
        "policy",
    )
    spec = EnvSpec({"policy": TensorSpec((36, 36, 1), torch.uint8)}, Continuous((-1.0,), (1.0,)), 2)
    algorithm = SMALL.build(spec, 0)
    assert algorithm.replay.obs["policy"].dtype == torch.uint8
    image = {"policy": torch.randint(0, 255, (2, 36, 36, 1), dtype=torch.uint8)}
    assert algorithm.learner.critics(image, torch.zeros(2, 1)).shape == (2, 2)


def test_ppo_takes_a_stack_with_layer_norm_and_refuses_batch_norm():
    env = tensor_envs["pendulum"](4, "cpu")
    stack = StackNetworkConfig(hidden=(8,), blocks=1, norm="layer", output_norm="rms")
    config = PPOConfig(horizon=4, epochs=1, num_minibatches=1, model=ModelConfig(policy=stack))
    algorithm = config.build(env.spec, 0)
    before = [parameter.clone() for parameter in algorithm.model.parameters()]
    algorithm.update(Collector(env, algorithm, 0).collect())
    assert sum(not torch.equal(a, b) for a, b in zip(before, algorithm.model.parameters(), strict=True)) > 10
    with pytest.raises(ValueError, match="batch needs the joint batches of sac; use layer or rms"):
        replace(config, model=ModelConfig(policy=replace(stack, norm="batch"))).build(env.spec, 0)
