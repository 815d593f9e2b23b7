"""A watchdog's thread, see `tests/faults` for what it says of environments that hang."""

import gc
import threading
import time

from canter.envs.watchdog import Watchdog


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
