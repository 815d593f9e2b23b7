"""Whole programs on a real terminal: what they leave on the screen, however they end."""

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
import time

import pytest
from screen import Screen

QUICK = ("--algorithm.horizon=32", "--algorithm.num-minibatches=2", "--algorithm.epochs=1")

NOISY = """
import logging, warnings
from dataclasses import replace
import torch
from canter import preset_for
from canter.training.trainer import train
from canter.app.console.console import make_console

logging.basicConfig()
torch.set_num_threads(1)

def speak(report):
    print(f"print {report.iteration}")
    warnings.warn(f"warning {report.iteration}")
    logging.getLogger("test").warning(f"log {report.iteration}")

config = replace(preset_for("tensor:cartpole"), total_steps=3 * 1024)
train(config, speak, writers=[make_console()])
"""


class Program:
    """A process whose whole world is a terminal of 80 columns."""

    def __init__(self, *command, cwd):
        self.end, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
        env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            cwd=cwd,
            env=env | {"TERM": "xterm-256color"},
        )
        os.close(terminal)
        self.output = ""
        self.killer = threading.Timer(120, self.process.kill)
        self.killer.start()

    def read_until(self, text=None):
        """Follow the output until it has `text` in it, or until it ends."""
        while text is None or text not in self.output:
            try:
                data = os.read(self.end, 65536)
            except OSError:  # how a terminal says that nobody is left
                break
            self.output += data.decode(errors="replace")
        return self

    def wait(self):
        code = self.read_until().process.wait()
        self.killer.cancel()
        os.close(self.end)
        return code, Screen(self.output)


def test_training_on_a_terminal_leaves_one_table_and_what_to_do_next(tmp_path):
    code, screen = Program(
        "-m", "canter", "train", "tensor:cartpole", "--total-steps=2000", *QUICK, cwd=tmp_path
    ).wait()
    assert code == 0
    (table,) = screen.tables()
    assert "100%" in table[2]
    assert all(len(line) == 80 for line in table)
    assert screen.cursor_shown
    below = "\n".join(screen.lines[screen.lines.index(table[-1]) :])
    assert "Final score: mean return" in below
    assert "What next?" in below
    assert "--total-steps 4000" in below.replace("\n", "")  # a long path may be broken by the edge of the screen


@pytest.mark.long
def test_prints_warnings_and_log_lines_stay_above_the_table(tmp_path):
    code, screen = Program("-c", NOISY, cwd=tmp_path).wait()
    assert code == 0
    (table,) = screen.tables()
    above = "\n".join(screen.lines[: screen.lines.index(table[0])])
    for iteration in (1, 2, 3):
        for text in (f"print {iteration}", f"UserWarning: warning {iteration}", f"WARNING:test:log {iteration}"):
            assert above.count(text) == 1, text


@pytest.mark.parametrize(
    ("number", "times"), [(signal.SIGINT, 1), pytest.param(signal.SIGTERM, 2, marks=pytest.mark.long)]
)
def test_a_signal_restores_the_terminal(tmp_path, number, times):
    # The second signal does not wait for the iteration, which takes very long here.
    slow = ("--algorithm.epochs=100000",) if times == 2 else QUICK
    program = Program("-m", "canter", "train", "tensor:cartpole", "--total-steps=100000000", *slow, cwd=tmp_path)
    program.read_until("Ctrl-C stops" if times == 2 else "steps/s")
    for _ in range(times):
        time.sleep(1.0)  # the first iteration is under way, and two signals at once are one to the process
        program.process.send_signal(number)
    code, screen = program.wait()
    assert code == 128 + number
    assert screen.cursor_shown
    assert len(screen.tables()) == (1 if times == 1 else 0)  # one without a single iteration does not stay
    assert (" resume runs/" in program.output) == (times == 1)
    assert not list(tmp_path.glob("runs/*/run.lock"))
