"""What the scripts of this folder share: their arguments, a stopwatch, and the line of JSON that each prints."""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch

WARM_UP = 5
"""Iterations before the first one that counts."""


class Stopwatch:
    """Seconds of the two halves of each iteration; or, without waiting for the device, their host synchronisations."""

    def __init__(self, device: str, count_syncs: bool = False) -> None:
        self.on_gpu, self.count_syncs = device.startswith("cuda"), count_syncs
        self.laps: dict[str, list[float]] = {"collect": [], "learn": []}
        self.caught: list[Any] = []
        self.last = self.now()

    def now(self) -> float:
        """Seconds, once the device has done its work; or the synchronisations so far."""
        if self.count_syncs:
            return sum("synchronizing" in str(warning.message) for warning in self.caught)
        if self.on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def lap(self, half: str) -> None:
        """The half of an iteration that ends here."""
        now = self.now()
        self.laps[half].append(now - self.last)
        self.last = now

    def before(self, method: Callable[..., Any], half: str) -> Callable[..., Any]:
        """The method; a call of it ends `half`."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.lap(half)
            return method(*args, **kwargs)

        return timed

    def after(self, method: Callable[..., Any], half: str) -> Callable[..., Any]:
        """The method; its return ends `half`."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            self.lap(half)
            return result

        return timed


def arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--num-envs", type=int, default=4096)
    parser.add_argument("--horizon", type=int, default=24)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 128, 64])
    parser.add_argument("--iterations", type=int, default=20, help="iterations that count, after the warm-up")
    parser.add_argument("--repeats", type=int, default=1, help="trainers built one after the other and measured alike")
    parser.add_argument("--threads", type=int, help="CPU threads of torch")
    parser.add_argument("--syncs", action="store_true", help="count host synchronisations as well (CUDA only)")
    return parser


Train = Callable[[argparse.Namespace, int, Stopwatch], None]
"""Runs so many iterations in a new trainer, and laps the stopwatch twice in each."""


def bench(library: str, package: str, train: Train, parser: argparse.ArgumentParser) -> None:
    """Measure a library and print what came out."""
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    if options.threads:
        torch.set_num_threads(options.threads)
    collect: list[float] = []
    learn: list[float] = []
    for _ in range(options.repeats):
        watch = Stopwatch(options.device)
        train(options, WARM_UP + options.iterations, watch)
        collect += watch.laps["collect"][WARM_UP:]
        learn += watch.laps["learn"][WARM_UP:]
    result: dict[str, Any] = {"library": library, "version": version(package)}
    result |= milliseconds(collect, learn, options.num_envs * options.horizon)
    if options.device.startswith("cuda"):
        result["peak_memory_mb"] = round(torch.cuda.max_memory_allocated() / 2**20)
        if options.syncs:
            result["syncs"] = count_syncs(options, train)
    print(json.dumps(result), flush=True)


def count_syncs(options: argparse.Namespace, train: Train) -> float:
    """How often the host waits for the device in one iteration, in a trainer of its own that is not timed."""
    watch = Stopwatch(options.device, count_syncs=True)
    with warnings.catch_warnings(record=True) as watch.caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        train(options, WARM_UP + 3, watch)
        torch.cuda.set_sync_debug_mode("default")
    return statistics.median(map(sum, zip(*(counts[WARM_UP:] for counts in watch.laps.values()), strict=True)))


def milliseconds(collect: list[float], learn: list[float], steps: int) -> dict[str, float]:
    """Medians of the two halves and of their sum, from seconds."""
    whole = statistics.median(map(sum, zip(collect, learn, strict=True)))
    return {
        "collect_ms": round(1e3 * statistics.median(collect), 3),
        "learn_ms": round(1e3 * statistics.median(learn), 3),
        "iteration_ms": round(1e3 * whole, 3),
        "steps_per_second": round(steps / whole),
    }
