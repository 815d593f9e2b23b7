from dataclasses import replace

import pytest
import torch

from canter.app.check.random_rollout import ENOUGH_STEPS, run_random_actions
from canter.core.specs import (
    ACTION_MASK,
    Continuous,
    ContractBroken,
    Discrete,
    EnvSpec,
    MultiDiscrete,
    Step,
    TensorSpec,
)
from canter.envs.contract import check_obs, check_step
from canter.envs.tensor import CartPole
from canter.play.player import random_actions

INF = float("inf")


def spec_of(action, obs=None):
    return EnvSpec(obs=obs or {"policy": TensorSpec((2,))}, action=action, num_envs=50)


def draws(spec, obs=None, times=20):
    generator = torch.Generator().manual_seed(0)
    return torch.cat([random_actions(spec, obs or {}, generator) for _ in range(times)])


def test_continuous_actions_fill_their_bounds_and_are_normal_without():
    drawn = draws(spec_of(Continuous(low=(-2.0, -INF, 0.0), high=(3.0, INF, INF))))
    assert drawn.shape == (1000, 3) and drawn.isfinite().all()
    assert -2 <= drawn[:, 0].min() < -1.9 and 2.9 < drawn[:, 0].max() <= 3
    assert drawn[:, 1].std() == pytest.approx(1.0, abs=0.1)
    assert drawn[:, 2].min() == 0


def test_discrete_actions_are_all_tried_unless_a_mask_forbids():
    assert draws(spec_of(Discrete(3))).unique().tolist() == [0, 1, 2]
    mask = torch.tensor([True, False, True]).expand(50, 3)
    assert draws(spec_of(Discrete(3)), {ACTION_MASK: mask}).unique().tolist() == [0, 2]
    mask = torch.tensor([False, True, True, True, False]).expand(50, 5)
    drawn = draws(spec_of(MultiDiscrete((2, 3))), {ACTION_MASK: mask})
    assert drawn.shape == (1000, 2)
    assert [drawn[:, i].unique().tolist() for i in (0, 1)] == [[1], [0, 1]]


def test_a_rollout_repeats_itself_and_counts_whole_episodes():
    env = CartPole(4, "cpu")
    one, again = (run_random_actions(env, 3, steps=120, seconds=60) for _ in range(2))
    assert torch.equal(one.obs["policy"], again.obs["policy"])
    assert one.obs["policy"].shape == (121, 4, 4) and one.reward.shape == (120, 4)
    episodes = one.episodes()
    assert len(episodes) == int(one.done.sum()) > 4
    assert all(return_ == length and terminated for return_, length, terminated in episodes)
    assert sum(length for _, length, _ in episodes) <= 480


def test_a_slow_environment_stops_after_a_few_steps_and_a_large_one_when_memory_is_full():
    env = CartPole(4, "cpu")
    assert len(run_random_actions(env, 0, steps=1000, seconds=0.0).reward) == ENOUGH_STEPS
    assert len(run_random_actions(env, 0, steps=5, seconds=0.0).reward) == 5


def step(**changes):
    fine = Step(
        obs={"policy": torch.zeros(50, 2)},
        reward=torch.zeros(50),
        terminated=torch.zeros(50, dtype=torch.bool),
        truncated=torch.zeros(50, dtype=torch.bool),
        valid=torch.ones(50, dtype=torch.bool),
    )
    return replace(fine, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"obs": {"other": torch.zeros(50, 2)}}, r"groups \['other'\], the spec has \['policy'\]"),
        ({"obs": {"policy": torch.zeros(50, 3)}}, r"'policy' as torch.float32 \(50, 3\), the spec says .* \(50, 2\)"),
        ({"obs": {"policy": torch.zeros(50, 2).double()}}, "torch.float64"),
        ({"reward": torch.zeros(50, 1)}, r"reward as torch.float32 \(50, 1\), it must be torch.float32 \(50,\)"),
        ({"valid": torch.ones(50)}, "valid as torch.float32"),
        ({"terminated": torch.ones(50).bool(), "truncated": torch.ones(50).bool()}, "terminated must win"),
        ({"terminated": torch.ones(50).bool()}, "ended without Step.final_obs"),
        ({"metrics": {"lift": torch.zeros(50)}}, r"the metric 'lift' as \(50,\) on cpu, it must be \(\) on cpu"),
        (
            {"terminated": torch.ones(50).bool(), "final_obs": {"policy": torch.zeros(2)}},
            r"final_obs returned observation 'policy' as torch.float32 \(2,\)",
        ),
    ],
)
def test_steps_that_break_the_contract_are_refused(changes, message):
    check_step(step(), spec_of(Discrete(2)))
    with pytest.raises(ContractBroken, match=message):
        check_step(step(**changes), spec_of(Discrete(2)))


def test_observations_must_be_where_the_spec_says():
    spec = replace(spec_of(Discrete(2)), device=torch.device("cuda:0"))
    with pytest.raises(ContractBroken, match="on cpu, the spec says cuda:0"):
        check_obs({"policy": torch.zeros(50, 2)}, spec, "reset()")
