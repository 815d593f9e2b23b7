"""Repeat a command while another process disturbs it and compare bits; write `results.json`.

    python benchmarks/repeat/run.py --runs 20

Each run trains in a process of its own; its final policy is compared byte by byte.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WIDTHS = (64, 128, 256, 512)
DISTURB = "import numpy as np\nwhile True: np.random.rand(400, 400) @ np.random.rand(400, 400)"


def train(width: int, folder: Path, number: int) -> str:
    """The hash of the final policy's tensors."""
    flags = ["--env.num-envs", "16", "--algorithm.horizon", "256", "--algorithm.epochs", "2"]
    flags += ["--algorithm.num-minibatches", "4", "--algorithm.model.policy.hidden", f"{width},{width}"]
    name, command = f"{width}-{number}", [sys.executable, "-m", "canter", "train", "tensor:pendulum", "--seed", "0"]
    flags += ["--total-steps", "8192", "--run-dir", str(folder), "--name", name, "--console", "quiet"]
    subprocess.run([*command, *flags], check=True, capture_output=True)
    return hashlib.sha256((folder / name / "policies" / "final_actor.safetensors").read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    disturbing = subprocess.Popen([sys.executable, "-c", DISTURB])
    results: dict[str, Any] = {"command": " ".join(["python", *sys.argv]), "cores": os.cpu_count(), "widths": {}}
    try:
        with tempfile.TemporaryDirectory() as folder:
            for width in WIDTHS:
                hashes = [train(width, Path(folder), number) for number in range(options.runs)]
                results["widths"][width] = {"runs": len(hashes), "different": len(set(hashes))}
                print(f"width {width}: {len(set(hashes))} result(s) in {len(hashes)} runs", flush=True)
    finally:
        disturbing.kill()
    Path(__file__).with_name("results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
