"""Measurements of simulators in JAX, each printed as one line of JSON.

    python benchmarks/speed/jax_bench.py step brax:ant --num-envs 4096
    python benchmarks/speed/jax_bench.py rollout brax:ant --num-envs 4096 --horizon 24
    python benchmarks/speed/jax_bench.py iteration playground:Go1JoystickFlatTerrain
    python benchmarks/speed/jax_bench.py canter brax:ant --total-steps 10000000 --seed 0
    python benchmarks/speed/jax_bench.py brax brax:ant --total-steps 10000000 --seed 0

The functions of these names say what is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import torch
from canter_bench import config_of
from iteration import measure
from peers.jax_ppo import init_mlp, log_prob, mlp

import canter
from canter.core.specs import Discrete
from canter.envs.jax_envs.adapter import JaxEnv
from canter.play.evaluation import evaluate
from canter.training.execution import ExecutionConfig
from canter.training.trainer import Trainer

AHEAD = 8
"""Steps that are queued behind a busy device; JAX itself waits beyond 32 programs."""
WAITS = ("Synchronize", "MemcpyDtoH", "MemcpyD2H")
"""Parts of the names of calls in which the host waits for the device, or copies from it."""
EPISODES = 128
"""Episodes of an evaluation, as in Brax's own training."""


def step(options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a step of Canter's environment and of `jit(step)` alone, in turns, and waits of the host.

    Both loops run the same program for the dynamics, ends, restarts and final observations. Canter's hands actions
    and results over between torch and JAX; the other stays in JAX.
    """
    env = make(options)
    env.reset(0)
    action = random_action(env)
    loops = {"jax": jax_loop(env, action), "canter": canter_loop(env, action)}  # both begin at the same state
    times: dict[str, list[float]] = {name: [] for name in loops}
    for loop in loops.values():
        timed(loop, 3, options.device)
    for _ in range(options.rounds):
        for name, loop in loops.items():
            times[name].append(timed(loop, options.iterations, options.device))
    result: dict[str, Any] = {f"{name}_step_ms": round(statistics.median(rows), 4) for name, rows in times.items()}
    pairs = zip(loops["canter"](1).obs.values(), loops["jax"](1).obs.values(), strict=True)
    result["equal_bits"] = all(torch.equal(ours, torch.from_dlpack(theirs)) for ours, theirs in pairs)
    result["ratio"] = round(result["canter_step_ms"] / result["jax_step_ms"], 4)
    result |= {"all_step_ms": {name: [round(value, 4) for value in rows] for name, rows in times.items()}}
    result["steps_per_second"] = round(options.num_envs / result["canter_step_ms"] * 1e3)
    if options.device == "cuda":
        for name, loop in loops.items():
            result[f"{name}_waits"] = count_waits(loop)
        result |= {"canter_queued": queued(loops["canter"]), "jax_queued": queued_in_jax(env, action)}
    return result


def canter_loop(env: JaxEnv, action: torch.Tensor) -> Callable[[int], Any]:
    """Return a function that steps Canter's environment so many times."""

    def run(steps: int) -> Any:
        for _ in range(steps):
            last = env.step(action)
        return last

    return run


def jax_loop(env: JaxEnv, action: torch.Tensor) -> Callable[[int], Any]:
    """Return a function that steps the same task so many times with arrays alone, by a program of its own."""
    program = jax.jit(env._step_batch)
    carry = env._state
    array = jax.dlpack.from_dlpack(action)

    def run(steps: int) -> Any:
        nonlocal carry
        for _ in range(steps):
            carry, last = program(carry, array)
        return last

    return run


def random_action(env: JaxEnv) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    spec = env.spec.action
    if isinstance(spec, Discrete):
        action = torch.randint(spec.n, (env.spec.num_envs,), generator=generator, dtype=torch.int32)
    else:
        action = torch.rand((env.spec.num_envs, spec.dim), generator=generator) * 2 - 1
    return action.to(env.device)


def timed(loop: Callable[[int], Any], steps: int, device: str) -> float:
    """Milliseconds of a step, with the end of the last one."""
    wait(None, device)
    begin = time.perf_counter()
    wait(loop(steps), device)
    return 1e3 * (time.perf_counter() - begin) / steps


def wait(result: Any, device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()  # of the whole device, XLA's streams included
    else:
        jax.block_until_ready(result)


def queued(loop: Callable[[int], Any]) -> dict[str, Any]:
    """Queue steps behind a kernel that keeps the device busy: the host is free long before it if it never waits.

    The kernel is on torch's stream, which only Canter's steps wait for.
    """
    return milliseconds_of(lambda: torch.cuda._sleep(2_000_000_000), lambda: loop(AHEAD))  # about a second


def queued_in_jax(env: JaxEnv, action: torch.Tensor) -> dict[str, Any]:
    """Queue steps of JAX alone behind a program of its own that takes about as long, and gives them their action."""
    program = jax.jit(env._step_batch)
    array = jax.dlpack.from_dlpack(action)
    factor = jax.device_put(jnp.full((4096, 4096), 1e-4), env._jax_device)
    busy = jax.jit(lambda x, y: y + (jax.lax.fori_loop(0, 3000, lambda _, z: z @ factor, x)[0, 0] > 1e9))
    late: list[Any] = []

    def run() -> None:
        carry = env._state
        for _ in range(AHEAD):
            carry, _ = program(carry, late[-1])

    late.append(busy(factor, array))
    run()  # compiles
    return milliseconds_of(lambda: late.append(busy(factor, array)), run)


def milliseconds_of(begin: Callable[[], Any], then: Callable[[], Any]) -> dict[str, Any]:
    """Milliseconds until the host is free, and until the device is."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    begin()
    then()
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    device = time.perf_counter() - start
    return {"steps": AHEAD, "host_ms": round(1e3 * host, 3), "device_ms": round(1e3 * device, 3)}


def count_waits(loop: Callable[[int], Any]) -> dict[str, Any]:
    """Calls per step in which the host waits for the device, by torch's profiler, and its warnings."""
    import warnings

    loop(2)
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        loop(20)
        torch.cuda.set_sync_debug_mode("default")
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        loop(20)
    events = {event.key: event.count / 20 for event in profile.key_averages()}
    waits = {key: count for key, count in events.items() if any(part in key for part in WAITS)}
    calls = {key: count for key, count in events.items() if key.startswith("cu")}
    warned = sum("synchronizing" in str(warning.message) for warning in caught) / 20
    return {"torch_warnings": warned, "waits": waits, "calls": calls}


def rollout(options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of Canter's iterations, step by step and with `execution.mode=scan`, and of a rollout in JAX alone.

    The rollout in JAX is one `lax.scan` that computes observations, actions, log-probabilities, values of the
    observations and of the final ones, rewards and ends. Matrix products of the policy are TF32 on a GPU in all.
    """
    config = config_of(options, options.num_envs)
    steps = measure(config, options.device, ExecutionConfig(mode=options.mode), options.iterations)
    scan = measure(config, options.device, ExecutionConfig(mode="scan"), options.iterations)
    alone = measure_scan(make(options), options)
    return {
        "canter": steps,
        "canter_scan": scan,
        "jax_scan_ms": alone,
        "ratio": round(steps["collect_ms"] / alone, 4),
        "ratio_scan": round(scan["collect_ms"] / alone, 4),
        "steps_to_scan": round(steps["collect_ms"] / scan["collect_ms"], 4),
    }


def measure_scan(env: JaxEnv, options: argparse.Namespace) -> float:
    keys = jax.random.split(jax.random.PRNGKey(0), 4)
    size = sum(spec.shape[0] for spec in env.spec.obs.values())
    discrete = isinstance(env.spec.action, Discrete)
    actions = env.spec.action.n if discrete else env.spec.action.dim
    params = {
        "policy": init_mlp(keys[0], [size, *options.hidden, actions], 0.01),
        "critic": init_mlp(keys[1], [size, *options.hidden, 1], 1.0),
        "log_std": jnp.zeros(actions),
    }

    def act(params: Any, obs: Any, key: Any) -> tuple[Any, Any]:
        out = mlp(params["policy"], obs)
        if discrete:
            action = jax.random.categorical(key, out)
            return action, jnp.take_along_axis(jax.nn.log_softmax(out), action[:, None], 1)[:, 0]
        action = out + jnp.exp(params["log_std"]) * jax.random.normal(key, out.shape)
        return action, log_prob(out, params["log_std"], action)

    def one(carry: Any, _: Any) -> Any:
        params, key, state, obs = carry
        key, noise, own = jax.random.split(key, 3)
        action, logp = act(params, obs, noise)
        sent = action if discrete else jnp.clip(action, -1, 1)
        with jax.default_matmul_precision(env.matmul_precision):
            state, outcome = env.task.step(own, state, sent)
        value = mlp(params["critic"], obs)[:, 0]
        final = mlp(params["critic"], outcome.final_obs)[:, 0]
        ends = (outcome.terminated, outcome.truncated)
        return (params, key, state, outcome.obs), (obs, action, logp, value, final, outcome.reward, *ends)

    program = jax.jit(lambda carry: jax.lax.scan(one, carry, None, options.horizon))
    state, obs = env.task.reset(keys[2])
    carry = jax.device_put((params, keys[3], state, obs), env._jax_device)
    times = []
    for _ in range(3 + options.iterations):
        begin = time.perf_counter()
        carry, _ = jax.block_until_ready(program(carry))
        times.append(1e3 * (time.perf_counter() - begin))
    return round(statistics.median(times[3:]), 3)


def iteration(options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of Canter's iteration, collection and update."""
    config = replace(config_of(options, options.num_envs), env=env_config(options))
    return measure(config, options.device, ExecutionConfig(mode=options.mode), options.iterations)


def learn_canter(options: argparse.Namespace) -> dict[str, Any]:
    """Return of Canter's policy, acting without noise, after so many steps, and the seconds of the training."""
    config = config_of(options, options.num_envs)
    algorithm = replace(config.algorithm, gamma=options.gamma, num_minibatches=options.num_minibatches)
    config = replace(
        config, algorithm=algorithm, seed=options.seed, total_steps=options.total_steps, device=options.device
    )
    ends: list[float] = []
    begin = time.perf_counter()
    with Trainer(config, lambda _: ends.append(time.perf_counter())) as trainer:
        trainer.learn()
        result = evaluate(trainer.algorithm.policy, trainer.env, options.num_envs, 0)
    steps = options.num_envs * options.horizon
    return {
        "return": round(result.mean, 1),
        "confidence_interval_95": [round(bound, 1) for bound in result.confidence_interval],
        "env_steps": len(ends) * steps,
        "first_iteration_s": round(ends[0] - begin, 2),
        "train_s": round(ends[-1] - begin, 2),
        "iteration_ms": round(1e3 * statistics.median(b - a for a, b in pairwise(ends[1:])), 2),
        "steps_per_second": round(steps * (len(ends) - 2) / (ends[-1] - ends[1])),
    }


def learn_brax(options: argparse.Namespace) -> dict[str, Any]:
    """Return of the policy of Brax's own PPO with its settings for ant, acting without noise, and its seconds."""
    from brax import envs  # pyright: ignore[reportMissingImports]
    from brax.training.agents.ppo import train as ppo  # pyright: ignore[reportMissingImports]

    if "device_put_replicated" not in vars(jax):  # JAX 0.10 removed it; Brax 0.14 calls it
        jax.device_put_replicated = replicate  # pyright: ignore[reportAttributeAccessIssue]
    rows: list[dict[str, Any]] = []
    begin = time.perf_counter()

    def note(steps: int, metrics: Any) -> None:
        row = {"env_steps": int(steps), "seconds": round(time.perf_counter() - begin, 2)}
        row |= {"return": round(float(metrics["eval/episode_reward"]), 1)}
        rows.append(row | {"steps_per_second": round(float(metrics.get("training/sps", 0.0)))})

    ppo.train(
        environment=envs.get_environment(options.env.partition(":")[2]),
        num_timesteps=options.total_steps,
        episode_length=1000,
        num_envs=options.num_envs,
        batch_size=options.num_envs // 2,
        num_minibatches=32,
        num_updates_per_batch=4,
        unroll_length=5,
        reward_scaling=10,
        normalize_observations=True,
        discounting=0.97,
        learning_rate=3e-4,
        entropy_cost=1e-2,
        num_evals=3,  # the speed of the second half is without compilation
        num_eval_envs=EPISODES,
        seed=options.seed,
        progress_fn=note,
    )
    return {**rows[-1], "evaluations": rows}


def replicate(tree: Any, devices: list[Any]) -> Any:
    """Return a tree whose arrays have a copy for each device, along a new first axis."""
    return jax.tree.map(lambda leaf: jnp.stack([jnp.asarray(leaf)] * len(devices)), tree)


def make(options: argparse.Namespace) -> Any:
    return env_config(options).build(options.device)


def env_config(options: argparse.Namespace) -> canter.EnvConfig:
    """The environment; tasks of Playground run on MJX's own physics."""
    own = {"impl": "jax"} if options.env.startswith("playground:") else {}
    return canter.EnvConfig(id=options.env, num_envs=options.num_envs, options=own)


COMMANDS = {"step": step, "rollout": rollout, "iteration": iteration, "canter": learn_canter, "brax": learn_brax}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("env", nargs="?", default="brax:ant")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--num-envs", type=int, default=4096)
    parser.add_argument("--horizon", type=int, default=24)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 128, 64])
    parser.add_argument("--iterations", type=int, default=20, help="steps of a round of `step`; else rollouts")
    parser.add_argument("--rounds", type=int, default=7, help="of `step`")
    parser.add_argument("--total-steps", type=int, default=10_000_000)
    parser.add_argument("--gamma", type=float, default=0.97)
    parser.add_argument("--num-minibatches", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    # What `canter_bench.config_of` asks for besides.
    vars(options).update(cell="lstm", memory=None, precision="float32", distribution="auto", discrete=None)
    result = COMMANDS[options.command](options)
    print(json.dumps({"jax": jax.__version__, "canter": canter.__version__} | result), flush=True)


if __name__ == "__main__":
    main()
