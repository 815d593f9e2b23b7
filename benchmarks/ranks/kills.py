"""Ranks killed, agents killed and ranks that hang: does every run end, and with the bits of one that nobody disturbed?

    python benchmarks/ranks/kills.py --kills 100 --agents 10 --hangs 10

Each run is disturbed several times: a rank is killed (SIGKILL) or stopped (SIGSTOP) at a random moment once the run has
gone on since the last time, and torchrun restarts all ranks; or torchrun itself is killed, and started again. Recovery
is the time from that moment, or from the new start, to the next row of metrics.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from launching import about, end, outcome, ranks_of, rows_of, start, wait_for

RANKS, PER_RUN = 2, 10
TIMEOUT = 4.0
FLAGS = ["CartPole-v1", "--num-envs=8", "--algorithm.horizon=32", "--algorithm.epochs=4", "--console=quiet"]
FLAGS += ["--algorithm.num-minibatches=4", "--until.iterations=120", "--total-steps=null", "--resume-if-present"]
FLAGS += ["--checkpoints.save-every=3", f"--execution.rank-timeout={TIMEOUT}"]


class Trial:
    """One run in a folder of its own."""

    def __init__(self, parent: Path, name: str, draw: random.Random) -> None:
        self.run, self.draw = parent / name, draw
        self.command = ["train", *FLAGS, f"--run-dir={parent}", f"--name={name}"]
        self.agent = self.start()
        self.said, self.recoveries, self.lost = "", list[float](), 0

    def start(self) -> subprocess.Popen[str]:
        """The command, as anybody would give it again."""
        return start(RANKS, *self.command, restarts=PER_RUN + 2)

    def last_row(self) -> float:
        """When the newest row was written."""
        rows = rows_of(self.run)
        return rows[-1]["wall_time"] if rows else 0.0

    def at_a_random_moment(self) -> bool:
        """Wait until the run has gone on, and then a little; False if it has ended meanwhile."""
        since = self.last_row()
        ended = lambda: self.agent.poll() is not None  # noqa: E731
        wait_for(lambda: ended() or self.last_row() > since, 60.0)
        time.sleep(self.draw.uniform(0.0, 0.6))
        return not ended() and len(ranks_of(self.agent.pid)) == RANKS

    def recovered(self, since: float) -> None:
        """Note how long it takes to the next row."""
        if wait_for(lambda: self.last_row() > since or self.agent.poll() is not None, 90.0) and self.last_row() > since:
            self.recoveries.append(self.last_row() - since)
        elif self.agent.poll() is None:
            self.lost += 1

    def disturb(self, number: signal.Signals) -> bool:
        """Send a signal to one of the ranks; False where the run has ended."""
        if not self.at_a_random_moment():
            return False
        pid, now = self.draw.choice(list(ranks_of(self.agent.pid).values())), time.time()
        os.kill(pid, number)
        wait_for(lambda: pid not in ranks_of(self.agent.pid).values(), 60.0)
        self.recovered(now + 0.02)
        return True

    def kill_agent(self) -> bool:
        """Kill torchrun, wait until its ranks have noticed, and start it again."""
        if not self.at_a_random_moment():
            return False
        pids = set(ranks_of(self.agent.pid).values())
        self.agent.kill()
        self.said += end(self.agent)
        if not wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 30.0):
            self.lost += 1
        now, self.agent = time.time(), self.start()
        self.recovered(now)
        return True


def campaign(parent: Path, kind: str, wanted: int, reference: dict[str, Any], limit: float) -> dict[str, Any]:
    """So many disturbances of a kind, or as many as there is time for."""
    draw, done, ended, equal, runs, lost = random.Random(kind), 0, 0, 0, 0, 0
    recoveries, doing = list[float](), collections.Counter[str]()
    deadline = time.monotonic() + limit
    while done < wanted and time.monotonic() < deadline:
        trial = Trial(parent, f"{kind}-{runs}", draw)
        runs += 1
        for _ in range(min(PER_RUN, wanted - done)):
            how = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP}.get(kind)
            if not (trial.kill_agent() if how is None else trial.disturb(how)):
                break
            done += 1
        trial.said += end(trial.agent)
        ended += trial.agent.returncode == 0
        equal += trial.agent.returncode == 0 and outcome(trial.run) == reference
        lost += trial.lost
        recoveries += trial.recoveries
        doing.update(re.findall(r"; it was ([a-z]+)", trial.said))
        if trial.agent.returncode or trial.lost:
            (Path(__file__).parent / f"failed-{kind}-{runs}.log").write_text(trial.said)
        shutil.rmtree(trial.run, ignore_errors=True)
        print(f"{kind}: {done} done, {ended}/{runs} runs ended, {equal} equal", flush=True)
    return {
        "disturbances": done,
        "runs": runs,
        "runs_ended": ended,
        "runs_equal_to_the_bit": equal,
        "not_recovered": lost,
        "seconds_to_the_next_row": summary(recoveries),
        "named_while": dict(doing),
    }


def summary(seconds: list[float]) -> dict[str, float]:
    """Median, largest and how many within ten seconds."""
    if not seconds:
        return {"count": 0}
    within = sum(value <= 10.0 for value in seconds)
    return {"count": len(seconds), "median": statistics.median(seconds), "max": max(seconds), "within_10": within}


def main() -> None:
    """Run the campaign and write what came of it."""
    parser = argparse.ArgumentParser()
    for name, usual in (("kills", 100), ("agents", 10), ("hangs", 10)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--seconds", type=float, default=3600.0, help="for each of the three parts, at most")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "kills.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        parent = Path(folder)
        undisturbed = start(RANKS, "train", *FLAGS, f"--run-dir={parent}", "--name=undisturbed")
        said = end(undisturbed)
        assert undisturbed.returncode == 0, said
        reference = outcome(parent / "undisturbed")
        results = {"about": about(), "ranks": RANKS, "command": ["canter", "train", *FLAGS]}
        for kind, wanted in (("kill", arguments.kills), ("agent", arguments.agents), ("hang", arguments.hangs)):
            if wanted:
                results[kind] = campaign(parent, kind, wanted, reference, arguments.seconds)
                arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
