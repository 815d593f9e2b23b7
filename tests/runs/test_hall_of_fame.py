"""The best policies of all runs on a problem, in any order of their ends."""

import errno
import functools
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from canter.algorithms.ppo import PPOConfig
from canter.core.specs import Discrete, EnvSpec, TensorSpec
from canter.envs import EnvConfig
from canter.nn.policy_file import save_policy
from canter.nn.policy_loading import load_policy
from canter.runs.hall_of_fame import PLACES, HallOfFame, enter_by_average, enter_hall_of_fame, problem_of

ENV = EnvConfig(id="CartPole-v1")


@functools.cache
def some_policy():
    spec = EnvSpec({"policy": TensorSpec((2,))}, Discrete(2), 1, env_id=ENV.id)
    return PPOConfig(horizon=8, num_minibatches=1).build(spec, seed=0).policy


def finish(runs, name, mean, *, env=ENV, spread=0.0, seed=0):
    """End a run with a new policy; return the sentence."""
    policy = some_policy()
    policy.actor.head.linear.bias.data[0] = mean
    save_policy(runs / name / "policies" / "final_actor.safetensors", policy, env_steps=1000)
    return enter_hall_of_fame(runs / name, env, [mean - spread, mean + spread] * 5, seed)


def hall(runs, env=ENV):
    return HallOfFame(runs / "hall_of_fame", problem_of(env))


def test_a_run_is_compared_with_all_before_it(tmp_path):
    assert finish(tmp_path, "first", 100) == "First result on CartPole-v1: 100.0"
    assert finish(tmp_path, "second", 250, seed=7) == "Best so far on CartPole-v1: 250.0, beating 100.0 of run first"
    assert finish(tmp_path, "third", 200) == "Not the best on CartPole-v1: 200.0, run second has 250.0"
    assert finish(tmp_path, "fourth", 250) == "As good as the best on CartPole-v1: 250.0, like run second"
    entries = hall(tmp_path).entries()
    assert [entry.run for entry in entries] == ["second", "fourth", "third", "first"]
    assert (entries[0].seed, entries[0].env_steps, entries[0].return_, entries[0].error) == (7, 1000, 250, 0)
    best = load_policy(hall(tmp_path).folder / entries[0].file)
    assert best.actor.head.linear.bias[0].item() == 250


def test_a_lead_within_the_noise_is_called_that(tmp_path):
    finish(tmp_path, "first", 100, spread=30)
    assert finish(tmp_path, "second", 110, spread=30).endswith("of run first (the difference may be noise)")
    assert finish(tmp_path, "third", 90, spread=30).endswith("has 110.0 (the difference may be noise)")
    assert finish(tmp_path, "fourth", 500, spread=30).endswith("beating 110.0 of run second")


def test_only_the_best_few_stay(tmp_path):
    for i, mean in enumerate([5, 3, 9, 1, 7, 8, 2]):
        finish(tmp_path, f"run{i}", mean)
    entries = hall(tmp_path).entries()
    assert [entry.return_ for entry in entries] == [9, 8, 7, 5, 3]
    assert len(entries) == PLACES
    files = {path.name for path in hall(tmp_path).folder.glob("*.safetensors")}
    assert files == {entry.file for entry in entries}


def test_the_same_policy_is_entered_once(tmp_path):
    finish(tmp_path, "run", 5)
    assert finish(tmp_path, "run", 5) == "First result on CartPole-v1: 5.0"
    finish(tmp_path, "run", 6)
    assert [entry.return_ for entry in hall(tmp_path).entries()] == [6, 5]


@pytest.mark.parametrize(
    "change", [{"num_envs": 3}, {"vectorization": "async"}, {"autoreset": "next_step"}], ids=lambda change: str(change)
)
def test_how_an_environment_is_stepped_is_no_other_problem(change, tmp_path):
    finish(tmp_path, "first", 1)
    assert "beating 1.0 of run first" in finish(tmp_path, "second", 2, env=replace(ENV, **change))


@pytest.mark.parametrize(
    "change",
    [{"id": "Acrobot-v1"}, {"options": {"gravity": 1}}, {"finite_horizon": True}],
    ids=lambda change: str(change),
)
def test_other_settings_are_another_problem(change, tmp_path):
    finish(tmp_path, "first", 1)
    assert finish(tmp_path, "second", 2, env=replace(ENV, **change)).startswith("First result on")
    names = sorted(os.listdir(tmp_path / "hall_of_fame"))
    assert len(names) == 2
    assert all(name.startswith(("CartPole-v1-", "Acrobot-v1-")) for name in names)


def test_runs_with_different_numbers_of_episodes_are_compared_and_one_episode_is_too_few(tmp_path):
    finish(tmp_path, "first", 1)
    assert "of run first" in finish(tmp_path, "second", 2)
    assert "run second has" in enter_hall_of_fame(tmp_path / "first", ENV, [1.0] * 11, 0)
    assert enter_hall_of_fame(tmp_path / "first", ENV, [1.0], 0) == (
        "One episode is too few for a comparison with other runs"
    )


def average(runs, name, mean, ci=0.0, *, env=ENV, training=False):
    policy = some_policy()
    policy.actor.head.linear.bias.data[0] = mean
    policy.save(runs / name / "policies" / f"{'best' if training else 'final_actor'}.safetensors")
    return enter_by_average(runs / name, env, (mean, ci), 0, training=training)


def test_long_run_averages_have_halls_of_their_own_in_which_resets_make_no_other_problem(tmp_path):
    finish(tmp_path, "first", 100)
    assert average(tmp_path, "first", -2.9154) == "First result on CartPole-v1 by long-run average: -2.915"
    assert average(tmp_path, "first", -3.1, training=True).startswith("First result")
    said = average(tmp_path, "second", -2.9, 0.1, env=replace(ENV, reset_steps=1000))
    assert said.endswith("by long-run average: -2.9, beating -2.915 of run first (the difference may be noise)")
    assert len(os.listdir(tmp_path / "hall_of_fame")) == 3


def test_while_training_a_run_has_one_place(tmp_path):
    for mean in (1.0, 2.0, 3.0):
        average(tmp_path, "first", mean, training=True)
    assert average(tmp_path, "second", 2.5, training=True).startswith("Not the best")
    (folder,) = (tmp_path / "hall_of_fame").iterdir()
    entries = json.loads((folder / "index.json").read_text())["entries"]
    assert [(entry["run"], entry["return_"]) for entry in entries] == [("first", 3.0), ("second", 2.5)]


def contend(runs, barrier, number):
    torch.set_num_threads(1)
    some_policy()
    barrier.wait()
    for i in range(4):
        finish(runs, f"run{number}-{i}", 10 * i + number)


@pytest.mark.long
def test_processes_that_finish_at_once_are_all_entered(tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["canter"])
    barrier = context.Barrier(3)
    running = [context.Process(target=contend, args=(tmp_path, barrier, number)) for number in range(3)]
    for process in running:
        process.start()
    for process in running:
        process.join(120)
        assert process.exitcode == 0
    assert [entry.return_ for entry in hall(tmp_path).entries()] == [32, 31, 30, 22, 21]


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 2}', '{"schema":1,"problem":{},"entries":[{"return_":1}]}'])
def test_an_index_that_cannot_be_read_is_set_aside(text, tmp_path, caplog):
    finish(tmp_path, "first", 1)
    index = hall(tmp_path).folder / "index.json"
    index.write_text(text)
    assert finish(tmp_path, "second", 2).startswith("First result")
    assert index.with_name("index.json.corrupt").read_text() == text
    assert "the hall of fame starts empty" in caplog.text


def test_an_entry_cannot_lead_out_of_the_hall(tmp_path):
    victim = tmp_path / "victim.safetensors"
    victim.touch()
    finish(tmp_path, "first", 1)
    index = hall(tmp_path).folder / "index.json"
    document = json.loads(index.read_text())
    document["entries"][0]["file"] = "../../victim.safetensors"
    index.write_text(json.dumps(document))
    for i in range(6):
        finish(tmp_path, f"run{i}", 10 + i)
    assert victim.exists()


def test_where_there_is_no_policy_or_no_room_the_sentence_says_so(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    assert enter_hall_of_fame(tmp_path / "run", ENV, [1.0] * 10, 0).startswith(
        "The hall of fame was not updated: there is no"
    )
    finish(tmp_path, "run", 1)

    def full(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    shutil.copytree(tmp_path / "run", tmp_path / "other")
    monkeypatch.setattr(os, "fsync", full)
    assert "No space left" in enter_hall_of_fame(tmp_path / "other", ENV, [2.0] * 10, 0)
    monkeypatch.undo()
    assert [entry.run for entry in hall(tmp_path).entries()] == ["run"]


def test_a_mean_that_is_no_number_is_not_entered(tmp_path):
    finish(tmp_path, "run", 1)
    text = enter_hall_of_fame(tmp_path / "run", ENV, [float("nan")] * 10, 0)
    assert text == "The hall of fame was not updated: a return is NaN or infinite"
    assert [entry.return_ for entry in hall(tmp_path).entries()] == [1]


DRIVER = """
import os, signal, sys
from dataclasses import replace
from pathlib import Path
from canter.runs.hall_of_fame import Entry, HallOfFame

os.fsync = os.fstat  # what is written outlives a killed process

def entry(number):
    about = dict(error=0.0, seed=0, env_steps=1, date="")
    return Entry(return_=float(number), run=str(number), file=f"{number}.safetensors", **about)

def hook(name, kill_at, after):
    original = getattr(os, name)
    def counted(*args, **kwargs):
        global calls
        calls += 1
        mine = calls == kill_at
        if mine and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return original(*args, **kwargs)
        finally:
            if mine:
                os.kill(os.getpid(), signal.SIGKILL)
    setattr(os, name, counted)

for after in (False, True):
    kill_at = 0
    while True:
        kill_at += 1
        hall = HallOfFame(Path(sys.argv[1]) / f"{after}-{kill_at}", {"id": "x"})
        for number in range(5):
            hall.enter(entry(number), bytes([number]))
        pid = os.fork()
        if pid == 0:
            calls = 0
            for name in ("open", "fsync", "rename", "unlink"):
                hook(name, kill_at, after)
            hall.enter(entry(9), bytes([9]))
            os._exit(0)
        if os.waitpid(pid, 0)[1] == 0:
            break
"""


@pytest.mark.long
def test_killed_anywhere_on_entering_a_hall_is_as_before_or_as_after(tmp_path):
    subprocess.run([sys.executable, "-c", DRIVER, str(tmp_path)], check=True, timeout=300)
    seen = []
    for parent in sorted(tmp_path.iterdir()):
        halls = HallOfFame(parent, {"id": "x"})
        entries = halls.entries()
        seen.append([int(entry.return_) for entry in entries])
        for entry in entries:
            assert (halls.folder / entry.file).read_bytes() == bytes([int(entry.return_)])
        halls.enter(replace(entries[0], return_=10.0, file="10.safetensors"), bytes([10]))
        names = {path.name for path in halls.folder.iterdir() if not path.name.endswith(".guard")}
        assert names == {"index.json", *(entry.file for entry in halls.entries())}
    assert len(seen) > 15
    assert {tuple(numbers) for numbers in seen} == {(4, 3, 2, 1, 0), (9, 4, 3, 2, 1)}
