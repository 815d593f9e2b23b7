"""Compare curiosity and symmetry with plain PPO of the same settings, on five seeds.

    python benchmarks/extensions/run.py rnd            maze and deep sea
    python benchmarks/extensions/run.py symmetry       swimmer and quadrotor

One JSON file for each, `results/NAME.json`; runs in it are not repeated. `steps_to_goal` is when the mean return of the
last 100 training episodes first reached the goal, None if never; `evaluation_return` is the mean of 100 new episodes
without noise. `asymmetry` is the mean squared difference between the action in a mirrored state and the mirrored
action, over the mean square of the action, in states that the policy visits.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import canter
from canter.algorithms.base import symmetries_of
from canter.algorithms.extensions import SymmetryConfig
from canter.core.plain import from_plain, to_plain
from canter.core.seeding import derive_seed
from canter.training.trainer import train

RESULTS = Path(__file__).parent / "results"
SEEDS = 5
FOUND = canter.UntilConfig(mean_return=0.9)
"""Runs in search of a reward end when it is found again and again."""


SWIMMER_GOAL = 150.0
QUADROTOR_GOAL = 300.0
"""Returns of an episode that count as learned."""


def preset(name: str, *, extended: bool) -> canter.TrainConfig:
    """Return a preset, without its extensions for comparison (`extended=False`)."""
    config = canter.presets[name]
    return config if extended else from_plain({"algorithm": {"extensions": [], "bonus_value": None}}, config)


def searching(config: canter.TrainConfig) -> tuple[canter.TrainConfig, float]:
    """Settings that end a run at its goal, and the goal."""
    return replace(config, until=FOUND), 0.9


STUDIES: dict[str, dict[str, tuple[canter.TrainConfig, float]]] = {
    "rnd": {
        "maze, ppo": searching(preset("tensor:maze", extended=False)),
        "maze, rnd": searching(preset("tensor:maze", extended=True)),
        "deep sea, ppo": searching(preset("tensor:deep-sea", extended=False)),
        "deep sea, rnd": searching(preset("tensor:deep-sea", extended=True)),
    },
    "symmetry": {
        "swimmer, ppo": (preset("tensor:swimmer", extended=False), SWIMMER_GOAL),
        "swimmer, symmetry": (preset("tensor:swimmer", extended=True), SWIMMER_GOAL),
        "quadrotor, ppo": (preset("quadrotor-symmetry", extended=False), QUADROTOR_GOAL),
        "quadrotor, symmetry": (preset("quadrotor-symmetry", extended=True), QUADROTOR_GOAL),
    },
}
"""Settings, and the return to reach, by name."""


@torch.no_grad()
def asymmetry(policy: canter.Policy, env: Any, seed: int, steps: int = 300) -> float:
    """How far a policy is from doing the mirrored thing in mirrored states; actions as the environment gets them."""
    obs = env.reset(seed)
    errors, sizes = [], []
    for _ in range(steps):
        action, _ = policy.act(obs)
        for symmetry in symmetries_of(SymmetryConfig(), env.spec):
            seen = {name: symmetry.obs[name](group) for name, group in obs.items()}
            errors.append((policy.act(seen)[0] - symmetry.action(action)).square())
            sizes.append(action.square())
        obs = env.step(action).obs
    return float(torch.stack(errors).mean() / torch.stack(sizes).mean())


def run(config: canter.TrainConfig, goal: float) -> dict[str, Any]:
    """One run, and what came of it."""
    torch.set_num_threads(1)
    reached: list[int] = []
    returns: list[float | None] = []

    def follow(report: canter.Report) -> None:
        returns.append(report.return_)
        if not reached and report.episodes >= 100 and (report.return_ or 0.0) >= goal:
            reached.append(report.env_steps)

    start = time.perf_counter()
    algorithm = train(config, follow)
    seconds = round(time.perf_counter() - start, 1)
    options = {name: value for name, value in config.env.options.items() if name != "random_start"}
    env = replace(config.env, options=options).build(config.device)
    evaluation = canter.evaluate(algorithm.policy, env, 100, derive_seed(config.seed, "eval"))
    found = (
        {"asymmetry": asymmetry(algorithm.policy, env, derive_seed(config.seed, "eval"))} if env.spec.symmetries else {}
    )
    return {
        "seed": config.seed,
        "steps_to_goal": reached[0] if reached else None,
        "training_return": returns[-1],
        "evaluation_return": evaluation.mean,
        **found,
        "seconds": seconds,
    }


def main(name: str) -> None:
    """Do the runs of a study that are missing."""
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    document = json.loads(path.read_text()) if path.exists() else {}
    for seed in range(SEEDS):
        for study, (config, goal) in STUDIES[name].items():
            entry = document.setdefault(study, {"goal": goal, "config": to_plain(config), "runs": []})
            if seed in [run["seed"] for run in entry["runs"]]:
                continue
            entry["runs"].append(run(replace(config, seed=seed), goal))
            print(study, entry["runs"][-1], flush=True)
            path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in STUDIES:
        sys.exit(f"python {sys.argv[0]} {'|'.join(STUDIES)}")
    main(sys.argv[1])
