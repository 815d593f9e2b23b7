"""Runs of the command line under torchrun: killed, stopped, hung, resumed by others, and with impossible settings."""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
import torch
from torchrun import launch, torchrun

from canter.app.cli import main
from canter.core import distributed
from canter.core.distributed.world import world
from canter.core.registry import UserError
from canter.core.storage.checkpoint import CheckpointStore

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are found in /proc")

ITERATIONS = 16
COMMAND = ["train", "CartPole-v1", "--num-envs", "4", "--algorithm.horizon", "64", "--console", "quiet"]
COMMAND += ["--until.iterations", str(ITERATIONS), "--total-steps", "100000", "--checkpoints.save-every", "4"]
COMMAND += ["--execution.rank-timeout", "6", "--resume-if-present"]


def ranks_of(agent: int) -> dict[int, int]:
    """Process ids of the ranks that a torchrun has started, by rank."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            environment = dict(item.split("=", 1) for item in (folder / "environ").read_text().split("\0") if item)
        except (OSError, ValueError):
            continue
        if parent == agent and "RANK" in environment:
            found[int(environment["RANK"])] = int(folder.name)
    return found


def wait_for(condition, seconds=150.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it has not happened in time"
        time.sleep(0.02)


def rows_of(run: Path) -> list[dict]:
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    return [json.loads(line) for line in lines]


def outcome(run: Path):
    """The last checkpoint, and what the log tells but for times."""
    _, tree = CheckpointStore(run / "checkpoints").load_latest()
    rows = [{k: v for k, v in row.items() if "time" not in k and k != "seconds"} for row in rows_of(run)]
    return tree, rows


@pytest.fixture
def start(tmp_path):
    """Starts the run of this test once more; what is left of it at the end is killed."""
    agents = []

    def launched(**how):
        command = ["-m", "canter", *COMMAND, "--run-dir", tmp_path, "--name", "run"]
        agents.append(launch(2, *command, cwd=tmp_path, **how))
        return agents[-1]

    yield launched
    for agent in agents:
        agent.kill()
        agent.communicate()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    out, _ = torchrun(2, "-m", "canter", *COMMAND, "--run-dir", folder, "--name", "run", cwd=folder)
    return folder / "run", out


def test_only_rank_0_speaks(undisturbed):
    run, out = undisturbed
    assert out.count("Final score") == 1
    assert [row["iteration"] for row in rows_of(run)] == list(range(1, ITERATIONS + 1))
    assert json.loads((run / "run.json").read_text())["ranks"] == 2


@pytest.mark.long
def test_a_run_that_is_stopped_killed_and_hung_ends_like_one_that_was_not(undisturbed, tmp_path, start):
    run = tmp_path / "run"
    agent = start()
    wait_for(lambda: len(rows_of(run)) >= 2)
    os.kill(ranks_of(agent.pid)[1], signal.SIGTERM)
    out, err = agent.communicate(timeout=150)
    assert agent.returncode != 0
    assert err.count("canter: rank") == 1 and "stopped by SIGTERM" in err, err
    assert len(rows_of(run)) < ITERATIONS

    agent = start(restarts=2)
    begun = len(rows_of(run))
    wait_for(lambda: len(rows_of(run)) > begun)
    victim = ranks_of(agent.pid)[1]
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: len(ranks_of(agent.pid)) == 2 and victim not in ranks_of(agent.pid).values())
    rows = len(rows_of(run))
    wait_for(lambda: 0 < len(rows_of(run)) != rows)
    hung = ranks_of(agent.pid)[0]
    os.kill(hung, signal.SIGSTOP)
    out, err = agent.communicate(timeout=300)
    assert agent.returncode == 0, out + err
    assert f"rank 1 (process {victim}" in err and "has gone; it was" in err, err
    assert f"rank 0 (process {hung}" in err and "no sign of life" in err, err

    (theirs, their_rows), (mine, my_rows) = outcome(undisturbed[0]), outcome(run)
    assert my_rows == their_rows
    for name in ("model", "optimizers", "policy_rng", "shuffle_rng"):
        assert str(mine["algorithm"][name]) == str(theirs["algorithm"][name])
    for name, weight in theirs["algorithm"]["model"].items():
        assert torch.equal(mine["algorithm"]["model"][name], weight)


def test_one_process_continues_with_a_run_of_two_ranks(undisturbed, caplog, monkeypatch, capsys):
    run, _ = undisturbed
    monkeypatch.chdir(run.parent)
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("iterations: 16", "iterations: 18"))
    main(["resume", str(run), "--accept-edits", "--console", "quiet"])
    assert "all episodes restart: the run was saved by 2 and goes on with 1 ranks" in caplog.text
    assert [row["iteration"] for row in rows_of(run)] == list(range(1, 19))


@pytest.mark.long
def test_ranks_with_different_settings_are_refused_once(tmp_path):
    script = tmp_path / "differ.py"
    script.write_text(
        "import os, sys\nfrom canter.app.cli import main\n"
        "main(['train', 'CartPole-v1', '--seed', os.environ['RANK'], '--run-dir', sys.argv[1]])\n"
    )
    _, err = torchrun(2, script, tmp_path / "runs", fails=True)
    told = [line for line in err.splitlines() if "canter:" in line]
    assert len(told) == 1 and "ranks differ: seed is 0 on rank 0 and 1 on rank 1" in told[0], err
    assert not (tmp_path / "runs").exists()


def test_environments_that_cannot_be_shared_are_refused_with_the_nearest_numbers(monkeypatch):
    monkeypatch.setattr(distributed, "world_size", lambda: 3)
    with pytest.raises(ValueError, match=r"env.num_envs=8 is the number over all ranks .* use env.num_envs=6 or 9"):
        distributed.share(8, "env.num_envs")
    with pytest.raises(ValueError, match=r"env.num_envs=2 .* use env.num_envs=3$"):
        distributed.share(2, "env.num_envs")


def test_a_device_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(distributed, "active", lambda: True)
    monkeypatch.setattr(distributed, "rank", lambda: 5)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ValueError, match=r"rank 5 needs cuda:1, but torch finds 1 CUDA devices"):
        distributed.rank_device("cuda")


def test_a_port_that_is_in_use_is_named(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(UserError, match=f"MASTER_PORT={port} at MASTER_ADDR=localhost is in use"):
            world.start()


def test_a_rank_whose_torchrun_has_ended_does_not_wait_for_it(monkeypatch):
    monkeypatch.setattr("canter.core.distributed.world.SECONDS", 0.0)
    with socket.socket() as taken:
        taken.bind(("localhost", 0))  # nobody listens
        port = str(taken.getsockname()[1])
        for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MASTER_PORT", port)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        with pytest.raises(UserError, match=f"torchrun's agent at MASTER_ADDR=localhost, MASTER_PORT={port} has ended"):
            world.start()
