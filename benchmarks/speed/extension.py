"""What an extension costs that only adds rewards and phases: milliseconds of an iteration with it and without.

    python benchmarks/speed/extension.py --device cuda
    python benchmarks/speed/extension.py --device cpu --num-envs 256

Its reward is the environment's and its list of phases is empty: what is measured is the cost of having one, and
whether the fast engine stays. Both forms run in turns, in one process.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass, replace
from typing import Any

import torch
from iteration import build, clock, settings
from torch import Tensor

import canter
from canter.algorithms.extension import Extension
from canter.algorithms.phase import Phase
from canter.core.data.rollout import Rollout
from canter.engines.base import PPOBatch
from canter.training.execution import ExecutionConfig


class Idle(Extension):
    """Offers a reward and phases, and changes nothing."""

    def reward(self, rollout: Rollout[Any]) -> Tensor:
        """The environment's own."""
        return rollout.reward

    def phases(self) -> dict[str, Phase[PPOBatch]]:
        """None."""
        return {}


@canter.register("extension", "idle")
@dataclass(frozen=True)
class IdleConfig:
    """Has nothing to set."""

    def build(self, spec: canter.EnvSpec, model: canter.ActorCritic, generator: torch.Generator) -> Idle:
        """An extension that does nothing."""
        return Idle()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--num-envs", type=int, default=4096)
    parser.add_argument("--iterations", type=int, default=30)
    options = parser.parse_args()
    execution = ExecutionConfig(mode="graph" if options.device == "cuda" else "eager")
    plain = settings(num_envs=options.num_envs)
    extended = replace(plain, algorithm=replace(plain.algorithm, extensions=(IdleConfig(),)))
    forms = {"without": plain, "with": extended}
    programs = {name: build(config, options.device, execution) for name, config in forms.items()}
    times: dict[str, list[float]] = {name: [] for name in forms}
    for repeat in range(options.iterations + 5):
        for name, program in programs.items():
            start = clock(options.device)
            program.update(program.collect())
            if repeat >= 5:
                times[name].append(clock(options.device) - start)
    result = {name: round(1e3 * statistics.median(values), 3) for name, values in times.items()}
    print(json.dumps({"device": options.device, "ms": result, "ratio": round(result["with"] / result["without"], 3)}))


if __name__ == "__main__":
    main()
