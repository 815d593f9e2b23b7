import json
import logging
import multiprocessing
import os
import subprocess
import sys
import time

import pytest

from canter.core.storage.lock import RunLock, RunLocked, is_alive


def dead_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def forge(folder, **fields):
    """A lock as another process would have left it."""
    with RunLock(folder) as lock:
        owner = json.loads(lock.path.read_text())
    lock.path.write_text(json.dumps(owner | fields))
    return lock.path


def test_a_lock_is_there_while_held_and_gone_after(tmp_path):
    with RunLock(tmp_path / "run") as lock:
        owner = json.loads(lock.path.read_text())
        assert owner["pid"] == os.getpid()
        assert owner["host"]
        assert owner["since"].endswith("+00:00")
    assert not lock.path.exists()
    with lock:
        assert lock.path.exists()


def test_a_lock_is_released_after_an_error(tmp_path):
    with pytest.raises(KeyError), RunLock(tmp_path) as lock:
        raise KeyError
    assert not lock.path.exists()


def test_a_second_writer_gets_the_owner_of_the_folder(tmp_path):
    with RunLock(tmp_path) as lock:
        owner = json.loads(lock.path.read_text())
        with pytest.raises(RunLocked) as caught, RunLock(tmp_path):
            pass
        message = str(caught.value)
        assert f"process {owner['pid']} on {owner['host']} since {owner['since']}" in message
        assert lock.path.exists()


def test_the_lock_of_a_dead_process_is_taken_over_and_explained(tmp_path, caplog):
    pid = dead_pid()
    path = forge(tmp_path, pid=pid)
    with caplog.at_level(logging.WARNING), RunLock(tmp_path):
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert f"process {pid}, its owner since" in caplog.text


def test_a_later_process_with_the_same_number_is_not_the_owner(tmp_path):
    forge(tmp_path, pid=os.getpid(), birth="another boot:1")
    with RunLock(tmp_path):
        pass


def test_a_lock_of_another_machine_is_refused_with_instructions(tmp_path):
    path = forge(tmp_path, pid=dead_pid(), host="elsewhere")
    with pytest.raises(RunLocked, match=rf"on elsewhere since .* remove {path} by hand"), RunLock(tmp_path):
        pass
    path.unlink()
    with RunLock(tmp_path):
        pass


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "null", '{"pid": 1}', "\x00\xff"])
def test_a_lock_that_cannot_be_read_is_refused_with_instructions(content, tmp_path):
    path = forge(tmp_path)
    path.write_text(content)
    with pytest.raises(RunLocked, match=r"cannot be read; .* by hand"), RunLock(tmp_path):
        pass


def test_a_lock_that_was_taken_away_is_not_removed(tmp_path, caplog):
    with caplog.at_level(logging.WARNING), RunLock(tmp_path) as lock:
        other = json.loads(lock.path.read_text()) | {"token": "other"}
        lock.path.write_text(json.dumps(other))
    assert lock.path.exists()
    assert "replaced by another process" in caplog.text


def test_a_zombie_is_dead():
    process = subprocess.Popen([sys.executable, "-c", ""])
    deadline = time.monotonic() + 20
    while is_alive(process.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(process.pid)
    process.wait()
    assert is_alive(os.getpid())


def contend(folder, races, barrier, winners):
    for race in range(races):
        barrier.wait()
        try:
            with RunLock(folder / str(race)):
                won = True
                barrier.wait()
        except RunLocked:
            won = False
            barrier.wait()
        winners.put((race, won))


@pytest.mark.parametrize("stale", [False, True], ids=["free", "stale"])
def test_of_several_that_race_exactly_one_wins(stale, tmp_path):
    races, processes = 20, 3
    if stale:
        pid = dead_pid()
        for race in range(races):
            forge(tmp_path / str(race), pid=pid)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["canter.core.storage.lock"])
    barrier, winners = context.Barrier(processes), context.Queue()
    arguments = (tmp_path, races, barrier, winners)
    running = [context.Process(target=contend, args=arguments) for _ in range(processes)]
    for process in running:
        process.start()
    results = [winners.get(timeout=120) for _ in range(races * processes)]
    for process in running:
        process.join(60)
        assert process.exitcode == 0
    assert sorted(race for race, won in results if won) == list(range(races))
