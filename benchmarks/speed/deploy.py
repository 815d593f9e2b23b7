"""One step of exported policies on one core: C header, onnxruntime, NumPy and torch.export, in alternation.

    python benchmarks/speed/deploy.py --rounds 9

The policy has the size of a quadruped's: 48 observations, hidden layers 512, 256, 128, 12 actions. The table shows the
lowest p50 and p99 of all rounds, since other programs on the machine can only add time. They go to
benchmarks/speed/results/deploy.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS, machine

from canter.core.specs import Continuous, EnvSpec, TensorSpec
from canter.nn.actor_critic import ModelConfig
from canter.nn.network import NetworkConfig
from canter.play.export import SUFFIXES, Format, export_policy
from canter.play.latency import measure_latency
from canter.play.program import Weights

INFINITY = float("inf")
TARGETS: dict[str, tuple[Format, Weights]] = {
    "C": ("c", "float32"),
    "C, weights of 8 bits": ("c", "int8"),
    "onnxruntime": ("onnx", "float32"),
    "NumPy": ("numpy", "float32"),
    "torch.export": ("torch", "float32"),
}


def run(rounds: int, activation: str) -> dict[str, Any]:
    """Export a policy to every target; return the microseconds of one step and the size of each file."""
    torch.manual_seed(0)
    spec = EnvSpec({"policy": TensorSpec((48,))}, Continuous((-INFINITY,) * 12, (INFINITY,) * 12), 1)
    policy = ModelConfig(policy=NetworkConfig(hidden=(512, 256, 128), activation=activation)).build_policy(spec)
    obs = {"policy": torch.randn(1000, 48)}
    best = {name: (INFINITY, INFINITY) for name in TARGETS}
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / f"{w}{SUFFIXES[f]}" for name, (f, w) in TARGETS.items()}
        for name, (format, weights) in TARGETS.items():
            export_policy(policy, files[name], format, obs, weights=weights)
        for _ in range(rounds):
            for name, path in files.items():
                p50, p99 = measure_latency(path, (obs, ()))
                best[name] = (min(best[name][0], p50), min(best[name][1], p99))
        sizes = {name: path.stat().st_size for name, path in files.items()}
    return {
        name: {"p50_us": round(1e6 * p50, 1), "p99_us": round(1e6 * p99, 1), "bytes": sizes[name]}
        for name, (p50, p99) in best.items()
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--activation", default="elu")
    parser.add_argument("--out", type=Path, default=RESULTS / "deploy.json")
    arguments = parser.parse_args()
    measured = run(arguments.rounds, arguments.activation)
    print("| target | p50 | p99 |\n| --- | --- | --- |")
    for name, times in measured.items():
        print(f"| {name} | {times['p50_us']:.0f} us | {times['p99_us']:.0f} us |")
    about = machine()
    about["versions"]["onnxruntime"] = version("onnxruntime")
    command = f"python benchmarks/speed/deploy.py --rounds {arguments.rounds} --activation {arguments.activation}"
    arguments.out.write_text(json.dumps({**about, "command": command, "targets": measured}, indent=1) + "\n")
