"""Declared symmetries are verified by mirrored steps; errors name the wrong component."""

from dataclasses import replace

import pytest
import torch

import canter
from canter.app.check.checks import preflight
from canter.app.check.plan import plan_for
from canter.app.check.random_rollout import check_symmetry
from canter.core.declarations import Mirror


def flipped(mirror, *components):
    """The mirror with other signs at some components."""
    signs = tuple(-sign if i in components else sign for i, sign in enumerate(mirror.sign))
    return replace(mirror, sign=signs)


def swapped(mirror, i, j):
    order = list(mirror.order)
    order[i], order[j] = order[j], order[i]
    return replace(mirror, order=tuple(order))


def in_obs(change, *arguments):
    return lambda s: replace(s, obs=dict(s.obs) | {"policy": change(s.obs["policy"], *arguments)})


def in_action(change, *arguments):
    return lambda s: replace(s, action=change(s.action, *arguments))


def in_state(name, change, *arguments):
    return lambda s: replace(s, state=dict(s.state) | {name: change(s.state[name], *arguments)})


OBS = r"observation 'policy' component {} is"
PLANTED = [
    *(("swimmer", in_obs(flipped, i), OBS.format(i)) for i in (0, 2, 5, 6, 7, 10)),
    ("swimmer", in_obs(swapped, 0, 1), OBS.format(0)),
    ("swimmer", in_obs(swapped, 6, 9), OBS.format(6)),
    ("swimmer", in_action(flipped, 1), "action component 1 alone"),
    ("swimmer", in_action(swapped, 0, 2), "action component 0 alone"),
    ("swimmer", in_state("heading", flipped, 0), OBS.format(10)),
    *(("quadrotor", in_obs(flipped, i), OBS.format(i)) for i in (1, 7, 15, 19, 28)),
    ("quadrotor", in_obs(swapped, 0, 1), OBS.format(0)),
    ("quadrotor", in_action(flipped, 1), "action component 1 alone"),
    ("quadrotor", in_action(flipped, 0), "action component 0 alone"),
    ("cartpole", in_action(lambda mirror: Mirror.of("++")), OBS.format(1)),
]


def env_of(name):
    return canter.EnvConfig(id=f"tensor:{name}", num_envs=8).build("cpu")


@pytest.mark.parametrize("name", ["swimmer", "quadrotor", "cartpole"])
def test_the_declarations_of_these_environments_are_true(name):
    env = env_of(name)
    for symmetry in env.spec.symmetries:
        assert check_symmetry(symmetry, env, 0).level == "ok"


def test_the_declarations_of_a_loaded_quadrotor_are_true():
    env = canter.EnvConfig(id="tensor:quadrotor", num_envs=4, options={"loaded": True}).build("cpu")
    assert [check_symmetry(symmetry, env, 0).level for symmetry in env.spec.symmetries] == ["ok", "ok"]


def test_twenty_errors_are_planted():
    assert len(PLANTED) == 20


@pytest.mark.parametrize(("name", "plant", "named"), PLANTED)
def test_a_planted_error_is_refused_by_its_component(name, plant, named):
    env = env_of(name)
    finding = check_symmetry(plant(env.spec.symmetries[0]), env, 0)
    assert finding.level == "error" and "declared wrongly" in finding.text
    assert named in finding.text


def test_a_forgotten_part_of_the_state_is_named():
    env = env_of("swimmer")
    (symmetry,) = env.spec.symmetries
    state = {name: mirror for name, mirror in symmetry.state.items() if name != "rates"}
    assert "no mirror of 'rates'" in check_symmetry(replace(symmetry, state=state), env, 0).text


def test_an_environment_that_cannot_be_set_is_not_verified():
    env = env_of("swimmer")
    (symmetry,) = env.spec.symmetries
    finding = check_symmetry(replace(symmetry, state={}), env, 0)
    assert finding.level == "note" and "not verified" in finding.text


def test_preflight_verifies_the_symmetries_that_the_extension_uses():
    config = canter.TrainConfig(
        env=canter.EnvConfig(id="tensor:cartpole", num_envs=8),
        total_steps=10_000,
        algorithm=canter.PPOConfig(extensions=(canter.SymmetryConfig(),)),
    )
    env = config.env.build("cpu")
    found = preflight(config, plan_for(config), env)
    assert [f.level for f in found if f.subject == "symmetry"] == ["ok"]
    (symmetry,) = env.spec.symmetries
    env.spec = replace(env.spec, symmetries=(replace(symmetry, action=Mirror.of("++")),))
    found = preflight(config, plan_for(config), env)
    assert [f.text for f in found if f.level == "error"] and torch.equal(env.reset(0)["policy"], env.reset(0)["policy"])
    bare = replace(config, algorithm=canter.PPOConfig())
    assert not [f for f in preflight(bare, plan_for(bare), env) if f.subject == "symmetry"]
