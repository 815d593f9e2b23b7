"""Population-based training from a bad start beside the tuned preset, on `tensor:quadrotor`.

    python benchmarks/tuning/population_based.py [--repetitions 5] [--jobs 4] [--steps 300000]

All eight members begin with a learning rate of 1e-5, a hundredth of the preset's, with which a run learns next to
nothing; population-based training may change it within [1e-5, 1e-1], along with the clip range and the entropy
coefficient. The score is the mean return of the best member's policy in 100 new whole episodes. Beside it: the preset
(five seeds), the bad start without population-based training, and the best of eight runs with fixed random learning
rates, each with as many steps as a member. JSON goes to `results/population_based.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results" / "population_based.json"
TASK, PRESET = "tensor:quadrotor", "quadrotor-symmetry"
SPACE = {
    "algorithm.optimizer.learning_rate": "1e-5..1e-1:log",
    "algorithm.clip_ratio": "0.1..0.4",
    "algorithm.entropy_coef": "1e-5..0.03:log",
}
BAD_RATE = 1e-5
MEMBERS, INTERVALS = 8, 15
EPISODES = 100
RULE = {"share": 0.25, "resample": 0.5, "factors": (0.5, 2.0), "spread": False}


def main() -> None:
    """Train the population some times, and what it is compared with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300_000)
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which nothing new is started")
    parser.add_argument("--resume", action="store_true", help="keep what the file of results has already")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    until = time.monotonic() + options.limit
    document: dict[str, Any] = {"members": MEMBERS, "steps": options.steps, "bad_rate": BAD_RATE, "space": SPACE}
    if options.resume and options.out.is_file():
        document |= json.loads(options.out.read_text())
    populations = document.setdefault("populations", [])

    options.out.parent.mkdir(parents=True, exist_ok=True)

    def write() -> None:
        if "preset" in document:
            goal = 0.95 * document["preset"]["mean"]
            document["reached"] = sum(found["return"] >= goal for found in populations)
        options.out.write_text(json.dumps(document, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as place:

        def compare(name: str, flags: list[str]) -> None:
            if name not in document and time.monotonic() < until:
                scores = sweep(Path(place), name, ["--total-steps", str(options.steps), *flags], options.jobs)
                document[name] = {"mean": float(np.mean(scores)), "best": max(scores), "scores": scores}
                print(name, json.dumps(document[name]), flush=True)
                write()

        others = single_runs()
        compare("preset", others.pop("preset"))
        for seed in range(len(populations), options.repetitions):
            if time.monotonic() < until:
                populations.append(population(Path(place), seed, options.steps, options.jobs))
                print(json.dumps(populations[-1]), flush=True)
                write()
        for name, flags in others.items():
            compare(name, flags)
    print(f"{document.get('reached')} of {len(populations)} reached 95 % of the preset's return")


def population(place: Path, seed: int, steps: int, jobs: int) -> dict[str, Any]:
    """Return the result of a population from the bad start."""
    import canter

    start = time.perf_counter()
    result = canter.tune(
        TASK,
        preset=PRESET,
        pbt={"members": MEMBERS, "interval": steps // INTERVALS, **RULE},
        space=SPACE,
        jobs=jobs,
        run_dir=place,
        name=f"population{seed}",
        on_change=lambda plan, line: None,
        seed=100 * (seed + 1),
        total_steps=steps,
        algorithm={"optimizer": {"learning_rate": BAD_RATE}, "entropy_coef": 1e-3},
    )
    assert result.run is not None
    outcome = result.outcome
    seconds = time.perf_counter() - start
    lasting = {"seed": 100 * (seed + 1), "return": full_return(result.run), "seconds": seconds}
    return {**lasting, "settings": outcome.settings, "scores": [*outcome.scores.values()]}


def single_runs() -> dict[str, list[str]]:
    """Return the flags of the runs that the populations are compared with."""
    rate = "--algorithm.optimizer.learning-rate"
    rates = ",".join(f"{rate:.4g}" for rate in 10 ** np.random.default_rng(0).uniform(-5, -1, MEMBERS))
    return {
        "preset": ["--seed", "5000..5004"],
        "bad_start": ["--seed", "5000..5001", rate, str(BAD_RATE)],
        "fixed_rates": ["--seed", "5000", rate, rates],
    }


def sweep(place: Path, name: str, flags: list[str], jobs: int) -> list[float]:
    """Return the scores of the runs of a sweep."""
    command = [sys.executable, "-m", "canter", "sweep", TASK, "--preset", PRESET, "--jobs", str(jobs), *flags]
    command += ["--run-dir", str(place), "--name", name]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    runs = sorted((place / name).glob("*/run.json"))
    return [full_return(file.parent) for file in runs if not file.parent.is_symlink()]  # `latest` is a link


def full_return(run: Path) -> float:
    """Return the mean return of a run's policy in new episodes, the same for all runs."""
    import canter

    policy = run / "policies" / "final_actor.safetensors"
    return float(canter.evaluate(policy, canter.EnvConfig(id=TASK), EPISODES, 9000, num_envs=EPISODES).mean)


if __name__ == "__main__":
    main()
