"""Folders of runs, and how runs are found."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from canter.app.experiments.folders import new_run
from canter.config import TrainConfig
from canter.runs.records import CONFIG, SWEEP, find_all, find_run


def test_runs_that_start_together_get_different_folders(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: new_run(tmp_path / "runs", None, TrainConfig()).path, range(40)))
    assert len({*paths}) == 40
    assert all(path.is_dir() for path in paths)


def test_a_name_that_is_taken_is_refused(tmp_path):
    made(tmp_path / "mine")
    with pytest.raises(ValueError, match="already exists; choose another --name"):
        new_run(tmp_path, "mine", TrainConfig())


def made(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / CONFIG).write_text("seed: 0\n")
    return path


def test_runs_are_found_by_path_name_beginning_folder_and_sweep(tmp_path):
    runs = tmp_path / "runs"
    first, second, other = (made(runs / name) for name in ("Cart-1", "Cart-2", "Hop-1"))
    inside = [made(runs / "sweep" / name) for name in ("seed0", "seed1")]
    (runs / "sweep" / SWEEP).write_text("{}")
    made(runs / "no-sweep" / "seed0")
    assert find_run("Hop", runs) == other
    assert find_run(str(first), runs) == first
    assert find_all("Cart", runs) == [first, second]
    assert find_all("sweep", runs) == inside
    assert find_all("sweep/seed1", runs) == inside[1:]
    assert find_all(str(runs), runs) == [first, second, other, *inside]
    with pytest.raises(ValueError, match="'Cart' could be any of Cart-1, Cart-2"):
        find_run("Cart", runs)
    with pytest.raises(ValueError, match=r"no run 'Card' here or under .*: did you mean"):
        find_all("Card", runs)
