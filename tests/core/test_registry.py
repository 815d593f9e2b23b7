from dataclasses import dataclass

import pytest

import canter
from canter.core.registry import Registry, nearest


def test_an_unknown_name_offers_the_nearest_ones():
    registry = Registry("colour")
    registry.register("green")(1)
    registry.register("blue")(2)
    with pytest.raises(KeyError, match=r"unknown colour 'gren': did you mean green\?"):
        registry["gren"]


def test_a_name_like_nothing_lists_all_names():
    assert nearest("zzz", ["b", "a"]) == "known: a, b"


def test_case_does_not_matter_for_suggestions():
    assert nearest("CARTPOLE", ["cartpole", "pendulum"]) == "did you mean cartpole?"


def test_two_registrations_of_one_name_say_where_both_are():
    registry = Registry("colour")
    registry.register("green")("first")
    with pytest.raises(ValueError, match=r"'green' is registered twice: at .*test_registry\.py:\d+ and at .*:\d+"):
        registry.register("green")("second")


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match=r"register\('shedule', 'x'\): unknown kind of thing, did you mean schedule"):
        canter.register("shedule", "x")


def test_settings_must_be_a_frozen_dataclass_of_their_own():
    @dataclass
    class Loose:
        x: int = 1

    class Undecorated(canter.Linear):
        pass

    for item in (Loose, Undecorated, lambda: None):
        with pytest.raises(TypeError, match=r"schedule 'x', registered at .*test_registry\.py:\d+: expected settings"):
            canter.register("schedule", "x")(item)


def test_a_field_called_kind_is_refused():
    @dataclass(frozen=True)
    class Named:
        kind: str = "a"

    with pytest.raises(TypeError, match=r"Named\.kind: in settings files this key selects the class"):
        canter.register("network", "x")(Named)


def test_settings_without_a_name_cannot_be_written_but_can_be_used():
    @dataclass(frozen=True)
    class Nameless(canter.Linear):
        pass

    optimizer = canter.OptimizerConfig(learning_rate=Nameless(1.0))
    config = canter.TrainConfig(algorithm=canter.PPOConfig(optimizer=optimizer))
    with pytest.raises(ValueError, match=r"learning_rate: Nameless .* @canter\.register\('schedule', NAME\)"):
        canter.core.plain.to_plain(config)


def test_names_with_control_characters_are_refused():
    with pytest.raises(ValueError, match=r"activation 'a\\x1bb', registered at .*: a name must be printable"):
        canter.register("activation", "a\x1bb")(object())
