"""How long an exchange of gloo takes between two processes of this machine, without anything of Canter's.

torchrun --standalone --nproc-per-node 2 benchmarks/ranks/exchange.py
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

REPEATS = 300


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for size in (1_000, 12_000, 50_000):
        numbers = torch.zeros(size)
        dist.all_reduce(numbers)
        start = time.perf_counter()
        for _ in range(REPEATS):
            dist.all_reduce(numbers)
        if dist.get_rank() == 0:
            print(f"{size:,} numbers: {1e3 * (time.perf_counter() - start) / REPEATS:.2f} ms")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
