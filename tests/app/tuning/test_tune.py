"""Searches with real runs in processes: continued after kill -9, and resumed to the bit."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

import canter
from canter.app.tuning.tune import open_plan
from canter.config.files import read_config
from canter.core.storage.checkpoint import load_checkpoint
from canter.core.storage.lock import is_locked
from canter.runs.metrics import METRICS, read_last_row

FLAGS = ["--total-steps", "2048", "--algorithm.horizon", "32", "--algorithm.num-minibatches", "4", "--num-envs", "4"]
FLAGS += ["--space.algorithm.gamma", "0.9..0.999:log1m", "--space.algorithm.epochs", "1..4"]
PLAN = ["--trials", "4", "--seeds", "2", "--finalists", "1", "--final-seeds", "2", "--jobs", "2"]
KILLS = 20


def start(folder, *arguments):
    with (folder / "output.txt").open("w") as output:
        return subprocess.Popen([sys.executable, "-m", "canter", "tune", *arguments], cwd=folder, stdout=output)


def results(search):
    return {name: note["score"] for name, note in search.study.notes.items() if "@" in name}


@pytest.mark.long
def test_a_search_that_is_killed_again_and_again_has_the_same_trials_and_scores(tmp_path):
    pytest.importorskip("optuna")
    whole = start(tmp_path, "tensor:cartpole", *FLAGS, *PLAN, "--name", "whole")
    assert whole.wait(300) == 0
    expected = open_plan(tmp_path / "runs" / "whole")
    moments = random.Random(0)
    folder = tmp_path / "runs" / "killed"
    search = start(tmp_path, "tensor:cartpole", *FLAGS, *PLAN, "--name", "killed")
    for kill in range(KILLS):
        while not (folder / "study.journal").is_file():
            time.sleep(0.05)
        time.sleep(moments.uniform(0.0, 8.0))
        search.kill()
        search.wait()
        for lock in folder.glob("trial-*/run.lock") if kill % 2 else ():  # its runs die too, or go on as orphans
            if is_locked(lock.parent):
                os.kill(json.loads(lock.read_text())["pid"], signal.SIGKILL)
        search = start(tmp_path, str(folder), "--jobs", "1" if kill % 2 else "2")
    assert search.wait(300) == 0
    assert "fresh seeds" in (tmp_path / "output.txt").read_text()
    again = open_plan(folder)
    assert again.study.trials == expected.study.trials
    assert results(again) == results(expected)
    best = [read_config(path / "best.yaml").plain for path in (folder, expected.folder)]
    assert best[0] == best[1]


@pytest.mark.long
def test_rungs_learn_what_a_run_without_pauses_learns(tmp_path):
    pytest.importorskip("optuna")
    settings = {"algorithm": {"horizon": 32, "num_minibatches": 4}, "env": {"num_envs": 4}, "total_steps": 4096}
    plan = {"trials": 3, "seeds": 1, "finalists": 1, "final_seeds": 1, "jobs": 2, "run_dir": tmp_path}
    result = canter.tune("tensor:cartpole", space={"algorithm.gamma": "0.9..0.99"}, name="search", **plan, **settings)
    search = open_plan(result.path)
    [number] = search.rung_scores(4096)
    texts = search.study.trials[number]
    settings["algorithm"]["gamma"] = float(texts["algorithm.gamma"])
    whole = canter.train("tensor:cartpole", run_dir=tmp_path, name="whole", console="quiet", **settings)
    paused = result.path / f"trial-{number:03}-seed0"
    steps = [read_last_row(path / METRICS)["env_steps"] for path in (paused, whole.path)]
    assert steps == [4096, 4096]
    left, right = (newest(path / "checkpoints") for path in (paused, whole.path))
    assert left.keys() == right.keys()
    assert all(left[name].equal(right[name]) for name in left)


def newest(folder):
    """The weights in the newest checkpoint."""
    tree = load_checkpoint(max(folder.glob("step-*")))
    return tree["algorithm"]["model"]
