"""mjlab: the cost of exact final observations, and Canter compared with mjlab's own trainer.

    python benchmarks/robots/mjlab_trainers.py --out benchmarks/robots/results --budget 540

Each measurement runs in a new process and writes `OUT/mjlab_NAME.json`; one that fails writes its
error there and the others continue. --only selects measurements; --seeds and --iterations apply to
the trainers. On a CPU: --device cpu --num-envs 16.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

if importlib.util.find_spec("mjlab_stubs") is not None:
    import mjlab_stubs  # noqa: F401  # pyright: ignore - stands in for viewers on a machine without them

import torch
from torch import Tensor

TASK = "Mjlab-Velocity-Flat-Unitree-Go1"


def make(options: argparse.Namespace, **more: Any) -> Any:
    from canter.envs.robots.mjlab import make_mjlab

    return make_mjlab(options.task, options.num_envs, options.device, **more)


def noise(options: argparse.Namespace, env: Any) -> Callable[[], Tensor]:
    """Return a function that draws actions like an untrained policy."""
    generator = torch.Generator(options.device).manual_seed(0)
    shape = (options.num_envs, env.spec.action.dim)
    return lambda: torch.randn(shape, generator=generator, device=options.device)


def endings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the milliseconds of a step without final observations, as in mjlab, and with them.

    Episodes are so short that one ends in nearly every step, as with thousands of robots. Both take
    turns, so that both see the same load of the machine. Time is CPU time on a CPU, which other
    processes do not lengthen, and wall time on a GPU.
    """
    cut = {"max_episode_steps": options.episode_steps}
    envs = {name: make(options, final_obs=name, **cut) for name in ("approximate", "exact")}
    spent: dict[str, list[float]] = {name: [] for name in envs}
    ended = dict.fromkeys(envs, 0)
    acts = {name: noise(options, env) for name, env in envs.items()}
    for env in envs.values():
        env.reset(seed=0)
        env.set_progress(None)
    for i in range(options.warm_up + options.steps):
        for name, env in envs.items():
            start = now(options)
            step = env.step(acts[name]())
            if i >= options.warm_up:
                spent[name].append(1000 * (now(options) - start))
                ended[name] += int((step.terminated | step.truncated).sum())
    return {
        name: {"mean_ms": fmean(times), "median_ms": median(times), "episodes_ended": ended[name]}
        for name, times in spent.items()
    }


def now(options: argparse.Namespace) -> float:
    if options.device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def canter(options: argparse.Namespace) -> dict[str, Any]:
    """Run Canter's trainer with the task's settings; times start when the environment is ready."""
    from dataclasses import replace

    from canter.compat import task_settings
    from canter.nn.policy_file import save_policy
    from canter.training.trainer import Trainer

    logging.basicConfig(level=logging.INFO)
    imported = task_settings(f"mjlab:{options.task}", options.device)
    assert imported is not None
    config = replace(imported.config, seed=options.seed, env=replace(imported.config.env, num_envs=options.num_envs))
    built = time.perf_counter()
    config.execution.start(config.device)
    env = config.env.build(config.device)
    ready = time.perf_counter()
    rows: list[dict[str, float]] = []
    with Trainer(config, lambda report: rows.append(row(report)), env=env) as trainer:
        trainer.learn(options.iterations)
        if options.policy:
            save_policy(options.policy, trainer.algorithm.policy)
    return {"build_seconds": ready - built, "rows": relative(rows, ready)}


def row(report: Any) -> dict[str, float]:
    return {"at": time.perf_counter(), "return": report.return_, "length": report.length}


def theirs(options: argparse.Namespace) -> dict[str, Any]:
    """Run mjlab's own trainer, timed in the same way."""
    from dataclasses import asdict

    import mjlab.tasks  # noqa: F401
    from mjlab.envs import ManagerBasedRlEnv
    from mjlab.rl import MjlabOnPolicyRunner, RslRlVecEnvWrapper
    from mjlab.tasks.registry import load_env_cfg, load_rl_cfg
    from mjlab.utils.torch import configure_torch_backends

    configure_torch_backends()
    env_cfg = load_env_cfg(options.task)
    env_cfg.scene.num_envs = options.num_envs
    env_cfg.seed = options.seed
    agent = load_rl_cfg(options.task)
    agent.seed = options.seed
    agent.logger = "tensorboard"
    agent.upload_model = False
    agent.save_interval = 10**6
    built = time.perf_counter()
    env = RslRlVecEnvWrapper(ManagerBasedRlEnv(env_cfg, device=options.device), clip_actions=agent.clip_actions)
    ready = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        runner = MjlabOnPolicyRunner(env, asdict(agent), folder, options.device)
        rows: list[dict[str, float]] = []
        log = runner.logger.log

        def noted(*arguments: Any, **given: Any) -> None:
            log(*arguments, **given)
            returns = list(runner.logger.rewbuffer)
            lengths = list(runner.logger.lenbuffer)
            mean = sum(returns) / len(returns) if returns else float("nan")
            long = sum(lengths) / len(lengths) if lengths else float("nan")
            parts = {key: given.get(key, 0.0) for key in ("collect_time", "learn_time")}
            rows.append({"at": time.perf_counter(), "return": mean, "length": long, **parts})

        runner.logger.log = noted
        runner.learn(options.iterations, init_at_random_ep_len=True)
    return {"build_seconds": ready - built, "rows": relative(rows, ready)}


def relative(rows: list[dict[str, float]], start: float) -> list[dict[str, float]]:
    return [{**one, "at": one["at"] - start} for one in rows]


def summary(result: dict[str, Any]) -> dict[str, float | None]:
    """Return seconds per iteration (last two thirds) and to a return of 50, and mean returns."""
    rows = result["rows"]
    late = [b["at"] - a["at"] for a, b in pairwise(rows)][len(rows) // 3 :]
    reached = next((one["at"] for one in rows if one["return"] >= 50), None)
    returns = {f"return at {i}": fmean(r["return"] for r in rows[i - 10 : i]) for i in (50, 100, 150) if i <= len(rows)}
    return {
        "seconds_per_iteration": sorted(late)[len(late) // 2] if late else None,
        "seconds_to_50": reached,
        "first_iteration_seconds": rows[0]["at"] if rows else None,
        **returns,
    }


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "endings": endings,
    "canter": canter,
    "theirs": theirs,
}


def one(options: argparse.Namespace) -> None:
    """Run one measurement in this process and write the result."""
    try:
        with torch.no_grad() if options.part == "endings" else torch.enable_grad():
            result = PARTS[options.part](options)
        if "rows" in result:
            result = {"summary": summary(result)} | result
    except BaseException as error:
        result = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-4000:]}
    about = {"task": options.task, "num_envs": options.num_envs, "seed": options.seed, "torch": torch.__version__}
    if torch.cuda.is_available():
        about["device"] = torch.cuda.get_device_name()
    file = Path(options.out) / f"mjlab_{options.label or options.part}.json"
    file.write_text(json.dumps(about | result, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results"))
    parser.add_argument("--only", nargs="*", default=list(PARTS))
    parser.add_argument("--task", default=TASK)
    parser.add_argument("--num-envs", type=int, default=4096)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--steps", type=int, default=100, help="steps that are timed")
    parser.add_argument("--episode-steps", type=int, default=16, help="of the part endings")
    parser.add_argument("--warm-up", type=int, default=20, help="steps before that")
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1])
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for all parts")
    parser.add_argument("--policy", help="where to keep what Canter has learned")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--label", help=argparse.SUPPRESS)
    options = parser.parse_args()
    Path(options.out).mkdir(parents=True, exist_ok=True)
    if options.part:
        one(options)
        return
    trainers = [part for part in options.only if part != "endings"]
    jobs = [("endings", 1)] if "endings" in options.only else []
    jobs += [(part, seed) for seed in options.seeds for part in trainers]  # in turns: the budget may end them
    end = time.monotonic() + options.budget
    for part, seed in jobs:
        label = f"{part}_{seed}" if part in ("canter", "theirs") else part
        left = end - time.monotonic()
        if left < 20:
            print(f"{label}: left out, the budget is used up")
            continue
        given = ["--part", part, "--seed", str(seed), "--label", label]
        print(f"== {label} ({left:.0f} s left)", flush=True)
        try:
            subprocess.run([sys.executable, __file__, *sys.argv[1:], *given], timeout=left, check=False)
        except subprocess.TimeoutExpired:
            print(f"{label}: ended by the budget")
        show(Path(options.out) / f"mjlab_{label}.json")


def show(file: Path) -> None:
    if file.exists():
        result = json.loads(file.read_text())
        result.pop("rows", None)
        print(json.dumps(result, indent=1)[:6000], flush=True)


if __name__ == "__main__":
    main()
