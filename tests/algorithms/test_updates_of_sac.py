"""Number of SAC's updates: by transition, or by step of all environments, and the warning about few."""

from dataclasses import replace
from typing import Any

import pytest

import canter
from canter.app.check.plan import check_plan, plan_for
from canter.config.presets import preset_for, presets
from canter.envs.tensor import Pendulum


def updates_after(config: canter.SACConfig, num_envs: int, transitions: int) -> int:
    """Return the number of updates after a number of transitions."""
    algorithm = config.build(Pendulum(num_envs, "cpu").spec, seed=0)
    for _ in range(transitions // (config.horizon * num_envs)):
        algorithm.begin_iteration()
    return algorithm.updates


@pytest.mark.parametrize("num_envs", [1, 2, 8, 64])
def test_the_number_of_environments_does_not_change_the_number_of_updates(num_envs):
    config = canter.SACConfig(warmup_steps=0)
    assert updates_after(config, num_envs, 2_560) == 2_560
    assert updates_after(replace(config, updates_per_transition=0.25), num_envs, 2_560) == 640


def test_updates_may_be_counted_by_step_of_all_environments():
    assert updates_after(canter.SACConfig(warmup_steps=0, updates_per_step=2.0), 8, 256) == 64


def test_a_rollout_needs_a_whole_number_of_updates():
    config = canter.SACConfig(updates_per_transition=0.01)
    with pytest.raises(ValueError, match=r"updates_per_transition=0.01 times 32 transitions .* use .*=0.03125"):
        config.build(Pendulum(8, "cpu").spec, seed=0)
    with pytest.raises(ValueError, match="updates_per_transition=0 must be above 0"):
        canter.SACConfig(updates_per_transition=0)


def test_updates_by_transition_have_no_effect_with_updates_by_step():
    config = canter.SACConfig(updates_per_step=1.0, updates_per_transition=0.5)
    lines = config.unused(Pendulum(2, "cpu").spec)
    assert lines == [
        "algorithm.updates_per_transition=0.5 has no effect here: updates_per_step sets the number of updates"
    ]


@pytest.mark.parametrize(("name", "updates"), [("Pendulum-sac", 4), ("sac", 4), ("sac-large", 4), ("quadrotor-sac", 8)])
def test_presets_keep_their_updates(name, updates):
    config: Any = presets[name]
    plan = plan_for(config)
    assert plan.updates == updates
    assert config.algorithm.updates_after(plan.batch) == updates


def warnings_of(config: canter.TrainConfig) -> list[str]:
    return [finding.text for finding in check_plan(plan_for(config)) if finding.subject == "updates"]


def test_few_updates_are_warned_of_in_short_runs():
    base = canter.TrainConfig(env=canter.EnvConfig(id="Pendulum-v1"), total_steps=20_000)
    sparse = replace(base, algorithm=canter.SACConfig(updates_per_step=1.0))
    (text,) = warnings_of(sparse)
    assert "only 1,876 updates for 20,000 transitions, one for 8 of them" in text
    assert "updates_per_transition to 1" in text
    assert warnings_of(replace(base, algorithm=canter.SACConfig())) == []
    assert warnings_of(replace(base, algorithm=canter.SACConfig(updates_per_transition=0.25))) == []
    assert warnings_of(replace(sparse, total_steps=2_000_000)) == []
    assert warnings_of(base) == []


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "HalfCheetah-v5", "tensor:quadrotor"])
def test_presets_have_enough_updates(env_id):
    preset = preset_for(env_id, "sac")
    assert preset is not None and warnings_of(preset) == []
