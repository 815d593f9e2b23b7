import sys

import gymnasium
import pytest

from canter.app.cli import main, take_permissions
from canter.envs import EnvConfig, imports

SOURCE = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
from canter.envs.tensor import tensor_envs

def one(length=0.5):
    env = CartPoleEnv()
    env.length = length
    return gymnasium.wrappers.TimeLimit(env, 20)

def batch(num_envs, device, max_episode_steps=30):
    return tensor_envs["cartpole"](num_envs, device, max_episode_steps=max_episode_steps)

gymnasium.register("MyOwn-v0", entry_point=CartPoleEnv, max_episode_steps=10)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of the user's; nothing is trusted before or after."""
    (tmp_path / "my_tasks.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(imports, "_allowed", {})
    yield "my_tasks"
    sys.modules.pop("my_tasks", None)
    gymnasium.registry.pop("MyOwn-v0", None)


def test_an_id_imports_nothing_unless_it_is_allowed(module):
    with pytest.raises(ValueError, match="if it is a module of yours, add --allow-import my_tasks"):
        EnvConfig(id="my_tasks:one").build("cpu")
    assert "my_tasks" not in sys.modules


def test_a_prefix_allows_modules_inside_of_it_and_no_others(module):
    imports.allow_import("my_tasks")
    assert imports.is_allowed("my_tasks.inner.deep")
    assert not imports.is_allowed("my_tasks_2")
    assert not imports.is_allowed("my")


@pytest.mark.parametrize("name", ["one", "batch", "MyOwn-v0"])
def test_a_factory_of_one_or_of_many_or_a_registered_name_is_built(module, name):
    imports.allow_import("my_tasks")
    env = EnvConfig(id=f"my_tasks:{name}", num_envs=3).build("cpu")
    assert env.spec.num_envs == 3
    assert env.reset(0)["policy"].shape == (3, 4)
    env.close()


def test_a_name_that_is_not_there_is_named(module):
    imports.allow_import("my_tasks")
    with pytest.raises(ValueError, match="my_tasks has no many and registers no such environment"):
        EnvConfig(id="my_tasks:many").build("cpu")


def test_a_misspelt_kind_offers_the_right_one(module):
    with pytest.raises(ValueError, match=r"unknown scheme .tensr., did you mean tensor\?"):
        EnvConfig(id="tensr:cartpole").build("cpu")


def test_every_command_understands_the_permission(module, capsys):
    assert take_permissions(["eval", "latest", "--allow-import", "my_tasks", "--json"]) == ["eval", "latest", "--json"]
    assert "MyOwn-v0" in gymnasium.registry  # imported at once, for what it registers
    assert take_permissions(["check", "--allow_import=my_tasks"]) == ["check"]
    with pytest.raises(ModuleNotFoundError, match=r"my_tasks\.envs"):
        take_permissions(["check", "--allow_import=my_tasks.envs"])
    with pytest.raises(SystemExit) as error:
        main(["train", "--allow-import", "../evil"])
    assert error.value.code == 2
    assert "expected a module such as my_package" in capsys.readouterr().err
