"""Average reward against discounting and against priority rules, on a queueing network that never ends.

    python benchmarks/learning/queue_network.py             5 seeds of both presets, about half an hour on one core
    python benchmarks/learning/queue_network.py --seeds 1

The task is `tensor:queue`, the criss-cross network at load 0.6, and the score is its long-run average holding cost per
unit of time: lower is better. Each learned policy and each static priority rule (serve this class whenever it waits) is
simulated in the same way, without resets and after a warm-up. `results/queue_network.json` is written after every run;
runs that are in it are not repeated.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import asdict, replace
from itertools import permutations
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

import canter
from canter.config.presets import presets
from canter.core.seeding import derive_seed
from canter.core.specs import ACTION_MASK, Discrete
from canter.core.struct import Obs, State
from canter.envs.tensor import QueueNetwork
from canter.play.evaluation import long_run_average
from canter.play.player import ActingPolicy
from canter.training.trainer import train

RESULT = Path(__file__).parent / "results" / "queue_network.json"
PRESETS = ("queue-average-reward", "queue-discounted")
EVAL_ENVS, EVAL_STEPS, EVAL_WARM_UP = 1024, 5000, 1000


class Priority:
    """Serves the first class of `order` that waits."""

    def __init__(self, order: tuple[int, ...]) -> None:
        self.rank = torch.tensor([len(order) - order.index(action) for action in range(len(order))])

    def initial_state(self, num_envs: int) -> State:
        """No state."""
        return ()

    def act(
        self, obs: Obs, state: State, reset: Tensor | None, *, deterministic: bool, generator: torch.Generator | None
    ) -> tuple[Tensor, State]:
        """Actions `[N]`."""
        return (obs[ACTION_MASK] * self.rank).argmax(-1), state


def average_cost(policy: ActingPolicy) -> dict[str, float]:
    """Cost per unit of time, give or take the half-width of its 95 % interval."""
    env = QueueNetwork(EVAL_ENVS, max_episode_steps=None)
    average = long_run_average(policy, env, EVAL_STEPS, warm_up=EVAL_WARM_UP, seed=derive_seed(0, "eval"))
    return {"cost": -average.mean, "ci": average.ci}


def static_rules() -> dict[str, dict[str, float]]:
    """The cost of every priority rule, by the order in which classes are served."""
    action = QueueNetwork(1).spec.action
    assert isinstance(action, Discrete)
    orders = permutations(range(action.n))
    return {" before ".join(f"class {k}" for k in order): average_cost(Priority(order)) for order in orders}


def run(preset: str, seed: int) -> dict[str, Any]:
    """Train with a preset and measure the policy's cost."""
    last: list[canter.Report] = []
    start = time.perf_counter()
    algorithm = train(replace(presets[preset], seed=seed), lambda report: last.__setitem__(slice(None), [report]))
    seconds = time.perf_counter() - start
    metrics = {key: value for key, value in last[0].metrics.items() if key.startswith(("value/", "lta/"))}
    return {
        "preset": preset,
        "seed": seed,
        **average_cost(algorithm.policy),
        "env_steps": last[0].env_steps,
        "seconds": round(seconds, 1),
        "last_metrics": metrics,
    }


def finished() -> dict[str, Any]:
    """The result file, or a new one with the static rules in it."""
    if RESULT.exists():
        return json.loads(RESULT.read_text())
    return {
        "task": "tensor:queue, long-run average holding cost per unit of time, lower is better",
        "command": "python benchmarks/learning/queue_network.py",
        "evaluation": {"num_envs": EVAL_ENVS, "steps": EVAL_STEPS, "warm_up": EVAL_WARM_UP, "acting": "without noise"},
        "configs": {name: asdict(presets[name]) for name in PRESETS},
        "versions": {"canter": canter.__version__, "torch": torch.__version__},
        "machine": f"{platform.machine()}, one core",
        "static_rules": static_rules(),
        "runs": [],
    }


def summary(document: dict[str, Any]) -> dict[str, Any]:
    """Mean cost of each preset, against the best static rule."""
    best = min(rule["cost"] for rule in document["static_rules"].values())
    costs = {name: [run["cost"] for run in document["runs"] if run["preset"] == name] for name in PRESETS}
    return {"best_static_cost": best} | {
        name: {
            "seeds": len(of),
            "mean_cost": mean(of),
            "worst_cost": max(of),
            "mean_cost_over_best_static": mean(of) / best,
        }
        for name, of in costs.items()
        if of
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds, from 0")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    document = finished()
    done = [(run["preset"], run["seed"]) for run in document["runs"]]
    for seed in range(arguments.seeds):
        for preset in PRESETS:
            if (preset, seed) not in done:
                result = run(preset, seed)
                document["runs"].append(result)
                document["summary"] = summary(document)
                RESULT.parent.mkdir(exist_ok=True)
                RESULT.write_text(json.dumps(document, indent=1) + "\n")
                print(f"{preset} seed {seed}: cost {result['cost']:.3f} +- {result['ci']:.3f}", flush=True)
    print(json.dumps(document["summary"], indent=1))


if __name__ == "__main__":
    main()
