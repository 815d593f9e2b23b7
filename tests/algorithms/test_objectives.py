import pytest
import torch

from canter.algorithms.ppo import PPOConfig
from canter.algorithms.ppo.advantages import AverageReward, Discounted
from canter.core.data.rollout import Rollout
from canter.core.specs import Discrete, EnvSpec, TensorSpec
from canter.envs.tensor import Pendulum, QueueNetwork
from canter.functional.returns import gae
from canter.nn.actor_critic import ModelConfig
from canter.nn.heads import ValueHead, ValueNormalizerConfig
from canter.training.collector import Collector


def rollout_of(reward, duration=None, num_envs=1):
    spec = EnvSpec({"policy": TensorSpec((1,))}, Discrete(2), num_envs=num_envs)
    reward = torch.as_tensor(reward).reshape(-1, num_envs)
    rollout = Rollout.allocate(len(reward), {"policy": torch.zeros(num_envs, 1)}, torch.zeros(num_envs), spec)
    rollout.reward.copy_(reward)
    rollout.valid.fill_(True)
    if duration is not None:
        rollout.duration.copy_(torch.as_tensor(duration).reshape(-1, num_envs))
    return rollout


def rows(*values):
    return torch.tensor(values).unsqueeze(-1)


def test_the_rate_is_reward_per_unit_of_time():
    objective, zero = AverageReward(0.1, 0.95), rows(0.0, 0.0)
    objective.update(rollout_of([6.0, 1.0], duration=[3.0, 0.5]), zero, zero)
    assert objective.rate.item() == pytest.approx(2.0)


def test_the_rate_is_zero_before_anything_was_seen():
    assert AverageReward(0.1, 0.95).rate.item() == 0.0


def test_values_correct_a_rate_that_an_incomplete_cycle_gets_wrong():
    """The cycle pays 0, 2, 0, 2, ...; three rows of it average 2/3 or 4/3, and values know what was left out."""
    objective = AverageReward(0.1, 0.95)
    objective.update(rollout_of([0.0, 2.0, 0.0]), rows(-0.5, 0.5, -0.5), rows(0.5, -0.5, 0.5))
    assert objective.rate.item() == pytest.approx(1.0)


def test_values_correct_for_resets_to_a_good_state():
    """A queue costs its length and is emptied every five steps, before it could grow to its usual length."""
    generator, step = torch.Generator().manual_seed(0), 0.4
    queue, rewards, values, nexts, cut = 0, [], [], [], []
    for t in range(40_000):
        up = torch.rand((), generator=generator).item() < step
        after = queue + 1 if up else max(queue - 1, 0)
        rewards.append(float(-queue))
        # Poisson's equation of the walk that goes up with probability 0.4 and else down: V(n) = -(n^2 + n) / 0.4.
        values.append(-(queue**2 + queue) / 0.4)
        nexts.append(-(after**2 + after) / 0.4)
        cut.append(t % 5 == 4)
        queue = 0 if cut[-1] else after
    ratio = step / (1 - step)
    true_rate = -ratio / (1 - ratio)  # minus the mean of a geometric queue
    rollout = rollout_of(rewards)
    rollout.truncated.copy_(rows(*cut))
    assert rollout.reward.mean().item() > 0.6 * true_rate  # far too good, because of the resets
    objective = AverageReward(0.1, 0.95)
    objective.update(rollout, rows(*values), rows(*nexts))
    assert objective.rate.item() == pytest.approx(true_rate, rel=0.05)


def test_a_terminated_row_has_no_successor():
    objective, rollout = AverageReward(0.1, 0.95), rollout_of([1.0])
    rollout.terminated.fill_(True)
    objective.update(rollout, rows(3.0), rows(float("nan")))
    assert objective.rate.item() == pytest.approx(1.0 - 3.0)


def test_centring_shifts_all_values_alike_and_leaves_their_differences():
    torch.manual_seed(0)
    for normalizer in (ValueNormalizerConfig(), None):
        head, features = ValueHead(3, "orthogonal", 1.0, normalizer), torch.randn(10, 3)
        valid = torch.ones(10, dtype=torch.bool)
        head.update_statistics(torch.randn(10) * 7 + 40, valid)
        before = head.normalizer.inverse(head(features)).detach()
        return_ = before + 5.0
        AverageReward(0.5, 0.95).centre_(head, return_, valid)
        after = head.normalizer.inverse(head(features)).detach()
        torch.testing.assert_close(after, before - 0.5 * return_.mean(), atol=1e-4, rtol=1e-4)


def test_centring_by_nan_moves_nothing():
    head = ValueHead(3, "orthogonal", 1.0, None)
    before = head.linear.bias.clone()
    AverageReward(0.5, 0.95).centre_(head, rows(float("nan"), 1.0), torch.ones(2, 1, dtype=torch.bool))
    assert torch.equal(head.linear.bias, before)


def test_a_discount_of_time_is_one_of_steps_to_the_power_of_their_duration():
    rollout, value, following = rollout_of([1.0, 2.0], duration=[2.0, 0.5]), rows(1.0, 2.0), rows(2.0, 3.0)
    found, _ = Discounted(0.9, "time", 0.8).advantages(rollout, value, following)
    done = torch.zeros(2, 1, dtype=torch.bool)
    expected, _ = gae(rollout.reward, value, following, done, done, rows(0.9**2, 0.9**0.5), 0.8)
    torch.testing.assert_close(found, expected)
    by_step, _ = Discounted(0.9, "step", 0.8).advantages(rollout, value, following)
    torch.testing.assert_close(by_step, gae(rollout.reward, value, following, done, done, 0.9, 0.8)[0])


def test_durations_reach_the_rollout_and_default_to_one():
    env = QueueNetwork(4, sampled_duration=True)
    collector = Collector(env, PPOConfig(horizon=8, num_minibatches=1).build(env.spec, 0), 0)
    duration = collector.collect().duration
    assert duration.unique().numel() == 32
    assert duration.mean().item() == pytest.approx(1 / env.event_rate, rel=0.5)
    env = Pendulum(4)
    collector = Collector(env, PPOConfig(horizon=8, num_minibatches=1).build(env.spec, 0), 0)
    assert (collector.collect().duration == 1).all()


def test_gamma_one_matters_only_for_the_discounted_objective():
    spec = Pendulum(4).spec
    with pytest.raises(ValueError, match="gamma=1"):
        PPOConfig(gamma=1.0, horizon=8).build(spec, 0)
    PPOConfig(gamma=1.0, horizon=8, objective="average").build(spec, 0)


@pytest.mark.parametrize("step", [0.0, 1.5])
def test_a_step_out_of_range_is_refused_by_name(step):
    with pytest.raises(ValueError, match=f"average_step={step} must lie above 0 and up to 1"):
        PPOConfig(average_step=step)


def test_the_rate_is_reported_in_the_average_mode_only():
    for objective in ("average", "discounted"):
        env = Pendulum(4)
        algorithm = PPOConfig(horizon=8, num_minibatches=1, objective=objective, model=ModelConfig()).build(env.spec, 0)
        metrics = algorithm.update(Collector(env, algorithm, 0).collect())
        assert ("value/reward_rate" in metrics) == (objective == "average")
