import math
from dataclasses import dataclass, replace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from canter.algorithms.ppo import PPOConfig
from canter.config import TrainConfig
from canter.config.files import dump_config, read_config
from canter.config.presets import presets
from canter.core.hints import config_keys
from canter.core.plain import ConfigError, from_plain, to_plain
from canter.core.registry import registries
from canter.core.storage.files import parse
from canter.envs import EnvConfig
from canter.nn.actor_critic import ModelConfig
from canter.nn.network import NetworkConfig
from canter.nn.optimizer import OptimizerConfig
from canter.nn.schedules import AdaptiveKL, Constant, Linear

DEFAULT = TrainConfig()
RICH = TrainConfig(
    env=EnvConfig(id="tensor:queue", options={"a": [1, 2.5, None, "1e-3", "yes"], "b": {"c": True, "é\n": ""}}),
    algorithm=PPOConfig(
        entropy_coef=Linear(0.01),
        target_kl=0.02,
        optimizer=OptimizerConfig(learning_rate=AdaptiveKL(1e-3, every="minibatch"), max_grad_norm=math.inf),
        critic_optimizer=OptimizerConfig(learning_rate=Constant(1e-3)),
        model=ModelConfig(critic=NetworkConfig(obs_groups=("critic",), hidden=())),
    ),
    seed=7,
)


def write(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def nested(key, value):
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


# Round trips


@pytest.mark.parametrize("config", [DEFAULT, RICH, *(presets[name] for name in presets)], ids=lambda c: c.env.id)
def test_a_dumped_config_reads_back_equal_over_any_base(config, tmp_path):
    path = write(tmp_path, dump_config(config))
    assert read_config(path).over(DEFAULT) == config
    assert read_config(path).over(RICH) == config


def test_a_constant_schedule_is_a_number_and_the_others_name_their_kind():
    plain = to_plain(RICH)["algorithm"]
    assert plain["critic_optimizer"]["learning_rate"] == 1e-3
    assert plain["entropy_coef"] == {"kind": "linear", "start": 0.01, "end": 0.0, "begin_at": 0.0, "end_at": 1.0}
    assert plain["optimizer"]["learning_rate"]["kind"] == "adaptive_kl"
    assert plain["model"]["critic"]["obs_groups"] == ["critic"]


def test_options_that_are_no_plain_data_cannot_be_written():
    with pytest.raises(ConfigError, match=r"^env\.options\.wrapper: expected .* got <class"):
        to_plain(TrainConfig(env=EnvConfig(options={"wrapper": dict})))


# Merging


def test_a_partial_mapping_leaves_the_rest_of_the_base():
    config = from_plain({"algorithm": {"gamma": 0.5, "optimizer": {"eps": 1}}, "seed": 3}, RICH)
    assert config == replace(
        RICH,
        seed=3,
        algorithm=replace(RICH.algorithm, gamma=0.5, optimizer=replace(RICH.algorithm.optimizer, eps=1.0)),
    )
    assert isinstance(config.algorithm.optimizer.eps, float)


@pytest.mark.parametrize(
    ("plain", "expected"),
    [
        (1, Constant(1.0)),
        ("1e-3", Constant(1e-3)),
        ({"end": 0.005}, Linear(0.01, 0.005)),
        ({"kind": "linear", "start": 1}, Linear(1.0, 0.0)),
        ({"kind": "constant", "value": 2}, Constant(2.0)),
    ],
)
def test_schedules_merge_into_their_own_kind_and_replace_another(plain, expected):
    assert from_plain({"algorithm": {"entropy_coef": plain}}, RICH).algorithm.entropy_coef == expected


def test_null_takes_an_optional_section_away_and_a_mapping_brings_it():
    gone = from_plain(nested("algorithm.critic_optimizer", None), RICH)
    assert gone.algorithm.critic_optimizer is None
    back = from_plain(nested("algorithm.critic_optimizer.eps", 1e-3), gone)
    assert back.algorithm.critic_optimizer == OptimizerConfig(eps=1e-3)


def test_numbers_may_be_written_as_people_write_them(tmp_path):
    path = write(tmp_path, "total_steps: 1e6\nalgorithm: {gamma: 9e-1, target_kl: 1}\nenv: {options: {noise: 1e-2}}")
    config = read_config(path).over(DEFAULT)
    assert (config.total_steps, config.algorithm.gamma, config.algorithm.target_kl) == (1_000_000, 0.9, 1.0)
    assert type(config.total_steps) is int
    assert config.env.options == {"noise": 0.01}


# Refusals


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("algorithm.gama", 1, "algorithm.gama: unknown key, did you mean gamma"),
        ("algoritm", {}, "algoritm: unknown key, did you mean algorithm?"),
        (
            "algorithm.entropy_coef.start",
            1,
            "entropy_coef.start: unknown key, it belongs to kind linear or step or adaptive_kl",
        ),
        ("algorithm.entropy_coef.kind", "linea", "entropy_coef.kind: unknown schedule 'linea', did you mean linear?"),
        ("algorithm.entropy_coef.kind", "linear", "algorithm.entropy_coef.start: needs a value"),
        ("algorithm.entropy_coef", "fast", "entropy_coef: expected a number, or a mapping with kind constant or"),
        (
            "algorithm.entropy_coef",
            [1],
            "entropy_coef: expected a mapping with kind constant or linear or step or adaptive_kl",
        ),
        ("algorithm.entropy_coef", True, "entropy_coef: expected a number, or"),
        (
            "algorithm.surrogate",
            "cliped",
            "expected one of clipped, smooth_clipped, vanilla, got 'cliped'; did you mean",
        ),
        ("algorithm.gamma", "high", "algorithm.gamma: expected a number, got 'high'"),
        ("algorithm.gamma", True, "algorithm.gamma: expected a number, got true"),
        ("algorithm.gamma", None, "algorithm.gamma: expected a number, got null"),
        ("algorithm.gamma", math.nan, "algorithm.gamma: expected a finite number, got nan"),
        ("algorithm.value_coef", math.inf, "algorithm.value_coef: expected a finite number, got inf"),
        ("algorithm.value_coef", 10**400, "expected a finite number, got an integer of 1329 bits"),
        ("algorithm.gamma", 2, "algorithm.gamma=2.0 must lie in 0..1"),
        ("algorithm.horizon", True, "algorithm.horizon: expected an integer, got true"),
        ("algorithm.horizon", 1.5, "algorithm.horizon: expected an integer, got 1.5"),
        ("algorithm.horizon", "64", "algorithm.horizon: expected an integer, got '64'"),
        ("algorithm.recompute_advantage", 1, "expected true or false, got 1"),
        ("algorithm.optimizer", None, "algorithm.optimizer: expected a mapping, got null"),
        ("algorithm.critic_optimizer", 3, "expected a mapping or null, got 3"),
        ("algorithm.optimizer.betas", [0.9], "betas: expected a list of 2, got [0.9]"),
        ("algorithm.model.policy.hidden", [64, "x"], "algorithm.model.policy.hidden[1]: expected an integer, got 'x'"),
        ("algorithm.model.policy.cnn.layers", [[1, 2]], "must be (channels, kernel, stride), each at least 1"),
        ("algorithm.model.std.minimum", 3, "algorithm.model.std: 0 < minimum < initial"),
        ("algorithm.model.std", {"kind": "net"}, "std.kind: expected one of parameter, network, got 'net'"),
        ("env.num_envs", 0, "env.num_envs=0 must be at least 1"),
        ("env.autoreset", "never", "same_step, next_step, disabled or null, got 'never'"),
        ("env.options", [1], "env.options: expected a mapping, got [1]"),
        ("env.options", {1: 2}, "env.options: expected strings as keys, got 1"),
        ("env.options", {"a": [{"b": dict}]}, "env.options.a[0].b: expected a string, a number"),
        ("seed", -1, "seed=-1 must not be negative"),
        ("seed", 2**70, "seed: expected an integer of at most 63 bits"),
    ],
)
def test_an_error_names_path_value_and_remedy(key, value, message):
    with pytest.raises(ConfigError) as caught:
        from_plain(nested(key, value), DEFAULT)
    assert message in str(caught.value)
    assert key.startswith(caught.value.key.partition("[")[0]) or caught.value.key.startswith(key)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nalgorithm:\n  gama: 2\n", ":3: algorithm.gama: unknown key, did you mean gamma"),
        ("algorithm:\n  gamma: 2\n", ":2: algorithm.gamma=2.0 must lie"),
        (
            "algorithm:\n  model:\n    policy:\n      hidden:\n      - 1\n      - x\n",
            ":4: algorithm.model.policy.hidden[1]",
        ),
        ("seed: 1\nenv: {}\nseed: 2\n", ":3: not valid YAML: the key seed is there twice"),
        ("env:\n  options: {a: 1, a: 2}\n", ":2: not valid YAML: the key a is there twice"),
        ("env:\n\tid: x\n", ":2: not valid YAML: found character '\\t'"),
        ("env: [1\n", "not valid YAML"),
        ("", "expected a mapping of settings at the top, found nothing"),
        ("- 1\n", "expected a mapping of settings at the top, found a list"),
        ("seed: 1\n---\nseed: 2\n", "not valid YAML"),
        ("seed: !!python/object/apply:builtins.print [x]\n", ":1: not valid YAML"),
        ("seed: !!int x\n", "not valid YAML"),
        ("seed: !!bool x\n", "not valid YAML"),
        ("seed: !!timestamp x\n", "not valid YAML"),
        ("seed: 2001-13-45\n", "not valid YAML"),
        ("seed: 2001-12-14\n", "seed: expected an integer, got datetime.date"),
        ("seed: " + "9" * 5000 + "\n", ":1: not valid YAML: more than 400 digits"),
        ("seed: 1" + ":1" * 400_000 + "\n", ":1: not valid YAML: more than 400 digits"),
        ("1" + ":1" * 400 + ": 1\n", ":1: not valid YAML: more than 400 digits"),
        ("? [1, 2]\n: 3\n", ":1: not valid YAML: a key must be a plain name"),
        ("seed: \x00\n", "not valid YAML"),
        (b"seed: 1\nenv: {id: \xff}\n", ":2: not UTF-8 text"),
        ("env: {options: " + "[" * 100_000 + "}\n", "more than 50 levels"),
        ("env: {options: &a {b: *a}}\n", "more than 50 levels"),
        ("env: {options: {a: &a 1, b: [" + "*a, " * 101 + "]}}\n", "more than 100 aliases"),
        ("env: {options: {a: [" + "1, " * 10_001 + "]}}\n", "more than 10,000 values"),
        ("#" * (2**20 + 1), "1,048,577 bytes, more than the 1,048,576 allowed"),
    ],
    ids=lambda value: repr(value[:40]),
)
def test_a_file_that_cannot_be_used_is_named_with_the_line(text, message, tmp_path):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_config(path).over(DEFAULT)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)


@pytest.mark.parametrize("use", ["*{}", "{{<<: [*{0}, *{0}]}}"])
def test_an_alias_bomb_is_refused_at_once(use, tmp_path):
    lines = ["env:", "  options:", "    a0: &a0 {x: 1}"]
    for i in range(1, 10):
        item = use.format(f"a{i - 1}")
        lines.append(f"    a{i}: &a{i} " + "{" + ", ".join(f"k{j}: {item}" for j in range(5)) + "}")
    with pytest.raises(ConfigError, match=r"more than 1(0,000 values|00 aliases)"):
        read_config(write(tmp_path, "\n".join(lines))).over(DEFAULT)


def test_a_few_aliases_are_fine(tmp_path):
    path = write(tmp_path, "algorithm: {optimizer: &o {eps: 1e-3}, critic_optimizer: {<<: *o, weight_decay: 0.1}}")
    config = read_config(path).over(DEFAULT)
    assert config.algorithm.critic_optimizer == OptimizerConfig(eps=1e-3, weight_decay=0.1)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    for path in (tmp_path / "nothing.yaml", tmp_path, "a\0b"):
        with pytest.raises(ConfigError):
            read_config(path).over(DEFAULT)


# Anything at all: a valid config or a ConfigError

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["1e-3", "linear", "clipped", "none", 10**400, 0, 1, 0.5, "cpu"])
)
NAMES = sorted({part for key in config_keys(TrainConfig) for part in key.split(".")} | {"kind"})
KEYS = st.sampled_from(NAMES) | st.text(max_size=5) | st.integers() | st.none()
TREES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=10
)


def check(read):
    """Return True if reading returned a config; it must be one that can be written and read again."""
    try:
        config = read()
    except ConfigError as error:
        assert str(error)
        return False
    assert isinstance(config, TrainConfig)
    assert from_plain(to_plain(config), DEFAULT) == config
    return True


@settings(max_examples=100, deadline=None)
@given(TREES)
def test_any_tree_is_a_config_or_a_config_error(tree):
    check(lambda: from_plain(tree, RICH))


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(config_keys(TrainConfig))), TREES, min_size=1, max_size=2))
def test_any_value_at_a_real_key_is_a_config_or_a_config_error(changes):
    config = RICH
    for key, value in changes.items():
        try:
            config = from_plain(nested(key, value), config)
        except ConfigError as error:
            assert str(error)
    assert from_plain(to_plain(config), DEFAULT) == config


LINES = dump_config(RICH).splitlines()
JUNK = st.sampled_from(
    [": ", "- ", "&a ", "*a", "<<: *a", "!!int ", "!x ", "{", "}", "[", "]", '"', "'", "\t", "#"]
) | st.text(max_size=4)


@st.composite
def damaged_texts(draw):
    start = draw(st.integers(0, len(LINES) - 1))
    text = "\n".join(LINES[start : start + draw(st.integers(1, 15))])
    for _ in range(draw(st.integers(0, 4))):
        at, cut = draw(st.integers(0, len(text))), draw(st.integers(0, 5))
        text = text[:at] + draw(JUNK) + text[at + cut :]
    return text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@settings(max_examples=100, deadline=None)
@given(damaged_texts() | st.text(max_size=40) | TREES.map(lambda tree: yaml.safe_dump(tree)))
def test_any_text_is_a_config_or_a_config_error(folder, text):
    path = write(folder, text.encode("utf-8", "surrogatepass"))
    check(lambda: read_config(path).over(DEFAULT))


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.text(), st.recursive(LEAVES, st.lists).filter(lambda v: v == v), max_size=3))
def test_options_survive_the_way_through_a_file(folder, options):
    try:
        config = from_plain({"env": {"options": options}}, DEFAULT)
    except ConfigError:
        return
    assert read_config(write(folder, dump_config(config))).over(RICH) == config


def test_yaml_text_is_read_with_the_line_of_each_key():
    assert parse("a: 1\nb:\n  c: [2e0]\n", "text") == ({"a": 1, "b": {"c": [2.0]}}, {"": 1, "a": 1, "b": 2, "b.c": 3})


def test_settings_with_one_field_by_keyword_are_written_and_read(tmp_path, monkeypatch):
    extensions = registries["extension"]
    monkeypatch.setattr(extensions, "_items", {})

    @extensions.register("single")
    @dataclass(frozen=True, kw_only=True)
    class Single:
        scale: float = 0.5

    config = replace(DEFAULT, algorithm=replace(DEFAULT.algorithm, extensions=(Single(scale=0.25),)))
    assert "extensions: [0.25]" in dump_config(config)
    assert read_config(write(tmp_path, dump_config(config))).over(DEFAULT) == config
