"""Milliseconds of one PPO iteration written in JAX alone, as one line of JSON: what a whole-program compiler gives.

    python benchmarks/speed/peers/jax_ppo.py --num-envs 4096 --hidden 256 128 64

The work of the other scripts (the environment of `tensor:null`, 5 epochs of 4 minibatches, adaptive KL, observations
and values normalised) as one compiled function over donated buffers; matrix products at JAX's default precision, which
is TF32 on recent GPUs. It is a yardstick, not a library: no checkpoints, no statistics of episodes, no other network.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp

OBS, ACTIONS, EPOCHS, MINIBATCHES, LIMIT = 48, 12, 5, 4, 1000
GAMMA, LAMBDA, CLIP, ENTROPY, TARGET_KL, MAX_NORM = 0.99, 0.95, 0.2, 0.01, 0.01, 1.0
PATTERN = jnp.linspace(0.5, 1.5, OBS)
Tree = Any


def mlp(params: Tree, x: jax.Array) -> jax.Array:
    for weight, bias in params[:-1]:
        x = jax.nn.elu(x @ weight + bias)
    return x @ params[-1][0] + params[-1][1]


def init_mlp(key: jax.Array, sizes: list[int], gain: float) -> Tree:
    init, last = jax.nn.initializers.orthogonal(2**0.5), jax.nn.initializers.orthogonal(gain)
    keys, shapes = jax.random.split(key, len(sizes) - 1), list(pairwise(sizes))
    makers = [init] * (len(shapes) - 1) + [last]
    return [(make(k, shape), jnp.zeros(shape[1])) for make, k, shape in zip(makers, keys, shapes, strict=True)]


def observe(env: Tree) -> jax.Array:
    return env["signal"][:, None] + env["orbit"][:, None] * PATTERN


def env_step(env: Tree, action: jax.Array, key: jax.Array) -> tuple[Tree, Tree]:
    orbit = 3.99 * env["orbit"] * (1 - env["orbit"])
    after = {
        "orbit": orbit,
        "signal": 0.9 * env["signal"] + jnp.clip(action, -1, 1).mean(-1),
        "steps": env["steps"] + 1,
    }
    terminated = orbit > 0.9974
    truncated = (after["steps"] >= LIMIT) & ~terminated
    fresh = jax.random.uniform(key, orbit.shape, minval=0.05, maxval=0.95)
    new = {"orbit": fresh, "signal": fresh, "steps": jnp.zeros_like(after["steps"])}
    env = jax.tree.map(partial(jnp.where, terminated | truncated), new, after)
    return env, {"reward": orbit, "terminated": terminated, "truncated": truncated, "final": observe(after)}


def scaled(stats: Tree, x: jax.Array) -> jax.Array:
    return (x - stats["mean"]) / jnp.sqrt(stats["var"] + 1e-8)


def merged(stats: Tree, x: jax.Array) -> Tree:
    """Mean and variance of what was seen before and of `x [B, ...]` together."""
    total = stats["count"] + len(x)
    delta = x.mean(0) - stats["mean"]
    spread = stats["var"] * stats["count"] + x.var(0) * len(x) + delta**2 * stats["count"] * len(x) / total
    return {"mean": stats["mean"] + delta * len(x) / total, "var": spread / total, "count": total}


def log_prob(mean: jax.Array, log_std: jax.Array, action: jax.Array) -> jax.Array:
    return (-0.5 * ((action - mean) / jnp.exp(log_std)) ** 2 - log_std - 0.9189385).sum(-1)


def values(state: Tree, obs: jax.Array) -> jax.Array:
    raw = mlp(state["params"]["critic"], scaled(state["obs"], obs))[..., 0]
    return raw * jnp.sqrt(state["value"]["var"] + 1e-8) + state["value"]["mean"]


def collect(state: Tree, horizon: int) -> tuple[Tree, Tree]:
    params = state["params"]

    def step(carry: Tree, key: jax.Array) -> tuple[Tree, Tree]:
        noise_key, env_key = jax.random.split(key)
        obs = observe(carry)
        mean = mlp(params["policy"], scaled(state["obs"], obs))
        action = mean + jnp.exp(params["log_std"]) * jax.random.normal(noise_key, mean.shape)
        record = {"obs": obs, "action": action, "mean": mean, "value": values(state, obs)}
        carry, outcome = env_step(carry, action, env_key)
        final = outcome.pop("final")
        record |= {"log_prob": log_prob(mean, params["log_std"], action), "next_value": values(state, final)}
        return carry, record | outcome

    key, own = jax.random.split(state["key"])
    env, rollout = jax.lax.scan(step, state["env"], jax.random.split(own, horizon))
    return state | {"env": env, "key": key}, rollout


def advantages(rollout: Tree) -> jax.Array:
    ends = rollout["terminated"] | rollout["truncated"]
    delta = rollout["reward"] + GAMMA * ~rollout["terminated"] * rollout["next_value"] - rollout["value"]

    def back(later: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        now = row[0] + GAMMA * LAMBDA * ~row[1] * later
        return now, now

    return jax.lax.scan(back, jnp.zeros_like(delta[0]), (delta, ends), reverse=True)[1]


def loss(params: Tree, batch: Tree, old_log_std: jax.Array) -> tuple[jax.Array, jax.Array]:
    mean, log_std = mlp(params["policy"], batch["obs"]), params["log_std"]
    ratio = jnp.exp(log_prob(mean, log_std, batch["action"]) - batch["log_prob"])
    gain = jnp.minimum(ratio * batch["advantage"], jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * batch["advantage"])
    error = (mlp(params["critic"], batch["obs"])[:, 0] - batch["target"]) ** 2
    entropy = (log_std + 1.4189385).sum()
    spread = (jnp.exp(2 * old_log_std) + (batch["mean"] - mean) ** 2) / (2 * jnp.exp(2 * log_std))
    kl = (log_std - old_log_std + spread - 0.5).sum(-1).mean()
    return error.mean() - gain.mean() - ENTROPY * entropy, kl


def update(learner: Tree, batch: Tree, old_log_std: jax.Array) -> tuple[Tree, jax.Array]:
    (_, kl), grads = jax.value_and_grad(loss, has_aux=True)(learner["params"], batch, old_log_std)
    factor = jnp.where(kl > 2 * TARGET_KL, 1 / 1.5, jnp.where(kl < TARGET_KL / 2, 1.5, 1.0))
    rate, count = jnp.clip(learner["rate"] * factor, 1e-5, 1e-2), learner["count"] + 1
    norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, MAX_NORM / (norm + 1e-6)), grads)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, learner["first"], grads)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, learner["second"], grads)
    size = rate * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
    params = jax.tree.map(lambda p, m, v: p - size * m / (jnp.sqrt(v) + 1e-8), learner["params"], first, second)
    return {"params": params, "first": first, "second": second, "rate": rate, "count": count}, kl


def learn(state: Tree, rollout: Tree) -> tuple[Tree, jax.Array]:
    advantage = advantages(rollout)
    target = advantage + rollout["value"]
    stats = merged(state["value"], target.reshape(-1))
    data = {name: rollout[name] for name in ("action", "mean", "log_prob")}
    data |= {"obs": scaled(state["obs"], rollout["obs"]), "target": scaled(stats, target)}
    data |= {"advantage": (advantage - advantage.mean()) / (advantage.std() + 1e-8)}
    data = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), data)
    rows, old_log_std = len(data["target"]), state["params"]["log_std"]

    def epoch(learner: Tree, key: jax.Array) -> tuple[Tree, jax.Array]:
        order = jax.random.permutation(key, rows)
        batches = jax.tree.map(lambda x: x[order].reshape(MINIBATCHES, -1, *x.shape[1:]), data)
        return jax.lax.scan(lambda now, batch: update(now, batch, old_log_std), learner, batches)

    key, own = jax.random.split(state["key"])
    learner = {name: state[name] for name in ("params", "first", "second", "rate", "count")}
    learner, kl = jax.lax.scan(epoch, learner, jax.random.split(own, EPOCHS))
    seen = merged(state["obs"], rollout["obs"].reshape(-1, OBS))
    return state | learner | {"key": key, "obs": seen, "value": stats}, kl.mean()


@partial(jax.jit, static_argnames="horizon", donate_argnames="state")
def iteration(state: Tree, horizon: int) -> tuple[Tree, jax.Array]:
    return learn(*collect(state, horizon))


def start(num_envs: int, hidden: list[int], seed: int = 0) -> Tree:
    policy, critic, world, key = jax.random.split(jax.random.key(seed), 4)
    networks = {
        "policy": init_mlp(policy, [OBS, *hidden, ACTIONS], 0.01),
        "critic": init_mlp(critic, [OBS, *hidden, 1], 1),
    }
    params = networks | {"log_std": jnp.zeros(ACTIONS)}
    orbit = jax.random.uniform(world, (num_envs,), minval=0.05, maxval=0.95)
    return {
        "params": params,
        "first": jax.tree.map(jnp.zeros_like, params),
        "second": jax.tree.map(jnp.zeros_like, params),
        "rate": jnp.array(1e-3),
        "count": jnp.array(0),
        "obs": {"mean": jnp.zeros(OBS), "var": jnp.ones(OBS), "count": jnp.array(1e-4)},
        "value": {"mean": jnp.array(0.0), "var": jnp.array(1.0), "count": jnp.array(1e-4)},
        "env": {"orbit": orbit, "signal": orbit + 0, "steps": jnp.zeros(num_envs, jnp.int32)},
        "key": key,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cpu or cuda; by default the best that JAX finds")
    parser.add_argument("--num-envs", type=int, default=4096)
    parser.add_argument("--horizon", type=int, default=24)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 128, 64])
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=1, help="so many times as many iterations")
    options = parser.parse_args()
    if options.device:
        jax.config.update("jax_platforms", options.device)
    state, times = start(options.num_envs, options.hidden), []
    begin = time.perf_counter()
    state, kl = jax.block_until_ready(iteration(state, options.horizon))
    compile_s = time.perf_counter() - begin
    for _ in range(5 + options.iterations * options.repeats):
        begin = time.perf_counter()
        state, kl = jax.block_until_ready(iteration(state, options.horizon))
        times.append(time.perf_counter() - begin)
    assert jnp.isfinite(kl) and kl > 0, kl
    whole = statistics.median(times[5:])
    result = {"library": "pure JAX", "version": jax.__version__, "platform": jax.default_backend()}
    result |= {"collect_ms": None, "learn_ms": None, "iteration_ms": round(1e3 * whole, 3)}
    steps = round(options.num_envs * options.horizon / whole)
    print(json.dumps(result | {"steps_per_second": steps, "compile_s": round(compile_s, 2), "kl": round(float(kl), 5)}))


if __name__ == "__main__":
    main()
