"""Random steps of an environment: to inspect what it returns, and to verify its symmetries.

T steps, N environments, D components of a vector, A of an action.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from canter.app.check.plan import Finding
from canter.core.declarations import AnyMirror, Mirror, Symmetry
from canter.core.registry import UserError
from canter.core.specs import Continuous, Env, EnvSpec, Observable, Stateful, Step
from canter.core.struct import Obs
from canter.envs.contract import check_obs, check_step
from canter.envs.directory import directory_of
from canter.envs.failures import watched
from canter.play.player import random_actions

MAX_ENVS = 4
"""Number of environments that are inspected, however many are stepped."""
MAX_BYTES = 64 << 20
"""Bytes of observations after which a rollout ends early."""
ENOUGH_STEPS = 32
"""Steps after which a rollout of a slow environment may end early."""
SYMMETRY_STATES = 24
"""States in which a symmetry is verified; some lie before and some after ends of episodes."""
TOLERANCE = 1e-3
"""Differences up to this share of a component's range count as rounding."""


@dataclass(frozen=True)
class RandomRollout:
    """T steps of the first N environments under random actions, on the CPU."""

    spec: EnvSpec
    """Specification of these N environments."""
    obs: Obs
    """Observations `[T+1, N, ...]`; the first are those of the reset."""
    reward: Tensor
    """Rewards `[T, N]`."""
    terminated: Tensor
    """`[T, N]` bool."""
    truncated: Tensor
    """`[T, N]` bool."""
    valid: Tensor
    """`[T, N]` bool."""
    final_obs: Obs
    """True last observations `[T, N, ...]` if the spec says "separate"; arbitrary where no episode
    ended."""
    seconds: float
    """Median seconds of a step of all environments."""

    @property
    def done(self) -> Tensor:
        """`[T, N]` bool: an episode terminated or was truncated."""
        return self.terminated | self.truncated

    def episodes(self) -> list[tuple[float, int, bool]]:
        """Return (return, length, terminated) of every complete episode."""
        episodes: list[tuple[float, int, bool]] = []
        reward = self.reward.double().tolist()
        valid = self.valid.tolist()
        done = self.done.tolist()
        for env in range(self.spec.num_envs):
            total = 0.0
            length = 0
            for t in range(len(reward)):
                if valid[t][env]:
                    total += reward[t][env]
                    length += 1
                if done[t][env]:
                    episodes.append((total, length, bool(self.terminated[t, env])))
                    total = 0.0
                    length = 0
        return episodes


@torch.no_grad()
def run_random_actions(env: Env, seed: int, *, steps: int, seconds: float) -> RandomRollout:
    """Reset `env` by `seed` and take random actions, equal ones for equal seeds and observations.

    The rollout ends after `steps`. It ends earlier if `seconds` have passed (but not before
    `ENOUGH_STEPS`), or if the observations reach `MAX_BYTES`.
    """
    spec = env.spec
    num_envs = min(spec.num_envs, MAX_ENVS)
    generator = torch.Generator().manual_seed(0)
    transitions: list[list[Tensor]] = []
    last: list[Obs] = []
    times: list[float] = []
    directory = directory_of(env)
    with watched() as watchdog:
        with directory.during("reset()"):
            obs = env.reset(seed)
        check_obs(obs, spec, "reset()")
        seen = [to_host(obs, num_envs)]
        max_steps = min(steps, max(MAX_BYTES // max(1, sum(group.nbytes for group in seen[0].values())), 2))
        start = time.perf_counter()
        while len(transitions) < max_steps:
            if time.perf_counter() - start > seconds and len(transitions) >= ENOUGH_STEPS:
                break
            watchdog.begin()
            action = random_actions(spec, obs, generator).to(spec.device)
            step_start = time.perf_counter()
            with directory.during("step()"):
                step = env.step(action)
            times.append(time.perf_counter() - step_start)
            check_step(step, spec)
            parts = (step.reward, step.terminated, step.truncated, step.valid)
            transitions.append([part[:num_envs].to("cpu", copy=True) for part in parts])
            obs = step.obs
            seen.append(to_host(obs, num_envs))
            last.append(seen[-1] if step.final_obs is None else to_host(step.final_obs, num_envs))
    reward, terminated, truncated, valid = (torch.stack(part) for part in zip(*transitions, strict=True))
    separate = spec.obs if spec.final_obs == "separate" else ()
    return RandomRollout(
        spec=replace(spec, num_envs=num_envs),
        obs={name: torch.stack([groups[name] for groups in seen]) for name in spec.obs},
        reward=reward,
        terminated=terminated,
        truncated=truncated,
        valid=valid,
        final_obs={name: torch.stack([groups[name] for groups in last]) for name in separate},
        seconds=statistics.median(times),
    )


def to_host(obs: Obs, num_envs: int) -> Obs:
    """Return copies of the first environments, which the next step cannot overwrite."""
    return {name: group[:num_envs].detach().to("cpu", copy=True) for name, group in obs.items()}


class SymmetryViolated(UserError):
    """A mirrored step differs from the declared symmetry; the message names the component."""


class SettableEnv(Env, Stateful, Observable, Protocol):
    """An environment that can be set to a mirrored state and observed there."""


def check_symmetry(symmetry: Symmetry, env: Env, seed: int) -> Finding:
    """Verify a declared symmetry: from a mirrored state, mirrored actions have mirrored results.

    The finding is an error that names the wrong component, or a note if the environment cannot be
    set to a state.
    """
    if not symmetry.state or not isinstance(env, Stateful) or not isinstance(env, Observable):
        text = (
            f"{symmetry.name}: mirroring twice restores everything; mirrored steps were not verified, "
            "because this environment cannot be set to a mirrored state"
        )
        return Finding("note", "symmetry", text)
    env.reset(seed)
    try:
        for k in range(SYMMETRY_STATES):
            _check_mirrored_step(symmetry, env, torch.Generator().manual_seed(seed + k))
    except (SymmetryViolated, KeyError, IndexError, RuntimeError, ValueError) as error:
        detail = str(error) if isinstance(error, SymmetryViolated) else f"it cannot be applied: {error}"
        return Finding("error", "symmetry", f"symmetry {symmetry.name!r} is declared wrongly: {detail}")
    return Finding("ok", "symmetry", f"{symmetry.name}: mirrored steps matched in {SYMMETRY_STATES} states")


def _check_mirrored_step(symmetry: Symmetry, env: SettableEnv, generator: torch.Generator) -> None:
    """Compare a random step with its mirror image; leave the environment after the original."""
    obs = env.observe()
    state = env.state_dict()
    mirrored_state = state | {"state": _mirror_state(symmetry, state["state"])}
    env.load_state_dict(mirrored_state)
    for name, mirror in symmetry.obs.items():
        if name in obs:
            _compare(f"observation {name!r}", _mirror(mirror, obs[name]), env.observe()[name], "in a mirrored state")
    action = random_actions(env.spec, obs, generator).to(env.spec.device)
    for name, tried in (*_single_components(env, action), ("the action", action)):
        env.load_state_dict(mirrored_state)
        mirrored_step = env.step(_mirror_action(symmetry, env, tried)).map(torch.clone)
        env.load_state_dict(state)
        step = env.step(tried)
        _compare_steps(symmetry, step, mirrored_step, name)


def _compare_steps(symmetry: Symmetry, step: Step, mirrored: Step, action_name: str) -> None:
    where = f"after a mirrored step with {action_name}; it or its mirror is wrong"
    # The observation that ends an episode is compared: the next episode begins at random.
    last = step.obs if step.final_obs is None else step.final_obs
    mirrored_last = mirrored.obs if mirrored.final_obs is None else mirrored.final_obs
    for name, mirror in symmetry.obs.items():
        if name in last:
            _compare(f"observation {name!r}", _mirror(mirror, last[name]), mirrored_last[name], where)
    _compare("the reward", step.reward, mirrored.reward, where)
    _compare("the end of the episode", step.terminated.float(), mirrored.terminated.float(), where)


def _compare(name: str, expected: Tensor, actual: Tensor, where: str) -> None:
    """Raise SymmetryViolated, naming the component, if two tensors `[N, ...]` differ."""
    expected = expected.reshape(len(actual), -1)
    actual = actual.reshape(len(actual), -1)
    wrong = (expected - actual).abs() > TOLERANCE * expected.abs().amax().clamp(min=1.0)
    if wrong.any():
        env, i = wrong.nonzero()[0].tolist()
        component = "" if wrong.shape[1] == 1 else f" component {i}"
        values = f"{float(actual[env, i]):.4g} instead of {float(expected[env, i]):.4g}"
        raise SymmetryViolated(f"{name}{component} is {values} {where}")


def _single_components(env: Env, action: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the action with one component at a time, so that an error names the component."""
    if not isinstance(env.spec.action, Continuous):
        return
    for i in range(action.shape[-1]):
        alone = torch.zeros_like(action)
        alone[:, i] = action[:, i]
        yield f"action component {i} alone", alone


def _mirror(mirror: AnyMirror, x: Tensor) -> Tensor:
    return mirror(x) if x.ndim > 1 else mirror(x.unsqueeze(-1)).squeeze(-1)


def _mirror_state(symmetry: Symmetry, state: dict[str, Tensor]) -> dict[str, Tensor]:
    missing = sorted(set(state) - set(symmetry.state))
    if missing:
        raise SymmetryViolated(f"it has no mirror of {missing[0]!r}, a part of the state")
    return {name: _mirror(symmetry.state[name], x).to(x.dtype) for name, x in state.items()}


def _mirror_action(symmetry: Symmetry, env: Env, action: Tensor) -> Tensor:
    spec = env.spec.action
    mirror = symmetry.action
    if isinstance(spec, Continuous):
        return mirror(action)
    if not isinstance(mirror, Mirror):
        raise SymmetryViolated("discrete actions are mirrored by a function, but only a `Mirror` can be verified")
    heads = action.reshape(len(action), -1)
    one_hot = torch.cat([torch.nn.functional.one_hot(heads[:, k], n) for k, n in enumerate(spec.nvec)], -1)
    chosen = [head.argmax(-1) for head in mirror(one_hot).split(spec.nvec, -1)]
    return torch.stack(chosen, -1).reshape(action.shape)
