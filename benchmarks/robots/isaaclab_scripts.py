"""Isaac Lab's own train and play scripts, unmodified, on Canter and a FAKE of the simulator.

    python benchmarks/robots/isaaclab_scripts.py CHECKOUT [--ref v2.3.2] [--out results/isaaclab_scripts.json]

CHECKOUT is a clone of Isaac Lab, with or without a work tree; nothing of it is copied into this repository. The scripts
and the `isaaclab_rl` package of a version are taken from it into a temporary folder and run as they are: train, resume,
play, with `canter.compat.rsl_rl.take_over` imported before them. The simulator is the fake of
`tests/envs/fake_isaaclab.py`, whose application ends the process when it is closed, as the real one does. Needs
`rsl-rl-lib` (the scripts ask for its version), `tensordict` and `packaging`.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PATHS = ("scripts/reinforcement_learning", "source/isaaclab_rl/isaaclab_rl")
TASK = "Isaac-Points-v0"

LAUNCHER = """
import runpy, sys
sys.path[:0] = {paths!r}
import fake_isaaclab
fake_isaaclab.install()
import canter.compat.rsl_rl.take_over
from isaaclab_rl import rsl_rl

@fake_isaaclab.configclass
class Runner(rsl_rl.RslRlOnPolicyRunnerCfg):
    num_steps_per_env = 8
    max_iterations = 3
    save_interval = 2
    experiment_name = "points"
    device = "cpu"
    obs_groups = {{"policy": ["policy"], "critic": ["critic"]}}
    policy = rsl_rl.RslRlPpoActorCriticCfg(
        init_noise_std=1.0, actor_obs_normalization=True, critic_obs_normalization=True,
        actor_hidden_dims=[16, 16], critic_hidden_dims=[16, 16], activation="elu",
    )
    algorithm = rsl_rl.RslRlPpoAlgorithmCfg(
        value_loss_coef=1.0, use_clipped_value_loss=True, clip_param=0.2, entropy_coef=0.01, num_learning_epochs=2,
        num_mini_batches=2, learning_rate=1e-3, schedule="adaptive", gamma=0.99, lam=0.95, desired_kl=0.01,
        max_grad_norm=1.0,
    )

fake_isaaclab.register({task!r}, fake_isaaclab.ManagerBasedRLEnvCfg, rsl_rl_cfg_entry_point=Runner)
sys.argv = {argv!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def unpack(checkout: Path, ref: str, folder: Path) -> str:
    """The scripts and wrappers of a version; gives its commit."""
    git = ["git", "-C", str(checkout)]
    archive = subprocess.run([*git, "archive", ref, *PATHS], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return subprocess.run([*git, "rev-parse", ref], check=True, capture_output=True, text=True).stdout.strip()


def run(folder: Path, script: str, *arguments: str) -> dict[str, Any]:
    """One script in a process of its own, in an empty working folder that all of them share."""
    path = folder / "scripts/reinforcement_learning/rsl_rl" / script
    paths = [str(path.parent), str(folder / "source/isaaclab_rl"), str(ROOT / "tests/envs"), str(ROOT / "src")]
    argv = [str(path), "--task", TASK, "--num_envs", "16", "--headless", "--device", "cpu", *arguments]
    work = folder / "work"
    work.mkdir(exist_ok=True)
    start = time.perf_counter()
    code = LAUNCHER.format(paths=paths, task=TASK, argv=argv)
    (folder / "launch.py").write_text(code)
    done = subprocess.run(
        [sys.executable, str(folder / "launch.py")],
        cwd=work,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    files = sorted(str(file.relative_to(work)) for file in work.rglob("*") if file.is_file())
    kept = [file for file in files if file.endswith((".pt", ".onnx", ".yaml"))]
    result = {"exit_code": done.returncode, "seconds": round(time.perf_counter() - start, 1), "files": kept}
    return result if done.returncode == 0 else result | {"error": done.stderr[-1500:]}


def check(ref: str, results: dict[str, Any]) -> list[str]:
    """What is missing of what the scripts should have left; nothing where all is well."""
    wrong = [f"{ref} {name}: {result['error']}" for name, result in results.items() if result["exit_code"]]
    models = {Path(file).name for file in results["train"]["files"] if file.endswith(".pt")}
    wrong += [f"{ref} train left no {name}" for name in ("model_0.pt", "model_2.pt") if name not in models]
    again = {Path(file).name for file in results["resume"]["files"]}
    wrong += [f"{ref} resume left no model_4.pt: it has {sorted(again)}"] if "model_4.pt" not in again else []
    played = {Path(file).name for file in results["play"]["files"]}
    wrong += [f"{ref} play exported no {name}" for name in ("policy.pt", "policy.onnx") if name not in played]
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--ref", nargs="*", default=["v2.3.2", "HEAD"])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/isaaclab_scripts.json")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    wrong: list[str] = []
    for ref in options.ref:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            commit = unpack(options.checkout, ref, folder)
            results = {"train": run(folder, "train.py")}
            results["resume"] = run(folder, "train.py", "--resume")
            results["play"] = run(folder, "play.py")
            found[ref] = {"commit": commit} | results
            wrong += check(ref, results)
            print(json.dumps(found[ref], indent=1))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"simulator": "a fake", "versions": found, "wrong": wrong}, indent=1) + "\n")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
