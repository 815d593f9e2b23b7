"""Run Canter where the system has no more than macOS has, and refuse Windows."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from canter.core.distributed.watch import has_ended

AS_ON_MACOS = """
import fcntl, mmap, multiprocessing.heap, os, resource, runpy, select, signal, socket, sys

import gymnasium, numpy, rich.console, safetensors.torch, torch, torch.distributed, yaml

LINUX_ONLY = {
    os: "sched_getaffinity sched_setaffinity sched_getscheduler sched_setscheduler sched_param sched_getparam "
    "sched_setparam SCHED_OTHER SCHED_BATCH SCHED_IDLE SCHED_FIFO SCHED_RR eventfd eventfd_read eventfd_write "
    "memfd_create pidfd_open P_PIDFD posix_fallocate posix_fadvise pipe2 copy_file_range splice getrandom O_DIRECT "
    "O_LARGEFILE O_NOATIME O_PATH O_TMPFILE O_RSYNC getxattr setxattr listxattr removexattr unshare setns fdatasync "
    "waitid preadv2 pwritev2 getresuid setresuid getresgid setresgid",
    socket: "AF_NETLINK AF_PACKET AF_ALG AF_VSOCK AF_CAN SO_PEERCRED SO_PASSCRED SOCK_CLOEXEC SOCK_NONBLOCK MSG_MORE "
    "MSG_CMSG_CLOEXEC MSG_NOSIGNAL MSG_ERRQUEUE MSG_CONFIRM TCP_USER_TIMEOUT TCP_QUICKACK SO_BINDTODEVICE",
    signal: "SIGPWR SIGSTKFLT SIGPOLL SIGCLD SIGRTMIN SIGRTMAX sigwaitinfo sigtimedwait",
    select: "epoll",
    mmap: "MAP_POPULATE MADV_HUGEPAGE MADV_DONTFORK MREMAP_MAYMOVE",
    fcntl: "F_ADD_SEALS F_GET_SEALS F_SETPIPE_SZ F_OFD_SETLK F_NOTIFY",
    resource: "prlimit RLIMIT_NICE RLIMIT_RTPRIO RLIMIT_MSGQUEUE RLIMIT_SIGPENDING",
}


def without_files_of_linux(event, arguments):
    if event == "open" and str(arguments[0]).startswith(("/proc/", "/sys/", "/dev/shm")):
        raise FileNotFoundError(2, "No such file or directory", str(arguments[0]))


for module, names in LINUX_ONLY.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    multiprocessing.heap.Arena._dir_candidates = []
    sys.platform = "darwin"
    sys.addaudithook(without_files_of_linux)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""

IMPORT_EVERYTHING = """
import importlib, pkgutil

import canter

OPTIONAL = {"triton", "jax", "mjlab", "mujoco", "isaaclab", "envpool", "pettingzoo", "warp"}
OPTIONAL |= {"imageio", "onnx", "onnxscript"}
count = 0
for module in pkgutil.walk_packages(canter.__path__, "canter."):
    if module.name in ("canter.__main__", "canter.engines.native._native"):
        continue
    try:
        importlib.import_module(module.name)
        count += 1
    except ModuleNotFoundError as error:
        assert error.name.partition(".")[0] in OPTIONAL, error
print(count)
"""

COMMANDS = """
import sys

from canter.app.cli import main

if __name__ == "__main__":
    for line in sys.argv[1:]:
        main(line.split())
"""

VECTORIZATIONS = """
import canter

if __name__ == "__main__":
    for way in ("async", "threads", "sync"):
        settings = {"env": {"num_envs": 2, "vectorization": way}, "algorithm": {"horizon": 16, "num_minibatches": 4}}
        result = canter.train("Pendulum-v1", **settings, total_steps=64, final_evaluation=False, folder=False)
        print(way, result.ended_by)
"""


@pytest.fixture
def on_macos(tmp_path):
    """Return a function that runs a program in an empty folder without what only Linux has."""
    (tmp_path / "as_on_macos.py").write_text(AS_ON_MACOS)
    (tmp_path / "everything.py").write_text(IMPORT_EVERYTHING)
    (tmp_path / "canter_commands.py").write_text(COMMANDS)
    (tmp_path / "vectorizations.py").write_text(VECTORIZATIONS)

    def run(program, *arguments):
        command = [sys.executable, "as_on_macos.py", f"{program}.py", *arguments]
        settings = {**os.environ, "MUJOCO_GL": "disabled"}  # MuJoCo's EGL, which macOS has not, reads /proc
        done = subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_every_module_can_be_imported(on_macos):
    assert int(on_macos("everything")) > 180


@pytest.mark.long
def test_a_run_is_trained_resumed_and_evaluated(on_macos, tmp_path):
    train = "train CartPole-v1 --num-envs 4 --algorithm.horizon 16 --algorithm.num-minibatches 4 --total-steps 256"
    on_macos(
        "canter_commands",
        f"{train} --name first",
        "resume first --total-steps 512",
        "eval first --episodes 2 --json scores.json",
    )
    assert json.loads((tmp_path / "runs/first/run.json").read_text())["status"] == "finished"
    assert json.loads((tmp_path / "scores.json").read_text())["episodes"] == 2


@pytest.mark.long  # processes that are not forked import everything again
def test_environments_are_stepped_without_forks(on_macos):
    out = on_macos("vectorizations")
    for way in ("async", "threads", "sync"):
        assert f"\n{way} total_steps\n" in out


def test_a_living_process_of_this_machine_has_not_ended(monkeypatch):
    def no_such_file(path):
        raise FileNotFoundError(path)

    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        heartbeat = {"pid": process.pid, "host": os.uname().nodename}
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_text", no_such_file)
            assert not has_ended(heartbeat)
        assert not has_ended(heartbeat)
        process.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 10
        while not has_ended(heartbeat) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert has_ended(heartbeat), "it is dead, though nobody has waited for it"
    assert has_ended(heartbeat)


def test_windows_is_refused_in_one_line():
    code = "import sys; sys.platform = 'win32'; import canter"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ImportError: Canter needs Linux or macOS; on Windows use WSL 2, which is Linux (docs/stability.md)"
    )
