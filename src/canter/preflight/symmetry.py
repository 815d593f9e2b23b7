"""Whether a declared symmetry is one: the environment, set to a mirrored state, must do the mirrored thing.

N environments, D components of a vector, A of an action.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from canter.preflight.plan import Finding
from canter.preflight.trial import random_actions
from canter.specs import AnyMirror, Continuous, Env, Mirror, Stateful, Step, Symmetry

STEPS = 24
"""States in which it is looked at; some come before and some after episodes have ended."""
TOLERANCE = 1e-3
"""Differences up to this share of a component's range are rounding."""


class Asymmetric(ValueError):
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
