"""Seconds from an environment that is ready to the end of the first iteration, with no kernel compiled before.

    python benchmarks/speed/cold_start.py [--hidden 512 256 128]

`tensor:null`, 4,096 environments, on a GPU, each form in a process of its own with an empty cache of Triton: kernels
compiled side by side before the first iteration, as they are, and one after another when each is first launched.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

import torch
from iteration import settings

from canter.training import execution
from canter.training.collector import Collector


def measure(hidden: tuple[int, ...], form: str) -> dict[str, float]:
    """Seconds of each part, and until the end of the first iteration."""
    if form == "one after another":
        execution.compile_ahead = lambda functions, generators: None
    config, how = settings(hidden=hidden), execution.ExecutionConfig(mode="graph")
    how.start("cuda")
    env, marks = config.env.build("cuda"), {}
    start = last = _now()

    def mark(name: str) -> None:
        nonlocal last
        last, before = _now(), last
        marks[name] = round(last - before, 2)

    algorithm = config.algorithm.build(env.spec, seed=0)
    algorithm.use_engine("auto")
    collector = Collector(env, algorithm, seed=0)
    mark("build")
    programs = how.prepare(collector, algorithm)
    mark("compile")
    algorithm.begin_iteration()
    rollout = programs.collect()
    mark("collect")
    programs.update(rollout)
    mark("update")
    return marks | {"first iteration ended": round(last - start, 2)}


def _now() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[512, 256, 128])
    parser.add_argument("--form", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.form:
        print(json.dumps({arguments.form: measure(tuple(arguments.hidden), arguments.form)}), flush=True)
        return
    for form in ("side by side", "one after another"):
        with tempfile.TemporaryDirectory() as empty:
            given = [sys.executable, __file__, *sys.argv[1:], "--form", form]
            subprocess.run(given, env=os.environ | {"TRITON_CACHE_DIR": empty}, check=True)


if __name__ == "__main__":
    main()
