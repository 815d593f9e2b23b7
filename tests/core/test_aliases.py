import importlib
import logging
from dataclasses import dataclass, fields, is_dataclass

import pytest

import canter
from canter.core import hints
from canter.core.hints import config_keys
from canter.core.plain import ConfigError, from_plain


@dataclass(frozen=True)
class Section:
    width: int = 1
    style: str = "plain"


@dataclass(frozen=True)
class Special(Section):
    depth: int = 2


@dataclass(frozen=True)
class Top:
    section: Special = Special()
    rate: float = 0.5


@pytest.fixture(autouse=True)
def old_names(monkeypatch):
    table = {
        "Section.breadth": "width",
        "Section.style=simple": "plain",
        "Top.part": "section",
        "Top.speed": "rate",
    }
    monkeypatch.setattr(hints, "_warned", set())
    monkeypatch.setattr(hints, "SETTING_ALIASES", table)


def test_old_names_and_values_are_read_at_every_level():
    plain = {"part": {"breadth": 7, "style": "simple", "depth": 3}, "speed": 0.25}
    assert from_plain(plain, Top) == Top(Special(7, "plain", 3), 0.25)
    assert from_plain({"part": {"breadth": 7}}, Top(Special(depth=9))) == Top(Special(7, depth=9))


def test_every_old_name_is_warned_of_once_with_both_names(caplog):
    for _ in range(3):
        from_plain({"part": {"breadth": 7, "style": "simple"}}, Top)
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(messages) == 3
    assert any("part is now called section" in message for message in messages)
    assert any("part.breadth is now called part.width" in message for message in messages)
    assert any("value simple of the setting part.style is now called plain" in message for message in messages)


def test_a_setting_given_under_both_names_is_refused():
    with pytest.raises(ConfigError, match=r"^section\.breadth: also given as section\.width, another name") as error:
        from_plain({"section": {"width": 1, "breadth": 2}}, Top)
    assert error.value.key == "section.breadth"


def test_errors_name_the_key_as_it_was_written():
    with pytest.raises(ConfigError, match=r"^speed: expected a number"):
        from_plain({"speed": "fast"}, Top)


def test_flags_know_the_old_names_and_lists_of_settings_do_not():
    assert set(config_keys(Top)) == {"section.width", "section.style", "section.depth", "rate"}
    old = set(config_keys(Top, with_old_names=True)) - set(config_keys(Top))
    assert old == {"speed", "section.breadth", "part.breadth", "part.width", "part.style", "part.depth"}


def test_a_deprecated_public_name_warns_and_is_the_new_one(monkeypatch):
    monkeypatch.setitem(hints.DEPRECATED, "OldPPOConfig", "PPOConfig")
    with pytest.warns(DeprecationWarning, match=r"canter\.OldPPOConfig is now called canter\.PPOConfig"):
        assert canter.OldPPOConfig is canter.PPOConfig  # pyright: ignore[reportAttributeAccessIssue]
    vars(canter).pop("OldPPOConfig")


def test_the_tables_lead_to_names_that_exist(monkeypatch):
    monkeypatch.undo()
    api = importlib.import_module("canter.app.api")
    for old, new in hints.DEPRECATED.items():
        assert hasattr(api, new)
        assert not hasattr(api, old)
    classes = {
        cls.__name__: cls for cls in _subclasses(object) if is_dataclass(cls) and cls.__module__.startswith("canter")
    }
    for alias, new in hints.SETTING_ALIASES.items():
        owner, _, old = alias.partition(".")
        names = {field.name for field in fields(classes[owner])}
        if "=" in old:
            assert old.partition("=")[0] in names
        else:
            assert new in names
            assert old not in names


def _subclasses(cls):
    found = set()
    stack = [cls]
    while stack:
        for child in type.__subclasses__(stack.pop()):
            if child not in found:
                found.add(child)
                stack.append(child)
    return found
