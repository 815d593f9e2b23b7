"""Sums through memory that ranks of one machine share, under a real torchrun."""

import json
import sys
from pathlib import Path

import pytest
from torchrun import torchrun

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ranks have gloo alone")

ADDS = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
from canter.core import distributed
from canter.core.distributed.shared_memory import BYTES
from canter.core.distributed.world import world

rank = int(os.environ["RANK"])
if "no room" in sys.argv and rank == 0:
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
world.start()
ranks = distributed.world_size()
told = {"shared": distributed.shared is not None}

def numbers(shape, dtype, of):
    generator = torch.Generator().manual_seed(1000 * of + 1)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (100 * drawn).round().to(dtype) if dtype == torch.int64 else drawn.to(dtype)

def added(shape, dtype):
    total = numbers(shape, dtype, 0)
    for other in range(1, ranks):
        total = total + numbers(shape, dtype, other)
    return total

if "sums" in sys.argv:
    for dtype in (torch.float32, torch.float64, torch.int64):
        for shape in ((), (0,), (1,), (7, 5), (BYTES // 8 * 3 + 5,)):
            mine = numbers(shape, dtype, rank)
            assert distributed.sum_(mine) is mine
            assert torch.equal(mine, added(shape, dtype)), (dtype, shape)
    across = numbers((4, 6), torch.float32, rank).t()
    assert not across.is_contiguous() and torch.allclose(distributed.sum_(across), added((4, 6), torch.float32).t())

if "means" in sys.argv:
    shared = distributed.shared
    for length in (30, BYTES):  # the second is too long for one exchange
        results = []
        for distributed.shared in (shared, None):  # None: torch's group, by the definition
            mine = [numbers((length,), torch.float32, rank), numbers((3, 4), torch.float32, rank)]
            distributed.weighted_mean_(mine, torch.tensor(float(rank + 2)))
            results.append(torch.cat([part.reshape(-1) for part in mine]))
        total = sum(torch.arange(2.0, ranks + 2))
        by_hand = sum((other + 2) * numbers((length,), torch.float32, other) for other in range(ranks)) / total
        assert torch.allclose(results[0][:length], by_hand, atol=1e-6)
        assert torch.equal(*results) if ranks == 2 else torch.allclose(*results, atol=1e-6)
        distributed.shared = shared
        bad = torch.tensor([float("inf") if rank else -float("inf"), float("nan"), 3e38])
        distributed.weighted_mean_([bad], torch.tensor(float(rank + 2)))
        assert not torch.isfinite(bad).any()
        nothing = torch.ones(3)
        distributed.weighted_mean_([nothing], torch.zeros(()))
        assert nothing.tolist() == [0.0, 0.0, 0.0], "nobody counts"

if "turns" in sys.argv:
    pause = random.Random(rank)
    for turn in range(600):
        size = 1 + turn * 37 % 5000
        mine = torch.full((size,), float(turn * (rank + 1)))
        if pause.random() < 0.05:
            time.sleep(0.004 * pause.random())  # one rank is ahead, then another
        wanted = float(turn * ranks * (ranks + 1) // 2)
        assert bool((distributed.sum_(mine) == wanted).all()), turn

if "killed" in sys.argv:
    distributed.sum_(torch.zeros(3))
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        distributed.sum_(torch.zeros(3))
    except distributed.RankLost as error:
        told |= {"lost": str(error), "after": time.monotonic() - start}
mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/canter-" in line]
told["in the file system"] = [line for line in mapped if not line.endswith("(deleted)")]
assert bool(mapped) == told["shared"]
Path(f"rank{rank}.json").write_text(json.dumps(told))
if "killed" not in sys.argv:
    world.end()
"""


def ask(folder, ranks, *words, **how):
    (folder / "adds.py").write_text(ADDS)
    _, err = torchrun(ranks, folder / "adds.py", *words, cwd=folder, **how)
    return [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank*.json"))], err


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_sums_and_means_are_those_of_all_ranks_in_their_order(tmp_path, ranks):
    told, err = ask(tmp_path, ranks, "sums", "means", "turns")
    assert "Warning" not in err
    assert told == [{"shared": True, "in the file system": []}] * ranks


@pytest.mark.long
def test_without_room_for_it_ranks_go_by_gloo(tmp_path):
    told, _ = ask(tmp_path, 2, "no room", "turns")
    assert told == [{"shared": False, "in the file system": []}] * 2


def test_a_rank_that_is_killed_is_missed_at_once(tmp_path):
    (told,), err = ask(tmp_path, 2, "killed", fails=True)
    assert told["lost"].startswith("while adding up: the connection to another rank is lost")
    assert told["after"] < 5.0, "much less than any time-out, of which the shortest is 300 s"
    assert "canter: rank 1 (process" in err and "has gone; it was starting" in err
