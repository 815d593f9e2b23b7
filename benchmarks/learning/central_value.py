"""Measure an asymmetric critic on a quadrotor with an unknown load and an unknown charge.

    python benchmarks/learning/central_value.py                 5 seeds of both critics, about 10 minutes on one core
    python benchmarks/learning/central_value.py --device cuda --num-envs 4096 --total-steps 8000000

The preset `quadrotor-central-value`, whose central critic is told load and charge, and the same with a critic that
sees what the policy sees; nothing else differs. More environments mean more minibatches of the same size.

`curve` is the mean return of the last 500 training episodes at every rollout, from the first 500 on; `steps_to_120`
is when it first reached 120, and `area` is its mean over all rollouts. `evaluation_return` is the mean of 500 new
episodes without noise. `results/central_value.json` has one study for each device and number of environments and is
written after every run; runs that are in it are not repeated.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections import deque
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import canter
from canter.core.plain import from_plain
from canter.core.seeding import derive_seed
from canter.training.trainer import train

RESULT = Path(__file__).parent / "results" / "central_value.json"
CRITICS = {"sees load and charge": True, "sees what the policy sees": False}
EPISODES, THRESHOLD = 500, 120


class Curve:
    """Mean return of the last `EPISODES` episodes after each rollout."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []
        self.recent: deque[tuple[int, float]] = deque()
        self.episodes = 0

    def __call__(self, report: canter.Report) -> None:
        """Add a rollout."""
        if report.rollout_return is not None:
            self.recent.append((report.episodes - self.episodes, report.rollout_return))
        self.episodes = report.episodes
        while self.recent and sum(count for count, _ in self.recent) - self.recent[0][0] >= EPISODES:
            self.recent.popleft()
        total = sum(count for count, _ in self.recent)
        if total >= EPISODES:
            value = sum(count * return_ for count, return_ in self.recent) / total
            self.points.append((report.env_steps, round(value, 2)))

    def steps_to(self, threshold: float) -> int | None:
        """Steps at which the curve first reached the threshold."""
        return next((steps for steps, value in self.points if value >= threshold), None)


def config_for(arguments: argparse.Namespace, *, privileged: bool) -> canter.TrainConfig:
    """The preset on a device, with minibatches of the preset's size whatever the number of environments."""
    preset = canter.presets["quadrotor-central-value"]
    if not privileged:
        preset = from_plain({"algorithm": {"model": {"critic": {"obs_groups": ["policy"]}}}}, preset)
    algorithm, central = preset.algorithm, preset.algorithm.central_value
    num_envs = arguments.num_envs or preset.env.num_envs
    num_minibatches = max(1, algorithm.num_minibatches * num_envs // preset.env.num_envs)
    assert central is not None
    return replace(
        preset,
        env=replace(preset.env, num_envs=num_envs),
        total_steps=arguments.total_steps or preset.total_steps,
        device=arguments.device,
        algorithm=replace(
            algorithm,
            num_minibatches=num_minibatches,
            central_value=replace(central, num_minibatches=num_minibatches),
        ),
    )


def run(config: canter.TrainConfig) -> dict[str, Any]:
    """Train and evaluate."""
    curve, start = Curve(), time.perf_counter()
    algorithm = train(config, curve)
    seconds = time.perf_counter() - start
    env = config.env.build(config.device)
    evaluation = canter.evaluate(algorithm.policy, env, EPISODES, derive_seed(config.seed, "eval"))
    return {
        "seed": config.seed,
        f"steps_to_{THRESHOLD}": curve.steps_to(THRESHOLD),
        "area": round(mean(value for _, value in curve.points), 2),
        "training_return": curve.points[-1][1],
        "evaluation_return": round(evaluation.mean, 2),
        "seconds": round(seconds, 1),
        "curve": curve.points,
    }


def describe(study: dict[str, Any]) -> str:
    """One line per run."""
    columns = (f"steps_to_{THRESHOLD}", "area", "training_return", "evaluation_return", "seconds")
    lines = [f"{'critic':<26} seed " + " ".join(f"{column:>17}" for column in columns)]
    for critic, part in study["critics"].items():
        for entry in part["runs"]:
            lines.append(f"{critic:<26} {entry['seed']:>4} " + " ".join(f"{entry[c]!s:>17}" for c in columns))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to simulate and to learn")
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds, from 0")
    parser.add_argument("--num-envs", type=int, help="environments; default: the preset's")
    parser.add_argument("--total-steps", type=int, help="steps of each run; default: the preset's")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    configs = {name: config_for(arguments, privileged=privileged) for name, privileged in CRITICS.items()}
    sample = configs["sees load and charge"]
    key = f"{arguments.device}, {sample.env.num_envs} environments, {sample.total_steps} steps"
    document: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    study = document.setdefault(
        key,
        {
            "command": f"python benchmarks/learning/central_value.py --device {arguments.device} "
            f"--num-envs {sample.env.num_envs} --total-steps {sample.total_steps}",
            "versions": {"canter": canter.__version__, "torch": torch.__version__},
            "machine": torch.cuda.get_device_name()
            if arguments.device == "cuda"
            else f"{platform.machine()}, one core",
            "critics": {name: {"config": asdict(config), "runs": []} for name, config in configs.items()},
        },
    )
    for seed in range(arguments.seeds):
        for name, config in configs.items():
            runs = study["critics"][name]["runs"]
            if seed in [entry["seed"] for entry in runs]:
                continue
            runs.append(run(replace(config, seed=seed)))
            RESULT.write_text(json.dumps(document) + "\n")
            print(f"{name}, seed {seed}: {THRESHOLD} at {runs[-1][f'steps_to_{THRESHOLD}']}", flush=True)
    print(describe(study))


if __name__ == "__main__":
    main()
