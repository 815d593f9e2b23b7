import math

import pytest
import torch

from canter.algorithms.ppo import PPOConfig
from canter.algorithms.ppo.rewards import RewardConfig
from canter.core.data.rollout import Rollout
from canter.core.specs import Discrete, EnvSpec, TensorSpec
from canter.envs.gymnasium import make_gymnasium
from canter.envs.tensor import CartPole, Pendulum, QueueNetwork
from canter.training.collector import Collector

SPEC = EnvSpec({"policy": TensorSpec((1,))}, Discrete(2), num_envs=1)


def rollout_of(reward, *, done=(), valid=None, duration=None, spec=SPEC):
    """A rollout of one environment with these rewards; `done` lists the rows that end by truncation."""
    rollout = Rollout.allocate(len(reward), {"policy": torch.zeros(spec.num_envs, 1)}, torch.zeros(1), spec)
    rollout.reward.copy_(torch.tensor(reward).unsqueeze(-1))
    rollout.valid.copy_(torch.tensor(valid or [True] * len(reward)).unsqueeze(-1))
    rollout.truncated[list(done)] = True
    if duration:
        rollout.duration.copy_(torch.tensor(duration).unsqueeze(-1))
    return rollout


def transformed(config, reward, gamma=0.99, **others):
    return config.build(SPEC, gamma)(rollout_of(reward, **others)).reward.flatten().tolist()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [-3.0, 0.5, 8.0]),
        ({"scale": 0.1}, [-0.3, 0.05, 0.8]),
        ({"shift": 2.0}, [-1.0, 2.5, 10.0]),
        ({"shift": 2.0, "scale": 0.1}, [-0.1, 0.25, 1.0]),
        ({"minimum": -1.0, "maximum": 1.0}, [-1.0, 0.5, 1.0]),
        ({"maximum": 1.0}, [-3.0, 0.5, 1.0]),
        ({"scale": 0.1, "maximum": 0.5}, [-0.3, 0.05, 0.5]),
        ({"squash": "symlog"}, [-math.log(4), math.log(1.5), math.log(9)]),
        ({"shift": 4.0, "minimum": 0.5, "squash": "log"}, [0.0, math.log(4.5), math.log(12)]),
        ({"minimum": 0.1, "squash": "log"}, [math.log(0.1), math.log(0.5), math.log(8)]),
        ({"time": "multiply"}, [-6.0, 0.25, 32.0]),
        ({"time": "divide"}, [-1.5, 1.0, 2.0]),
        ({"time": "multiply", "shift": 1.0, "scale": 2.0}, [-10.0, 2.5, 66.0]),
        ({"centering": 0.5}, [-3.0 - 5.5 / 3, 0.5 - 5.5 / 3, 8.0 - 5.5 / 3]),
    ],
    ids=str,
)
def test_transforms_by_hand_in_their_order(settings, expected):
    found = transformed(RewardConfig(**settings), [-3.0, 0.5, 8.0], duration=[2.0, 0.5, 4.0])
    assert found == pytest.approx(expected, rel=1e-6)


def test_division_by_the_spread_of_the_discounted_return_by_hand():
    pipeline = RewardConfig(normalize=True).build(SPEC, gamma=0.5)
    first = pipeline(rollout_of([2.0, 0.0, 4.0], done=[1])).reward.flatten()
    returns = torch.tensor([2.0, 1.0, 4.0])  # the episode ended after the second row
    assert first.tolist() == pytest.approx([x / returns.std(correction=0).item() for x in (2.0, 0.0, 4.0)])
    second = pipeline(rollout_of([1.0, 1.0])).reward.flatten()
    returns = torch.tensor([2.0, 1.0, 4.0, 3.0, 2.5])  # and runs on from one rollout to the next
    assert second.tolist() == pytest.approx([1 / returns.std(correction=0).item()] * 2)


def test_the_discount_of_that_return_may_be_one_of_time():
    pipeline = RewardConfig(normalize=True).build(SPEC, gamma=0.5, per="time")
    found = pipeline(rollout_of([4.0, 0.0], duration=[1.0, 2.0])).reward.flatten()
    assert found[0].item() == pytest.approx(4.0 / torch.tensor([4.0, 1.0]).std(correction=0).item())


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_divided_rewards_do_not_depend_on_the_scale(scale):
    reward = [1.0, -2.0, 0.5, 3.0]
    expected = transformed(RewardConfig(normalize=True), reward)
    assert transformed(RewardConfig(normalize=True, scale=scale), reward) == pytest.approx(expected, rel=1e-4)


def test_returns_that_are_all_alike_are_not_divided():
    ends = {"done": [0, 1, 2]}
    assert transformed(RewardConfig(normalize=True), [0.1, 0.1, 0.1], **ends) == pytest.approx([0.1] * 3)
    assert transformed(RewardConfig(normalize=True), [0.0, 0.0, 0.0], **ends) == [0.0] * 3


@pytest.mark.parametrize("settings", [{"normalize": True}, {"centering": 0.5}], ids=str)
def test_invalid_steps_have_no_influence(settings):
    config = RewardConfig(**settings)
    expected = transformed(config, [1.0, 5.0, 2.0])
    padded = transformed(config, [1.0, 5.0, 99.0, 2.0], valid=[True, True, False, True])
    assert [padded[0], padded[1], padded[3]] == pytest.approx(expected)


def test_the_moving_average_follows_over_rollouts():
    pipeline = RewardConfig(centering=0.5).build(SPEC, 0.99)
    assert pipeline(rollout_of([1.0, 3.0])).reward.flatten().tolist() == [-1.0, 1.0]
    average = (0.25 * 2.0 + 0.5 * 8.0) / 0.75
    assert pipeline(rollout_of([8.0])).reward.item() == pytest.approx(8.0 - average)


def test_nan_stays_out_of_the_statistics():
    pipeline = RewardConfig(centering=0.1, normalize=True).build(SPEC, 0.99)
    pipeline(rollout_of([1.0, 2.0]))
    before = {name: tensor.clone() for name, tensor in pipeline.state_dict().items()}
    pipeline(rollout_of([1.0, float("nan")]))
    after = pipeline.state_dict()
    assert all(torch.isfinite(tensor).all() for tensor in after.values())
    assert torch.equal(after["stages.0.average.value"], before["stages.0.average.value"])
    assert torch.equal(after["stages.1.statistics.m2"], before["stages.1.statistics.m2"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"minimum": 1.0, "maximum": 0.0}, "minimum=1.0 must be below maximum=0.0"),
        ({"squash": "log"}, "squash='log' needs a minimum above 0, not minimum=None"),
        ({"squash": "log", "minimum": 0.0}, "not minimum=0.0"),
        ({"scale": 0.0}, "scale=0.0 leaves nothing"),
        ({"centering": 0.0}, "centering=0.0 must lie above 0"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        RewardConfig(**settings)


# In a run.


class Counting:
    """An environment that keeps its own account of what it paid."""

    def __init__(self, env):
        self.env, self.spec, self.reset, self.close = env, env.spec, env.reset, env.close
        self.running, self.returns = torch.zeros(env.spec.num_envs, dtype=torch.float64), []

    def step(self, action):
        step = self.env.step(action)
        self.running += torch.where(step.valid, step.reward, 0.0)
        for i in (step.terminated | step.truncated).nonzero().flatten().tolist():
            self.returns.append(self.running[i].item())
            self.running[i] = 0.0
        return step


CONFIGS = {
    "scale": RewardConfig(scale=0.01, shift=5.0),
    "clip": RewardConfig(minimum=-0.1, maximum=0.1),
    "log": RewardConfig(shift=20.0, minimum=1e-3, squash="log"),
    "symlog": RewardConfig(squash="symlog"),
    "centred": RewardConfig(centering=0.1),
    "divided": RewardConfig(normalize=True),
    "timed": RewardConfig(time="multiply"),
    "all": RewardConfig(
        time="divide", scale=3.0, shift=1.0, maximum=9.0, squash="symlog", centering=0.1, normalize=True
    ),
}
ENVS = {
    "pendulum": lambda: Pendulum(4, max_episode_steps=12),
    "cartpole": lambda: CartPole(4),
    "queue": lambda: QueueNetwork(4, max_episode_steps=12, sampled_duration=True),
    "next_step": lambda: make_gymnasium("Pendulum-v1", 2, autoreset="next_step", max_episode_steps=12),
}


@pytest.mark.parametrize("env_name", ENVS)
@pytest.mark.parametrize("name", CONFIGS)
def test_reported_returns_are_of_the_raw_reward(name, env_name):
    env, objective = Counting(ENVS[env_name]()), "average" if env_name == "queue" else "discounted"
    config = PPOConfig(
        horizon=16, epochs=2, num_minibatches=2, reward=CONFIGS[name], objective=objective, recompute_advantage=True
    )
    algorithm = config.build(env.spec, 0)
    collector, reported = Collector(env, algorithm, 0), []
    for _ in range(4):
        rollout = collector.collect()
        raw = rollout.reward.clone()
        metrics = algorithm.update(rollout)
        assert torch.equal(collector.rollout.reward, raw)
        assert all(math.isfinite(value) for value in metrics.values())
        reported += collector.read_episodes().return_
    assert len(reported) >= 4
    assert sorted(reported) == pytest.approx(sorted(env.returns), rel=1e-9)


def test_a_constant_scale_changes_nothing_but_the_units_of_values():
    def learn(scale):
        env = Pendulum(4)
        config = PPOConfig(horizon=16, epochs=2, num_minibatches=2, reward=RewardConfig(scale=scale))
        algorithm = config.build(env.spec, 0)
        collector = Collector(env, algorithm, 0)
        for _ in range(3):
            algorithm.update(collector.collect())
        return algorithm.model

    small, large = learn(1.0), learn(1024.0)
    for a, b in zip(small.actor.parameters(), large.actor.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert (large.critic.head.normalizer.scale / small.critic.head.normalizer.scale).item() == pytest.approx(
        1024, rel=1e-2
    )


def test_statistics_are_updated_once_for_each_rollout_however_often_it_is_evaluated():
    env = Pendulum(4)
    config = PPOConfig(
        horizon=8,
        epochs=5,
        num_minibatches=1,
        recompute_advantage=True,
        objective="average",
        reward=RewardConfig(centering=0.1, normalize=True),
    )
    algorithm = config.build(env.spec, 0)
    collector = Collector(env, algorithm, 0)
    for iteration in range(1, 4):
        algorithm.update(collector.collect())
        assert algorithm.rewards.stages[1].statistics.count == iteration * 32
        weight = torch.tensor(1 - 0.9**iteration, dtype=torch.float64)
        torch.testing.assert_close(algorithm.rewards.stages[0].average.weight, weight)
        torch.testing.assert_close(algorithm.objective.gain_and_time.weight, weight)


def test_statistics_are_saved_and_restored_in_place():
    def build(seed):
        env = Pendulum(4, max_episode_steps=10)
        config = PPOConfig(
            horizon=8,
            num_minibatches=2,
            objective="average",
            reward=RewardConfig(centering=0.1, normalize=True, squash="symlog"),
        )
        algorithm = config.build(env.spec, seed)
        return algorithm, Collector(env, algorithm, seed)

    algorithm, collector = build(0)
    for _ in range(3):
        algorithm.update(collector.collect())
    restored, other = build(1)
    addresses = [t.data_ptr() for t in (*restored.rewards.buffers(), *restored.objective.buffers())]
    restored.load_state_dict(algorithm.state_dict())
    assert [t.data_ptr() for t in (*restored.rewards.buffers(), *restored.objective.buffers())] == addresses
    other.load_state_dict(collector.state_dict())
    for _ in range(2):
        left, right = algorithm.update(collector.collect()), restored.update(other.collect())
        assert all(torch.equal(left[name], right[name]) for name in left)
