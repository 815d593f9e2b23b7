"""RSL-RL's Python files are read and never run."""

import pytest
from theirs import rl_games

from canter.compat import ImportRefused, import_config
from canter.compat.settings.python_config import read_python_config
from canter.core.plain import ConfigError

ISAAC = """
from isaaclab.utils import configclass
from isaaclab_rl.rsl_rl import RslRlOnPolicyRunnerCfg, RslRlMLPModelCfg, RslRlPpoAlgorithmCfg
from my.tasks import mirror
raise SystemExit("this file was run")

WIDTH = 16

@configclass
class RoughCfg(RslRlOnPolicyRunnerCfg):
    num_steps_per_env = 24
    max_iterations = 3 * 100
    save_interval = 50
    experiment_name = "rough"
    actor = RslRlMLPModelCfg(
        hidden_dims=[2 * WIDTH, WIDTH], activation="elu",
        distribution_cfg=RslRlMLPModelCfg.GaussianDistributionCfg(init_std=1.0),
    )
    critic = RslRlMLPModelCfg(hidden_dims=(8,), activation="elu")
    algorithm = RslRlPpoAlgorithmCfg(
        value_loss_coef=1.0, use_clipped_value_loss=True, clip_param=0.2, entropy_coef=-0.5e-2, num_learning_epochs=5,
        num_mini_batches=4, learning_rate=1.0e-3, schedule="adaptive", gamma=0.99, lam=0.95, desired_kl=0.01,
        max_grad_norm=1.0,
    )

@configclass
class FlatCfg(RoughCfg):
    def __post_init__(self):
        super().__post_init__()
        self.max_iterations = 50
        self.actor.hidden_dims = [4]
"""


def write(tmp_path, text, name="agent_cfg.py"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_classes_calls_arithmetic_and_post_init(tmp_path):
    path = write(tmp_path, ISAAC)
    rough, _ = read_python_config(path, "RoughCfg")
    flat, _ = read_python_config(path, "FlatCfg")
    assert (rough["max_iterations"], rough["actor"]["hidden_dims"]) == (300, [32, 16])
    assert rough["actor"]["distribution_cfg"] == {"class_name": "GaussianDistribution", "init_std": 1.0}
    assert rough["algorithm"]["entropy_coef"] == -0.005
    assert (flat["max_iterations"], flat["actor"]["hidden_dims"], flat["actor"]["activation"]) == (50, [4], "elu")
    config = import_config(f"{path}:FlatCfg", num_envs=8).config
    assert config.until.iterations == 50 and config.algorithm.model.policy.hidden == (4,)


def test_names_are_followed_into_other_files(tmp_path):
    package = tmp_path / "pack"
    (package / "deep").mkdir(parents=True)
    write(package, "from .base import *\n", "__init__.py")
    write(
        package,
        "from dataclasses import dataclass, field\n"
        "@dataclass\nclass AlgorithmCfg:\n  clip_param: float = 0.3\n  class_name: str = 'PPO'\n"
        "@dataclass\nclass MyRunnerCfg:\n  num_steps_per_env: int = 8\n  max_iterations: int = 1\n"
        "  algorithm: AlgorithmCfg = field(default_factory=AlgorithmCfg)\n"
        "  policy: dict = field(default_factory=lambda: {'class_name': 'ActorCritic'})\n",
        "base.py",
    )
    path = write(
        package / "deep",
        "from pack import MyRunnerCfg, AlgorithmCfg\n"
        "def runner_cfg() -> MyRunnerCfg:\n  clip = 0.1\n"
        "  return MyRunnerCfg(algorithm=AlgorithmCfg(clip_param=clip))\n",
    )
    config = import_config(path).config
    assert config.algorithm.clip_ratio == 0.1 and config.algorithm.horizon == 8


def test_sections_of_legged_gym_are_classes_inside_of_a_class(tmp_path):
    path = write(
        tmp_path,
        "class BaseCfgPPO:\n  seed = 1\n  runner_class_name = 'OnPolicyRunner'\n"
        "  class policy:\n    init_noise_std = 1.0\n    actor_hidden_dims = [8]\n"
        "    critic_hidden_dims = [8]\n    activation = 'elu'\n"
        "  class algorithm:\n    clip_param = 0.2\n    num_learning_epochs = 5\n    num_mini_batches = 4\n"
        "  class runner:\n    policy_class_name = 'ActorCritic'\n    algorithm_class_name = 'PPO'\n"
        "    num_steps_per_env = 24\n"
        "    max_iterations = 10\n"
        "class RobotCfgPPO(BaseCfgPPO):\n  class algorithm(BaseCfgPPO.algorithm):\n    entropy_coef = 0.02\n",
    )
    config = import_config(f"{path}:RobotCfgPPO").config
    assert config.algorithm.entropy_coef.value == 0.02 and config.algorithm.epochs == 5 and config.seed == 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("max_iterations = int(open('/etc/passwd').read())", ("agent_cfg.py", "without running")),
        ("max_iterations = [x for x in range(3)]", ("without running", "[x for x")),
        ("max_iterations = (", ("not valid Python",)),
        ("def __post_init__(self):\n        import os", ("without running", "import os")),
        ("def __post_init__(self):\n        self.nothing.there = 3", ("self.nothing.there", "exists")),
    ],
)
def test_values_known_only_at_run_time_are_refused_by_line(tmp_path, body, words):
    path = write(tmp_path, f"class ACfg(RslRlOnPolicyRunnerCfg):\n    {body}\n")
    with pytest.raises(ConfigError) as refused:
        import_config(path)
    for word in words:
        assert word in str(refused.value)


def test_several_classes_want_a_name(tmp_path):
    path = write(tmp_path, ISAAC)
    with pytest.raises(ConfigError, match=r"say which: .*:RoughCfg, .*:FlatCfg"):
        import_config(path)
    with pytest.raises(ConfigError, match="did you mean FlatCfg"):
        import_config(f"{path}:FlotCfg")
    with pytest.raises(ConfigError, match="no class of settings"):
        import_config(write(tmp_path, "x = 1\n", "other.py"))
    with pytest.raises(ConfigError, match="no such file"):
        import_config(tmp_path / "absent.py")


def test_arithmetic_round_and_pass_are_read(tmp_path):
    path = write(
        tmp_path,
        ISAAC + "\n\n@configclass\nclass MineCfg(RoughCfg):\n"
        "    num_steps_per_env = 2**3 * round(2.4)\n\n    def __post_init__(self):\n        pass\n",
    )
    assert read_python_config(path, "MineCfg")[0]["num_steps_per_env"] == 16
    huge = write(tmp_path, "class ACfg(RslRlOnPolicyRunnerCfg):\n    max_iterations = 10**10**10\n", "huge.py")
    with pytest.raises(ConfigError, match="too large a power"):
        import_config(huge)


def test_post_init_reads_and_scales_fields_of_self(tmp_path):
    path = write(
        tmp_path,
        ISAAC + "\nSCALE = 0.5\n\n@configclass\nclass SlowCfg(RoughCfg):\n    def __post_init__(self):\n"
        "        super().__post_init__()\n"
        "        self.num_steps_per_env = round(self.num_steps_per_env * SCALE)\n"
        "        self.algorithm.gamma = self.algorithm.gamma ** (1 / SCALE)\n"
        "        self.max_iterations = self.max_iterations * 2\n        self.critic = self.actor\n",
    )
    slow, _ = read_python_config(path, "SlowCfg")
    assert (slow["num_steps_per_env"], slow["max_iterations"]) == (12, 600)
    assert slow["algorithm"]["gamma"] == pytest.approx(0.99**2)
    assert slow["critic"]["hidden_dims"] == [32, 16]


def test_a_field_of_self_that_does_not_exist_is_refused(tmp_path):
    body = "    def __post_init__(self):\n        self.max_iterations = self.iterations * 2\n"
    path = write(tmp_path, f"{ISAAC}\n@configclass\nclass MineCfg(RoughCfg):\n{body}")
    with pytest.raises(ConfigError, match=r"max_iterations: .*no such field of self: self\.iterations"):
        import_config(f"{path}:MineCfg")


def test_a_label_that_only_a_run_of_the_file_knows_is_left_out(tmp_path):
    body = "    run_name = ''.join(['a', 'b'])\n    load_run = os.path.expanduser('~')\n"
    path = write(tmp_path, f"{ISAAC}\n@configclass\nclass MineCfg(RoughCfg):\n{body}")
    imported = import_config(f"{path}:MineCfg", num_envs=8)
    assert imported.config.until.iterations == 300
    assert "run_name" in imported.report.text()


def test_a_setting_that_only_a_run_of_the_file_knows_is_refused_by_key(tmp_path):
    path = write(tmp_path, f"{ISAAC}\n@configclass\nclass MineCfg(RoughCfg):\n    save_interval = chosen()\n")
    with pytest.raises(ConfigError, match=r"save_interval: .*chosen\(\).*--without"):
        import_config(f"{path}:MineCfg", num_envs=8)
    assert import_config(f"{path}:MineCfg", num_envs=8, without=("save_interval",)).config.until.iterations == 300


def test_a_function_that_needs_arguments_is_no_run(tmp_path):
    text = "from x import RslRlOnPolicyRunnerCfg\n\n\n"
    takes = text + "def parse(args) -> RslRlOnPolicyRunnerCfg:\n    cfg = args\n    return cfg\n"
    with pytest.raises(ConfigError, match="no function without arguments"):
        import_config(f"{write(tmp_path, takes)}:parse")


def test_a_package_that_is_not_found_is_named(tmp_path):
    text = "from not_here.agents import FlatPPORunnerCfg\n\n\nclass MineRunnerCfg(FlatPPORunnerCfg):\n    seed = 1\n"
    with pytest.raises(ConfigError, match=r"no num_steps_per_env.* of not_here\.agents; .*PYTHONPATH"):
        import_config(write(tmp_path, text))


def test_a_missing_number_of_environments_is_the_only_complaint():
    with pytest.raises(ImportRefused) as refused:
        import_config(rl_games(config__num_actors=-1))
    assert [entry.key for entry in refused.value.report.of("refused")] == ["params.config.num_actors"]
    assert "say --num-envs N" in str(refused.value)


def test_a_refusal_ends_with_the_flags_that_leave_out_all_unknown_keys(tmp_path):
    text = f"{ISAAC}\n@configclass\nclass MineCfg(RoughCfg):\n    a = 1\n    b = dict(c=2)\n    d = 3\n    e = 4\n"
    path = write(tmp_path, text)
    with pytest.raises(ImportRefused, match=r"and 1 more; .*--without a --without b\.c --without d --without e"):
        import_config(f"{path}:MineCfg", num_envs=8)
