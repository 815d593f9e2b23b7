"""How long an exchange takes between ranks that compute for a while before each, as in training.

    torchrun --standalone --nproc-per-node 2 benchmarks/ranks/exchange.py
    torchrun --standalone --nproc-per-node 2 benchmarks/ranks/exchange.py gloo
    torchrun --standalone --nproc-per-node 2 benchmarks/ranks/exchange.py plain

`gloo` is without memory that the ranks share, as between machines. `plain` is a group as torch makes it, without cores
of their own for ranks and without patience of gloo's threads too.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
import torch.distributed as dist

from canter.core import distributed
from canter.core.distributed.world import world

REPEATS, WARM_UP = 700, 50


def main() -> None:
    """Print the median, the mean and what 9 of 10 stay below, in ms, for several sizes."""
    plain = "plain" in sys.argv
    _ = dist.init_process_group("gloo") if plain else world.start()
    add_up = dist.all_reduce if plain or "gloo" in sys.argv else distributed.sum_
    torch.set_num_threads(1)
    matrix = torch.randn(256, 256)
    for size in (1_000, 12_000, 50_000):
        numbers, took = torch.zeros(size), list[float]()
        for _ in range(REPEATS):
            for _ in range(6):
                torch.mm(matrix, matrix)
            start = time.perf_counter()
            add_up(numbers)
            took.append(1e3 * (time.perf_counter() - start))
        found = sorted(took[WARM_UP:])
        if dist.get_rank() == 0:
            middle, mean, tenth = statistics.median(found), statistics.mean(found), found[len(found) * 9 // 10]
            print(f"{size:,} numbers: median {middle:.2f} ms, mean {mean:.2f}, 9 of 10 below {tenth:.2f}", flush=True)
    _ = dist.destroy_process_group() if plain else world.end()


if __name__ == "__main__":
    main()
