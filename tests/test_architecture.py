"""Check that docs/architecture.md is true: packages, their sizes, layers, the loop, and the files that it names."""

import configparser
import inspect
import re
import textwrap
from pathlib import Path

import pytest

from canter.training.trainer import Trainer
from code_lines import SOURCE, lines_under

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
ROW = re.compile(r"^\| `(\w+)` \| .* \| (\d+) \| ([\d,]+) \|$", re.MULTILINE)
PACKAGES = {name: (int(files), int(lines.replace(",", ""))) for name, files, lines in ROW.findall(PAGE)}


def section(title):
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_every_package_is_on_the_page():
    assert set(PACKAGES) == {path.parent.name for path in SOURCE.glob("*/__init__.py")}


@pytest.mark.parametrize("package", PACKAGES)
def test_sizes_are_those_of_the_source(package):
    files, lines = PACKAGES[package]
    folder = SOURCE / package
    assert files == len([*folder.rglob("*.py")])
    assert lines == pytest.approx(lines_under(folder), rel=0.05)


def test_layers_are_those_that_are_checked():
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    checked = contracts["importlinter:contract:layers"]["layers"].strip().splitlines()
    assert checked[0] == "__main__"
    on_page = reversed(re.findall(r"^\d+\. (.*)$", section("Layers"), re.MULTILINE))
    assert [set(re.findall(r"`(\w+)`", line)) for line in on_page] == [set(line.split(" : ")) for line in checked[1:]]


def test_the_loop_is_the_one_that_runs():
    (shown,) = re.findall(r"^```text\n(.*?)^```$", section("The loop and its guard"), re.MULTILINE | re.DOTALL)
    assert textwrap.indent(shown, 8 * " ") in inspect.getsource(Trainer.learn)


def test_files_that_are_named_exist():
    named = re.findall(r"\b((?:[a-z_]+/)+[a-z_]+\.py)\b", PAGE.partition("\n## How to add\n")[0])
    for name in named:
        assert (SOURCE / name).exists() or (ROOT / name).exists(), name
