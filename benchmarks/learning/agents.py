"""Compare a team with a centralised critic (MAPPO) and with decentralised critics (IPPO), seed by seed.

    python benchmarks/learning/agents.py             both, seeds 0 to 2
    python benchmarks/learning/agents.py --seeds 5   more

One JSON file for each in `results/`, in the form of those of `run.py`. `explained_variance` is how much of the returns
the critic foresees, over the last tenth of training. The goal is 95 % of what a controller earns that knows where
everyone is and heads for the centre.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Any

import gymnasium
import torch

import canter
from canter.core.plain import from_plain
from canter.core.seeding import derive_seed
from canter.training.trainer import train

RESULTS = Path(__file__).parent / "results"
EVAL_EPISODES = 300
THRESHOLD = 45.7
VARIANTS: dict[str, Any] = {
    "rendezvous-mappo": {},
    "rendezvous-ippo": {"critic": {"obs_groups": ["policy"]}},
}
"""Settings of the model, over the preset's: MAPPO's critic reads the whole world, IPPO's what its agent sees."""


def run(config: canter.TrainConfig) -> dict[str, Any]:
    """Train and evaluate; everything worth keeping of one run."""
    reports: list[canter.Report] = []
    start = time.perf_counter()
    algorithm = train(config, reports.append)
    seconds = time.perf_counter() - start
    env = config.env.build(config.device)
    evaluation = canter.evaluate(algorithm.policy, env, EVAL_EPISODES, derive_seed(config.seed, "eval"))
    solved = [report.env_steps for report in reports if (report.return_ or 0.0) >= THRESHOLD]
    last = reports[-len(reports) // 10 :]
    return {
        "seed": config.seed,
        "training_return": reports[-1].return_,
        "evaluation_return": evaluation.mean,
        "explained_variance": mean(report.metrics["value/explained_variance"] for report in last),
        "steps_to_threshold": solved[0] if solved else None,
        "env_steps": reports[-1].env_steps,
        "seconds": round(seconds, 1),
        "curve": [[report.env_steps, report.return_] for report in reports[::2]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds, from 0")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name, model in VARIANTS.items():
        config = from_plain({"algorithm": {"model": model}}, canter.presets["Rendezvous"])
        runs = [run(replace(config, seed=seed)) for seed in range(arguments.seeds)]
        document = {
            "env": f"{config.env.id} ({name.rpartition('-')[2].upper()})",
            "command": "python benchmarks/learning/agents.py",
            "threshold": THRESHOLD,
            "config": asdict(config),
            "versions": {"canter": canter.__version__, "torch": torch.__version__, "gymnasium": gymnasium.__version__},
            "machine": f"{platform.machine()}, one core per run",
            "runs": runs,
        }
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
        for entry in runs:
            print(
                f"{name} seed {entry['seed']}: {entry['training_return']:.1f} in training, "
                f"{entry['evaluation_return']:.1f} without noise, explained variance {entry['explained_variance']:.2f} "
                f"in {entry['seconds']} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
