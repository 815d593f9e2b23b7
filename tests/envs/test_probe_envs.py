"""Probe environments: their stated answers follow from the rewards they pay."""

import pytest
import torch

from canter.core.specs import ACTION_MASK, Continuous, Discrete, MultiDiscrete
from canter.envs.probes import PROBES, Probe, ProbeCheck
from canter.envs.tensor import tensor_envs

NAMES = [name for name in tensor_envs if name.startswith("probe-")]
GAMMA = 0.99


def make(name, num_envs=64, seed=0):
    env = tensor_envs[name](num_envs)
    obs = env.reset(seed=seed)
    return env, obs


def default_action(env):
    match env.spec.action:
        case Continuous():
            return torch.zeros(env.num_envs, env.spec.action.dim)
        case Discrete():
            return torch.zeros(env.num_envs, dtype=torch.int64)
        case MultiDiscrete():
            return torch.zeros(env.num_envs, len(env.spec.action.nvec), dtype=torch.int64)


def matching_row(check, history, obs):
    """For each env, the row of the check that has seen the same; every env must find one."""
    seen, wanted = [*history, obs], [*check.history, check.obs]
    same = torch.stack([(a["policy"][:, None] == b["policy"][None]).all(-1) for a, b in zip(seen, wanted, strict=True)])
    match = same.all(0)
    assert match.any(-1).all()
    return match.int().argmax(-1)


def best_returns(env, obs):
    """Play the stated actions for one episode; compare returns with the stated values where no row is cut."""
    checks = env.checks(GAMMA)
    history, values, rewards = [], [], []
    for check in checks:
        row = matching_row(check, history, obs)
        action = default_action(env) if check.action is None else check.action[row]
        values.append(None if check.value is None else check.value[row])
        step = env.step(action)
        rewards.append(step.reward)
        history.append(obs)
        obs = step.obs
    assert step.terminated.all()
    return values, rewards


def test_every_probe_is_registered():
    assert {name.removeprefix("probe-") for name in NAMES} == set(PROBES)
    assert len(NAMES) == 15


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("probe-truncation", "probe-cycle")])
def test_playing_the_stated_actions_earns_the_stated_values(name):
    values, rewards = best_returns(*make(name))
    follows = torch.zeros_like(rewards[0])
    for value, reward in zip(reversed(values), reversed(rewards), strict=True):
        follows = reward + GAMMA * follows
        if value is None:
            assert (follows == 0).all()  # real actions on their targets
        else:
            torch.testing.assert_close(value, follows)


@pytest.mark.parametrize("name", ["probe-action", "probe-obs-action", "probe-masked", "probe-value-scale"])
def test_no_other_allowed_action_earns_more(name):
    env, obs = make(name, num_envs=6)
    (check,) = env.checks(GAMMA)
    for choice in range(env.spec.action.n):
        row = matching_row(check, [], obs)
        allowed = obs[ACTION_MASK][:, choice] if ACTION_MASK in obs else torch.ones(6, dtype=torch.bool)
        step = env.step(torch.full((6,), choice))
        worse = step.reward < check.value[row]
        assert (worse | ~allowed | (check.action[row] == choice)).all()
        obs = step.obs


def test_truncation_probe_has_the_value_of_ten_point_nine():
    env, _ = make("probe-truncation", num_envs=4096)
    start, at_a, at_b = env.checks(GAMMA)
    assert at_a.value.item() == pytest.approx(10.90)
    assert start.value.item() == pytest.approx(0.99 * 10.90)
    assert at_b.value.item() == pytest.approx(10.0)
    assert env.spec.truncates
    nothing = default_action(env)
    assert (env.step(nothing).reward == 0).all()
    step = env.step(nothing)
    assert (step.reward == 1).all() and not step.terminated.any()
    assert step.truncated.float().mean().item() == pytest.approx(0.5, abs=0.03)  # 4 standard errors of 4096 coins
    assert (step.final_obs["policy"] == at_b.obs["policy"]).all()
    after = torch.where(step.truncated[:, None], start.obs["policy"], at_b.obs["policy"])
    assert (step.obs["policy"] == after).all()
    last = env.step(nothing)
    assert torch.equal(last.terminated, ~step.truncated)
    assert torch.equal(last.reward, 10.0 * last.terminated)


def test_both_flags_probe_ends_by_termination_alone():
    env, _ = make("probe-both-flags")
    assert env.spec.truncates
    for _ in range(3):
        step = env.step(default_action(env))
        assert step.terminated.all() and not step.truncated.any()


def test_finite_horizon_probe_counts_down_to_one():
    env, _ = make("probe-finite-horizon")
    assert [check.value.item() for check in env.checks(1.0)] == [5.0, 4.0, 3.0, 2.0, 1.0]
    assert env.spec.truncates is False


def test_cycle_probe_never_ends_and_pays_one_on_average():
    env, obs = make("probe-cycle")
    rewards = []
    for _ in range(4):
        step = env.step(default_action(env))
        assert not (step.terminated | step.truncated).any()
        assert torch.equal(step.reward, 2.0 * obs["policy"][:, 0])
        rewards.append(step.reward)
        obs = step.obs
    assert (torch.stack(rewards).mean(0) == 1.0).all()
    (check,) = env.checks(1.0)
    assert check.value.tolist() == [-0.5, 0.5]
    (check,) = env.checks(GAMMA)
    low, high = check.value.tolist()
    assert (low, high) == (pytest.approx(GAMMA * high), pytest.approx(2.0 + GAMMA * low))


def test_masked_probe_tempts_with_ten():
    env, obs = make("probe-masked")
    forbidden = obs[ACTION_MASK].int().argmin(-1)
    assert (env.step(forbidden).reward == 10.0).all()


def test_multi_discrete_probe_pays_each_head_alone():
    env, obs = make("probe-multi-discrete")
    (check,) = env.checks(GAMMA)
    action = check.action[matching_row(check, [], obs)].clone()
    action[:, 1] = (action[:, 1] + 1) % 3
    assert (env.step(action).reward == 0.5).all()


def test_recall_probe_shows_the_cue_only_at_first_and_asks_at_the_end():
    env, _ = make("probe-recall")
    checks = env.checks(GAMMA)
    assert [check.action is None for check in checks] == [True] * 4 + [False]
    question = checks[-1]
    assert question.obs["policy"].tolist() == [[0.0, 1.0], [0.0, 1.0]]
    assert question.history[0]["policy"].tolist() == [[-1.0, 0.0], [1.0, 0.0]]
    assert all((obs["policy"] == 0).all() for obs in question.history[1:])
    assert question.action.tolist() == [0, 1]


def test_a_custom_task_can_be_probed():
    env = Probe(2, task=PROBES["discount"])
    env.reset(seed=0)
    assert isinstance(env.checks(0.5)[0], ProbeCheck)
    assert [check.value.item() for check in env.checks(0.5)] == [0.5, 1.0]
