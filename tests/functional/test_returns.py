import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from canter.functional.returns import average_reward_gae, gae, reverse_discounted_sum_, successor_values


def rows(*values: float) -> Tensor:
    """One environment: [T, 1] float64."""
    return torch.tensor(values, dtype=torch.float64).unsqueeze(-1)


def flags(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool).unsqueeze(-1)


def n_step_definition(reward, value, next_value, terminated, done, gamma, gae_lambda):
    """The advantage as an average of n-step returns, every one of them summed on its own.

    G(n) = discounted sum of n rewards + discounted value of where they lead to; all weight that is left goes to the
    longest return, the one that ends with the episode or with the rollout.
    """
    horizon, num_envs = reward.shape
    gamma = torch.as_tensor(gamma, dtype=torch.float64).expand(horizon, num_envs)
    lists = [x.T.tolist() for x in (reward, value, next_value, terminated, done, gamma)]
    result = torch.zeros(num_envs, horizon, dtype=torch.float64)
    for env in range(num_envs):
        r, v, v_next, term, end, g = (x[env] for x in lists)
        for t in range(horizon):
            last = next((k for k in range(t, horizon) if end[k]), horizon - 1)
            longest = last - t + 1
            total = 0.0
            for n in range(1, longest + 1):
                n_step, discount = 0.0, 1.0
                for k in range(t, t + n):
                    n_step += discount * r[k]
                    discount *= g[k]
                n_step += 0.0 if term[t + n - 1] else discount * v_next[t + n - 1]
                weight = gae_lambda ** (n - 1) * (1.0 if n == longest else 1.0 - gae_lambda)
                total += weight * n_step
            result[env, t] = total - v[t]
    return result.T


@st.composite
def rollouts(draw):
    """Random rollouts with every kind of ending, in float64.

    Row t+1 starts where row t led to, unless an episode ended there: else n-step returns would mean nothing.
    """
    shape = (draw(st.integers(1, 12)), draw(st.integers(1, 4)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    ending = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))

    def normal() -> Tensor:
        return 3.0 * torch.randn(shape, generator=generator, dtype=torch.float64)

    def uniform() -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    done = uniform() < ending
    terminated = done & (uniform() < draw(st.sampled_from([0.0, 0.5, 1.0])))
    gamma = draw(st.one_of(st.sampled_from([0.0, 0.99, 1.0]), st.floats(0.0, 1.0), st.just("per step")))
    value, next_value = normal(), normal()
    next_value[:-1][~done[:-1]] = value[1:][~done[:-1]]
    return {
        "reward": normal(),
        "value": value,
        "next_value": next_value,
        "terminated": terminated,
        "done": done,
        "gamma": 0.9 ** (1.0 + 3.0 * uniform()) if gamma == "per step" else gamma,
        "gae_lambda": draw(st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.0, 1.0))),
    }


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


# By hand: gamma = 0.5, lambda = 0.5 (so each step back adds a quarter of the advantage after it).


def test_gae_matches_hand_computed_recursion():
    advantage, return_ = gae(
        rows(1, 2, 3), rows(4, 2, 6), rows(2, 6, 8), flags(0, 0, 0), flags(0, 0, 0), gamma=0.5, gae_lambda=0.5
    )
    # delta = 1+1-4, 2+3-2, 3+4-6 = -2, 3, 1
    close(advantage, rows(-2 + 0.25 * 3.25, 3 + 0.25 * 1, 1))
    close(return_, advantage + rows(4, 2, 6))


def test_gae_bootstraps_truncation_but_not_termination():
    reward, value, next_value = rows(1, 1), rows(2, 0), rows(10, 0)
    truncated, _ = gae(reward, value, next_value, flags(0, 0), flags(1, 0), gamma=0.5, gae_lambda=0.5)
    terminated, _ = gae(reward, value, next_value, flags(1, 0), flags(1, 0), gamma=0.5, gae_lambda=0.5)
    close(truncated, rows(1 + 5 - 2, 1))
    close(terminated, rows(1 - 2, 1))


def test_gae_of_one_step_is_the_temporal_difference():
    advantage, return_ = gae(rows(1), rows(3), rows(7), flags(0), flags(0), gamma=0.9, gae_lambda=0.95)
    close(advantage, rows(1 + 0.9 * 7 - 3))
    close(return_, rows(1 + 0.9 * 7))


def test_gae_takes_one_discount_per_step():
    gamma = rows(0.5, 0.25, 1.0)
    advantage, _ = gae(rows(0, 0, 1), rows(0, 0, 0), rows(0, 0, 8), flags(0, 0, 0), flags(0, 0, 0), gamma, 1.0)
    close(advantage, rows(0.5 * 0.25 * 9, 0.25 * 9, 9))


@pytest.mark.parametrize("unknown", [float("nan"), float("inf")])
def test_gae_ignores_the_successor_of_a_terminated_step(unknown):
    advantage, return_ = gae(rows(1, 1), rows(0, 0), rows(1, unknown), flags(0, 1), flags(0, 1), 0.5, 1.0)
    close(advantage, rows(2, 1))
    close(return_, rows(2, 1))


def test_gae_leaves_its_inputs_alone_and_has_no_gradient():
    inputs = [rows(1, 2), rows(3, 4).requires_grad_(), rows(5, 6), flags(0, 1), flags(0, 1)]
    before = [x.detach().clone() for x in inputs]
    advantage, return_ = gae(*inputs, 0.9, 0.9)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))
    assert not advantage.requires_grad and not return_.requires_grad


def test_gae_keeps_float32():
    inputs = [x.float() for x in (rows(1, 2), rows(3, 4), rows(5, 6))]
    advantage, return_ = gae(*inputs, flags(0, 0), flags(0, 1), 0.99, 0.95)
    assert advantage.dtype == return_.dtype == torch.float32


# Against the definition.


@settings(max_examples=300, deadline=None)
@given(rollouts())
def test_gae_equals_the_weighted_average_of_n_step_returns(rollout):
    advantage, return_ = gae(**rollout)
    close(advantage, n_step_definition(**rollout))
    close(return_, advantage + rollout["value"])


@settings(max_examples=300, deadline=None)
@given(rollouts(), st.floats(-2.0, 2.0), st.booleans())
def test_average_reward_gae_equals_the_definition_with_the_rate_taken_off(rollout, reward_rate, timed):
    del rollout["gamma"]
    reward = rollout.pop("reward")
    duration = 1.0 + torch.arange(reward.numel(), dtype=torch.float64).reshape(reward.shape) % 3 if timed else None
    advantage, _ = average_reward_gae(reward, **rollout, reward_rate=reward_rate, duration=duration)
    gain = reward - reward_rate * (duration if timed else 1.0)
    close(advantage, n_step_definition(gain, **rollout, gamma=1.0))


# Properties.


@settings(max_examples=200, deadline=None)
@given(rollouts())
def test_gae_without_lambda_is_temporal_differences(rollout):
    rollout["gae_lambda"] = 0.0
    advantage, _ = gae(**rollout)
    alive = (~rollout["terminated"]).double()
    close(advantage, rollout["reward"] + rollout["gamma"] * alive * rollout["next_value"] - rollout["value"])


@settings(max_examples=200, deadline=None)
@given(rollouts())
def test_gae_with_lambda_one_is_monte_carlo(rollout):
    rollout |= {"gae_lambda": 1.0, "gamma": 0.9}
    _, return_ = gae(**rollout)
    horizon, num_envs = return_.shape
    reward, next_value, terminated, done = (rollout[k].tolist() for k in ("reward", "next_value", "terminated", "done"))
    expected = [[0.0] * num_envs for _ in range(horizon)]
    for env in range(num_envs):
        for t in range(horizon):
            for k in range(t, horizon):
                expected[t][env] += 0.9 ** (k - t) * reward[k][env]
                last = done[k][env] or k == horizon - 1
                if last and not terminated[k][env]:
                    expected[t][env] += 0.9 ** (k - t + 1) * next_value[k][env]
                if last:
                    break
    close(return_, torch.tensor(expected, dtype=torch.float64))


@settings(max_examples=200, deadline=None)
@given(rollouts(), st.integers(0, 11))
def test_gae_stops_at_the_end_of_an_episode(rollout, end):
    end = min(end, rollout["reward"].shape[0] - 1)
    rollout["done"][end] = True
    before, _ = gae(**rollout)
    for name in ("reward", "value", "next_value"):
        rollout[name] = rollout[name].clone()
        rollout[name][end + 1 :] += 100.0
    after, _ = gae(**rollout)
    assert torch.equal(before[: end + 1], after[: end + 1])


@settings(max_examples=200, deadline=None)
@given(rollouts(), st.floats(-10.0, 10.0))
def test_gae_scales_with_rewards_and_values(rollout, scale):
    advantage, return_ = gae(**rollout)
    scaled = rollout | {name: scale * rollout[name] for name in ("reward", "value", "next_value")}
    close(gae(**scaled)[0], scale * advantage)
    close(gae(**scaled)[1], scale * return_)


@settings(max_examples=200, deadline=None)
@given(rollouts(), st.floats(-10.0, 10.0))
def test_gae_is_unmoved_by_a_constant_reward_that_the_values_expect(rollout, shift):
    """Adding c to every reward and c / (1 - gamma) to every value changes no advantage, while nothing terminates."""
    rollout |= {"gamma": 0.9, "terminated": torch.zeros_like(rollout["terminated"])}
    shifted = rollout | {
        "reward": rollout["reward"] + shift,
        "value": rollout["value"] + 10.0 * shift,
        "next_value": rollout["next_value"] + 10.0 * shift,
    }
    close(gae(**shifted)[0], gae(**rollout)[0])


def test_gae_is_zero_when_values_are_exact():
    shape = (20, 3)
    reward, value = torch.full(shape, 2.0).double(), torch.full(shape, 2.0 / (1 - 0.75)).double()
    never = torch.zeros(shape, dtype=torch.bool)
    advantage, return_ = gae(reward, value, value, never, never, 0.75, 0.95)
    assert torch.equal(advantage, torch.zeros_like(advantage))
    assert torch.equal(return_, value)


@settings(max_examples=100, deadline=None)
@given(rollouts())
def test_gae_treats_environments_apart(rollout):
    advantage, _ = gae(**rollout)
    order = torch.arange(advantage.shape[1]).flip(0)
    permuted = {k: x[:, order] if isinstance(x, Tensor) else x for k, x in rollout.items()}
    assert torch.equal(gae(**permuted)[0], advantage[:, order])


@settings(max_examples=200, deadline=None)
@given(rollouts(), st.integers(1, 11))
def test_gae_of_a_split_rollout_agrees_where_the_split_is_an_end(rollout, split):
    split = min(split, rollout["reward"].shape[0])
    rollout["done"][split - 1] = True
    halves = [
        gae(**{k: x[part] if isinstance(x, Tensor) else x for k, x in rollout.items()})[0]
        for part in (slice(None, split), slice(split, None))
    ]
    assert torch.equal(torch.cat(halves), gae(**rollout)[0])


# Average reward.


def test_average_reward_advantages_vanish_on_the_two_state_cycle():
    """Rewards 0, 2, 0, 2, ...: the rate is 1, and the state before the 2 is worth one half more than average."""
    reward, value = rows(0, 2, 0, 2), rows(-0.5, 0.5, -0.5, 0.5)
    never = flags(0, 0, 0, 0)
    advantage, return_ = average_reward_gae(reward, value, value.roll(-1, 0), never, never, 1.0, 0.95)
    assert torch.equal(advantage, torch.zeros_like(advantage))
    assert torch.equal(return_, value)


def test_average_reward_counts_time_not_steps():
    # Rate 2 per unit of time: a step of length 3 is expected to pay 6.
    advantage, _ = average_reward_gae(
        rows(6, 1), rows(0, 0), rows(0, 0), flags(0, 0), flags(0, 0), torch.tensor(2.0), 0.0, duration=rows(3, 1)
    )
    close(advantage, rows(0, -1))


# Successors.


def test_successor_is_the_next_row_or_the_final_observation_where_an_episode_ended():
    value, final_value = rows(1, 2, 3, 4), rows(float("nan"), 20, float("nan"))
    reset = flags(0, 0, 1, 0)
    assert torch.equal(successor_values(value, flags(0, 1, 0), reset, final_value), rows(2, 20, 4))


def test_successor_is_always_the_next_row_when_that_holds_the_final_observation():
    # The row after it only resets, so the next episode begins one later.
    assert torch.equal(successor_values(rows(1, 2, 3, 4), flags(0, 1, 0), flags(0, 0, 0, 1), None), rows(2, 3, 4))


def test_where_the_final_observation_is_lost_the_value_before_stands_in_for_it():
    # Two steps to a truncation, then a terminated one; V of the next episodes, 100, must not be seen in either.
    value, reset = rows(1, 2, 100, 100), flags(0, 0, 1, 1)
    truncated, terminated = flags(0, 1, 0), flags(0, 0, 1)
    following = successor_values(value, truncated | terminated, reset, None)
    assert torch.equal(following, rows(2, 2, 100))
    advantage, return_ = gae(rows(1, 1, 1), value[:-1], following, terminated, truncated | terminated, 0.5, 0.5)
    # Temporal differences: 1 + 0.5 * 2 - 1 = 1; 1 + 0.5 * 2 - 2 = 0; 1 - 100, without a successor.
    close(advantage, rows(1 + 0.25 * 0, 0, -99))
    close(return_, rows(2, 2, 1))


@pytest.mark.parametrize("engine", ["plain", "kernel"])
def test_the_sum_backwards_in_time_by_hand(engine):
    function = reverse_discounted_sum_.plain if engine == "plain" else reverse_discounted_sum_
    x = torch.tensor([[1.0, 8.0], [2.0, 4.0], [3.0, 2.0]])
    decay = torch.tensor([[0.5, 1.0], [0.25, 0.0], [9.0, 9.0]])  # the last is not used
    function(x, decay)
    # 2 + 0.25 * 3 = 2.75, 1 + 0.5 * 2.75 = 2.375; an episode that ends at step 1: 4, 8 + 4
    assert x.tolist() == [[2.375, 12.0], [2.75, 4.0], [3.0, 2.0]]
