"""A population computes for each member what a single run computes, and no member depends on another.

A population multiplies the matrices of all members in one call, which may round differently than a
single run; so runs are compared after a few updates, with thresholds of some hundred roundings.
Members of populations of equal size are compared to the bit.
"""

from dataclasses import fields, replace

import pytest
import torch

import canter
from canter.algorithms.ppo import MemberConfig, PopulationConfig
from canter.core.dispatch import plain_functions
from canter.core.seeding import derive_seed
from canter.envs.tensor import tensor_envs
from canter.functional.optimization import AdamGroup, adam_rows_, adam_step_
from canter.training.collector import Collector

ENVS = 4
SHARED = {"horizon": 16, "epochs": 2, "num_minibatches": 4}


def single_run(env_id, config, seed, iterations, **options):
    """An ordinary run by the definition of PPO."""
    env = tensor_envs[env_id](ENVS, **options)
    algorithm = config.build(env.spec, seed)
    algorithm.use_engine("plain")
    with plain_functions():
        collector = Collector(env, algorithm, derive_seed(seed, "env"))
        metrics = [algorithm.update(collector.collect()) for _ in range(iterations)]
    return algorithm, metrics


def population(config, members):
    shared = {each.name: getattr(config, each.name) for each in fields(canter.PPOConfig)}
    return PopulationConfig(**shared, members=tuple(members))


def run(env_id, config, members, iterations, seed=0, change=None, **options):
    """A population; `change(algorithm)` is called before its first iteration."""
    env = tensor_envs[env_id](ENVS * len(members), **options)
    algorithm = population(config, members).build(env.spec, seed)
    collector = Collector(env, algorithm, derive_seed(seed, "env"))
    if change is not None:
        change(algorithm)
    metrics = [algorithm.update(collector.collect()) for _ in range(iterations)]
    return algorithm, metrics


def weights(policy):
    return {name: tensor.detach().clone() for name, tensor in policy.actor.state_dict().items()}


def assert_close(left, right, tolerance=2e-5):
    for name, tensor in left.items():
        assert torch.allclose(tensor, right[name], rtol=tolerance, atol=tolerance), name


VARIANTS = {
    "discrete actions": ("cartpole", {}),
    "continuous actions": ("pendulum", {"reward": canter.RewardConfig(normalize=True)}),
    "squashed actions, shared trunk": (
        "pendulum",
        {"model": canter.ModelConfig(distribution="tanh_gaussian", shared_trunk=True)},
    ),
    "clipped values, advantages by minibatch": (
        "pendulum",
        {"value_loss": "clipped", "advantage_normalization": "minibatch", "shuffle": "rollout"},
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_population_of_one_is_an_ordinary_run(variant):
    env_id, settings = VARIANTS[variant]
    config = canter.PPOConfig(**SHARED, entropy_coef=canter.Constant(0.01), **settings)
    expected, rows = single_run(env_id, config, 5, 3, max_episode_steps=20)
    member, own_rows = run(env_id, config, [MemberConfig(seed=5)], 3, max_episode_steps=20)
    assert_close(weights(expected.policy), weights(member.policy))
    for row, own in zip(rows, own_rows, strict=True):
        assert row.keys() == own.keys()
        for name in row:
            assert float(own[name]) == pytest.approx(float(row[name]), rel=1e-3, abs=1e-4), name


SCHEDULES = {
    "linear": canter.Linear(1e-3, 1e-4),
    "adaptive": canter.AdaptiveKL(1e-3, target_kl=0.0005, every="minibatch"),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_and_early_stopping_are_those_of_an_ordinary_run(schedule):
    optimizer = canter.OptimizerConfig(learning_rate=SCHEDULES[schedule])
    config = canter.PPOConfig(**{**SHARED, "epochs": 6}, optimizer=optimizer, target_kl=0.001)
    expected, rows = single_run("pendulum", config, 2, 3)
    both, own_rows = run("pendulum", config, [MemberConfig(seed=2), MemberConfig(seed=9, learning_rate=3e-3)], 3)
    assert_close(weights(expected.policy), weights(both.views[0]))
    steps = [float(row["optim/minibatch_updates"]) for row in rows]
    assert min(steps) < 24  # the target stops some updates
    assert float(both.latest["optim/minibatch_updates"][0]) == steps[-1]
    rates = both.optimizer.adam.learning_rate
    second, _ = single_run("pendulum", MemberConfig(learning_rate=3e-3).settings_of(config), 9, 3)
    for rate, one in zip(rates, (expected, second), strict=True):
        assert float(rate) == pytest.approx(float(one.optimizers["policy"].groups["model"].learning_rate))
    assert len(own_rows) == 3


MEMBERS = (
    MemberConfig(seed=1),
    MemberConfig(seed=2, learning_rate=3e-3, entropy_coef=0.02),
    MemberConfig(seed=3, clip_ratio=0.05, gamma=0.9, gae_lambda=0.8),
)


@pytest.mark.parametrize("env_id", ["cartpole", pytest.param("quadrotor", marks=pytest.mark.long)])
def test_each_member_equals_the_run_with_that_member_alone(env_id):
    config = canter.PPOConfig(**SHARED, reward=canter.RewardConfig(normalize=True))
    together, _ = run(env_id, config, MEMBERS, 3)
    for number, member in enumerate(MEMBERS):
        alone, _ = run(env_id, config, [member], 3, seed=50 + number)
        assert_close(weights(alone.policy), weights(together.views[number]))
        single, _ = single_run(env_id, member.settings_of(config), member.seed, 3)
        assert_close(weights(single.policy), weights(together.views[number]))


SETTINGS = {"seed": 8, "learning_rate": 1e-4, "entropy_coef": 0.1, "clip_ratio": 0.01, "gamma": 0.5, "gae_lambda": 0.1}


def trained_with(member):
    """Return the state of a population whose second member is the given one, after two iterations."""
    config = canter.PPOConfig(**SHARED, optimizer=canter.OptimizerConfig(learning_rate=canter.Constant(3e-3)))
    trained, _ = run("cartpole", config, [MEMBERS[0], member, MEMBERS[0]], 2)
    return trained.state_dict()


@pytest.fixture(scope="module")
def before():
    return trained_with(MemberConfig(seed=4))


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_changes_its_member_and_no_bit_of_the_others(before, setting):
    left, right = before, trained_with(replace(MemberConfig(seed=4), **{setting: SETTINGS[setting]}))
    for number in (0, 2):
        assert left["flat"][number].equal(right["flat"][number])
        assert all(buffer[number].equal(right["buffers"][name][number]) for name, buffer in left["buffers"].items())
    assert not left["flat"][1].equal(right["flat"][1])


def test_draws_that_are_made_ahead_are_those_of_the_member_alone():
    """As on a GPU, where the draws of all steps of a rollout take one launch for each member."""
    config = canter.PPOConfig(**SHARED)

    def learn(members):
        env = tensor_envs["pendulum"](ENVS * len(members), max_episode_steps=7)
        algorithm = population(config, members).build(env.spec, 0)
        algorithm.draws_ahead = True
        collector = Collector(env, algorithm, derive_seed(0, "env"))
        for _ in range(2):
            algorithm.begin_iteration()
            algorithm.update(collector.collect())
        assert not any(next(block, None) is not None for block in algorithm.policy_rng.blocks.values())
        return algorithm, collector.rollout.record.action

    together, action = learn(MEMBERS)
    for number, member in enumerate(MEMBERS):
        alone, own = learn([member])
        assert_close(weights(alone.policy), weights(together.views[number]))
        torch.testing.assert_close(action[:, number * ENVS : (number + 1) * ENVS], own, rtol=1e-3, atol=1e-3)
    assert len(action.unique()) == action.numel()  # no draw is used twice


def test_settings_in_device_tensors_may_change_during_a_run():
    config = canter.PPOConfig(**SHARED)

    def change(algorithm):
        algorithm.settings["clip_ratio"][1] = 0.05
        algorithm.optimizer.adam.learning_rate[1] = 3e-3

    changed, _ = run("cartpole", config, [MemberConfig(), MemberConfig()], 2, change=change)
    given = [MemberConfig(), MemberConfig(clip_ratio=0.05, learning_rate=3e-3)]
    expected, _ = run("cartpole", config, given, 2)
    assert changed.optimizer.adam.flat.equal(expected.optimizer.adam.flat)


def test_nan_in_one_member_reaches_no_other():
    config = canter.PPOConfig(**SHARED)

    def spoil(algorithm):
        algorithm.optimizer.adam.exp_avg[1].fill_(torch.nan)

    spoilt, _ = run("cartpole", config, MEMBERS, 2, change=spoil)
    healthy, _ = run("cartpole", config, MEMBERS, 2)
    assert spoilt.optimizer.adam.flat[1].isnan().any()
    for number in (0, 2):
        assert spoilt.optimizer.adam.flat[number].equal(healthy.optimizer.adam.flat[number])


@pytest.mark.parametrize("coupled", [False, True])
def test_adam_steps_each_row_as_a_single_vector(coupled):
    generator = torch.Generator().manual_seed(0)
    members, size = 4, 50
    draw = [torch.randn(members, size, generator=generator) for _ in range(4)]
    rates = torch.tensor([1e-3, 1e-2, 1e-1, 1e-3])
    skip = torch.tensor([False, False, True, False])
    draw[1][3, 7] = torch.inf
    same = {"betas": (0.9, 0.99), "eps": 1e-5, "weight_decay": 0.1, "max_norm": 0.5, "coupled": coupled}

    def group(tensors, step, rate):
        flat, gradient, mean, square = (tensor.clone() for tensor in tensors)
        return AdamGroup(flat, gradient, mean, square.square(), step, rate.clone(), **same)

    rows = group(draw, torch.full((members,), 3.0), rates)
    singles = [group([each[i] for each in draw], torch.tensor(3.0), rates[i]) for i in range(members)]
    for _ in range(3):
        norms, blocked = adam_rows_(rows, skip)
        for number, one in enumerate(singles):
            one.gradient.copy_(draw[1][number])
            norm, stopped = adam_step_.plain([one], True, skip[number])
            assert float(blocked[number]) == float(stopped) == float(number == 3)
            assert float(norms[number]) == pytest.approx(float(norm))
    for number, one in enumerate(singles):
        for left, right in ((rows.flat, one.flat), (rows.exp_avg, one.exp_avg), (rows.exp_avg_sq, one.exp_avg_sq)):
            assert torch.allclose(left[number], right, rtol=1e-5, atol=1e-6)
        assert float(rows.step[number]) == float(one.step) == (3.0 if number >= 2 else 6.0)


def test_returns_of_episodes_are_counted_for_each_member():
    """A pole that falls within 12 steps: every return is the length of an episode."""
    env = tensor_envs["cartpole"](6, max_episode_steps=7)
    algorithm = population(canter.PPOConfig(**SHARED), [MemberConfig()] * 3).build(env.spec, 0)
    collector = Collector(env, algorithm, 0)
    ended = {member: [] for member in range(3)}
    running = [0] * 6
    for _ in range(3):
        rollout = collector.collect()
        for done in rollout.done.tolist():
            for number in range(6):
                running[number] += 1
                if done[number]:
                    ended[number // 2].append(running[number])
                    running[number] = 0
        algorithm.update(rollout)
    rows = algorithm.member_rows()
    assert rows["episodes"] == [len(own) for own in ended.values()]
    assert rows["episode_returns"] == [sum(own) for own in ended.values()]


REFUSED = {
    "model.policy.rnn": {"model": canter.ModelConfig(policy=canter.NetworkConfig(rnn=canter.RNNConfig()))},
    "central_value": {"central_value": canter.CentralValueConfig()},
    "kl=rl_games": {"kl": "rl_games"},
    "policy_average=0.9": {"policy_average": 0.9},
    "model.distribution=beta": {"model": canter.ModelConfig(distribution="beta")},
    "objective=average": {"objective": "average"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(name):
    spec = tensor_envs["pendulum"](4).spec
    with pytest.raises(ValueError, match=name):
        population(canter.PPOConfig(**SHARED, **REFUSED[name]), MEMBERS[:2]).build(spec, 0)


def test_environments_must_be_divisible_and_plain():
    env = tensor_envs["pendulum"](4)
    with pytest.raises(ValueError, match=r"num_envs=4.*3 members"):
        population(canter.PPOConfig(**SHARED), MEMBERS).build(env.spec, 0)
    config = replace(canter.EnvConfig(id="CartPole-v1"), num_envs=2)
    gymnasium = config.build("cpu")
    algorithm = population(canter.PPOConfig(**SHARED), MEMBERS[:2]).build(gymnasium.spec, 0)
    with pytest.raises(ValueError, match="needs a plain tensor environment"):
        Collector(gymnasium, algorithm, 0)
    gymnasium.close()
