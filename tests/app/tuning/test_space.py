"""Ranges of a search as text."""

from dataclasses import replace

import pytest

from canter.algorithms.ppo import PPOConfig
from canter.app.tuning.space import build_space, parse_dimension, read_space, setting_names, spec_of
from canter.config import TrainConfig
from canter.config.presets import preset_for
from canter.core.plain import ConfigError
from canter.core.registry import UserError
from canter.nn.schedules import Linear

BASE = TrainConfig(algorithm=PPOConfig(gamma=0.98, epochs=6, horizon=64))


def space(**ranges):
    return build_space({key.replace("__", "."): text for key, text in ranges.items()}, BASE)


def test_ranges_are_numbers_on_a_scale():
    rate, discount, epochs = space(
        algorithm__optimizer__learning_rate="1e-5..1e-2:log",
        algorithm__gamma="0.9..0.999:log1m",
        algorithm__epochs="2..9",
    )
    assert (rate.low, rate.high, rate.scale, rate.integer) == (1e-5, 1e-2, "log", False)
    assert rate.text(0.00123456) == "0.001235"
    assert discount.text(0.0123456) == "0.98765"
    assert [discount.position(text) for text in ("0.9", "0.99", "0.999")] == pytest.approx([0, 0.5, 1])
    assert (epochs.integer, epochs.text(3)) == (True, "3")


def test_values_are_choices():
    [activation] = space(algorithm__model__policy__activation="tanh,relu")
    assert activation.choices == ("tanh", "relu") and activation.position("relu") == 1


def test_relative_ranges_follow_the_base():
    discount, epochs, horizon = space(
        algorithm__gamma="0.5x..2x:log1m", algorithm__epochs="0.5x..2x", algorithm__horizon="0.5x,1x,2x"
    )
    assert (discount.low, discount.high) == pytest.approx((0.96, 0.99))
    assert (epochs.low, epochs.high) == (3, 12)
    assert horizon.choices == ("32", "64", "128")


def test_the_range_of_a_schedule_is_that_of_its_start():
    algorithm = replace(BASE.algorithm, entropy_coef=Linear(0.01))
    [entropy] = build_space({"algorithm.entropy_coef": "0.1x..10x:log"}, replace(BASE, algorithm=algorithm))
    assert (entropy.key, entropy.low, entropy.high) == ("algorithm.entropy_coef.start", 0.001, 0.1)
    assert setting_names([entropy.key]) == {entropy.key: "entropy_coef"}


@pytest.mark.parametrize(("env_id", "algorithm"), [("CartPole-v1", None), ("Acrobot-v1", None), ("Hopper-v5", "sac")])
def test_presets_have_a_default_space_which_reads_back(env_id, algorithm):
    base = preset_for(env_id, algorithm)
    dimensions = build_space({}, base)
    assert len(dimensions) >= 4
    assert build_space({part.key: part.spec for part in dimensions}, base) == dimensions


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("algorithm.gama", "0.9..0.99", "space.algorithm.gama: unknown key, did you mean algorithm.gamma"),
        ("algorithm.gamma", "0.9-0.99", r"space.algorithm.gamma: expected LOW..HIGH, .* got '0.9-0.99'"),
        ("algorithm.gamma", "0.9..1.5", "gamma=1.5 must lie in 0..1"),
        ("algorithm.gamma", "0.99..0.9", "0.99..0.9: expected LOW..HIGH with LOW below HIGH"),
        ("algorithm.gamma", "0.9..1:log1m", "with LOW below HIGH and below 1"),
        ("algorithm.gamma", "0.9..0.99:lg", "expected LOW..HIGH"),
        ("algorithm.entropy_coef", "0.1x..2x", "relative to the setting, which is 0.0"),
        ("algorithm.model.policy.activation", "tanh,rlu", "rlu"),
        ("seed", "0..4", "a search keeps seed fixed"),
        ("total_steps", "1000..2000", "a search keeps total_steps fixed"),
    ],
)
def test_ranges_that_make_no_sense_are_refused(key, text, message):
    with pytest.raises(UserError, match=message):
        build_space({key: text}, BASE)


def test_a_file_may_nest_keys_and_list_values(tmp_path):
    file = tmp_path / "space.yaml"
    file.write_text("algorithm:\n  gamma: 0.9..0.99\n  horizon: [32, 64]\nalgorithm.epochs: 2..4\n")
    assert read_space(file) == {
        "algorithm.gamma": "0.9..0.99",
        "algorithm.horizon": "32,64",
        "algorithm.epochs": "2..4",
    }
    with pytest.raises(ConfigError, match=r"space\.algorithm\.gamma: expected a range"):
        spec_of("algorithm.gamma", 0.9)


def test_a_relative_value_keeps_its_digits():
    assert parse_dimension("key", "0.5x,1x", 0.3).choices == ("0.15", "0.3")
