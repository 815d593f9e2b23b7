"""SAC beside PPO with 1,024 environments on a GPU: steps and seconds until SAC has PPO's final return.

    python benchmarks/speed/fleet.py [--tasks tensor:quadrotor tensor:swimmer] [--seeds 1]

PPO's settings are those of `iteration.py`, SAC's the task's preset for a GPU. Points of a curve are steps, the
mean return of 256 new episodes without noise, and seconds of training, evaluation not counted. JSON goes to
`results/fleet.json`.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from iteration import settings

import canter
from canter.config.presets import preset_for
from canter.core.seeding import derive_seed

RESULTS = Path(__file__).parent / "results" / "fleet.json"
NUM_ENVS, EPISODES = 1024, 256
STEPS = {"ppo": 20_000_000, "sac": 6_500_000}
POINTS = {"ppo": 8, "sac": 20}


def curve(config: canter.TrainConfig, count: int, stop_at: float | None) -> list[list[float]]:
    """So many points of a run, up to the first that reaches `stop_at`."""
    points: list[list[float]] = []
    trained = 0.0
    with canter.Trainer(config) as trainer:
        assert config.total_steps is not None
        chunk = max(1, round(config.total_steps / count / trainer.algorithm.horizon / NUM_ENVS))
        while not trainer.finished and (not points or stop_at is None or points[-1][1] < stop_at):
            start = time.perf_counter()
            trainer.learn(chunk)
            torch.cuda.synchronize()
            trained += time.perf_counter() - start
            env = replace(config.env, num_envs=EPISODES, options={}).build(config.device)
            score = canter.evaluate(trainer.algorithm.policy, env, EPISODES, derive_seed(config.seed, "eval")).mean
            points.append([trainer.progress.env_steps, round(score, 1), round(trained, 2)])
            print(config.env.id, type(trainer.algorithm).__name__, *points[-1], flush=True)
    return points


def run(task: str, seed: int) -> dict[str, Any]:
    """PPO, then SAC until it has PPO's final return."""
    env = canter.EnvConfig(id=task, num_envs=NUM_ENVS, options={"random_start": True})
    configs = {"ppo": settings(), "sac": preset_for(task, "sac", "cuda")}
    about = {"seed": seed, "device": "cuda", "env": env}
    found: dict[str, Any] = {"seed": seed}
    for name, config in configs.items():
        goal = found["ppo"][-1][1] if name == "sac" else None
        found[name] = curve(replace(config, total_steps=STEPS[name], **about), POINTS[name], goal)
    reached = found["sac"][-1][1] >= found["ppo"][-1][1]
    share = found["sac"][-1][0] / found["ppo"][-1][0]
    return found | {"reached": reached, "share_of_steps": round(share, 3)}


def main() -> None:
    """All tasks and seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["tensor:quadrotor", "tensor:swimmer"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    document: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "num_envs": NUM_ENVS, "runs": {}}
    for seed in range(options.seeds):
        for task in options.tasks:
            found = run(task, seed)
            document["runs"].setdefault(task, []).append(found)
            print(task, json.dumps(found), flush=True)
            options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
