"""What a group costs: the same run on a GPU without one, and as the only rank of one with NCCL.

    python benchmarks/ranks/group_of_one.py

The two take turns. With a group, every minibatch's gradients, and all statistics, go through NCCL.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from launching import about, end, rows_of, start


def measure(ranks: int | None, env: str, num_envs: int, iterations: int, device: str) -> float:
    """Steps per second of the second half of a run."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["train", env, f"--num-envs={num_envs}", f"--until.iterations={iterations}", f"--device={device}"]
        command += ["--total-steps=null", f"--run-dir={folder}", "--name=run", "--checkpoints.save-every=1000000"]
        command += ["--console=quiet", f"--log-every={iterations // 4}"]
        process = start(ranks, *command)
        said = end(process, 600.0)
        assert process.returncode == 0, said
        print("\n".join(line for line in said.splitlines() if "captured" in line))
        rows = rows_of(Path(folder) / "run")
    middle, last = rows[len(rows) // 2 - 1], rows[-1]
    return (last["env_steps"] - middle["env_steps"]) / (last["seconds"] - middle["seconds"])


def main() -> None:
    """Measure both, several times, and write what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--env", default="tensor:quadrotor")
    parser.add_argument("--num-envs", type=int, default=4096)
    parser.add_argument("--iterations", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "group_of_one.json")
    arguments = parser.parse_args()
    given = (arguments.env, arguments.num_envs, arguments.iterations, arguments.device)
    speeds = {"no group": list[float](), "group of one": list[float]()}
    for _ in range(arguments.repeats):
        for way, ranks in (("no group", None), ("group of one", 1)):
            speeds[way].append(measure(ranks, *given))
            print(f"{way}: {speeds[way][-1]:,.0f} steps/s", flush=True)
        medians = {way: statistics.median(found) for way, found in speeds.items()}
        cost = 1.0 - medians["group of one"] / medians["no group"]
        results = {"about": about(), "run": given, "steps_per_second": speeds, "median": medians, "cost": cost}
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
        print(f"cost of the group: {cost:.1%}", flush=True)


if __name__ == "__main__":
    main()
