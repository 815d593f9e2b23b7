from dataclasses import replace

import pytest
import torch

from canter.algorithms.ppo import PPOConfig
from canter.app.check.plan import (
    Plan,
    check_foresight,
    check_memory,
    check_plan,
    check_truncation,
    tree_bytes,
)
from canter.app.console.text import format_bytes, format_count
from canter.core.specs import Discrete, EnvSpec, TensorSpec

PLAN = Plan(total_steps=3200, num_envs=10, horizon=32, epochs=4, num_minibatches=4, gamma=0.99, gae_lambda=0.95)
SPEC = EnvSpec(obs={"policy": TensorSpec((4,))}, action=Discrete(2), num_envs=10, truncates=True)


def test_the_arithmetic_is_described():
    assert PLAN.describe_rollout() == (
        "batch = 32 steps x 10 envs = 320, 4 minibatches of 80, 4 epochs: 16 updates per rollout"
    )
    assert PLAN.describe_run() == "3,200 steps = 10 rollouts, 160 updates in total"
    one = replace(PLAN, epochs=1, num_minibatches=1, total_steps=1)
    assert one.describe_rollout().endswith("1 minibatch of 320, 1 epoch: 1 update per rollout")
    assert one.describe_run() == "1 step = 1 rollout, 1 update in total"
    team = replace(PLAN, num_agents=3)
    assert team.describe_rollout().startswith("batch = 32 steps x 10 envs x 3 agents = 960, 4 minibatches of 240, ")
    assert [finding.level for finding in check_plan(PLAN)] == ["ok", "ok"]


def test_a_budget_of_few_rollouts_and_tiny_minibatches_are_warned_of():
    short = check_plan(replace(PLAN, total_steps=1000))[-1]
    assert (short.level, short.subject) == ("warning", "budget")
    assert "only 4 rollouts" in short.text and "raise total_steps to 3,200 or more" in short.text
    tiny = check_plan(replace(PLAN, num_minibatches=32))[-1]
    assert (tiny.level, tiny.subject) == ("warning", "minibatches")
    assert "only 10 samples" in tiny.text


@pytest.mark.parametrize(
    ("gamma", "horizon", "length", "level", "part"),
    [
        (0.98, 128, 200.0, "ok", "gamma 0.98 looks about 50 steps ahead"),
        (0.98, 128, 501.0, "note", "raise gamma"),
        (0.98, 128, None, "ok", "never ends, --env.reset-steps N cuts episodes; a rollout has 128 steps"),
        (0.99, 8, 20.0, "note", "this is less than the 17 steps over which gae_lambda sums"),
        (1.0, 128, 20.0, "ok", "it looks ahead without limit"),
    ],
)
def test_foresight_is_held_against_episodes_and_rollouts(gamma, horizon, length, level, part):
    found = check_foresight(replace(PLAN, gamma=gamma, horizon=horizon), length)
    assert found.level == level
    assert part in found.text
    assert (length is None) == ("episodes of random actions" not in found.text)


@pytest.mark.parametrize(
    ("truncates", "final_obs", "level", "part"),
    [
        (False, "separate", "ok", "never truncated"),
        (True, "separate", "ok", "returned together with the next episode's first"),
        (True, "in_place", "ok", "returned before the reset"),
        (None, "separate", "ok", "does not declare"),
        (True, "unknown", "note", "bootstrapped from the value of the observation before it"),
        (None, "unknown", "note", "does not declare"),
        (False, "unknown", "ok", "never truncated"),
    ],
)
def test_the_bootstrap_of_truncated_episodes_is_reported(truncates, final_obs, level, part):
    found = check_truncation(replace(SPEC, truncates=truncates, final_obs=final_obs))
    assert found.level == level
    assert part in found.text


def test_memory_is_estimated_from_real_shapes():
    algorithm = PPOConfig(horizon=32, num_minibatches=4).build(SPEC, 0)
    record = {"action": torch.zeros(10, dtype=torch.int64), "dist_params": torch.zeros(10, 2)}
    found = check_memory(PLAN, SPEC, record, algorithm.state_dict())
    # Observation twice, the record, and 16 for reward and flags; 320 rows, twice.
    assert f"about {format_bytes(2 * 320 * (2 * 16 + (8 + 8) + 16))} for a rollout" in found.text
    weights = sum(parameter.nbytes for parameter in algorithm.model.parameters())
    assert (
        4 * weights < tree_bytes(algorithm.state_dict()) * 4 / 3 < 4 * weights + 27_000
    )  # three random streams of 5 kB
    assert tree_bytes(algorithm.empty_record()) > 0


def test_bytes_are_counted_in_any_tree():
    assert tree_bytes({"a": [torch.zeros(3), (torch.zeros(2, dtype=torch.bool), None)], "b": 5, "c": "x"}) == 14
    texts = [format_bytes(n) for n in (12, 61_440, 2_500_000, 3e9, 2e12)]
    assert texts == ["12 B", "61.4 kB", "2.5 MB", "3 GB", "2 TB"]
    assert [format_count(n, "minibatch") for n in (1, 2)] == ["1 minibatch", "2 minibatches"]
