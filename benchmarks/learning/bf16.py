"""Compare learning with products in bfloat16 and in float32.

    python benchmarks/learning/bf16.py             5 seeds of CartPole and Pendulum in both precisions
    python benchmarks/learning/bf16.py --seeds 1

The presets, with `precision` "float32" or "bfloat16" in both networks and nothing else changed. Two numbers per run,
as in `run.py`: `training_return`, the mean of the last 100 training episodes, and `evaluation_return`, the mean of 50
new ones without noise. `results/bf16.json` is written after every run; runs that are in it are not repeated.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import torch

import canter
from canter.core.seeding import derive_seed
from canter.training.trainer import train

RESULT = Path(__file__).parent / "results" / "bf16.json"
TASKS = ("CartPole-v1", "Pendulum-v1")
Precision = Literal["float32", "bfloat16"]
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")
EVAL_EPISODES = 50


def run(env_id: str, precision: Precision, seed: int) -> dict[str, Any]:
    """Train with the preset in a precision, and evaluate."""
    preset = canter.preset_for(env_id)
    assert preset is not None
    model = preset.algorithm.model
    model = replace(model, policy=replace(model.policy, precision=precision))
    config = replace(preset, seed=seed, algorithm=replace(preset.algorithm, model=model))
    last: list[canter.Report] = []
    start = time.perf_counter()
    algorithm = train(config, lambda report: last.__setitem__(slice(None), [report]))
    seconds = time.perf_counter() - start
    env = config.env.build(config.device)
    evaluation = canter.evaluate(algorithm.policy, env, EVAL_EPISODES, derive_seed(seed, "eval"))
    env.close()
    return {
        "env": env_id,
        "precision": precision,
        "seed": seed,
        "training_return": last[0].return_,
        "evaluation_return": evaluation.mean,
        "env_steps": last[0].env_steps,
        "seconds": round(seconds, 1),
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean returns of each task in each precision."""
    table: dict[str, Any] = {}
    for env_id in TASKS:
        for precision in PRECISIONS:
            found = [run for run in runs if (run["env"], run["precision"]) == (env_id, precision)]
            if found:
                means = {key: mean(run[key] for run in found) for key in ("training_return", "evaluation_return")}
                table[f"{env_id} {precision}"] = {"seeds": len(found)} | means
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds, from 0")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    document: dict[str, Any] = {
        "command": "python benchmarks/learning/bf16.py",
        "versions": {"canter": canter.__version__, "torch": torch.__version__},
        "machine": f"{platform.machine()}, one core, bfloat16 emulated",
        "runs": [],
    }
    if RESULT.exists():
        document = json.loads(RESULT.read_text())
    done = [(run["env"], run["precision"], run["seed"]) for run in document["runs"]]
    for seed, env_id, precision in product(range(arguments.seeds), TASKS, PRECISIONS):
        if (env_id, precision, seed) in done:
            continue
        result = run(env_id, precision, seed)
        document["runs"].append(result)
        document["summary"] = summary(document["runs"])
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(document, indent=1) + "\n")
        print(f"{env_id} {precision} seed {seed}: {result['training_return']:.1f}", flush=True)
    print(json.dumps(summary(document["runs"]), indent=1))


if __name__ == "__main__":
    main()
