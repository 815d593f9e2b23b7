"""The native engine against today's forms by hand and against autograd, in one run.

    python benchmarks/speed/native.py [--threads 2] [--clock cpu]

Every line is the best of many rounds in which the candidates take turns, so that what else runs on the machine meets
all alike. `--clock cpu` counts the time of this thread only, for a machine that others use; it says nothing about
several threads. GFLOP/s count 6 operations for each weight and row.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from canter.algorithms.ppo_batch import PPOBatch

from canter.algorithms.ppo import PPO, PPOConfig
from canter.engines.native import NativeEngine, adamw_
from canter.nn.actor_critic import ModelConfig
from canter.nn.network import NetworkConfig
from canter.specs import Continuous, EnvSpec, TensorSpec


@dataclass(frozen=True, kw_only=True)
class Loss:
    """PPO's usual loss, with the names that engines read."""

    surrogate: str = "clipped"
    clip_ratio: float = 0.2
    value_loss: str = "mse"
    value_clip: float = 0.2
    value_coef: float = 1.0
    advantage: str = "given"
    bound: None = None


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


def build(case: Case) -> tuple[PPO, PPOBatch, NativeEngine]:
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
    return ppo, batch, NativeEngine(Loss(), ppo.model, ppo.phases["policy"].optimizer.gradients)


def learning(case: Case, clock: Callable[[], float], seconds: float) -> None:
    ppo, batch, engine = build(case)
    rows, index, parameters = engine.begin(batch), torch.randperm(case.rows), list(ppo.model.parameters())
    coefs = {"entropy_coef": ppo.entropy_coef}
    candidates: dict[str, Callable[[], Any]] = {
        "native": lambda: engine.gradients(rows, index, coefs),
        "autograd": lambda: torch.autograd.grad(ppo.loss(batch).loss, parameters, materialize_grads=True),  # pyright: ignore
    }
    if ppo.by_hand is not None:
        read = replace(batch, obs=ppo.by_hand.read_rows(batch.obs))
        candidates["by hand"] = lambda: ppo.quick_loss(read.map(lambda x: x[:, index]))
    best = best_of(candidates, clock, seconds)
    operations = 6 * case.rows * sum(p.numel() for p in parameters if p.ndim == 2)
    show(f"minibatch of {case.rows}, {case.name}", best, f"{operations / best['native'] / 1e9:.1f} GFLOP/s")


def acting(case: Case, rows: int, clock: Callable[[], float], seconds: float) -> None:
    ppo, _, engine = build(case)
    obs, rng, reset = {"policy": torch.randn(rows, case.obs)}, torch.Generator(), torch.zeros(rows, dtype=torch.bool)
    hand = ppo.by_hand
    candidates: dict[str, Callable[[], Any]] = {"native": lambda: engine.act(obs, (), reset, rng)}
    if hand is not None:
        candidates["by hand"] = lambda: hand.act(obs, rng)
        ppo.by_hand = None
    candidates["autograd"] = lambda: ppo.act(obs, (), reset)
    show(f"acting, {rows} rows, {case.name}", best_of(candidates, clock, seconds))


def stepping(clock: Callable[[], float], seconds: float) -> None:
    optimizer = build(CASES[0])[0].phases["policy"].optimizer
    group, skip = next(iter(optimizer.groups.values())), torch.zeros((), dtype=torch.bool)
    group.gradient.normal_()
    config = group.config

    def native() -> float:
        return adamw_(
            group.flat,
            group.gradient,
            **group.moments,
            learning_rate=3e-4,
            betas=config.betas,
            eps=config.eps,
            weight_decay=0.0,
            max_norm=config.max_grad_norm,
        )

    best = best_of({"native": native, "by hand": lambda: optimizer.step(None, skip)}, clock, seconds)
    show(f"AdamW of {len(group.flat)} numbers", best)


def show(name: str, best: dict[str, float], note: str = "") -> None:
    ours = best.pop("native")
    ratios = [f"{other} {seconds * 1e6:9.1f} us ({seconds / ours:4.1f} x)" for other, seconds in best.items()]
    print(f"{name:46} native {ours * 1e6:9.1f} us | {' | '.join(ratios)} | {note}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each line")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.perf_counter if options.clock == "wall" else time.thread_time
    for case in CASES:
        learning(case, clock, options.seconds)
    for rows in (1, 16, 1024):
        acting(CASES[0], rows, clock, options.seconds)
    stepping(clock, options.seconds)


if __name__ == "__main__":
    main()
