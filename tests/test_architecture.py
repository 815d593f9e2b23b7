"""docs/architecture.md says what is so: the rooms, their sizes, and the layers."""

import configparser
import re
from pathlib import Path

import pytest

from code_lines import SOURCE, code_lines, lines_under
from test_budgets import CODE_LINES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
ROOMS = {name: int(lines) for name, lines in re.findall(r"^\| `(\S+)` \| .* \| (\d+) \|$", PAGE, re.MULTILINE)}


def section(title):
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rooms_of_the_source():
    folders = {f"{path.parent.relative_to(SOURCE)}/" for path in SOURCE.rglob("*.py")} - {"./"}
    return folders | {path.name for path in SOURCE.glob("*.py")}


def test_every_room_is_on_the_page_and_every_one_there_exists():
    assert set(ROOMS) == rooms_of_the_source()


@pytest.mark.parametrize("room", ROOMS)
def test_lines_are_those_of_the_source(room):
    path = SOURCE / room
    counted = sum(map(code_lines, path.glob("*.py"))) if path.is_dir() else code_lines(path)
    assert abs(ROOMS[room] - counted) <= max(0.05 * counted, 1), f"it has {counted} lines"


def test_totals_are_those_of_the_source():
    row = re.search(r"^\| code lines \| 12,404 \| ([\d,]+) \|$", PAGE, re.MULTILINE)
    files = re.search(r"^\| files \| 149 \| (\d+) \|$", PAGE, re.MULTILINE)
    assert row and int(row[1].replace(",", "")) == pytest.approx(lines_under(SOURCE), rel=0.05)
    assert files and int(files[1]) == pytest.approx(len([*SOURCE.rglob("*.py")]), rel=0.05)
    assert sum(ROOMS.values()) == pytest.approx(CODE_LINES, rel=0.05)


def test_layers_are_those_that_are_checked():
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    checked = contracts["importlinter:contract:layers"]["layers"].strip().splitlines()
    told = reversed(re.findall(r"^\d+\. (.*)$", section("Layers"), re.MULTILINE))
    assert [set(re.findall(r"`(\w+)`", line)) for line in told] == [set(line.split(" : ")) for line in checked]


def test_files_that_are_named_exist():
    for name in re.findall(r"\b((?:[a-z_]+/)+[a-z_]+\.py)\b", PAGE):
        assert (SOURCE / name).exists() or (ROOT / name).exists(), name
