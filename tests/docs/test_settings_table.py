"""docs/settings_table.md agrees with the results of varying settings; a few rows are recomputed here."""

import importlib
import re
from pathlib import Path

import pytest

from canter.engines.native import AVAILABLE

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "settings_table.md").read_text()
ROWS = {name: [*cells.split(" | ")] for name, cells in re.findall(r"^\| `([\w.]+)` \| (.*) \|$", PAGE, re.MULTILINE)}


@pytest.fixture
def effects(monkeypatch):
    monkeypatch.syspath_prepend(TESTS / "algorithms")
    return importlib.import_module("test_settings_have_effect")


def test_every_setting_that_is_varied_has_a_row(effects):
    assert list(ROWS) == list(effects.VARIED)
    header = " | ".join(f"{kind}, {engine}" for kind in effects.KINDS for engine in effects.ENGINES)
    assert f"| setting | {header} |" in PAGE


def test_only_words_that_are_explained():
    explained = set(re.findall(r"^\| (changes|refused|no effect|unsupported) \| ", PAGE, re.MULTILINE))
    assert {word for row in ROWS.values() for word in row} == explained


# Rows with different results.
@pytest.mark.skipif(not AVAILABLE, reason="the page is of an installation with the engine in C")
@pytest.mark.parametrize("path", ["gamma", "bound_loss.form", "model.bounds", "model.policy.precision"])
def test_a_row_is_what_is_found(effects, path):
    found = [effects.verdict(path, kind, engine) for kind in effects.KINDS for engine in effects.ENGINES]
    assert ROWS[path] == found
