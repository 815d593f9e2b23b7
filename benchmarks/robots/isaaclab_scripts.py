"""Isaac Lab's own train and play scripts, unmodified, on Canter and a FAKE of the simulator.

    python benchmarks/robots/isaaclab_scripts.py CHECKOUT [--ref v2.3.2] [--only rl_games] [--out FILE]

CHECKOUT is a clone of Isaac Lab, with or without a work tree; nothing of it is copied into this
repository. The scripts and the `isaaclab_rl` package of a version are taken from it into a
temporary folder and run as they are: train, resume, play, for RSL-RL and for rl_games, with
`canter.compat.rsl_rl.install_shim` or `canter.compat.rl_games.install_shim` imported before them.
The simulator is the fake of `tests/envs/fake_isaaclab.py`, whose application ends the process when
it is closed, as the real one does. Needs `rsl-rl-lib` (the scripts ask for its version),
`tensordict`, `packaging`, and `gym` and `prettytable`, which Isaac Lab's wrappers for rl_games
import; rl_games itself may be installed or not.
"""

from __future__ import annotations

import argparse
import importlib.util
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

FIRST = """
import runpy, sys
sys.path[:0] = {paths!r}
import fake_isaaclab
fake_isaaclab.install()
import canter.compat.{library}.install_shim
"""
LAST = """
sys.argv = {argv!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
RSL_RL = """
from isaaclab_rl import rsl_rl

@fake_isaaclab.configclass
class Runner(rsl_rl.RslRlOnPolicyRunnerCfg):
    num_steps_per_env = 8
    max_iterations = 3
    save_interval = 2
    experiment_name = "points"
    device = "cpu"
    obs_groups = {"policy": ["policy", "feet/left"], "critic": ["critic"]}
    policy = rsl_rl.RslRlPpoActorCriticCfg(
        init_noise_std=1.0, actor_obs_normalization=True, critic_obs_normalization=True,
        actor_hidden_dims=[16, 16], critic_hidden_dims=[16, 16], activation="elu",
    )
    algorithm = rsl_rl.RslRlPpoAlgorithmCfg(
        value_loss_coef=1.0, use_clipped_value_loss=True, clip_param=0.2, entropy_coef=0.01, num_learning_epochs=2,
        num_mini_batches=2, learning_rate=1e-3, schedule="adaptive", gamma=0.99, lam=0.95, desired_kl=0.01,
        max_grad_norm=1.0,
    )

fake_isaaclab.register("Isaac-Points-v0", fake_isaaclab.ManagerBasedRLEnvCfg, rsl_rl_cfg_entry_point=Runner)
"""
RL_GAMES = """
network = {
    "name": "actor_critic", "separate": False, "mlp": {
        "units": [16, 16], "activation": "elu", "d2rl": False, "initializer": {"name": "default"},
        "regularizer": {"name": None},
    }, "space": {"continuous": {
        "mu_activation": None, "sigma_activation": None, "mu_init": {"name": "default"},
        "sigma_init": {"name": "const_initializer", "val": 0}, "fixed_sigma": True,
    }},
}
memory = {"name": "lstm", "units": 8, "layers": 1, "before_mlp": True, "layer_norm": True}
learning = {"learning_rate": 1e-3, "grad_norm": 1.0, "clip_value": True, "mini_epochs": 2, "minibatch_size": 64}
central = learning | {"normalize_input": True, "network": {"name": "actor_critic", "central_value": True,
                                                          "mlp": network["mlp"]}}

def params(joined=True, rnn=False):
    own = learning | {
        "name": "points", "env_name": "rlgpu", "device": "cpu", "device_name": "cpu", "multi_gpu": False, "ppo": True,
        "mixed_precision": False, "normalize_input": True, "normalize_value": True, "value_bootstrap": True,
        "num_actors": -1, "reward_shaper": {"scale_value": 0.1}, "normalize_advantage": True, "gamma": 0.99,
        "tau": 0.95, "lr_schedule": "adaptive", "schedule_type": "legacy", "kl_threshold": 0.01, "score_to_win": 20000,
        "max_epochs": 3, "save_best_after": 1, "save_frequency": 2, "print_stats": True, "entropy_coef": 0.0,
        "truncate_grads": True, "e_clip": 0.2, "horizon_length": 8, "critic_coef": 2, "bounds_loss_coef": 0.001,
        "seq_length": 4, "clip_actions": False,
    }
    if not rnn:
        own["central_value_config"] = central
    env = {"clip_observations": 5.0, "clip_actions": 1.0, "concate_obs_groups": joined}
    env["obs_groups"] = {"obs": ["policy", "feet"], "states": ["critic", "feet"]}
    return {"params": {
        "seed": 42, "algo": {"name": "a2c_continuous"}, "model": {"name": "continuous_a2c_logstd"}, "env": env,
        "network": network | ({"rnn": memory} if rnn else {}), "load_checkpoint": False, "load_path": "",
        "config": own,
    }}

@fake_isaaclab.configclass
class Joined(fake_isaaclab.ManagerBasedRLEnvCfg):
    joined: bool = True
    episode_length_s: float = 0.12

agents = {"groups": lambda: params(joined=False), "memory": lambda: params(rnn=True)}
fake_isaaclab.register("Isaac-Points-v0", Joined, rl_games_cfg_entry_point=params, **agents)
"""
SETTINGS = {"rsl_rl": RSL_RL, "rl_games": RL_GAMES}
"""Code that runs before a script: the settings of a task, in the format of each library."""


def unpack(checkout: Path, ref: str, folder: Path) -> str:
    """Unpack the scripts and wrappers of a version; return its commit."""
    git = ["git", "-C", str(checkout)]
    archive = subprocess.run([*git, "archive", ref, *PATHS], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return subprocess.run([*git, "rev-parse", ref], check=True, capture_output=True, text=True).stdout.strip()


def run(folder: Path, library: str, script: str, *arguments: str) -> dict[str, Any]:
    """Run one script in a new process, in a working folder that all of them share."""
    path = folder / "scripts/reinforcement_learning" / library / script
    paths = [str(path.parent), str(folder / "source/isaaclab_rl"), str(ROOT / "tests/envs"), str(ROOT / "src")]
    argv = [str(path), "--task", TASK, "--num_envs", "16", "--headless", "--device", "cpu", *arguments]
    work = folder / "work"
    work.mkdir(exist_ok=True)
    before = set(work.rglob("*"))
    start = time.perf_counter()
    code = FIRST.format(paths=paths, library=library) + SETTINGS[library] + LAST.format(argv=argv)
    (folder / "launch.py").write_text(code)
    done = subprocess.run(
        [sys.executable, str(folder / "launch.py")],
        cwd=work,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    files = sorted(str(file.relative_to(work)) for file in set(work.rglob("*")) - before if file.is_file())
    kept = [file for file in files if file.endswith((".pt", ".pth", ".onnx", ".yaml"))]
    result = {"exit_code": done.returncode, "seconds": round(time.perf_counter() - start, 1), "new_files": kept}
    return result if done.returncode == 0 else result | {"error": done.stderr[-1500:]}


def run_rsl_rl(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Train, resume and play with RSL-RL's scripts; return the results and missing files."""
    results = {"train": run(folder, "rsl_rl", "train.py")}
    results["resume"] = run(folder, "rsl_rl", "train.py", "--resume")
    results["play"] = run(folder, "rsl_rl", "play.py")
    names = {name: {Path(file).name for file in result["new_files"]} for name, result in results.items()}
    wanted = [("train", "model_0.pt"), ("train", "model_2.pt"), ("resume", "model_4.pt"), ("play", "policy.pt")]
    wanted.append(("play", "policy.onnx"))
    return results, [f"{step} left no {name}" for step, name in wanted if name not in names[step]]


def run_rl_games(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Do the same with rl_games' scripts, with named groups and with a recurrent network."""
    results = {"train": run(folder, "rl_games", "train.py")}
    results["train"]["tags"] = tags = sorted(tags_under(folder / "work/logs/rl_games"))
    wrong = [f"train wrote no {tag}" for tag in ("Episode/Episode_Reward/stand", "rewards/step") if tag not in tags]
    best = next((folder / "work/logs/rl_games").glob("points/*/nn/points.pth"), None)
    wrong += [] if best else ["train left no points.pth"]
    again = ("--checkpoint", str(best), "--max_iterations", "5")
    results["resume"] = run(folder, "rl_games", "train.py", *again)
    results["play"] = run(folder, "rl_games", "play.py", "--use_last_checkpoint")
    for agent in ("groups", "memory"):
        results[f"train {agent}"] = run(folder, "rl_games", "train.py", "--agent", agent)
        results[f"play {agent}"] = run(folder, "rl_games", "play.py", "--agent", agent)
    for step, epoch in {"train": 3, "resume": 5}.items():
        left = epochs_in(folder, results[step]["new_files"])
        wrong += [] if epoch in left else [f"{step} left no file of epoch {epoch}, but of {sorted(left)}"]
    return results, wrong


def tags_under(folder: Path) -> set[str]:
    """Return the names of all scalars in the event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: set[str] = set()
    for file in folder.rglob("events.*"):
        events = EventAccumulator(str(file))
        events.Reload()
        found |= set(events.Tags()["scalars"])
    return found


def epochs_in(folder: Path, files: list[str]) -> set[int]:
    """Return the epochs of rl_games' checkpoints."""
    import torch

    paths = [folder / "work" / file for file in files if file.endswith(".pth")]
    return {int(torch.load(path, weights_only=True)["epoch"]) for path in paths}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--ref", nargs="*", default=["v2.3.2", "HEAD"])
    parser.add_argument("--only", nargs="*", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/isaaclab_scripts.json")
    options = parser.parse_args()
    installed = {name: importlib.util.find_spec(name) is not None for name in SETTINGS}
    found: dict[str, Any] = {}
    wrong: list[str] = []
    for ref in options.ref:
        found[ref] = {}
        for library in options.only:
            with tempfile.TemporaryDirectory() as place:
                folder = Path(place)
                found[ref]["commit"] = unpack(options.checkout, ref, folder)
                results, missing = {"rsl_rl": run_rsl_rl, "rl_games": run_rl_games}[library](folder)
            found[ref][library] = results
            failed = [f"{name}: {result['error']}" for name, result in results.items() if result["exit_code"]]
            wrong += [f"{ref} {library} {line}" for line in failed + missing]
        print(json.dumps(found[ref], indent=1))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    kept = {"simulator": "a fake", "installed": installed, "versions": found, "wrong": wrong}
    options.out.write_text(json.dumps(kept, indent=1) + "\n")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
