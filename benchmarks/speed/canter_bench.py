"""Canter's side of the comparisons, each as one line of JSON like those of `peers/`.

    python benchmarks/speed/canter_bench.py iteration --device cuda --mode graph --num-envs 4096
    python benchmarks/speed/canter_bench.py learn tensor:cartpole --target 475 --seeds 0 1 2
    python benchmarks/speed/canter_bench.py train HalfCheetah-v5 --num-envs 16 --horizon 128 --num-minibatches 8
    python benchmarks/speed/canter_bench.py target CartPole-v1 --target 475

The functions of these names say what is measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import warnings
from dataclasses import replace
from typing import Any

import torch
from iteration import build, measure, settings

import canter
from canter.nn.rnn import RNNConfig
from canter.training.execution import ExecutionConfig
from canter.training.progress import Report
from canter.training.trainer import train as train_run

WARM_UP = 2
"""Iterations of a whole training that do not count."""


class Reached(Exception):
    """The goal of a run, after so many seconds and steps."""


def config_of(options: argparse.Namespace, num_envs: int) -> canter.TrainConfig:
    memory = RNNConfig(cell=options.cell, hidden=options.memory) if options.memory else None
    return settings(
        options.env,
        num_envs=num_envs,
        horizon=options.horizon,
        hidden=tuple(options.hidden),
        memory=memory,
        precision=options.precision,
        distribution=options.distribution,
        **({"nvec": options.discrete} if options.discrete else {}),
    )


def iteration(options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds and peak memory; with several numbers of environments, those of each."""
    sizes = []
    for num_envs in options.num_envs:
        execution = ExecutionConfig(mode=options.mode, engine=options.engine, threads=options.threads)
        sizes.append(measure(config_of(options, num_envs), options.device, execution, options.iterations))
        sizes[-1]["learn_ms"] = sizes[-1].pop("update_ms")
        if options.syncs and options.device == "cuda":
            sizes[-1]["syncs"] = count_syncs(config_of(options, num_envs), options)
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    return sizes[0] if len(sizes) == 1 else {"num_envs": dict(zip(options.num_envs, sizes, strict=True))}


def count_syncs(config: canter.TrainConfig, options: argparse.Namespace) -> float:
    """How often the host waits for the device in one iteration, before it reads what came out."""
    programs = build(
        config, options.device, ExecutionConfig(mode=options.mode, engine=options.engine, threads=options.threads)
    )
    counts: list[int] = []
    for _ in range(8):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            programs.update(programs.collect())
            torch.cuda.set_sync_debug_mode("default")
        counts.append(sum("synchronizing" in str(warning.message) for warning in caught))
    return statistics.median(counts[5:])


def learn(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds from the first line of a run, start-up included, until its last 100 episodes are good enough."""
    runs = []
    for seed in options.seeds:
        config = config_of(options, options.num_envs[0])
        steps = options.max_iterations * options.num_envs[0] * options.horizon
        execution = ExecutionConfig(mode=options.mode, engine=options.engine, threads=options.threads)
        config = replace(config, seed=seed, total_steps=steps, device=options.device, execution=execution)
        runs.append({"seed": seed} | until(config, options.target))
        show({"runs": runs})  # counts if the next seed takes too long
    return {"runs": runs}


def until(config: canter.TrainConfig, target: float) -> dict[str, Any]:
    start, last = time.perf_counter(), []

    def look(report: Report) -> None:
        last[:] = [report]
        if report.episodes >= 100 and report.return_ is not None and report.return_ >= target:
            raise Reached

    try:
        train_run(config, look)
        reached = False
    except Reached:
        reached = True
    result = {"reached": reached, "seconds": round(time.perf_counter() - start, 2)}
    return result | {"env_steps": last[0].env_steps, "return": round(last[0].return_ or 0.0, 1)}


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Steps per second of a whole training after a warm-up, and the share of each part; two [64, 64] tanh networks."""
    rollout, ends, times = options.num_envs[0] * options.horizon, [], list[dict[str, float]]()
    config = canter.TrainConfig(
        env=canter.EnvConfig(id=options.env, num_envs=options.num_envs[0]),
        algorithm=canter.PPOConfig(
            horizon=options.horizon,
            epochs=10,
            num_minibatches=options.num_minibatches,
            optimizer=canter.OptimizerConfig(learning_rate=canter.Constant(3e-4), max_grad_norm=0.5),
        ),
        total_steps=rollout * (WARM_UP + options.iterations),
        execution=ExecutionConfig(mode=options.mode, engine=options.engine, threads=options.threads),
    )

    def note(report: Report) -> None:
        ends.append(time.perf_counter())
        times.append(report.times)

    train_run(config, note)
    spent = {part: sum(row[part] for row in times[WARM_UP:]) for part in times[-1]}
    shares = {part: round(seconds / sum(spent.values()), 3) for part, seconds in spent.items()}
    speed = rollout * options.iterations / (ends[-1] - ends[WARM_UP - 1])
    return {"steps_per_second": round(speed, 1), "shares": shares}


def target(options: argparse.Namespace) -> dict[str, Any]:
    """The environment's preset until the goal is reached; take the time of the process."""
    config = canter.preset_for(options.env)
    assert config is not None, f"there is no preset for {options.env}"
    execution = ExecutionConfig(threads=options.threads)
    return until(replace(config, seed=options.seeds[0], execution=execution), options.target)


def show(result: dict[str, Any]) -> None:
    print(json.dumps({"library": "Canter", "version": canter.__version__} | result), flush=True)


COMMANDS = {"iteration": iteration, "learn": learn, "train": train, "target": target}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("env", nargs="?", default="tensor:null")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--num-envs", type=int, nargs="+", default=[4096])
    parser.add_argument("--horizon", type=int, default=24)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 128, 64])
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--distribution", default="auto")
    parser.add_argument("--discrete", type=int, nargs="*", help="numbers of values of tensor:null's discrete actions")
    parser.add_argument("--memory", type=int, help="width of a recurrent layer before the network")
    parser.add_argument("--cell", choices=("lstm", "gru"), default="lstm")
    parser.add_argument("--num-minibatches", type=int, default=32, help="of `train`; the others use 4")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--syncs", action="store_true", help="count host synchronisations as well (CUDA only)")
    parser.add_argument("--max-iterations", type=int, default=1000)
    parser.add_argument("--target", type=float, default=475.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--threads", type=int, help="CPU threads of torch")
    options = parser.parse_args()
    if options.discrete == []:
        options.discrete = [12]
    if options.threads:
        torch.set_num_threads(options.threads)
    show(COMMANDS[options.command](options))


if __name__ == "__main__":
    main()
