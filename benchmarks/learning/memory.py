"""Cart-pole from positions alone: recurrent policies, with and without an asymmetric critic.

    python benchmarks/learning/memory.py          every run that is not finished yet, one after the other

One JSON file, `results/memory.json`; runs in it are not repeated. `steps_to_475` is when the mean return of the
last 100 training episodes first reached 475; `evaluation_return` is the mean of 50 new episodes without noise.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import canter
from canter.algorithms.ppo import CentralValueConfig
from canter.core.seeding import derive_seed
from canter.nn.network import NetworkConfig
from canter.training.trainer import train

RESULTS = Path(__file__).parent / "results" / "memory.json"
SEEDS = 5


def central_value(*, privileged: bool) -> canter.TrainConfig:
    """The LSTM policy with a critic of its own phase that sees the velocities, or not (`privileged`)."""
    base = canter.presets["cartpole-positions-lstm"]
    critic = NetworkConfig(obs_groups=("critic",) if privileged else ("policy",))
    return replace(
        base,
        env=replace(base.env, options={"positions_only": True, "privileged": True}),
        algorithm=replace(
            base.algorithm,
            model=replace(base.algorithm.model, critic=critic),
            central_value=CentralValueConfig(optimizer=base.algorithm.optimizer),
        ),
    )


STUDIES = {
    "lstm": canter.presets["cartpole-positions-lstm"],
    "gru": canter.presets["cartpole-positions-gru"],
    "central value that sees the velocities": central_value(privileged=True),
    "central value that does not": central_value(privileged=False),
}


def run(config: canter.TrainConfig) -> dict[str, Any]:
    torch.set_num_threads(1)
    reached: list[int] = []
    returns: list[float | None] = []

    def follow(report: canter.Report) -> None:
        returns.append(report.return_)
        if not reached and report.episodes >= 100 and (report.return_ or 0.0) >= 475:
            reached.append(report.env_steps)

    start = time.perf_counter()
    algorithm = train(config, follow)
    env = config.env.build(config.device)
    evaluation = canter.evaluate(algorithm.policy, env, 50, derive_seed(config.seed, "eval"))
    return {
        "seed": config.seed,
        "steps_to_475": reached[0] if reached else None,
        "training_return": returns[-1],
        "evaluation_return": evaluation.mean,
        "seconds": round(time.perf_counter() - start, 1),
    }


def main() -> None:
    document = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name, config in STUDIES.items():
        study = document.setdefault(name, {"config": asdict(config), "runs": []})
        for seed in range(SEEDS):
            if seed in [entry["seed"] for entry in study["runs"]]:
                continue
            study["runs"].append(run(replace(config, seed=seed)))
            RESULTS.write_text(json.dumps(document, indent=1) + "\n")
            print(name, study["runs"][-1], flush=True)


if __name__ == "__main__":
    main()
