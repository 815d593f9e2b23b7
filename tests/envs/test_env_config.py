import sys
from contextlib import closing
from dataclasses import fields
from typing import Any

import pytest
import torch
from test_pettingzoo import register_roll

import canter
from canter.app.cli import main
from canter.core.registry import UserError
from canter.core.specs import Capturable, Continuous, Env, Stateful
from canter.envs import EnvConfig, check_known, imports, schemes, unused_settings
from canter.envs.tensor import tensor_envs


def still(env):
    """The action 0 in every row."""
    rows, action = env.spec.num_envs, env.spec.action
    return torch.zeros(rows, action.dim) if isinstance(action, Continuous) else torch.zeros(rows).long()


def ends(config, steps=12):
    """Which steps were truncated and which terminated, in the first environment."""
    env = config.build("cpu")
    env.reset(0)
    seen = (env.step(still(env)) for _ in range(steps))
    flags = [(step.truncated[0].item(), step.terminated[0].item()) for step in seen]
    truncates = env.spec.truncates
    env.close()
    return [t for t, (cut, _) in enumerate(flags) if cut], any(ended for _, ended in flags), truncates


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "tensor:queue", "tensor:pendulum", "tensor:probe-cycle"])
def test_reset_steps_cuts_episodes_without_ending_them(env_id):
    assert ends(EnvConfig(id=env_id, num_envs=2, reset_steps=5)) == ([4, 9], False, True)


def test_reset_steps_cuts_environments_of_envpool():
    pytest.importorskip("envpool")
    # The step after a cut is a filler row there.
    assert ends(EnvConfig(id="envpool:Pendulum-v1", num_envs=2, reset_steps=5)) == ([4, 10], False, True)


def test_without_it_the_environment_keeps_its_own_limit():
    assert ends(EnvConfig(id="tensor:probe-cycle", num_envs=2)) == ([], False, False)
    assert ends(EnvConfig(id="tensor:queue", num_envs=2, options={"max_episode_steps": 6}))[0] == [5, 11]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reset_steps": 0}, "env.reset_steps=0 must be at least 1"),
        ({"num_envs": 0}, "env.num_envs=0 must be at least 1"),
        ({"reset_steps": 5, "finite_horizon": True}, "reset_steps=5 contradicts env.finite_horizon"),
        ({"reset_steps": 5, "options": {"max_episode_steps": 9}}, "contradicts env.options.max_episode_steps"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        EnvConfig(**settings)


class MySim:
    """Builds CartPole for a made-up scheme, and knows no option."""

    def __new__(cls, name, num_envs, device):
        return tensor_envs["cartpole"](num_envs, device)


@pytest.fixture
def kinds(tmp_path, monkeypatch):
    """An id of every kind of environments."""
    (tmp_path / "own_tasks.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(imports, "_allowed", {"own_tasks": str(tmp_path)})
    monkeypatch.setattr(schemes, "_items", dict(schemes._items))
    schemes.register("mysim")(MySim)
    yield
    sys.modules.pop("own_tasks", None)


OWN = """
from gymnasium.envs.classic_control import CartPoleEnv
from canter.envs.tensor import tensor_envs
import gymnasium

def one():
    return CartPoleEnv()

def batch(num_envs, device, max_episode_steps=30):
    return tensor_envs["cartpole"](num_envs, device, max_episode_steps=max_episode_steps)
"""

USED, UNUSED = "has an effect", "is listed as unused"
NO_DEADLINE = "env.finite_horizon=True: tensor:rps never truncates an episode"
CHANGES = {
    "num_envs": 2,
    "vectorization": "sync",
    "autoreset": "next_step",
    "step_timeout": 5.0,
    "close_timeout": 5.0,
    "log_info": False,
    "finite_horizon": True,
    "reset_steps": 5,
    "options": {"warp": 9},
    "wrappers": {"FrameStackObservation": {"stack_size": 3}},
}
REST = {"num_envs": USED, "vectorization": UNUSED, "autoreset": UNUSED, "finite_horizon": USED, "reset_steps": USED}
REST |= {"step_timeout": USED, "close_timeout": UNUSED, "log_info": UNUSED}
REST |= {"wrappers": "env.wrappers .* wrap Gymnasium's environments only, and .* is not one"}
GYMNASIUM = {
    "wrappers": USED,
    "log_info": USED,
    "vectorization": USED,
    "autoreset": USED,
    "options": "unexpected keyword argument 'warp'",
}
TABLE = {
    "Pendulum-v1": REST | GYMNASIUM,
    "gymnasium:Pendulum-v1": REST | GYMNASIUM,
    "own_tasks:one": REST | GYMNASIUM,
    "own_tasks:batch": REST | {"options": "env.options.warp=9: own_tasks:batch takes no such option"},
    "tensor:pendulum": REST | {"options": "env.options.warp=9: tensor:pendulum takes no such option"},
    "tensor:probe-cycle": REST
    | {
        "finite_horizon": "tensor:probe-cycle never truncates",
        "options": "env.options.warp=9: tensor:probe-cycle takes no",
    },
    "tensor:rps": REST
    | {
        "finite_horizon": NO_DEADLINE,
        "reset_steps": r"env.options.max_episode_steps=5 \(nor env.reset_steps, which sets it\): tensor:rps takes no",
        "options": "env.options.warp=9: tensor:rps takes no such option",
    },
    "mysim:thing": REST
    | {"reset_steps": "mysim:thing takes no such option", "options": "env.options.warp=9: mysim:thing takes no such"},
    "envpool:Pendulum-v1": REST | {"options": "warp"},
    "pettingzoo:canter/roll-v0": REST | {"options": "warp"},
}


def test_the_table_has_every_field():
    assert all(row.keys() == CHANGES.keys() for row in TABLE.values())
    assert CHANGES.keys() == {field.name for field in fields(EnvConfig)} - {"id"}


@pytest.mark.parametrize("capture", [True, False])
def test_an_option_for_gpus_is_named_elsewhere(capture):
    config = EnvConfig(id="mjlab:Mjlab-Cartpole-Balance", options={"capture": capture})
    assert unused_settings(config, "cuda:0") == unused_settings(EnvConfig(id=config.id), "cpu") == []
    [line] = unused_settings(config, "cpu")
    assert line.startswith(f"env.options.capture={capture} has no effect on cpu: parts of a step are recorded as CUDA")


@pytest.mark.parametrize("field", CHANGES)
@pytest.mark.parametrize("env_id", TABLE)
def test_no_setting_is_silently_without_effect(kinds, env_id, field):
    if ":" in env_id and env_id.partition(":")[0] in ("envpool", "pettingzoo"):
        pytest.importorskip(env_id.partition(":")[0])
    if env_id.startswith("pettingzoo"):
        register_roll()
    config, meant = EnvConfig(**{"id": env_id, field: CHANGES[field]}), TABLE[env_id][field]
    if meant not in (USED, UNUSED):
        with pytest.raises((ValueError, TypeError), match=meant):
            config.build("cpu")
        return
    lines = unused_settings(config, "cpu")
    if meant is UNUSED:
        assert len(lines) == 1
        assert lines[0].startswith(f"env.{field}={CHANGES[field]} has no effect here: these environments ")
    else:
        assert lines == []
    with closing(config.build("cpu")) as env, closing(EnvConfig(id=env_id).build("cpu")) as usual:
        if field == "num_envs":
            assert env.spec.num_envs == 2 * env.spec.num_agents
        if field == "wrappers":
            assert env.spec.obs["policy"].shape[0] == 3
        if field == "finite_horizon":
            assert env.spec.truncates is False
            assert usual.spec.truncates is not False
        if field == "reset_steps":
            assert env.spec.truncates is not False
            env.reset(0)
            assert [env.step(still(env)).truncated.any().item() for _ in range(5)] == [False] * 4 + [True]
        if field == "autoreset" and meant is USED:
            assert env.spec.final_obs == "in_place"
            assert usual.spec.final_obs == "separate"


@pytest.mark.parametrize("name", ["num_envs", "device", "vectorization", "autoreset"])
def test_an_option_that_is_a_separate_setting_is_refused(name):
    message = rf"env.options.{name}='x' is not an option of tensor:null; set (env.)?{name} instead"
    with pytest.raises(ValueError, match=message):
        EnvConfig(id="tensor:null", options={name: "x"}).build("cpu")


def test_threads_and_another_way_to_restart_exclude_each_other():
    config = EnvConfig(id="CartPole-v1", vectorization="threads", autoreset="next_step")
    with pytest.raises(ValueError, match="vectorization=threads needs autoreset=same_step; with autoreset=next_step"):
        config.build("cpu")


@pytest.mark.parametrize("env_id", ["tensor:cartpole", "tensor:rendezvous"])
def test_the_deadline_of_a_tensor_environment_may_be_a_part_of_its_task(env_id):
    limit: dict[str, Any] = {"options": {"max_episode_steps": 3}}
    cut, ended = (EnvConfig(id=env_id, num_envs=2, **limit, finite_horizon=f).build("cpu") for f in (False, True))
    assert isinstance(ended, Env) and isinstance(ended, Stateful) and isinstance(ended, Capturable)
    action = still(ended)
    assert torch.equal(cut.reset(0)["policy"], ended.reset(0)["policy"])
    one = other = None
    for _ in range(6):
        one, other = cut.step(action), ended.step(action)
        assert torch.equal(one.truncated | one.terminated, other.terminated)
        assert not other.truncated.any()
        assert torch.equal(one.obs["policy"], other.obs["policy"])
    assert one is not None and one.truncated.all()
    again: Any = EnvConfig(id=env_id, num_envs=2, **limit, finite_horizon=True).build("cpu")
    again.reset(1)
    again.load_state_dict(ended.state_dict())
    assert torch.equal(again.step(action).obs["policy"], ended.step(action).obs["policy"])


class TestSchemes:
    def test_a_scheme_is_one_registration(self, kinds):
        env = EnvConfig(id="mysim:thing", num_envs=3).build("cpu")
        assert env.reset(0)["policy"].shape == (3, 4)

    def test_a_misspelt_scheme_offers_the_nearest_also_of_those_registered(self, kinds):
        with pytest.raises(ValueError, match=r"'mysm:thing': unknown scheme 'mysm', did you mean mysim\?"):
            EnvConfig(id="mysm:thing").build("cpu")

    def test_a_builder_must_accept_its_arguments(self):
        with pytest.raises(TypeError, match=r"scheme 'x', registered at .*: expected a function of name, num_envs"):
            canter.register("scheme", "x")(lambda name, count: None)

    def test_a_scheme_of_ones_own_trains_from_the_command_line(self, kinds, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        main(["envs"])
        assert "mysim:ID       Builds CartPole for a made-up scheme, and knows no option." in capsys.readouterr().out
        main(["train", "mysim:thing", "--num-envs=4", "--total-steps=512", "--algorithm.horizon=32", "--console=quiet"])
        assert "Training PPO on mysim:thing" in capsys.readouterr().out
        assert "id: mysim:thing" in (tmp_path / "runs/latest/config.yaml").read_text()

    def test_a_preset_is_found_by_the_name_behind_any_scheme(self, kinds):
        preset: Any = canter.preset_for("mysim:CartPole-v1")
        assert preset.env.id == "mysim:CartPole-v1"


@pytest.mark.parametrize("env_id", ["CartPole-v1", "CartPole", "tensor:cartpole", "envpool:Anything-v4"])
def test_a_known_environment_needs_no_build_to_be_accepted(env_id):
    check_known(env_id)


@pytest.mark.parametrize("env_id", ["CartPole-v9", "runs/mine", "a b", "tensor:cartpol", "nowhere:Env"])
def test_an_unknown_environment_is_refused_without_a_build(env_id):
    with pytest.raises(UserError, match="unknown"):
        check_known(env_id)
