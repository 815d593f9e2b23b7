"""`benchmarks/learning/beside.py`: its statistics, its jobs, and the settings that it compares."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

import canter
from canter.core.plain import from_plain

LEARNING = Path(__file__).parents[2] / "benchmarks" / "learning"
sys.path.append(str(LEARNING))
import beside  # noqa: E402  # pyright: ignore[reportMissingImports]


def test_probability_of_improvement_counts_pairs():
    # Of the 3 x 2 pairs, 4 are won and one is a tie: (4 + 1/2) / 6.
    center, low, high = beside.probability_of_improvement(np.array([1.0, 4.0, 5.0]), np.array([1.0, 3.0]))
    assert center == pytest.approx(4.5 / 6)
    assert 0 <= low < center < high <= 1


def test_the_interval_covers_the_probability_of_equal_groups():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(40):
        x, y = rng.normal(size=(2, 20))
        _, low, high = beside.probability_of_improvement(x, y, draws=400)
        covered += low <= 0.5 <= high
    # 95 % of 40 are 38; 33 or fewer have a probability of 0.1 %.
    assert covered > 33


def test_jobs_are_read_with_seeds_and_minutes():
    jobs = beside.parse("sb3-trpo/Ant-v5/1-3@9")
    assert [job.key for job in jobs] == [("sb3-trpo", "Ant-v5", seed) for seed in (1, 2, 3)]
    assert {job.minutes for job in jobs} == {9.0}
    with pytest.raises(SystemExit, match="sb3-pppo is none of canter"):
        beside.parse("sb3-pppo/Ant-v5/1")


def test_every_variant_fits_the_preset_and_changes_it():
    for task, variants in yaml.safe_load((LEARNING / "variants.yaml").read_text()).items():
        preset = canter.preset_for(task)
        for settings in variants.values():
            assert from_plain(settings, preset) != preset


def test_a_line_that_was_cut_off_is_run_again(tmp_path):
    path = tmp_path / "beside.jsonl"
    path.write_text(json.dumps({"library": "canter", "task": "Hopper-v5", "seed": 0}) + '\n{"library": "can')
    assert [run["seed"] for run in beside.read(path)] == [0]


@pytest.mark.long
def test_runs_are_added_once_and_a_run_that_is_too_long_is_not_started(tmp_path, monkeypatch, capfd):
    path = tmp_path / "beside.jsonl"
    options = ["run", "--steps", "2048", "--results", str(path), "--limit-minutes", "5"]
    names = ["canter/InvertedDoublePendulum-v5/0@1", "canter/Hopper-v5/0@6"]
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["beside.py", *options, *names])
        beside.main()
    (run,) = beside.read(path)
    assert (run["library"], run["task"], run["seed"]) == ("canter", "InvertedDoublePendulum-v5", 0)
    assert run["steps"] == 2048 and run["evaluation_return"] > 0
    assert capfd.readouterr().out.count("exit 0") == 1
