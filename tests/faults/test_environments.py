"""Misbehaving environments cost at most the rollout in which they failed, from the command line."""

import json
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from canter.app.cli import main
from canter.core.storage.checkpoint import CheckpointStore
from canter.runs.crash import last_crash
from canter.runs.records import read_record
from covering import usual_of

CAMPAIGN = Path(__file__).parents[2] / "benchmarks" / "faults"
sys.path.append(str(CAMPAIGN))
from misbehaving import RESETS, STEPS  # noqa: E402  # pyright: ignore[reportMissingImports]

AT, HORIZON, NUM_ENVS = 400, 16, 2
LAST_GOOD = (AT - 1) // HORIZON
"""Iterations that end before step `AT` is taken."""
SMALL = [f"--algorithm.horizon={HORIZON}", "--algorithm.epochs=1", "--algorithm.num-minibatches=1"]
SMALL += [f"--num-envs={NUM_ENVS}", "--total-steps=1600", "--console=quiet", "--env.step-timeout=3"]


def canter(*arguments):
    """Exit code of a command in this process."""
    try:
        main(["--allow-import", "misbehaving", *map(str, arguments)])
    except SystemExit as leaving:
        return leaving.code
    return 0


def train(runs, kind, *flags, at=AT):
    own = [f"--env.options.kind={kind}", f"--env.options.at={at}", "--run-dir", runs, "--name", "run"]
    return canter("train", "misbehaving:Misbehaving", *SMALL, *own, *flags)


def said(capsys):
    return " ".join(capsys.readouterr().err.split())


def metric_rows(run):
    return [json.loads(line)["iteration"] for line in (run / "metrics.jsonl").read_text().splitlines()]


USUAL = ["raise_value_error", "raise_system_exit", "obs_short", "obs_text", "obs_nan", "reward_text", "reward_vector"]
USUAL += ["terminated_none", "truncated_text", "four_values", "reset_raises", "reset_nan"]


@pytest.mark.parametrize("kind", usual_of([*STEPS, *RESETS], USUAL))
def test_a_failure_costs_one_rollout_and_is_named(kind, tmp_path, capsys):
    assert train(tmp_path, kind) == 1
    err, run = said(capsys), tmp_path / "run"
    assert "Traceback" not in err
    number = re.search(r"canter: environment (\d)", err)
    assert number and number[1] == "0", err
    step = re.search(r"at its step (\d+)", err)
    assert step and abs(int(step[1]) - AT) <= 2, err
    assert f"Only that rollout was lost, and nothing was learned from it: {LAST_GOOD} iterations" in err
    assert re.search(rf"Go on with: \S*canter resume {run}$", err), err  # the run remembers what it may import
    assert CheckpointStore(run / "checkpoints").steps() == [0, LAST_GOOD]
    assert metric_rows(run) == list(range(1, LAST_GOOD + 1))
    assert "Traceback" in (run / "traceback.txt").read_text()
    assert read_record(run)["status"] == "failed"
    assert not (run / "run.lock").exists()


ALIKE = ["raise_value_error", "obs_short", "obs_nan", "reward_text", "terminated_none"]
WAYS = ["threads", "next_step", "async", "forked"]


@pytest.mark.parametrize(
    ("kind", "how"),
    usual_of([*product(ALIKE, WAYS)], [("raise_value_error", "async"), *zip(ALIKE[1:5], WAYS, strict=True)]),
)
def test_the_same_however_environments_are_stepped(kind, how, tmp_path, capsys):
    flag = f"--env.autoreset={how}" if how == "next_step" else f"--env.vectorization={how}"
    assert train(tmp_path, kind, flag) == 1
    err = said(capsys)
    assert "Traceback" not in err
    assert re.search(r"canter: environment [01] ", err), err
    lost = re.search(r"(\d+) iterations \(", err)
    # In the step after an end a `next_step` environment is only reset, so that it misbehaves a little later.
    assert lost and int(lost[1]) >= LAST_GOOD, err


def test_an_error_says_where_it_was_raised(tmp_path, capsys):
    assert train(tmp_path, "raise_value_error") == 1
    err = said(capsys)
    assert re.search(r"step\(\) raised ValueError: the robot fell apart \(\S+misbehaving\.py:\d+\)", err), err


def test_close_that_raises_spoils_nothing(tmp_path, caplog):
    assert train(tmp_path, "close_raises", "--total-steps=320") == 0
    assert "close() raised ZeroDivisionError" in caplog.text
    assert read_record(tmp_path / "run")["status"] == "finished"


@pytest.mark.long
def test_close_that_raises_in_worker_processes_spoils_nothing_either(tmp_path):
    assert train(tmp_path, "close_raises", "--total-steps=320", "--env.vectorization=async") == 0
    assert read_record(tmp_path / "run")["status"] == "finished"


def test_the_run_continues_once_the_environment_is_repaired(tmp_path, monkeypatch):
    assert train(tmp_path, "raise_value_error") == 1
    monkeypatch.setenv("MENDED", "yes")
    assert canter("resume", tmp_path / "run", "--console=quiet") == 0
    assert metric_rows(tmp_path / "run") == list(range(1, 51))


LOOKED_AT = ["raise_speechless", "obs_short", "obs_none", "obs_text", "obs_dict", "obs_inf", "final_obs_nan"]
LOOKED_AT += ["reward_text", "reward_none", "reward_vector", "terminated_text", "terminated_none", "truncated_text"]
LOOKED_AT += ["truncated_none", "four_values", "info_list"]


@pytest.mark.parametrize("kind", LOOKED_AT)
def test_check_finds_it(kind, tmp_path, capsys):
    flags = [f"--env.options.kind={kind}", "--env.options.at=8", "--num-envs=2"]
    assert canter("check", "misbehaving:Misbehaving", *flags) == 1
    out, err = capsys.readouterr()
    assert "This cannot work" in out
    assert "Traceback" not in out + err


PROCESS_WORDS = {
    "exit": r"its (worker|process) died in step\(\): exit code 3 ",
    "kill": r"its (worker|process) died in step\(\): signal SIGKILL",
    "segfault": r"its (worker|process) died in step\(\): signal SIGSEGV",
    "hang": r"step\(\) took more than 3 s \(env.step_timeout\), so ",
    "raise_unpicklable": r"step\(\) raised Unpicklable: holds a lock",
    "raise_system_exit": r"step\(\) raised SystemExit: 0",
}


@pytest.mark.parametrize("how", ["async", "forked"])
@pytest.mark.parametrize("kind", usual_of(PROCESS_WORDS, ["exit", "kill", "hang"]))
def test_a_process_that_dies_or_hangs_is_named_and_the_run_can_continue(kind, how, tmp_path, capsys):
    assert train(tmp_path, kind, f"--env.vectorization={how}") == 1
    err = said(capsys)
    assert re.search(rf"environment \d failed at its step 399: {PROCESS_WORDS[kind]}", err), err
    assert f"{LAST_GOOD} iterations" in err
    assert CheckpointStore(tmp_path / "run" / "checkpoints").steps() == [0, LAST_GOOD]
    assert not (tmp_path / "run" / "run.lock").exists()


@pytest.mark.long
@pytest.mark.parametrize("how", ["async", "forked"])
def test_processes_that_do_not_end_are_ended(how, tmp_path):
    flags = [f"--env.vectorization={how}", "--env.close-timeout=1", "--total-steps=320"]
    assert train(tmp_path, "close_hangs", *flags) == 0


@pytest.mark.long
def test_a_hanging_step_in_the_same_process_is_named(tmp_path):
    arguments = ["--allow-import", "misbehaving", "train", "misbehaving:Misbehaving", *SMALL]
    arguments += ["--env.options.kind=hang", "--env.step-timeout=1", "--run-dir", str(tmp_path), "--name=run"]
    command = [sys.executable, "-m", "canter", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=CAMPAIGN, stdout=subprocess.DEVNULL) as run:
        assert run.stderr is not None
        line = next(line for line in run.stderr if "waiting" in line)
        run.kill()
    assert re.search(r"waiting for environment 0, in hang \(\S+misbehaving\.py:\d+\), which has not returned", line)


MOVES = """
import os
from misbehaving import Misbehaving

class Moves(Misbehaving):
    def __init__(self, kind="", render_mode=None):
        super().__init__()
        self.when = kind
        self.move("__init__")

    def move(self, call):
        if self.when == call:
            os.chdir("elsewhere" if os.path.isdir("elsewhere") else ".")

    def load(self):
        if self.when == "__init__":
            open("asset").close()

    def reset(self, **kwargs):
        self.move("reset")
        self.load()
        return super().reset(**kwargs)

    def step(self, action):
        self.move("step")
        self.load()
        return super().step(action)

    def close(self):
        self.move("close")
"""


CALLS = ["__init__", "reset", "step", "close"]
IN_PROCESSES = [("step", "forked"), ("reset", "async")]


@pytest.mark.parametrize(
    ("call", "how"),
    usual_of([*product(CALLS, ["sync", "forked", "async"])], [*product(CALLS, ["sync"]), *IN_PROCESSES]),
)
def test_an_environment_that_changes_the_working_directory_moves_no_file_of_the_run(
    call, how, tmp_path, monkeypatch, caplog, capsys
):
    (tmp_path / "moves.py").write_text(MOVES)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "asset").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "moves", raising=False)
    monkeypatch.setattr("canter.envs.directory._warned", set())
    small = [*SMALL, "--total-steps=320", "--run-dir=runs", "--name=run", f"--env.vectorization={how}"]
    flags = ["--log=tensorboard", "--evaluate.every=160", "--evaluate.episodes=2", f"--env.options.kind={call}"]
    assert canter("--allow-import", "moves", "train", "moves:Moves", *small, *flags) == 0
    assert Path.cwd() == tmp_path
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["asset"]
    written = {path.name for path in (tmp_path / "runs" / "run").iterdir()}
    assert {"checkpoints", "policies", "metrics.jsonl", "report.html", "tensorboard"} <= written
    assert (tmp_path / "runs" / "run" / "policies" / "final_actor.safetensors").is_file()
    # Of processes there is a copy here that is made and closed, no more.
    here = how == "sync" or call in ("__init__", "close")
    built = call in ("__init__", "reset") or how == "async"  # which closes its copy at once
    place = "__init__() or reset()" if built else f"{call}()"
    told = f"moves:Moves changed the working directory to {tmp_path / 'elsewhere'} in {place}; its code goes on there"
    assert caplog.text.count("changed the working directory") == caplog.text.count(told) == here


LOUD = """
import os, sys
from misbehaving import Misbehaving

def long_error():
    raise ValueError("fell apart " * 100_000)

LOUD = {
    "long_error": long_error,
    "crash": os.abort,
    "is_killed": lambda: os.kill(os.getpid(), 9),
    "flood": lambda: print("careful: joint limit", file=sys.stderr),
    "closes_stdout": lambda: sys.stdout.close(),
    "closes_stderr": lambda: sys.stderr.close(),
    "closes_descriptor": lambda: os.closerange(1, 2),
    "closes_all": lambda: os.closerange(0, 256),
}

class Loud(Misbehaving):
    def __init__(self, kind="", render_mode=None):
        super().__init__()
        self.act = LOUD[kind]

    def step(self, action):
        result = super().step(action)
        if self.steps == 400 or (self.steps > 400 and self.act is LOUD["flood"]):
            self.act()
        return result
"""


def train_loud(tmp_path, kind, how="sync"):
    """Return the result of a training command in a process of its own."""
    (tmp_path / "loud.py").write_text(LOUD)
    arguments = [
        "--allow-import",
        "loud",
        "train",
        "loud:Loud",
        *SMALL,
        "--console=lines",
        "--run-dir=runs",
        "--name=run",
    ]
    command = [sys.executable, "-m", "canter", *arguments, f"--env.vectorization={how}", f"--env.options.kind={kind}"]
    folders = os.pathsep.join([str(CAMPAIGN), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": folders}
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("how", usual_of(["sync", "forked", "async"], ["forked"]))
def test_a_long_message_is_cut_where_it_is_printed_and_whole_in_the_file(how, tmp_path):
    ended = train_loud(tmp_path, "long_error", how)
    assert ended.returncode == 1
    cut = r"raised ValueError: fell .*\.\.\. \(1,099,999 characters, all of them in the traceback\) \("
    assert re.search(cut, ended.stderr)
    assert len(ended.stderr) < 4000
    assert "fell apart " * 100_000 in (tmp_path / "runs" / "run" / "traceback.txt").read_text()


def test_a_crash_of_the_runs_own_process_leaves_its_line_and_resume_reports_it(tmp_path):
    ended = train_loud(tmp_path, "crash")
    assert ended.returncode < 0
    assert "a crash of their code is a crash of the run" in ended.stdout
    run = tmp_path / "runs" / "run"
    assert "loud.py" in (run / "crash.txt").read_text()
    crash = last_crash(run)
    assert crash is not None and crash.startswith("Fatal Python error: Aborted (File ") and "loud.py" in crash
    # The iteration is one of 32 steps; the last one before the crash is saved or not.
    said = rf"canter: the process of this run crashed: {re.escape(crash)}; iteration \d+ is saved. Go on with: .*resume"
    assert re.search(said, ended.stderr)


def test_a_run_that_is_killed_is_reported_with_what_is_saved_and_how_to_go_on(tmp_path):
    ended = train_loud(tmp_path, "is_killed")
    assert ended.returncode == -9
    said = r"canter: the process of this run was killed, by a signal or for lack of memory; iteration \d+ is saved. "
    assert re.search(said + r"Go on with: .* resume runs/run\n", ended.stderr)


def test_an_environment_that_floods_standard_error_is_named_once_and_cut(tmp_path):
    ended = train_loud(tmp_path, "flood")
    assert ended.returncode == 0
    assert ended.stderr.count("careful") == 4000 // len("careful: joint limit\n") + 1
    named = r"canter: loud:Loud, in step\(\), writes much to standard error \(\S+loud\.py:\d+\); at most 4,000"
    assert len(re.findall(named, ended.stderr)) == 1


@pytest.mark.parametrize(
    "kind", usual_of(["closes_stdout", "closes_stderr", "closes_descriptor", "closes_all"], ["closes_all"])
)
def test_an_environment_that_closes_streams_leaves_no_traceback_and_no_line_in_another_file(kind, tmp_path):
    ended = train_loud(tmp_path, kind)
    assert "Traceback" not in ended.stderr and "Error" not in ended.stderr
    assert ended.returncode == 0
    assert (tmp_path / "runs" / "run" / "policies" / "final_actor.safetensors").is_file()
    if kind != "closes_all":  # which leaves nowhere to write to
        assert "What next?" in ended.stdout
    closed = "loud:Loud closed standard output in step(); it was opened again"
    assert ended.stderr.count(closed) == (kind == "closes_descriptor")


RARE = """
import sys
import time
from misbehaving import Misbehaving

class Panic(BaseException):
    pass

class Rare(Misbehaving):
    def __init__(self, kind="", at=400, render_mode=None):
        super().__init__("", at)
        self.rare = kind
        if kind == "init_raises":
            raise ValueError("no licence")
        if kind == "init_exits":
            sys.exit(4)

    def reset(self, **kwargs):
        if self.rare == "reset_raises":
            raise KeyError("scene")
        return super().reset(**kwargs)

    def step(self, action):
        if self.rare == "step_panics" and self.steps + 1 >= self.at:
            raise Panic("unwrap of nothing")
        if self.rare == "step_sleeps" and self.steps + 1 == self.at:
            time.sleep(1.5)
        if self.rare == "step_exits" and self.steps + 1 >= self.at:
            sys.exit(0)
        return super().step(action)

    def close(self):
        if self.rare == "close_exits":
            sys.exit(5)
"""


@pytest.fixture
def rare(tmp_path, monkeypatch):
    (tmp_path / "rare.py").write_text(RARE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "rare", raising=False)

    def command(name, kind, *flags, at=AT):
        own = [f"--env.options.kind={kind}", f"--env.options.at={at}", *flags]
        return canter("--allow-import", "rare", name, "rare:Rare", *own)

    return command


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("init_raises", "ValueError: no licence"),
        ("init_exits", "SystemExit: 4"),
        ("reset_raises", "KeyError: 'scene'"),
    ],
)
@pytest.mark.parametrize("command", ["train", "check"])
def test_an_environment_that_cannot_be_made_is_named_with_its_line(command, kind, words, rare, capsys):
    assert rare(command, kind) == 1
    err = said(capsys)
    assert re.search(rf"canter: rare:Rare could not be made: {words} \(\S+rare\.py:\d+\)", err), err
    assert "Traceback" not in err


def test_an_error_of_no_usual_class_costs_one_rollout_too(rare, tmp_path, capsys):
    assert rare("train", "step_panics", *SMALL, "--run-dir", tmp_path, "--name=run") == 1
    err = said(capsys)
    assert "Traceback" not in err
    assert "environment 0 failed at its step 399: step() raised Panic: unwrap of nothing" in err
    assert CheckpointStore(tmp_path / "run" / "checkpoints").steps() == [0, LAST_GOOD]


def test_check_reports_a_step_that_ends_the_program(rare, capsys):
    assert rare("check", "step_exits", at=8) == 1
    assert "random actions ended in SystemExit: 0 (rare.py, line " in capsys.readouterr().out


def test_a_step_that_hangs_in_the_look_before_a_run_is_named(rare, monkeypatch, caplog):
    monkeypatch.setattr("canter.envs.failures.HANG_WARNING_SECONDS", 0.5)
    assert rare("check", "step_sleeps", at=8) == 0
    assert "waiting for environment 0, in step" in caplog.text


def test_close_that_ends_the_program_spoils_nothing(rare, tmp_path, caplog):
    small = [*SMALL, "--total-steps=320", "--run-dir", tmp_path, "--name=run"]
    assert rare("train", "close_exits", *small) == 0
    assert "close() raised SystemExit: 5" in caplog.text
    assert read_record(tmp_path / "run")["status"] == "finished"


def test_eval_names_the_environment_that_fails(tmp_path, capsys):
    assert train(tmp_path, "", "--total-steps=320") == 0
    capsys.readouterr()
    assert canter("eval", tmp_path / "run", "--env.options.kind=raise_value_error", "--env.options.at=5") == 1
    err = said(capsys)
    place = r"\(\S+misbehaving\.py:\d+\)"
    assert re.search(rf"environment 0 failed at its step 4: step\(\) raised ValueError: .* {place}", err), err
    assert "Traceback" not in err


SPREADS = """
from dataclasses import replace
from canter.envs.tensor import Pendulum

class Spreads(Pendulum):
    rollouts = steps = 0

    def set_progress(self, progress):  # called in training, not in the look before it
        self.rollouts, self.steps = self.rollouts + 1, 0

    def step(self, action):
        step = super().step(action)
        self.steps += 1
        if self.rollouts < 3 or self.steps < 5:
            return step
        return replace(step, final_obs={name: group[:, :1] for name, group in step.obs.items()})
"""


def test_a_last_observation_that_is_too_small_is_not_spread(tmp_path, monkeypatch, capsys):
    (tmp_path / "spreads.py").write_text(SPREADS)
    monkeypatch.syspath_prepend(tmp_path)
    small = [*SMALL[:3], "--num-envs=4", "--total-steps=3200", "--console=quiet", "--run-dir", tmp_path, "--name=run"]
    assert canter("--allow-import", "spreads", "train", "spreads:Spreads", *small) == 1
    err = said(capsys)
    assert re.search(
        r"at its step \d+: step\(\) gave final_obs 'policy' of shape \(4, 1\), it must be \(4, 3\)", err
    ), err
