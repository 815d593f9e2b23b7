"""Hydra's `${...}` and the files around a training file."""

import pytest
import yaml
from theirs import rl_games

from canter.compat import import_config
from canter.compat.settings.importing import Scope, resolve
from canter.core.plain import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${.a}", 1),
        ("${..b}", "two"),
        ("${b}", "two"),
        ("x_${b}", "x_two"),
        ("${resolve_default:5,${.empty}}", 5),
        ("${resolve_default:5,${.a}}", 1),
        ("${if:${.a},7,8}", 7),
        ("${if:${.empty},7,8}", 8),
        ("${if:${nowhere},7,8}", "${if:${nowhere},7,8}"),
        ("${eq:${b},two}", True),
        ("${contains:wo,${b}}", True),
        ("${nowhere}", "${nowhere}"),
        ("${strange:1}", "${strange:1}"),
        ("${.chain}", 1),
    ],
)
def test_names_and_functions(text, value):
    tree = {"b": "two", "here": {"a": 1, "empty": "", "chain": "${.a}", "key": text}}
    assert resolve(tree, {}, {}, ())["here"]["key"] == value


def test_the_callers_values_win():
    assert resolve({"k": "${..seed}"}, {"seed": 3}, {"seed": 4}, ("train",))["k"] == 3


def test_a_circle_ends():
    with pytest.raises(ConfigError, match="refers to itself"):
        Scope({"a": "${b}", "b": "${a}"}, {}).resolve("${a}", ("c",))


def test_a_training_file_finds_task_root_and_defaults(tmp_path):
    for folder in ("train", "task"):
        (tmp_path / folder).mkdir()
    base = rl_games(
        seed="${...seed}",
        config__num_actors="${....task.env.numEnvs}",
        config__env_name="rlgpu",
        config__max_epochs="${resolve_default:50,${....max_iterations}}",
    )
    (tmp_path / "config.yaml").write_text("seed: 11\nnum_envs: ''\nmax_iterations: ''\ndefaults: [{task: Ant}]\n")
    (tmp_path / "task" / "Ant.yaml").write_text("env:\n  numEnvs: ${resolve_default:16,${...num_envs}}\n")
    (tmp_path / "train" / "AntPPO.yaml").write_text(yaml.dump(base))
    child = {"defaults": ["AntPPO", "_self_"], "params": {"config": {"mini_epochs": 9}}}
    (tmp_path / "train" / "AntBigPPO.yaml").write_text(yaml.dump(child))
    config = import_config(tmp_path / "train" / "AntBigPPO.yaml").config
    assert (config.seed, config.env.num_envs, config.until.iterations) == (11, 16, 50)
    assert (config.algorithm.epochs, config.algorithm.gamma) == (9, 0.98)
    given = {"num_envs": 32, "max_iterations": 5}
    config = import_config(tmp_path / "train" / "AntBigPPO.yaml", given=given).config
    assert (config.env.num_envs, config.until.iterations) == (32, 5)
    assert not import_config(tmp_path / "train" / "AntPPO.yaml").names_env
