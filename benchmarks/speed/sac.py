"""Speed of SAC: whole training beside Stable-Baselines3 on a CPU, and updates per second on a GPU.

    python benchmarks/speed/sac.py cpu --peers PATH/TO/python       both, in turns, each in a process of its own
    python benchmarks/speed/sac.py gpu                              updates per second: plain, large and fleet

The first needs a Python with Stable-Baselines3. Both train HalfCheetah-v5 in one environment with the same settings:
two critics and a policy of 256 x 256, batches of 256, one update a step, the same number of threads. Steps are counted
after the warm-up. JSON goes to `results/sac_cpu.json` and `results/sac_gpu.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
ENV, WARM_UP = "HalfCheetah-v5", 100


Rates = tuple[float, float]
"""Steps per second of the clock, and of processor time, which other programs disturb less."""


def clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def rates(steps: int, start: tuple[float, float]) -> Rates:
    wall, busy = (now - then for now, then in zip(clocks(), start, strict=True))
    return steps / wall, steps / busy


def ours(steps: int, threads: int) -> Rates:
    """Steps per second of this library."""
    from dataclasses import replace

    import canter

    preset = canter.presets["HalfCheetah-sac"]
    algorithm = replace(preset.algorithm, warmup_steps=WARM_UP, critic_optimizer=None)  # one learning rate, as theirs
    execution = replace(preset.execution, threads=threads)
    config = replace(preset, algorithm=algorithm, execution=execution, total_steps=10**9)
    with canter.Trainer(config) as trainer:
        trainer.learn(2 * WARM_UP // algorithm.horizon)
        start = clocks()
        trainer.learn(steps // algorithm.horizon)
        return rates(steps, start)


def theirs(steps: int, threads: int) -> Rates:
    """Steps per second of Stable-Baselines3."""
    import torch
    from stable_baselines3 import SAC

    torch.set_num_threads(threads)
    model = SAC("MlpPolicy", ENV, learning_starts=WARM_UP, policy_kwargs={"net_arch": [256, 256]}, device="cpu", seed=0)
    model.learn(2 * WARM_UP)
    start = clocks()
    model.learn(steps, reset_num_timesteps=False)
    return rates(steps, start)


def compare(peers: str, steps: int, rounds: int, threads: tuple[int, ...]) -> dict[str, Any]:
    """Both in turns, so that whatever else the machine does falls on both."""
    found: dict[str, Any] = {"env": ENV, "steps": steps, "machine": f"{platform.machine()}, {os.cpu_count()} cores"}
    for count in threads:
        measured: dict[str, list[Rates]] = {"canter": [], "stable-baselines3": []}
        for _ in range(rounds):
            for name, python in (("canter", sys.executable), ("stable-baselines3", peers)):
                command = [python, __file__, "one", name, "--steps", str(steps), "--threads", str(count)]
                environment = os.environ | {"OMP_NUM_THREADS": str(count)}
                out = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
                measured[name].append(json.loads(out.splitlines()[-1]))
                print(count, name, measured[name][-1], flush=True)
        found[f"{count} threads"] = {"steps per second of the clock, of processor time": measured}
        for kind, place in (("clock", 0), ("processor time", 1)):
            middle = {name: statistics.median(pair[place] for pair in pairs) for name, pairs in measured.items()}
            ratio = middle["canter"] / middle["stable-baselines3"]
            found[f"{count} threads"][f"ratio of medians by {kind}"] = round(ratio, 3)
    return found


def updates(name: str, seconds: float = 10.0, precision: str | None = None) -> dict[str, Any]:
    """Updates per second on a GPU with CUDA graphs, in an environment that costs next to nothing."""
    from dataclasses import replace

    import torch

    import canter

    preset = canter.presets[name]
    algorithm = replace(preset.algorithm, warmup_steps=4096)
    if name == "sac":  # an iteration of many updates, so that the updates are what is measured
        algorithm = replace(algorithm, updates_per_step=16.0)
    if precision is not None:
        networks = {part: replace(getattr(algorithm, part), precision=precision) for part in ("policy", "critic")}
        algorithm = replace(algorithm, **networks)
    env = replace(preset.env, id="tensor:quadrotor")
    config = replace(preset, env=env, algorithm=algorithm, device="cuda", total_steps=10**9, log_every=10**6)
    with canter.Trainer(config) as trainer:
        while not trainer.algorithm.stage.learns or trainer.progress.iteration % 2:
            trainer.learn(1)
        trainer.learn(20)
        torch.cuda.synchronize()
        start, before = time.perf_counter(), trainer.algorithm.updates
        while time.perf_counter() - start < seconds:
            trainer.learn(50)
        torch.cuda.synchronize()
        rate = (trainer.algorithm.updates - before) / (time.perf_counter() - start)
        return {"updates per second": round(rate, 1), "batch": algorithm.batch_size, "num_envs": env.num_envs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cpu", "gpu", "one"])
    parser.add_argument("name", nargs="?")
    parser.add_argument("--peers", help="a Python that has stable-baselines3")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    options = parser.parse_args()
    if options.what == "one":
        one = {"canter": ours, "stable-baselines3": theirs}[options.name]
        print(json.dumps(one(options.steps, options.threads[0])))
        return
    if options.what == "cpu":
        found = compare(options.peers, options.steps, options.rounds, tuple(options.threads))
    else:
        import torch

        names = ("sac", "HalfCheetah-sac-large", "quadrotor-sac-large")
        found = {"gpu": torch.cuda.get_device_name()} | {name: updates(name) for name in names}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"sac_{options.what}.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
