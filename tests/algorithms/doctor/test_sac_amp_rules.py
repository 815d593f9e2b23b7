"""Rules about SAC and about motion priors, each on made-up rows that cross its threshold and on rows that do not."""

import math

import pytest
import torch

import canter
from canter.algorithms.doctor.amp import AMP_RULES
from canter.algorithms.doctor.findings import Signals, diagnose_signals
from canter.algorithms.doctor.ppo import PPO_RULES
from canter.algorithms.doctor.sac import SAC_RULES
from canter.algorithms.sac.config import TemperatureConfig
from canter.app.experiments.settings import with_overrides
from canter.core.data.replay import ReplayConfig
from canter.core.data.rollout import Rollout

SAC = {
    "total_steps": 30_000,
    "algorithm.gamma": 0.99,
    "algorithm.batch_size": 256,
    "algorithm.warmup_steps": 1_000,
    "algorithm.updates_per_transition": 1.0,
    "algorithm.optimizer.learning_rate": 3e-4,
    "algorithm.temperature.learned": True,
}
DIM = 2.0
HEALTHY = {
    "value/mean": -50.0,
    "policy/entropy": -DIM,
    "policy/temperature": 0.2,
    "doctor/target_entropy": -DIM,
    "doctor/entropy_limit": DIM * math.log(2.0),
    "doctor/reward_min": -2.0,
    "doctor/reward_max": 0.0,
    "doctor/action_at_bound": 0.3,
    "length": 200.0,
}


def rows_of(returns, **columns):
    """Return 30 rows; a column is a value, or a function of the row's number."""
    common = {"doctor/return_std": 5.0, "rollout_reward": -1.0}
    made = []
    for i in range(30):
        row = {"env_steps": 1000 * (i + 1), "iteration": i + 1, "return": returns, "rollout_return": returns}
        row |= {name: value(i) if callable(value) else value for name, value in (common | columns).items()}
        made.append(row)
    return made


@pytest.mark.parametrize(
    "rule, settings, columns",
    [
        (None, {}, {}),
        ("sac_reward_scale", {}, {"doctor/reward_min": -2e-4}),
        ("sac_reward_scale", {}, {"doctor/reward_max": 1e4}),
        (None, {"algorithm.scale_rewards": True}, {"doctor/reward_max": 1e4}),
        ("warm_up", {"algorithm.warmup_steps": 20_000}, {}),
        ("warm_up", {"algorithm.warmup_steps": 4}, {}),
        ("few_updates", {"algorithm.updates_per_transition": 0.1}, {}),
        ("few_updates", {"algorithm.updates_per_step": 1.0, "env.num_envs": 64}, {}),
        (None, {"algorithm.updates_per_step": 1.0, "env.num_envs": 64, "total_steps": 100_000_000}, {}),
        # The best return is 0 and the worst -2 / (1 - 0.99) = -200; half of that amount and the entropy's share,
        # 2 * 0.2 / (1 - 0.99) = 40, are granted on both sides.
        (None, {}, {"value/mean": 139.0}),
        ("impossible_values", {}, {"value/mean": 141.0}),
        (None, {}, {"value/mean": -339.0}),
        ("impossible_values", {}, {"value/mean": -341.0}),
        ("impossible_values", {}, {"value/mean": 50.0, "reward/unit": 100.0}),
        # A reward of -0.06 sums up to -6 in 1 / (1 - 0.99) = 100 steps, and to -4.8 in an episode of 80.
        (None, {"algorithm.critic.atoms": 51}, {"rollout_reward": -0.04}),
        ("narrow_support", {"algorithm.critic.atoms": 51}, {"rollout_reward": -0.06}),
        (None, {"algorithm.critic.atoms": 51}, {"rollout_reward": -0.06, "length": 80.0}),
        (None, {"algorithm.critic.atoms": 51, "algorithm.scale_rewards": True}, {"rollout_reward": -0.06}),
        (None, {}, {"policy/temperature": 3.0}),
        ("high_temperature", {}, {"policy/temperature": 3.0, "policy/entropy": DIM * 0.6}),
        ("high_temperature", {}, {"policy/temperature": 3.0, "policy/entropy": -DIM * 1.6}),
        (None, {}, {"policy/entropy": -7.0}),
        ("low_temperature", {}, {"policy/entropy": -7.0, "policy/temperature": 0.001}),
        ("saturated_actions", {}, {"doctor/action_at_bound": 0.95}),
    ],
)  # fmt: skip
def test_a_fault_of_sac_is_named(rule, settings, columns):
    signals = Signals(SAC | settings, rows_of(-50.0, **(HEALTHY | columns)))
    assert [finding.rule for finding in diagnose_signals(signals, [SAC_RULES])] == ([] if rule is None else [rule])


def test_changes_of_sac_can_be_applied():
    temperature = TemperatureConfig(target_entropy=-9.0)
    config = canter.TrainConfig(algorithm=canter.SACConfig(tau=0.1, temperature=temperature))
    for columns in (
        {"policy/temperature": 3.0, "policy/entropy": 1.2},
        {"policy/entropy": -7.0, "policy/temperature": 0.001},
        {"value/mean": 1e6},
        {"rollout_reward": -1.0},
    ):
        settings = SAC | {"algorithm.temperature.target_entropy": -9.0, "algorithm.critic.atoms": 51}
        settings["algorithm.optimizer.learning_rate"] = 0.1
        for finding in diagnose_signals(Signals(settings, rows_of(-50.0, **(HEALTHY | columns))), [SAC_RULES]):
            assert finding.flags
            assert with_overrides(config, finding.change) != config


AMP = {"kind": "amp", "task_weight": 0.5, "style_weight": 0.5}
FAR = {"amp/accuracy_agent": 0.7, "amp/accuracy_demo": 0.8, "amp/style_reward": 0.5, "amp/pose_error": 0.3}


def fades(i):
    return 1.4 if i == 0 else 0.1


@pytest.mark.parametrize(
    "rule, settings, columns",
    [
        (None, {}, {}),
        ("discriminator_wins", {}, {"amp/accuracy_agent": 1.0, "amp/accuracy_demo": 0.99, "amp/style_reward": fades}),
        (None, {}, {"amp/accuracy_agent": 1.0, "amp/accuracy_demo": 0.9, "amp/style_reward": fades}),
        (None, {}, {"amp/accuracy_agent": 1.0, "amp/accuracy_demo": 1.0}),
        ("blind_discriminator", {}, {"amp/accuracy_agent": 0.3, "amp/accuracy_demo": 0.7}),
        (None, {}, {"amp/accuracy_agent": lambda i: 0.9 if i < 3 else 0.5, "amp/accuracy_demo": 0.5}),
        (None, {}, {"amp/accuracy_agent": 0.5, "amp/accuracy_demo": 0.5, "amp/pose_error": lambda i: 0.3 - 0.01 * i}),
        ("style_ignored", {"style_weight": 0.01}, {}),
        (None, {"task_weight": 0.0}, {}),
    ],
)
def test_a_fault_of_a_motion_prior_is_named(rule, settings, columns):
    plain = {"total_steps": 30_000, "algorithm.extensions": [AMP | settings]}
    signals = Signals(plain, rows_of(-50.0, **(FAR | columns)))
    assert [finding.rule for finding in diagnose_signals(signals, [AMP_RULES])] == ([] if rule is None else [rule])


PPO = {
    "total_steps": 30_000,
    "algorithm.horizon": 32,
    "env.num_envs": 16,
    "algorithm.num_minibatches": 16,
    "algorithm.optimizer.learning_rate.kind": "adaptive_kl",
    "algorithm.optimizer.learning_rate.minimum": 1e-6,
    "algorithm.optimizer.learning_rate.target_kl": 0.01,
}


def zigzag(i):
    return 1e-3 * (2.0 if i % 2 else 1.0)


@pytest.mark.parametrize(
    "rule, settings, rate",
    [
        ("noisy_rate", {}, zigzag),
        (None, {"algorithm.num_minibatches": 1}, zigzag),
        (None, {"algorithm.optimizer.learning_rate.kind": "linear"}, zigzag),
        (None, {}, lambda i: 10.0 * 1.6**-i),
        ("noisy_rate", {}, 1e-6),  # the lower bound, though the KL is above its target
        (None, {}, lambda i: 1e-3 * (1.2 if i % 2 else 1.0)),
    ],
)
def test_an_adaptive_rate_that_follows_noise_is_named(rule, settings, rate):
    rows = rows_of(-50.0, **{"optim/learning_rate/model": rate, "policy/kl": 0.02})
    found = diagnose_signals(Signals(PPO | settings, rows), [PPO_RULES])
    assert [finding.rule for finding in found] == ([] if rule is None else [rule])


@pytest.mark.parametrize(
    "rule, coef, std, returns",
    [
        ("std_runaway", 0.001, lambda i: max(1.0 - 0.1 * i, 0.02 * i), lambda i: 100.0 - abs(i - 12) * 5.0),
        (None, 0.0, lambda i: max(1.0 - 0.1 * i, 0.02 * i), lambda i: 100.0 - abs(i - 12) * 5.0),
        (None, 0.001, lambda i: max(1.0 - 0.1 * i, 0.02 * i), lambda i: 5.0 * i),
        (None, 0.001, lambda i: max(1.0 - 0.1 * i, 0.1), lambda i: 100.0 - abs(i - 12) * 5.0),
    ],
)
def test_a_std_that_grows_again_is_named(rule, coef, std, returns):
    columns = {"policy/std": std, "policy/entropy": 1.0, "return": returns, "rollout_return": returns}
    settings = {"total_steps": 30_000, "algorithm.entropy_coef": coef}
    found = diagnose_signals(Signals(settings, rows_of(0.0, **columns)), [PPO_RULES])
    assert [finding.rule for finding in found] == ([] if rule is None else [rule])


def test_the_newest_transitions_of_a_replay_are_read():
    spec = canter.EnvSpec(
        num_envs=2,
        obs={"policy": canter.TensorSpec((1,), torch.float32)},
        action=canter.Continuous((-1.0,), (1.0,)),
        device=torch.device("cpu"),
    )
    replay = ReplayConfig(capacity=6).build(spec, 1)
    for step in range(5):  # the ring holds the last three steps
        flags = torch.zeros((1, 2), dtype=torch.bool)
        rollout = Rollout(
            obs={"policy": torch.full((2, 2, 1), float(step))}, reward=torch.tensor([[step, step + 0.5]]),
            terminated=flags, truncated=flags, valid=~flags, duration=torch.ones(1, 2), final_obs=None,
            reset=torch.zeros((2, 2), dtype=torch.bool), state=(), record=(),
        )  # fmt: skip
        replay.write(rollout, torch.zeros(1, 2, 1))
    assert replay.reward[replay.newest(3)].tolist() == [4.5, 4.0, 3.5]
    assert sorted(set(replay.reward[replay.newest(50)].tolist())) == [2.0, 2.5, 3.0, 3.5, 4.0, 4.5]
