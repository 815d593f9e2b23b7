"""The watchdog's thread, and the place of a hang; `tests/faults` has whole runs with environments that hang."""

import gc
import subprocess
import sys
import threading
import time

import pytest

from canter.envs.failures import EnvCalls, Watchdog, locate_hang


def test_its_thread_ends_with_it_where_nobody_closes_it():
    watchdog = Watchdog(0.1, lambda seconds: None)
    watchdog.begin()
    thread = watchdog._thread
    assert thread is not None
    del watchdog
    gc.collect()
    thread.join(5.0)
    assert not thread.is_alive()


def test_it_is_late_once_for_each_beginning():
    heard, first = [], threading.Event()
    watchdog = Watchdog(0.05, lambda seconds: (heard.append(seconds), first.set()))
    watchdog.begin()
    assert first.wait(10.0)
    time.sleep(0.1)  # for several further looks
    watchdog.close()
    assert len(heard) == 1 and heard[0] > 0.05


@pytest.mark.parametrize("name", ["canter-env_0", "MainThread"])
def test_a_hang_is_located_by_environment_and_line(name):
    entered, leave = threading.Event(), threading.Event()

    def hang():
        entered.set()
        leave.wait(20.0)

    def step():
        with EnvCalls(3):
            hang()

    stepping = threading.Thread(target=step, name=name)
    stepping.start()
    entered.wait(10.0)
    waiting = threading.get_ident() if name.startswith("canter-env") else stepping.ident
    where = locate_hang(waiting)
    leave.set()
    stepping.join()
    assert where.startswith("environment 3, in wait (")
    assert locate_hang(threading.get_ident()).startswith("the environment, in locate_hang (")


def test_python_ends_where_nobody_closed_a_trainer():
    script = """
import canter
algorithm = canter.PPOConfig(horizon=4, epochs=1, num_minibatches=1)
trainer = canter.Trainer(canter.TrainConfig(env=canter.EnvConfig(id="CartPole-v1", num_envs=2), algorithm=algorithm))
trainer.learn(1)
"""
    # It hung for ever; importing and one iteration take some seconds on a busy machine.
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
