"""docs/settings_table.md agrees with the results of varying settings; a few rows are recomputed here."""

import importlib
import re
from pathlib import Path

import pytest
import torch

from canter.engines.native import AVAILABLE

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "settings_table.md").read_text()


def rows_of(title):
    """Return the verdicts on each setting that the table under a heading lists."""
    table = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return {name: cells.split(" | ") for name, cells in re.findall(r"^\| `([\w.]+)` \| (.*) \|$", table, re.MULTILINE)}


ROWS = {"cpu": rows_of("On a CPU"), "cuda": rows_of("On a GPU")}


@pytest.fixture
def effects(monkeypatch):
    monkeypatch.syspath_prepend(TESTS / "algorithms")
    return importlib.import_module("test_settings_have_effect")


@pytest.mark.parametrize("device", ROWS)
def test_the_tables_list_settings_that_exist(effects, device):
    assert effects.header(device) in PAGE
    assert set(ROWS[device]) <= set(effects.VARIED)


@pytest.mark.parametrize("device", ROWS)
def test_only_words_that_are_explained(device):
    explained = set(re.findall(r"^\| (changes|refused|no effect|unsupported) \| ", PAGE, re.MULTILINE))
    assert {word for row in ROWS[device].values() for word in row} <= explained


# Settings with different results; the last one is not in the table.
@pytest.mark.skipif(not AVAILABLE, reason="the page is of an installation with the engine in C")
@pytest.mark.parametrize("path", ["bound_loss.form", "model.bounds", "model.policy.precision", "gamma"])
def test_a_row_is_what_is_found(effects, path):
    assert ROWS["cpu"].get(path, ["changes"] * 6) == effects.row(path, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("path", ["model.distribution", "model.std.floor", "model.policy.precision", "gamma"])
def test_a_row_of_the_gpu_is_what_is_found(effects, path):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")  # as `execution.tf32`
    try:
        assert ROWS["cuda"].get(path, ["changes"] * 2) == effects.row(path, "cuda")
    finally:
        torch.set_float32_matmul_precision(before)
