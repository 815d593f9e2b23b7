"""Everyday failures: readers that go, disks that fill, Ctrl-C twice, clocks that are set back, hostile folders."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from itertools import product

import pytest

from canter.app.cli import main
from canter.core.storage.checkpoint import CheckpointStore
from canter.runs.records import read_record
from covering import usual_of

CANTER = [sys.executable, "-m", "canter"]
FLAGS = ["--num-envs=8", "--algorithm.horizon=8", "--algorithm.epochs=1", "--algorithm.num-minibatches=1"]
ESCAPE = "\x1b]0;owned\x07\x1b[31m"


def train(runs, *flags, steps=320):
    command = [*CANTER, "train", "tensor:cartpole", *FLAGS, f"--total-steps={steps}"]
    return [*command, "--checkpoints.save-every=2", "--run-dir", str(runs), "--name", "run", *flags]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    main(train(runs, "--console", "quiet")[3:])
    return runs / "run"


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def test_a_reader_that_goes_costs_the_output_and_not_the_run(tmp_path):
    command, pipe = train(tmp_path, "--console", "verbose"), subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe) as process:
        process.stdout.readline()
        process.stdout.close()  # as `| head -1` does
        assert (process.wait(timeout=120), process.stderr.read()) == (0, b"")
    assert read_record(tmp_path / "run")["status"] == "finished"
    assert CheckpointStore(tmp_path / "run" / "checkpoints").steps()[-1] == 5
    assert (tmp_path / "run" / "policies" / "final_actor.safetensors").is_file()


@pytest.mark.long
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_output_is_reported_and_does_not_cost_the_run(tmp_path):
    with open("/dev/full", "w") as full:
        finished = subprocess.run(train(tmp_path), stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert finished.returncode == 1
    assert finished.stderr == "canter: not all of the output could be written: [Errno 28] No space left on device\n"
    assert read_record(tmp_path / "run")["status"] == "finished"


@pytest.mark.parametrize(("times", "ignored"), [(1, False), pytest.param(2, False, marks=pytest.mark.long), (2, True)])
def test_ctrl_c_stops_after_the_iteration_and_once_more_at_once(times, ignored, tmp_path):
    slow = ["--algorithm.epochs=100000"] if times == 2 else []  # an iteration that would take minutes
    command = train(tmp_path, *slow, "--execution.engine=autograd", steps=10**9)
    told = os.environ | {"PYTHONFAULTHANDLER": "1"}
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.SIG_DFL)  # as `&` in a script leaves it
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=told)
    finally:
        signal.signal(signal.SIGINT, before)
    for line in process.stdout:
        if "checkpoints and policies go to" in line:
            break
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "run.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    for _ in range(times):
        time.sleep(1)
        process.send_signal(signal.SIGINT)
    # Python drops an interrupt that comes while a destructor runs; whoever sees nothing happen presses once more.
    for _ in range(10 * (times - 1)):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
            break
        process.send_signal(signal.SIGINT)
    try:
        _, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # says where all threads are
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGINT, err
    assert "Traceback" not in err
    said = (
        "stopped by SIGINT after" if times == 1 else "stopped at once; the training since the last checkpoint is lost"
    )
    assert said in err
    assert f"canter resume {tmp_path / 'run'}" in err
    assert read_record(tmp_path / "run")["status"] == "stopped"
    assert not (tmp_path / "run" / "run.lock").exists()
    assert len(CheckpointStore(tmp_path / "run" / "checkpoints").steps()) >= 2 - times


def mounts():
    command = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs tmpfs /mnt"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.skipif(not mounts(), reason="needs permission to mount a small file system")
@pytest.mark.parametrize("kilobytes", usual_of([8, 40, 120, 260], [8]))
def test_a_disk_that_fills_at_any_write_is_reported_and_written_files_stay(kilobytes, tmp_path):
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    inner = " ".join(f"'{argument}'" for argument in train(disk, "--console", "quiet", "--log-every=1", steps=3200))
    script = f"mount -t tmpfs -o size={kilobytes}k tmpfs {disk} && {inner}; code=$?; cp -r {disk} {kept}; exit $code"
    finished = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, timeout=120)
    assert finished.returncode == 2, finished.stdout + finished.stderr
    assert "Traceback" not in finished.stderr
    last = finished.stderr.splitlines()[-1]
    assert last.startswith("canter: ")
    assert "No space left on device" in finished.stderr
    run = kept / "run"
    if (run / "metrics.jsonl").exists():
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [row["iteration"] for row in rows] == list(range(1, len(rows) + 1))
    store = CheckpointStore(run / "checkpoints")
    assert not store.steps() or store.load_latest()[0] == store.steps()[-1]
    assert not list(kept.rglob(".*.partial")) + list(kept.rglob("*/.step-*partial*"))


def test_a_clock_that_is_put_back_changes_nothing(tmp_path, run_canter, monkeypatch):
    begin, started = time.time(), time.perf_counter()
    monkeypatch.setattr(time, "time", lambda: begin - 3600 * (time.perf_counter() - started))
    finished = run_canter(*train(tmp_path)[3:])
    assert finished.code == 0, finished.err
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["wall_time"] > rows[-1]["wall_time"]
    assert all(row[name] >= 0 for row in rows for name in row if name.startswith("time/") or name == "seconds")
    assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)
    assert not re.search(r"-\d+ (steps/s|left)", finished.out)


def test_runs_that_start_in_one_second_or_in_the_past_get_different_names(tmp_path, run_canter, monkeypatch):
    class Clock:
        @staticmethod
        def now(zone=None):
            from datetime import datetime

            return datetime(2026, 1, 1, tzinfo=zone)

    monkeypatch.setattr("canter.app.experiments.folders.datetime", Clock)
    flags = [flag for flag in train(tmp_path, "--console", "quiet", steps=64)[3:] if flag not in ("--name", "run")]
    assert [run_canter(*flags)[0] for _ in range(2)] == [0, 0]
    names = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("tensor"))
    assert names == ["tensor-cartpole-seed0-20260101-000000", "tensor-cartpole-seed0-20260101-000000-2"]


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))


@pytest.mark.parametrize("command", ["report", "runs", "runs --json"])
@pytest.mark.parametrize("kind", ["bomb", "pipe", "device", "out", "huge"])
def test_a_hostile_config_hangs_nothing(command, kind, run, run_canter, tmp_path):
    config = run / "config.yaml"
    config.unlink()
    make = {
        "bomb": lambda: config.write_text(BOMB),
        "pipe": lambda: os.mkfifo(config),
        "device": lambda: config.symlink_to("/dev/zero"),
        "out": lambda: config.symlink_to("/etc/passwd"),
        "huge": lambda: (config.touch(), os.truncate(config, 1 << 40)),
    }
    make[kind]()
    start = time.monotonic()
    if command == "report":
        code, _, err = run_canter("report", run, "--out", tmp_path / "page.html")
        assert code == 0 or "no run" in err  # what is no file is no run
    else:
        code, out, _ = run_canter(*command.split(), "--run-dir", run.parent)
        assert code == 0
        assert "root:" not in out
    assert time.monotonic() - start < 20


FILES = ["metrics.jsonl", "run.json", "run.lock", "policies/best.safetensors"]
KINDS = ["pipe", "device", "out"]


@pytest.mark.parametrize(
    ("name", "kind"), usual_of([*product(FILES, KINDS)], [*zip(FILES, [*KINDS, "pipe"], strict=True)])
)
def test_no_file_of_a_run_is_a_pipe_a_device_or_elsewhere(name, kind, run, run_canter, tmp_path):
    (run / name).unlink(missing_ok=True)
    target = {"device": "/dev/zero", "out": "/etc/passwd"}
    os.mkfifo(run / name) if kind == "pipe" else (run / name).symlink_to(target[kind])
    assert run_canter("runs", "--json", "--run-dir", run.parent)[0] == 0
    code, _, err = run_canter("report", run, "--out", tmp_path / "page.html")
    assert code == (2 if name == "metrics.jsonl" else 0)
    code, _, err = run_canter("eval", run, "--episodes", "1")
    assert code == (2 if name.startswith("policies") else 0), err
    code, _, err = run_canter("resume", run, "--console", "quiet")
    assert "Traceback" not in err
    assert kind == "pipe" or code == 2 or name.startswith("policies")


def test_terminal_escapes_are_spelled_out_wherever_they_are_printed(run, run_canter):
    evil = run.rename(run.with_name(f"x{ESCAPE}"))
    (evil / "config.yaml").write_text(f'env: {{id: "{ESCAPE.encode("unicode_escape").decode()}"}}\n')
    for command in (
        ["runs", "--run-dir", evil.parent],
        ["report", evil, "--out", evil.parent / "page.html"],
        ["eval", evil],
        ["resume", evil],
        ["train", ESCAPE],
        ["train", f"--{ESCAPE}", "1"],
        ["check", f"tensor:{ESCAPE}"],
        [ESCAPE],
    ):
        _, out, err = run_canter(*command)
        assert out + err
        assert "\x1b" not in out + err
        assert "\x07" not in out + err


def test_new_names_with_control_characters_are_refused(tmp_path, run_canter):
    code, _, err = run_canter(*train(tmp_path)[3:-1], f"a{ESCAPE}")
    assert code == 2
    assert "must be a plain folder name that can be printed" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (["tensor:cartpole", "--num-envs=1000000000"], "env.num_envs=1000000000 with horizon"),
        (["CartPole-v1", "--num-envs=1000000000"], "env.num_envs=1000000000: these environments"),
        (["CartPole-v1", "--algorithm.horizon=1000000000000"], "env.num_envs=8 with horizon 1000000000000"),
        (["CartPole-v1", "--algorithm.model.policy.hidden=100000000,100000000"], "algorithm.model.policy.hidden="),
        (["CartPole-v1", "--algorithm.model.policy.rnn.hidden=10000000"], "algorithm.model.policy.rnn.hidden="),
    ],
)
@pytest.mark.parametrize("command", ["train", "check"])
def test_sizes_that_no_memory_holds_are_refused_before_anything_is_made(command, flags, key, run_canter, monkeypatch):
    monkeypatch.setattr("canter.envs.EnvConfig.build", lambda config, device: pytest.fail("it was built"))
    code, _, err = run_canter(command, *flags)
    assert code == 2
    assert err.startswith(f"canter: {key}")
    assert "are free here" in err


def test_absurd_sizes_in_the_settings_of_a_stranger_are_refused(run, run_canter):
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("hidden: [64, 64]", "hidden: [100000000, 100000000]", 1))
    shutil.rmtree(run / "policies")
    for command in ("eval", "resume"):
        code, _, err = run_canter(command, run)
        assert code == 2
        assert "are free here" in err
