"""Tasks of gymnax, Brax and MuJoCo Playground as pure functions of N environments.

Each simulator's own functions and wrappers do the work, so that a task here is the task there:

- gymnax separates terminations from its time limit since version 1, and keeps final observations.
- Brax and Playground set `done` at the time limit too, and `truncation` tells them apart. Their
  wrapper that restarts ended environments loses the final observations, so `KeepFinalObs` notes
  them before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import partial
from inspect import signature
from typing import Any

import jax  # pyright: ignore[reportMissingImports]
import numpy as np

from canter.core.registry import UserError, nearest
from canter.core.specs import ActionSpec, Continuous, Discrete, UnsupportedSpace
from canter.envs.jax_envs.adapter import JaxTask, Outcome

FINAL_OBS = "canter_final_obs"
"""Entry of a Brax state's `info` with the observations before a restart."""
BRAX_LIMIT = 1000
"""Steps of an episode in Brax's own training."""


def gymnax_names() -> Iterable[str]:
    """Return the registered tasks of gymnax."""
    import gymnax  # pyright: ignore[reportMissingImports]

    return gymnax.registered_envs


def brax_names() -> Iterable[str]:
    """Return the registered tasks of Brax."""
    from brax import envs  # pyright: ignore[reportMissingImports]

    return envs._envs


def playground_names() -> Iterable[str]:
    """Return the tasks of MuJoCo Playground."""
    from mujoco_playground import registry  # pyright: ignore[reportMissingImports]

    return registry.ALL_ENVS


def make_gymnax_task(name: str, num_envs: int, options: Mapping[str, Any]) -> JaxTask:
    """Return a task of gymnax; its time limit is a truncation."""
    import gymnax  # pyright: ignore[reportMissingImports]
    from gymnax.environments.environment import Environment  # pyright: ignore[reportMissingImports]

    if not hasattr(Environment, "is_truncated"):
        raise UserError(f'gymnax:{name} needs gymnax 1.0, which tells time limits from ends: pip install "gymnax>=1"')
    _check_name(f"gymnax:{name}", name, gymnax.registered_envs)
    options = _limit(options, "max_steps_in_episode")
    factory = gymnax.registration._registry[name]
    arguments = {key: value for key, value in options.items() if key in signature(factory).parameters}
    env, params = gymnax.make(name, **arguments)
    settings = {key: value for key, value in options.items() if key not in arguments}
    known = {field.name for field in fields(params)}
    _check_options(f"gymnax:{name}", settings, known | signature(factory).parameters.keys())
    params = params.replace(**settings)
    space = env.action_space(params)
    action = _gymnax_action(f"gymnax:{name}", space)
    num_obs = getattr(env.observation_space(params), "n", None)

    def observe(obs: Any) -> Any:
        return obs if num_obs is None else jax.nn.one_hot(obs, num_obs)

    def reset(key: Any) -> tuple[Any, Any]:
        obs, state = jax.vmap(env.reset, in_axes=(0, None))(jax.random.split(key, num_envs), params)
        return state, observe(obs)

    def step(key: Any, state: Any, action: Any) -> tuple[Any, Outcome]:
        keys = jax.random.split(key, num_envs)
        action = action.reshape(num_envs, *space.shape)
        obs, state, reward, terminated, truncated, info = jax.vmap(env.step, in_axes=(0, 0, 0, None))(
            keys, state, action, params
        )
        final_obs = observe(info["final_observation"])
        return state, Outcome(observe(obs), reward, terminated, truncated & ~terminated, final_obs, {})

    return JaxTask(f"gymnax:{name}", num_envs, action, reset, step)


def make_brax_task(name: str, num_envs: int, options: Mapping[str, Any]) -> JaxTask:
    """Return a task of Brax with the wrappers of Brax's own training."""
    from brax import envs  # pyright: ignore[reportMissingImports]
    from brax.envs.wrappers import training  # pyright: ignore[reportMissingImports]

    _check_name(f"brax:{name}", name, envs._envs)
    options = {"episode_length": BRAX_LIMIT, "action_repeat": 1, **_limit(options, "episode_length")}
    episode = {key: options.pop(key) for key in ("episode_length", "action_repeat")}
    known = signature(envs._envs[name]).parameters.keys() | {"backend", "n_frames", "action_repeat"}
    _check_options(f"brax:{name}", options, known)
    env = training.EpisodeWrapper(training.VmapWrapper(envs.get_environment(name, **options)), **episode)
    return _wrapped_task(f"brax:{name}", num_envs, training.AutoResetWrapper(keep_final_obs(env)))


def make_playground_task(name: str, num_envs: int, options: Mapping[str, Any]) -> JaxTask:
    """Return a task of MuJoCo Playground with the wrappers of its own training."""
    from brax.envs.wrappers import training  # pyright: ignore[reportMissingImports]
    from mujoco_playground import registry, wrapper  # pyright: ignore[reportMissingImports]

    _check_name(f"playground:{name}", name, registry.ALL_ENVS)
    options = _limit(options, "episode_length")
    full_reset = bool(options.pop("full_reset", False))
    randomized = bool(options.pop("domain_randomization", False))
    config = registry.get_default_config(name)
    paths = [path for path, _ in _flatten(config.to_dict())]
    _check_options(f"playground:{name}", options, {*paths, "full_reset", "domain_randomization"})
    env = registry.load(name, config_overrides=options)
    config.update_from_flattened_dict(options)
    randomizer = registry.get_domain_randomizer(name) if randomized else None
    if randomized and randomizer is None:
        raise UserError(f"env.options.domain_randomization=True: playground:{name} has no domain randomization")
    if randomizer is None:
        batch = training.VmapWrapper(env)
    else:
        keys = jax.random.split(jax.random.PRNGKey(0), num_envs)
        batch = wrapper.BraxDomainRandomizationVmapWrapper(env, partial(randomizer, rng=keys))
    env = keep_final_obs(training.EpisodeWrapper(batch, config.episode_length, config.action_repeat))
    return _wrapped_task(f"playground:{name}", num_envs, wrapper.BraxAutoResetWrapper(env, full_reset=full_reset))


MAKERS: dict[str, Callable[[str, int, Mapping[str, Any]], JaxTask]] = {
    "gymnax": make_gymnax_task,
    "brax": make_brax_task,
    "playground": make_playground_task,
}
"""Makers of tasks by scheme."""
NAMES: dict[str, Callable[[], Iterable[str]]] = {
    "gymnax": gymnax_names,
    "brax": brax_names,
    "playground": playground_names,
}
"""Names of the tasks by scheme."""


def keep_final_obs(env: Any) -> Any:
    """Wrap a batch so that its state's `info` keeps the observations that a restart replaces."""
    from brax.envs.base import Wrapper  # pyright: ignore[reportMissingImports]

    class KeepFinalObs(Wrapper):
        def reset(self, rng: Any) -> Any:
            return self._keep(self.env.reset(rng))

        def step(self, state: Any, action: Any) -> Any:
            return self._keep(self.env.step(state, action))

        def _keep(self, state: Any) -> Any:
            return state.replace(info={**state.info, FINAL_OBS: state.obs})

    return KeepFinalObs(env)


def _wrapped_task(env_id: str, num_envs: int, env: Any) -> JaxTask:
    """Return the task of a batch of Brax or Playground that restarts ended environments."""

    def reset(key: Any) -> tuple[Any, Any]:
        state = env.reset(jax.random.split(key, num_envs))
        return state, state.obs

    def step(key: Any, state: Any, action: Any) -> tuple[Any, Outcome]:
        state = env.step(state, action)
        done = state.done.astype(bool)
        truncated = state.info["truncation"].astype(bool)
        final_obs = state.info[FINAL_OBS]
        return state, Outcome(state.obs, state.reward, done & ~truncated, done & truncated, final_obs, state.metrics)

    size = env.action_size
    return JaxTask(env_id, num_envs, Continuous((-1.0,) * size, (1.0,) * size), reset, step)


def _gymnax_action(env_id: str, space: Any) -> ActionSpec:
    """Return the action spec of a gymnax space."""
    if hasattr(space, "n"):
        return Discrete(int(space.n))
    if not hasattr(space, "low"):
        raise UnsupportedSpace(f"{env_id}: actions {type(space).__name__} are not supported, only Discrete and Box")
    low, high = (np.broadcast_to(np.asarray(bound, np.float32), space.shape) for bound in (space.low, space.high))
    return Continuous(tuple(low.reshape(-1).tolist()), tuple(high.reshape(-1).tolist()))


def _limit(options: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return options with the time limit by the simulator's name."""
    limit = options.get("max_episode_steps")
    rest = {key: value for key, value in options.items() if key != "max_episode_steps"}
    if limit is None:
        return rest
    if limit < 1 or name in rest:
        problem = f"contradicts env.options.{name}" if name in rest else "must be at least 1"
        raise UserError(f"env.options.max_episode_steps={limit} {problem}")
    return {**rest, name: limit}


def _check_name(env_id: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        raise UserError(f"unknown environment {env_id!r}: {nearest(name, known)}")


def _check_options(env_id: str, options: Mapping[str, Any], known: Iterable[str]) -> None:
    for name, value in options.items():
        if name not in known:
            raise UserError(f"env.options.{name}={value!r}: {env_id} takes no such option, {nearest(name, known)}")


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
