"""A short trial of an environment with random actions, kept on the host to be looked at.

T steps, N environments.

Whether a declared symmetry is one: the environment, set to a mirrored state, must do the mirrored thing.

N environments, D components of a vector, A of an action.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from canter.app.check.plan import Finding
from canter.core.declarations import AnyMirror, Mirror, Symmetry
from canter.core.registry import UserError
from canter.core.specs import ACTION_MASK, Continuous, Discrete, Env, EnvSpec, Stateful, Step
from canter.core.struct import Obs
from canter.envs.contract import check_obs, check_step
from canter.envs.failures import watched

MAX_ROWS = 4
"""A trial looks at so many environments, however many are stepped."""
MAX_BYTES = 64 << 20
"""A trial of large observations ends when it holds this much."""
ENOUGH_STEPS = 32
"""A trial of a slow environment ends when its time is up, but not before."""


@dataclass(frozen=True)
class Trial:
    """What the first N environments gave in T steps, on the CPU."""

    spec: EnvSpec
    """Theirs, for N of them."""
    obs: Obs
    """`[T+1, N, ...]`; row 0 is the reset's."""
    reward: Tensor
    """`[T, N]`."""
    terminated: Tensor
    truncated: Tensor
    valid: Tensor
    final_obs: Obs
    """True last observations `[T, N, ...]` where the spec says "separate", arbitrary in rows that did not end."""
    seconds: float
    """How long a step of all environments took, by the median."""

    @property
    def done(self) -> Tensor:
        """`[T, N]` bool: an episode ended, either way."""
        return self.terminated | self.truncated

    def episodes(self) -> list[tuple[float, int, bool]]:
        """Return, length and whether it terminated, for each episode that began and ended within the trial."""
        found: list[tuple[float, int, bool]] = []
        reward, valid, done = self.reward.double().tolist(), self.valid.tolist(), self.done.tolist()
        for row in range(self.spec.num_envs):
            total, length = 0.0, 0
            for t in range(len(reward)):
                if valid[t][row]:
                    total, length = total + reward[t][row], length + 1
                if done[t][row]:
                    found.append((total, length, bool(self.terminated[t, row])))
                    total, length = 0.0, 0
        return found


@torch.no_grad()
def run_trial(env: Env, seed: int, *, steps: int, seconds: float) -> Trial:
    """Reset `env` by `seed` and take random actions, the same ones for the same seed and observations.

    It ends after `steps`, or earlier when `seconds` are over (though not before `ENOUGH_STEPS`) or memory is.
    """
    spec, generator = env.spec, torch.Generator().manual_seed(0)
    with watched() as watchdog:
        obs = env.reset(seed)
        check_obs(obs, spec, "reset()")
        rows = min(spec.num_envs, MAX_ROWS)
        seen, taken, last, times = [to_host(obs, rows)], [], [], []
        room = MAX_BYTES // max(1, sum(group.nbytes for group in seen[0].values()))
        start = time.perf_counter()
        while len(taken) < min(steps, max(room, 2)):
            if time.perf_counter() - start > seconds and len(taken) >= ENOUGH_STEPS:
                break
            watchdog.begin()
            action, begin = random_actions(spec, obs, generator).to(spec.device), time.perf_counter()
            step = env.step(action)
            times.append(time.perf_counter() - begin)
            check_step(step, spec)
            columns = (step.reward, step.terminated, step.truncated, step.valid)
            taken.append([column[:rows].to("cpu", copy=True) for column in columns])
            obs = step.obs
            seen.append(to_host(obs, rows))
            last.append(seen[-1] if step.final_obs is None else to_host(step.final_obs, rows))
    groups = {name: torch.stack([row[name] for row in seen]) for name in spec.obs}
    separate = spec.obs if spec.final_obs == "separate" else ()
    final_obs = {name: torch.stack([row[name] for row in last]) for name in separate}
    reward, terminated, truncated, valid = (torch.stack(column) for column in zip(*taken, strict=True))
    about = replace(spec, num_envs=rows)
    return Trial(about, groups, reward, terminated, truncated, valid, final_obs, statistics.median(times))


def random_actions(spec: EnvSpec, obs: Obs, generator: torch.Generator) -> Tensor:
    """Actions for observations `[N, ...]`: uniform within finite bounds, normal without, uniform among the allowed."""
    action, rows = spec.action, spec.num_envs
    if isinstance(action, Continuous):
        low, high = torch.tensor(action.low), torch.tensor(action.high)
        spread = torch.rand((rows, action.dim), generator=generator)
        free = torch.randn((rows, action.dim), generator=generator).clamp(low, high)
        bounded = low.isfinite() & high.isfinite()
        return torch.where(bounded, torch.lerp(low.nan_to_num(), high.nan_to_num(), spread), free)
    allowed = obs.get(ACTION_MASK, torch.ones((rows, sum(action.nvec)))).to("cpu", torch.float32)
    picks = [torch.multinomial(part, 1, generator=generator) for part in allowed.split(action.nvec, dim=1)]
    return picks[0].squeeze(1) if isinstance(action, Discrete) else torch.cat(picks, dim=1)


def to_host(obs: Obs, rows: int) -> Obs:
    """A copy of the first rows that the environment's next step cannot overwrite."""
    return {name: group[:rows].detach().to("cpu", copy=True) for name, group in obs.items()}


STEPS = 24
"""States in which it is looked at; some come before and some after episodes have ended."""
TOLERANCE = 1e-3
"""Differences up to this share of a component's range are rounding."""


class Asymmetric(UserError):
    """The environment does not do in a mirror what was declared; the message names the component."""


def prove(symmetry: Symmetry, env: Env, seed: int) -> Finding:
    """An error that names what is wrong, or the word that it holds; a note where the environment cannot be set."""
    if not symmetry.state or not isinstance(env, Stateful) or not hasattr(env, "observe"):
        text = (
            f"{symmetry.name}: mirroring twice gives everything back; that a mirrored step does the mirrored thing was "
            "not proven, as this environment cannot be set to a mirrored state"
        )
        return Finding("note", "symmetry", text)
    env.reset(seed)
    try:
        for generator in (torch.Generator().manual_seed(seed + k) for k in range(STEPS)):
            _compare(symmetry, env, generator)
    except (Asymmetric, KeyError, IndexError, RuntimeError, ValueError) as error:
        detail = str(error) if isinstance(error, Asymmetric) else f"it cannot be tried out: {error}"
        return Finding("error", "symmetry", f"symmetry {symmetry.name!r} is declared wrongly: {detail}")
    return Finding("ok", "symmetry", f"{symmetry.name}: mirrored steps did the mirrored thing in {STEPS} states")


def _compare(symmetry: Symmetry, env: Any, generator: torch.Generator) -> None:
    """Do what is drawn, and the mirrored action in the mirrored state; leaves the environment after the first."""
    before, state = env.observe(), env.state_dict()
    mirrored = state | {"state": _mirrored_state(symmetry, state["state"])}
    env.load_state_dict(mirrored)
    for name, mirror in symmetry.obs.items():
        if name in before:
            _same(f"observation {name!r}", _apply(mirror, before[name]), env.observe()[name], "in a mirrored state")
    action = random_actions(env.spec, before, generator).to(env.spec.device)
    for what, tried in (*_single_actions(env, action), ("the action", action)):
        env.load_state_dict(mirrored)
        image = env.step(_mirrored_action(symmetry, env, tried)).map(torch.clone)
        env.load_state_dict(state)
        step = env.step(tried)
        _same_step(symmetry, step, image, what)


def _same_step(symmetry: Symmetry, step: Step, image: Step, what: str) -> None:
    when = f"after a mirrored step with {what}; it or its mirror is wrong"
    # What a step led to, also where an episode ended: a new one begins at random.
    last, mirrored = (each.obs if each.final_obs is None else each.final_obs for each in (step, image))
    for name, mirror in symmetry.obs.items():
        if name in last:
            _same(f"observation {name!r}", _apply(mirror, last[name]), mirrored[name], when)
    _same("the reward", step.reward, image.reward, when)
    _same("the end of the episode", step.terminated.float(), image.terminated.float(), when)


def _same(what: str, expected: Tensor, found: Tensor, when: str) -> None:
    expected, found = expected.reshape(len(found), -1), found.reshape(len(found), -1)
    wrong = (expected - found).abs() > TOLERANCE * expected.abs().amax().clamp(min=1.0)
    if wrong.any():
        row, i = wrong.nonzero()[0].tolist()
        number = "" if wrong.shape[1] == 1 else f" component {i}"
        values = f"{float(found[row, i]):.4g} instead of {float(expected[row, i]):.4g}"
        raise Asymmetric(f"{what}{number} is {values} {when}")


def _single_actions(env: Env, action: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The action with one component at a time, so that an error names the one."""
    if not isinstance(env.spec.action, Continuous):
        return
    for i in range(action.shape[-1]):
        alone = torch.zeros_like(action)
        alone[:, i] = action[:, i]
        yield f"action component {i} alone", alone


def _apply(mirror: AnyMirror, x: Tensor) -> Tensor:
    return mirror(x) if x.ndim > 1 else mirror(x.unsqueeze(-1)).squeeze(-1)


def _mirrored_state(symmetry: Symmetry, state: dict[str, Tensor]) -> dict[str, Tensor]:
    missing = sorted(set(state) - set(symmetry.state))
    if missing:
        raise Asymmetric(f"it says nothing of {missing[0]!r}, a part of the state")
    return {name: _apply(symmetry.state[name], x).to(x.dtype) for name, x in state.items()}


def _mirrored_action(symmetry: Symmetry, env: Env, action: Tensor) -> Tensor:
    spec, mirror = env.spec.action, symmetry.action
    if isinstance(spec, Continuous):
        return mirror(action)
    if not isinstance(mirror, Mirror):
        raise Asymmetric("a function mirrors choices, which can only be proven for an order of them")
    heads = action.reshape(len(action), -1)
    hot = torch.cat([torch.nn.functional.one_hot(heads[:, k], n) for k, n in enumerate(spec.nvec)], -1)
    chosen = [head.argmax(-1) for head in mirror(hot).split(spec.nvec, -1)]
    return torch.stack(chosen, -1).reshape(action.shape)
