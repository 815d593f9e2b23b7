"""Scheduling hints of ranks for their threads, read from the operating system under a real torchrun."""

import json
import os

import pytest
from torchrun import torchrun

ASKS = """
import json, os, sys
from pathlib import Path
from canter.core import distributed
from canter.core.distributed.world import world

def threads():
    tasks = [(int(path.name), (path / "comm").read_text().strip()) for path in Path("/proc/self/task").iterdir()]
    return [(name, os.sched_getscheduler(task), sorted(os.sched_getaffinity(task))) for task, name in tasks]

if "differ" in sys.argv and os.environ["RANK"] == "1":
    os.sched_setaffinity(0, {1})
world.start()
rank, inside, found = distributed.rank(), distributed.cores(), threads()
world.end()
own = [sorted(os.sched_getaffinity(0)), os.sched_getscheduler(0)]
Path(f"rank{rank}.json").write_text(json.dumps([inside, found, own]))
"""

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux alone has these ways")


def ask(folder, ranks, *words):
    (folder / "asks.py").write_text(ASKS)
    torchrun(ranks, folder / "asks.py", *words, cwd=folder)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.long
def test_ranks_have_cores_of_their_own_and_threads_that_do_not_interrupt(tmp_path):
    given = sorted(os.sched_getaffinity(0))
    told = ask(tmp_path, 2)
    taken = []
    for inside, threads, outside in told:
        (own,) = {tuple(cores) for _, _, cores in threads}
        assert inside == len(own) == max(1, len(given) // 2)
        assert {policy for name, policy, _ in threads if "gloo" in name} == {os.SCHED_BATCH}
        assert outside == [given, os.SCHED_OTHER], "as before once the group has ended"
        taken += own
    assert len(set(taken)) == len(taken) or len(given) == 1


@pytest.mark.long
def test_more_ranks_than_cores_have_one_each(tmp_path):
    ranks = len(os.sched_getaffinity(0)) + 1
    if ranks > 5:
        pytest.skip("that many ranks take long to start")
    assert [inside for inside, *_ in ask(tmp_path, ranks)] == [1] * ranks


@pytest.mark.long
def test_ranks_that_were_given_different_cores_keep_them(tmp_path):
    given = tuple(sorted(os.sched_getaffinity(0)))
    if not {0, 1} <= set(given):
        pytest.skip("needs cores 0 and 1")
    told = ask(tmp_path, 2, "differ")
    assert [{tuple(cores) for _, _, cores in threads} for _, threads, _ in told] == [{given}, {(1,)}]
