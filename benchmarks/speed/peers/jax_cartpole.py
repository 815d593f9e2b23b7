"""Seconds of a PPO written in JAX alone until gymnax's CartPole-v1 is solved, as one line of JSON.

    python benchmarks/speed/peers/jax_cartpole.py --num-envs 4096 --target 475

In the manner of PureJaxRL: the environment's steps, GAE and all updates of an iteration are one compiled function over
donated buffers. The settings are those of Canter's side: 5 epochs of 4 minibatches, clipping at 0.2, an adaptive rate
and observations normalised; networks and matrix products are those of `jax_ppo.py`.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from typing import Any

import gymnax
import jax
import jax.numpy as jnp
from jax_ppo import EPOCHS, MINIBATCHES, advantages, init_mlp, merged, mlp, scaled, values

CLIP, ENTROPY, TARGET_KL, MAX_NORM = 0.2, 0.01, 0.01, 1.0
EPISODES = 100
"""Least number of the newest episodes over which the return is averaged."""
Tree = Any
ENV, PARAMS = gymnax.make("CartPole-v1")


def step_envs(key: jax.Array, env: Tree, action: jax.Array) -> tuple[Tree, Tree]:
    """Step all environments; keep the return of each episode until it ends."""
    keys = jax.random.split(key, len(action))
    obs, state, reward, terminated, truncated, info = jax.vmap(ENV.step, (0, 0, 0, None))(
        keys, env["state"], action, PARAMS
    )
    ended = terminated | truncated
    total = env["return"] + reward
    outcome = {"reward": reward, "terminated": terminated, "truncated": truncated & ~terminated}
    outcome |= {"final": info["final_observation"], "return": jnp.where(ended, total, 0.0)}
    return {"state": state, "obs": obs, "return": jnp.where(ended, 0.0, total)}, outcome


def collect(state: Tree, horizon: int) -> tuple[Tree, Tree]:
    def step(env: Tree, key: jax.Array) -> tuple[Tree, Tree]:
        choice, own = jax.random.split(key)
        logits = mlp(state["params"]["policy"], scaled(state["obs"], env["obs"]))
        action = jax.random.categorical(choice, logits)
        record = {"obs": env["obs"], "action": action, "logits": jax.nn.log_softmax(logits)}
        record["value"] = values(state, env["obs"])
        env, outcome = step_envs(own, env, action)
        record["next_value"] = values(state, outcome.pop("final"))
        return env, record | outcome

    key, own = jax.random.split(state["key"])
    env, rollout = jax.lax.scan(step, state["env"], jax.random.split(own, horizon))
    return state | {"env": env, "key": key}, rollout


def loss(params: Tree, batch: Tree) -> tuple[jax.Array, jax.Array]:
    logits = jax.nn.log_softmax(mlp(params["policy"], batch["obs"]))
    ratio = jnp.exp(chosen(logits, batch["action"]) - chosen(batch["logits"], batch["action"]))
    gain = jnp.minimum(ratio * batch["advantage"], jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * batch["advantage"])
    error = (mlp(params["critic"], batch["obs"])[:, 0] - batch["target"]) ** 2
    entropy = -(jnp.exp(logits) * logits).sum(-1)
    kl = (jnp.exp(batch["logits"]) * (batch["logits"] - logits)).sum(-1).mean()
    return error.mean() - gain.mean() - ENTROPY * entropy.mean(), kl


def chosen(logits: jax.Array, action: jax.Array) -> jax.Array:
    return jnp.take_along_axis(logits, action[:, None], -1)[:, 0]


def update(learner: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
    (_, kl), grads = jax.value_and_grad(loss, has_aux=True)(learner["params"], batch)
    factor = jnp.where(kl > 2 * TARGET_KL, 1 / 1.5, jnp.where(kl < TARGET_KL / 2, 1.5, 1.0))
    rate, count = jnp.clip(learner["rate"] * factor, 1e-5, 1e-2), learner["count"] + 1
    norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, MAX_NORM / (norm + 1e-6)), grads)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, learner["first"], grads)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, learner["second"], grads)
    size = rate * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
    params = jax.tree.map(lambda p, m, v: p - size * m / (jnp.sqrt(v) + 1e-8), learner["params"], first, second)
    return {"params": params, "first": first, "second": second, "rate": rate, "count": count}, kl


@partial(jax.jit, static_argnames="horizon", donate_argnames="state")
def iteration(state: Tree, horizon: int) -> tuple[Tree, Tree]:
    """Collect, learn, and return the sum and number of the returns of episodes that ended."""
    state, rollout = collect(state, horizon)
    advantage = advantages(rollout)
    target = advantage + rollout["value"]
    stats = merged(state["value"], target.reshape(-1))
    data = {name: rollout[name] for name in ("action", "logits")}
    data |= {"obs": scaled(state["obs"], rollout["obs"]), "target": scaled(stats, target)}
    data |= {"advantage": (advantage - advantage.mean()) / (advantage.std() + 1e-8)}
    data = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), data)

    def epoch(learner: Tree, key: jax.Array) -> tuple[Tree, jax.Array]:
        order = jax.random.permutation(key, len(data["target"]))
        return jax.lax.scan(
            update, learner, jax.tree.map(lambda x: x[order].reshape(MINIBATCHES, -1, *x.shape[1:]), data)
        )

    key, own = jax.random.split(state["key"])
    learner = {name: state[name] for name in ("params", "first", "second", "rate", "count")}
    learner, _ = jax.lax.scan(epoch, learner, jax.random.split(own, EPOCHS))
    seen = merged(state["obs"], rollout["obs"].reshape(-1, rollout["obs"].shape[-1]))
    ended = rollout["terminated"] | rollout["truncated"]
    return state | learner | {"key": key, "obs": seen, "value": stats}, (rollout["return"].sum(), ended.sum())


def start(num_envs: int, hidden: list[int], seed: int) -> Tree:
    policy, critic, world, key = jax.random.split(jax.random.key(seed), 4)
    obs, state = jax.vmap(ENV.reset, (0, None))(jax.random.split(world, num_envs), PARAMS)
    params = {"policy": init_mlp(policy, [4, *hidden, 2], 0.01), "critic": init_mlp(critic, [4, *hidden, 1], 1)}
    return {
        "params": params,
        "first": jax.tree.map(jnp.zeros_like, params),
        "second": jax.tree.map(jnp.zeros_like, params),
        "rate": jnp.array(1e-3),
        "count": jnp.array(0),
        "obs": {"mean": jnp.zeros(4), "var": jnp.ones(4), "count": jnp.array(1e-4)},
        "value": {"mean": jnp.array(0.0), "var": jnp.array(1.0), "count": jnp.array(1e-4)},
        "env": {"state": state, "obs": obs, "return": jnp.zeros(num_envs)},
        "key": key,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=4096)
    parser.add_argument("--horizon", type=int, default=24)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 128, 64])
    parser.add_argument("--target", type=float, default=475.0)
    parser.add_argument("--max-iterations", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    runs = []
    for seed in options.seeds:
        begin = time.perf_counter()
        state = start(options.num_envs, options.hidden, seed)
        recent: list[tuple[float, int]] = []
        for count in range(1, options.max_iterations + 1):
            state, (total, episodes) = iteration(state, options.horizon)
            if count == 1:
                jax.block_until_ready(total)
                first = time.perf_counter() - begin
            recent.append((float(total), int(episodes)))
            while sum(number for _, number in recent[1:]) >= EPISODES:
                del recent[0]
            number = sum(number for _, number in recent)
            mean = sum(total for total, _ in recent) / max(1, number)
            if number >= EPISODES and mean >= options.target:
                break
        run = {"seed": seed, "reached": mean >= options.target, "seconds": round(time.perf_counter() - begin, 2)}
        run |= {"first_iteration_s": round(first, 2), "return": round(mean, 1)}
        runs.append(run | {"env_steps": count * options.num_envs * options.horizon})
        print(json.dumps({"library": "pure JAX", "version": jax.__version__, "runs": runs}), flush=True)


if __name__ == "__main__":
    main()
