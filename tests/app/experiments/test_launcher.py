"""Runs that a server forks: exit codes, output, and what happens if either of them is killed."""

import os
import signal
import time

import pytest

from canter.app.experiments.launcher import KILLED, Launcher


def ended(launcher, run):
    while run.returncode is None:
        launcher.update()
        time.sleep(0.01)
    return run.returncode


def test_runs_have_logs_and_exit_codes(tmp_path):
    log = tmp_path / "a.log"
    with Launcher() as launcher:
        assert ended(launcher, launcher.start(["--version"], log)) == 0
        assert ended(launcher, launcher.start(["trian"], log)) == 2
        assert "canter 0." in log.read_text() and "unknown command 'trian'" in log.read_text()
        command = ["train", "tensor:cartpole", "--total-steps", "1000000", "--checkpoints.save-every", "1"]
        command += ["--run-dir", str(tmp_path), "--name"]
        killed = launcher.start([*command, "killed"], log)
        stopped = launcher.start([*command, "stopped"], log)
        os.kill(killed.pid, signal.SIGKILL)
        assert ended(launcher, killed) == KILLED
        while not any((tmp_path / "stopped").glob("checkpoints/step-*")):
            time.sleep(0.01)
    assert stopped.returncode == 128 + signal.SIGINT
    assert launcher.server.returncode == 0


@pytest.mark.long
def test_a_server_that_is_killed_loses_exit_codes_and_no_run(tmp_path):
    log = tmp_path / "a.log"
    with Launcher() as launcher:
        flags = ["--total-steps", "20000", "--run-dir", str(tmp_path), "--name", "run"]
        run = launcher.start(["train", "tensor:cartpole", *flags], log)
        os.kill(launcher.server.pid, signal.SIGKILL)
        launcher.server.wait()
        other = launcher.start(["--version"], log)  # by a new server, which has not forked the first run
        assert ended(launcher, run) == KILLED
        assert (tmp_path / "run" / "report.html").is_file()
        assert ended(launcher, other) == 0
