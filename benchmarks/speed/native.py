"""The native engine against the one by autograd, in one run.

    python benchmarks/speed/native.py [--threads 2] [--clock cpu]
    python benchmarks/speed/native.py --soak 100000    # as many minibatches, and whether memory grows

Every line is the best of many rounds in which the candidates take turns, so that what else runs on the machine meets
all alike. `--clock cpu` counts the time of this thread only, for a machine that others use; it says nothing about
several threads. GFLOP/s count 6 operations for each weight and row.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from canter.algorithms.ppo import PPO, PPOConfig
from canter.core.specs import Continuous, EnvSpec, TensorSpec
from canter.engines.base import PPOBatch
from canter.engines.choose import EngineName
from canter.functional.optimization import adam_step_
from canter.nn.actor_critic import ModelConfig
from canter.nn.network import NetworkConfig

ENGINES: tuple[EngineName, ...] = ("native", "autograd")


@dataclass(frozen=True)
class Case:
    """Sizes of a task and of a minibatch."""

    name: str
    obs: int
    action: int
    hidden: tuple[int, ...]
    activation: str
    rows: int


CASES = (
    Case("HalfCheetah", 17, 6, (64, 64), "tanh", 64),
    Case("HalfCheetah, wide batch", 17, 6, (64, 64), "tanh", 2048),
    Case("quadruped", 48, 12, (256, 128, 64), "elu", 1536),
    Case("quadruped, gelu", 48, 12, (256, 128, 64), "gelu", 1536),
)


def best_of(candidates: dict[str, Callable[[], Any]], clock: Callable[[], float], seconds: float) -> dict[str, float]:
    """The least time of one call of each, in rounds that take turns."""
    best, times = dict.fromkeys(candidates, float("inf")), {}
    for name, call in candidates.items():
        call()
        start = clock()
        call()
        times[name] = max(1, int(0.02 / max(clock() - start, 1e-7)))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, call in candidates.items():
            start = clock()
            for _ in range(times[name]):
                call()
            best[name] = min(best[name], (clock() - start) / times[name])
    return best


def build(case: Case) -> tuple[PPO, PPOBatch]:
    spec = EnvSpec(
        {"policy": TensorSpec((case.obs,))}, Continuous((-1.0,) * case.action, (1.0,) * case.action), case.rows
    )
    network = NetworkConfig(hidden=case.hidden, activation=case.activation)  # pyright: ignore[reportArgumentType]
    ppo = PPOConfig(horizon=8, num_minibatches=8, model=ModelConfig(policy=network)).build(spec, seed=0)
    obs = {"policy": torch.randn(1, case.rows, case.obs)}
    with torch.no_grad():
        params, value = ppo.model(obs, (), (), None)
    action = ppo.distribution.sample(params)
    row = torch.randn(1, case.rows)
    batch = PPOBatch(
        obs=obs,
        action=action,
        log_prob=ppo.distribution.log_prob(params, action) + 0.1 * row,
        dist_params=params,
        value=value,
        return_=value + row,
        advantage=row.flip(1),
        valid=row < 10,
        reset=row > 10,
        policy_state=(),
        critic_state=(),
    )
    return ppo, batch


def learning(case: Case, clock: Callable[[], float], seconds: float) -> None:
    ppo, batch = build(case)
    index, candidates = torch.randperm(case.rows), {}
    for name in ENGINES:
        ppo.use_engine(name)
        candidates[name] = partial(ppo.engine.gradients, ppo.engine.begin(batch), index, ppo.coefs)
    best = best_of(candidates, clock, seconds)
    operations = 6 * case.rows * sum(p.numel() for p in ppo.model.parameters() if p.ndim == 2)
    show(f"minibatch of {case.rows}, {case.name}", best, f"{operations / best['native'] / 1e9:.1f} GFLOP/s")


def acting(case: Case, rows: int, clock: Callable[[], float], seconds: float) -> None:
    ppo, _ = build(case)
    obs, rng, reset = {"policy": torch.randn(rows, case.obs)}, torch.Generator(), torch.zeros(rows, dtype=torch.bool)
    candidates = {}
    for name in ENGINES:
        ppo.use_engine(name)
        candidates[name] = partial(ppo.engine.act, obs, (), reset, rng)
    show(f"acting, {rows} rows, {case.name}", best_of(candidates, clock, seconds))


def stepping(clock: Callable[[], float], seconds: float) -> None:
    optimizer, skip = build(CASES[0])[0].optimizers["policy"], torch.zeros((), dtype=torch.bool)
    optimizer.adams[0].gradient.normal_()
    plain = partial(adam_step_.plain, optimizer.adams, True, skip)
    best = best_of({"native": partial(adam_step_, optimizer.adams, True, skip), "torch": plain}, clock, seconds)
    show(f"AdamW of {len(optimizer.adams[0].flat)} numbers", best)


def soak(count: int) -> None:
    """Memory of the process after a thousand minibatches and after all of them."""
    ppo, batch = build(CASES[0])
    ppo.use_engine("native")
    rows, index = ppo.engine.begin(batch), torch.randperm(CASES[0].rows)
    for done in range(1, count + 1):
        ppo.engine.gradients(rows, index, ppo.coefs)
        if done in (1000, count):
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            print(f"{done:,} minibatches: {most:,} KiB at most", flush=True)


def show(name: str, best: dict[str, float], note: str = "") -> None:
    ours = best.pop("native")
    ratios = [f"{other} {seconds * 1e6:9.1f} us ({seconds / ours:4.1f} x)" for other, seconds in best.items()]
    print(f"{name:46} native {ours * 1e6:9.1f} us | {' | '.join(ratios)} | {note}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each line")
    parser.add_argument("--soak", type=int)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.soak:
        soak(options.soak)
        return
    clock = time.perf_counter if options.clock == "wall" else time.thread_time
    for case in CASES:
        learning(case, clock, options.seconds)
    for rows in (1, 16, 1024):
        acting(CASES[0], rows, clock, options.seconds)
    stepping(clock, options.seconds)


if __name__ == "__main__":
    main()
