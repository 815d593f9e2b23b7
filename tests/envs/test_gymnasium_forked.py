"""Groups of environments in forked processes: the same results, errors, deaths and deadlines."""

import faulthandler
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from canter.core.specs import EnvFailed
from canter.envs.gymnasium import GymnasiumEnv, make_gymnasium
from canter.envs.gymnasium.state import StateUnavailable
from canter.envs.gymnasium.sync import SyncStepper


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr("canter.core.distributed.cores", lambda: 2)


class Stuck(gymnasium.Wrapper):
    """Raises in its third step."""

    state_attributes = ("steps",)
    steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps == 3:
            raise RuntimeError("the motor is stuck")
        return self.env.step(action)


def forked(**options) -> Any:
    return make_gymnasium("Hopper-v5", 4, vectorization="forked", **options)


def push(env):
    return env.step(torch.zeros(4, 3))


def test_an_error_in_a_forked_process_is_told_and_the_state_before_it_is_there(two_cores):
    env = forked(wrappers=[lambda env: Stuck(env)])
    env.reset(0)
    push(env)
    before = env.state_dict()
    with pytest.raises(EnvFailed, match=r"RuntimeError: the motor is stuck \(.*test_gymnasium_forked") as told:
        push(env), push(env)
    assert told.value.row == 0
    env.load_state_dict(before)
    push(env)
    env.close()


def test_a_forked_process_that_dies_is_told_and_none_is_left_behind(two_cores):
    env = forked()
    env.reset(0)
    push(env)
    (fork,) = env._stepper.forks
    os.kill(fork.pid, signal.SIGKILL)
    with pytest.raises(EnvFailed, match="died: signal SIGKILL"):
        push(env)
    env.reset(0)
    push(env)
    (fork,) = env._stepper.forks
    pid = fork.pid
    env.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_forked_processes_end_with_one_that_is_killed():
    script = """
import os, signal, torch
import canter.envs.gymnasium as adapter
from canter.core import distributed
distributed.cores = lambda: 3
envs = [adapter.make_gymnasium("Hopper-v5", 6, vectorization="forked") for _ in range(2)]
for env in envs:
    env.reset(0)
    env.step(torch.zeros(6, 3))
envs[0].reset(0)  # forked anew, after the others: these pipes are in those processes and the other way round
envs[0].step(torch.zeros(6, 3))
print(*[fork.pid for env in envs for fork in env._stepper.forks], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=120)
    pids = [int(pid) for pid in ended.stdout.split()]
    assert ended.returncode == -signal.SIGKILL and len(pids) == 4
    until = time.monotonic() + 20.0
    while time.monotonic() < until and any(is_running(pid) for pid in pids):
        time.sleep(0.02)
    assert not any(is_running(pid) for pid in pids)


def is_running(pid):
    """Not so a process that has ended and that nobody has asked about."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_cannot_be_forked_says_why(two_cores):
    with pytest.raises(ValueError, match="vectorization=forked: pictures are drawn in this process; use threads"):
        forked(render_mode="rgb_array")
    with pytest.raises(ValueError, match="vectorization=forked needs autoreset=same_step"):
        forked(autoreset="next_step")


def test_environments_of_unknown_state_are_forked_on_demand_only(two_cores):
    own: dict[str, Any] = {"wrappers": [type("Own", (gymnasium.Wrapper,), {})]}
    env: Any = make_gymnasium("Hopper-v5", 8, **own)
    assert env._stepper.pool is not None and type(env._stepper) is SyncStepper  # threads, by default
    env.close()
    env, plain = forked(**own), make_gymnasium("Hopper-v5", 4, vectorization="sync", **own)
    for seed in (3, 4):
        env.reset(seed), plain.reset(seed)
        for _ in range(40):
            assert torch.equal(push(env).obs["policy"], push(plain).obs["policy"])
    with pytest.raises(StateUnavailable, match="the wrapper Own may hold state"):
        env.state_dict()
    assert torch.equal(env.reset()["policy"], plain.reset()["policy"])  # random streams continue
    env.close(), plain.close()


def spin():
    while True:
        pass


HANGS = {
    "sleeps": lambda: time.sleep(600),
    "spins": spin,
    "stops": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}
DEATHS = {
    "kill": (lambda: os.kill(os.getpid(), signal.SIGKILL), "signal SIGKILL"),
    "abort": (lambda: (faulthandler.disable(), os.abort()), "signal SIGABRT"),
    "alarm": (lambda: (signal.alarm(1), time.sleep(60)), "signal SIGALRM"),
    "exit": (lambda: os._exit(7), "exit code 7"),
}


class Bad(gymnasium.Env):
    """Does something in one of its calls."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, call="", act=lambda: None):
        self.call, self.act, self.parent = call, act, os.getpid()

    def happens(self, call):
        assert os.getpid() != self.parent, "called in the process that made it"
        if self.call == call:
            self.act()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.happens("reset")
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.happens("step")
        return np.zeros(2, np.float32), 1.0, False, False, {}

    def close(self):
        if os.getpid() != self.parent:
            self.happens("close")


def isolated(call, act, bad=1, **timeouts) -> Any:
    makers = [lambda n=n: Bad(call if n == bad else "", act) for n in range(3)]
    env = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    return GymnasiumEnv(env, groups=2, forked=True, **timeouts)


def run(env):
    env.reset(0)
    env.step(torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("call", ["step", "reset"])
@pytest.mark.parametrize("act", HANGS.values(), ids=HANGS)
def test_a_fork_that_takes_too_long_is_killed_and_names_its_environment(call, act):
    text = rf"{call}\(\) took more than 0.3 s \(env.step_timeout\), so its process was ended \(process \d+\)"
    with pytest.raises(EnvFailed, match=text) as failed, closing(isolated(call, act, step_timeout=0.3)) as env:
        run(env)
    assert failed.value.row == 1


@pytest.mark.parametrize("act", HANGS.values(), ids=HANGS)
def test_a_close_that_takes_too_long_is_killed_and_logged(act, caplog):
    env = isolated("close", act, close_timeout=0.3)
    run(env)
    (pid, _) = [fork.pid for fork in env._stepper.forks]
    env.close()
    assert "environment 1: close() took more than 0.3 s (env.close_timeout), so it was ended" in caplog.text
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_close_that_raises_is_logged(caplog):
    env = isolated("close", lambda: 1 / 0)
    run(env)
    env.close()
    assert "environment 1: close() raised ZeroDivisionError: division by zero" in caplog.text


@pytest.mark.parametrize(("act", "words"), DEATHS.values(), ids=DEATHS)
def test_a_fork_that_dies_names_its_environment_and_its_signal(act, words):
    env = isolated("step", act, bad=2)
    with pytest.raises(EnvFailed, match=rf"its process died in step\(\): {words} \(process \d+\)") as failed:
        run(env)
    assert failed.value.row == 2
    env.close()


def test_a_fork_that_closes_its_file_descriptors_is_an_error():
    env = isolated("step", lambda: os.closerange(3, 1024))
    with pytest.raises(EnvFailed, match=r"environments died: exit code 0, or it closed its file descriptors"):
        run(env)
    env.close()


def test_an_exit_in_a_fork_is_an_error_with_its_line():
    env = isolated("step", lambda: sys.exit(0))
    with pytest.raises(EnvFailed, match=r"step\(\) raised SystemExit: 0 \(.*test_gymnasium_forked"):
        run(env)
    env.close()


class Timed(Bad):
    def step(self, action):
        return *super().step(action)[:4], {"duration": 2.0}


def test_requested_entries_of_info_come_from_forks_and_a_missing_one_is_named_with_those_there_are():
    for key, advice in (("duration", None), ("durations", "did you mean 'duration'")):
        env = SyncVectorEnv([Timed, Timed, Timed], autoreset_mode=AutoresetMode.SAME_STEP)
        env = GymnasiumEnv(env, groups=2, forked=True, info_keys=[key])
        env.reset(0)
        step = env.step(torch.zeros(3, dtype=torch.int64))
        assert step.info[key].tolist() == [0.0 if advice else 2.0] * 3
        assert ("info has duration: " in str(env.absent_info())) == (advice is not None)
        env.close()


def test_forks_of_one_group_isolate_it_and_those_that_died_are_replaced():
    env = SyncVectorEnv([lambda: Bad("step", lambda: os._exit(1))], autoreset_mode=AutoresetMode.SAME_STEP)
    env = GymnasiumEnv(env, groups=1, forked=True)
    for _ in range(2):
        with pytest.raises(EnvFailed, match="exit code 1"):
            env.reset(0), env.step(torch.zeros(1, dtype=torch.int64))
    env.close()
