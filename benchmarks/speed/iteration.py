"""Milliseconds of one PPO iteration, by execution mode.

    python benchmarks/speed/iteration.py --device cuda --modes eager graph

Every mode runs the same work: `tensor:null`, 5 epochs of 4 minibatches, adaptive KL, normalisation on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any, Literal

import torch

import canter
from canter.nn.rnn import RNNConfig
from canter.training.collector import Collector
from canter.training.execution import ExecutionConfig, Programs


def settings(
    env: str = "tensor:null",
    *,
    num_envs: int = 4096,
    horizon: int = 24,
    hidden: tuple[int, ...] = (256, 128, 64),
    memory: RNNConfig | None = None,
    precision: Literal["float32", "bfloat16"] = "float32",
    distribution: str = "auto",
    **options: Any,
) -> canter.TrainConfig:
    network = canter.NetworkConfig(hidden=hidden, activation="elu", rnn=memory, precision=precision)
    return canter.TrainConfig(
        env=canter.EnvConfig(id=env, num_envs=num_envs, options=options),
        algorithm=canter.PPOConfig(
            horizon=horizon,
            epochs=5,
            num_minibatches=4,
            sequence_length=horizon,
            entropy_coef=canter.Constant(0.01),
            optimizer=canter.OptimizerConfig(
                learning_rate=canter.AdaptiveKL(1e-3, every="minibatch"), max_grad_norm=1.0
            ),
            model=canter.ModelConfig(policy=network, distribution=distribution),
        ),
    )


def build(config: canter.TrainConfig, device: str, execution: ExecutionConfig) -> Programs:
    execution.start(device)
    env = config.env.build(device)
    algorithm = config.algorithm.build(env.spec, seed=0)
    algorithm.use_engine(execution.engine)
    collector = Collector(env, algorithm, seed=0)
    return execution.prepare(collector, algorithm)


def clock(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(config: canter.TrainConfig, device: str, execution: ExecutionConfig, repeats: int = 30) -> dict[str, Any]:
    """Median milliseconds of collection, update and whole iteration; start-up is everything before the fifth one."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begin = clock(device)
    programs = build(config, device, execution)
    for _ in range(5):
        programs.update(programs.collect())
    start_up = clock(device) - begin
    collects, updates, iterations = [], [], []
    for _ in range(repeats):
        start = clock(device)
        rollout = programs.collect()
        middle = clock(device)
        programs.update(rollout)
        end = clock(device)
        collects.append(1e3 * (middle - start))
        updates.append(1e3 * (end - middle))
    start = clock(device)
    for _ in range(repeats):
        metrics = programs.update(programs.collect())
        iterations.append(metrics["loss/policy"])
    whole = 1e3 * (clock(device) - start) / repeats
    assert all(torch.isfinite(value) for value in metrics.values()), metrics
    steps = config.env.num_envs * config.algorithm.horizon
    result = {
        "collect_ms": round(statistics.median(collects), 3),
        "update_ms": round(statistics.median(updates), 3),
        "iteration_ms": round(whole, 3),
        "steps_per_second": round(steps / whole * 1e3),
        "start_up_s": round(start_up, 2),
    }
    if device == "cuda":
        result["peak_memory_mb"] = round(torch.cuda.max_memory_allocated() / 2**20)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--modes", nargs="+", default=["eager", "graph"])
    parser.add_argument("--env", default="tensor:null")
    parser.add_argument("--num-envs", type=int, default=4096)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 128, 64])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--ieee", action="store_true", help="strict float32 instead of TF32")
    arguments = parser.parse_args()
    for mode in arguments.modes:
        config = settings(arguments.env, num_envs=arguments.num_envs, hidden=tuple(arguments.hidden))
        execution = ExecutionConfig(mode=mode, engine=arguments.engine, tf32=not arguments.ieee)
        print(mode, json.dumps(measure(config, arguments.device, execution, arguments.repeats)), flush=True)


if __name__ == "__main__":
    main()
