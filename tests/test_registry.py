import pytest

from canter.registry import Registry, nearest


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
