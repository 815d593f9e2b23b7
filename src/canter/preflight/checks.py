"""A look at environment and settings before training starts, in about a second.

T steps, N environments, D components of an observation group.
"""

from __future__ import annotations

import contextlib
import random
import re
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from canter import distributed
from canter.algorithms.base import symmetries_of, unused_by
from canter.envs import closed_quietly, unused_settings
from canter.envs.gymnasium_contract import row_of, text_of
from canter.preflight.plan import Finding, Plan, check_foresight, check_memory, check_plan, check_truncation, counted
from canter.preflight.symmetry import prove
from canter.preflight.trial import Trial, run_trial
from canter.specs import ACTION_MASK, FROM_OUTSIDE, Continuous, ContractBroken, Env, EnvFailed
from canter.training.settings import RunConfig

STEPS, SECONDS = 256, 0.3
"""Random steps of each environment, and after how long a slow one may stop earlier."""
SEED_STEPS = 32
"""Steps that must repeat themselves under the same seed."""
HUGE_REWARD = 1e4
LONG_STEP = 1e-4
"""Seconds of a step of one environment from which on other processes are well worth asking."""
EXACT_IN_FLOAT32 = 2.0**24
"""Above it neighbouring whole numbers are one and the same in float32."""


def preflight(config: RunConfig, plan: Plan, env: Env | None = None) -> list[Finding]:
    """Everything there is to say before a run.

    It looks at the given environment, which is reset, stepped and left open, or at one of its own. `plan` tells the
    numbers of the real run; the environments may be fewer. The random streams of the process are left as they were, so
    a run is the same with and without it.
    """
    with _random_streams_kept(config.device), heard_warnings() as heard, ExitStack() as opened:
        env = opened.enter_context(closed_quietly(config.env.build(config.device))) if env is None else env
        found, trial = _examine(env, config.seed)
        plan = replace(plan, num_agents=env.spec.num_agents if config.self_play is None else 1)
        spec = replace(env.spec, num_envs=plan.rows // distributed.world_size())
        found += [] if trial is None or config.env.vectorization != "auto" else _speed(trial, env, plan.num_envs)
        about = getattr(env, "about", None)
        found += [] if about is None else [Finding("ok", "step", about())]
        lengths = [length for _, length, _ in trial.episodes()] if trial else []
        found += check_plan(plan)
        found += [check_foresight(plan, sum(lengths) / len(lengths) if lengths else None), check_truncation(spec)]
        try:
            if config.self_play is not None:
                config.self_play.check(spec, plan.num_envs // distributed.world_size())
            unused = (*unused_settings(config.env, config.device), *unused_by(config.algorithm, spec))
            found += [Finding("warning", "settings", line) for line in unused]
            algorithm = config.algorithm.build(spec, config.seed)
            algorithm.use_engine(config.execution.engine)
            found += [Finding("ok", what, str(chosen)) for what, chosen in algorithm.about().items()]
            found.append(check_memory(plan, spec, algorithm.empty_record(), algorithm.state_dict()))
            found += [prove(symmetry, env, config.seed) for symmetry in symmetries_of(config.algorithm, env.spec)]
        except ValueError as error:
            found.append(Finding("error", "settings", str(error)))
    return found + heard


def examine(env: Env, seed: int = 0) -> list[Finding]:
    """What a few random steps show about an environment; it is reset and stepped, and left open."""
    with heard_warnings() as heard:
        found, _ = _examine(env, seed)
    return found + heard


@contextlib.contextmanager
def heard_warnings() -> Iterator[list[Finding]]:
    """Warnings given inside become findings, each once, in the list; Gymnasium's own checks speak this way."""
    findings: list[Finding] = []
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        yield findings
    texts = [re.sub(r"\x1b\[[0-9;]*m|WARN: ", "", str(item.message)) for item in heard]
    findings += [Finding("warning", "warned", " ".join(text.split())) for text in dict.fromkeys(texts)]


def _examine(env: Env, seed: int) -> tuple[list[Finding], Trial | None]:
    try:
        trial = run_trial(env, seed, steps=STEPS, seconds=SECONDS)
        again = run_trial(env, seed, steps=min(SEED_STEPS, len(trial.reward)), seconds=SECONDS)
        other = run_trial(env, seed + 1, steps=len(again.reward), seconds=SECONDS)
    except BaseException as error:  # whatever an environment raises is what there is to report
        if isinstance(error, FROM_OUTSIDE):
            raise
        return [Finding("error", "environment", _raised(error))], None
    broken = list(_not_finite(trial))
    if broken:
        return broken, trial
    checks = (_observations, _actions, _autoreset, _episodes, _rewards)
    found = [finding for check in checks for finding in check(trial)]
    return [*found, *_seeds(trial, again, other)], trial


def _not_finite(trial: Trial) -> Iterator[Finding]:
    """The first NaN or infinity of each kind."""
    seen = {"reward": trial.reward} | {f"observation {name!r}": group for name, group in trial.obs.items()}
    for name in trial.obs:
        last = [torch.zeros_like(trial.obs[name][0]) if obs is None else obs[name] for obs in trial.final_obs]
        ended = trial.done.reshape(*trial.done.shape, *[1] * (trial.obs[name].ndim - 2))
        seen[f"final observation {name!r}"] = torch.where(ended, torch.stack(last), 0)
    for what, values in seen.items():
        bad = ~torch.isfinite(values)
        if bad.any():
            t, row, *component = bad.nonzero()[0].tolist()
            where = f" component {component}" if component else ""
            reset = what.startswith("observation") and t == 0
            when = "at its reset" if reset else f"after {counted(max(t, 1), 'random step')}"
            value = float(values[(t, row, *component)])
            yield Finding("error", what.split()[0] + "s", f"environment {row} gave {what}{where} = {value} {when}")


def _observations(trial: Trial) -> Iterator[Finding]:
    """Form, range, and components that never change."""
    blind = True
    for name, group in trial.obs.items():
        if name == ACTION_MASK:
            continue
        low, high = group.amin().item(), group.amax().item()
        shape, dtype = group.shape[2:], str(group.dtype).removeprefix("torch.")
        form = counted(shape[0], "number") if len(shape) == 1 else f"{' x '.join(map(str, shape))} numbers"
        text = f"{name}: {form} ({dtype}) between {low:.3g} and {high:.3g} in random steps"
        yield Finding("ok", "observations", text)
        if group.dtype == torch.float32 and max(abs(low), abs(high)) > EXACT_IN_FLOAT32:
            text = (
                f"{name} reaches {max(abs(low), abs(high)):.3g}; float32 holds about seven digits, so small changes "
                "are lost. Subtract a constant or use smaller units in the environment"
            )
            yield Finding("warning", "observations", text)
        still = (group == group[:1, :1]).flatten(2).all(0).all(0)
        blind &= bool(still.all())
        # Constant pixels at the borders of images are normal.
        if 0 < int(still.sum()) < len(still) and group.ndim == 3:
            listed = still.nonzero().flatten().tolist()
            which = ", ".join(map(str, listed[:8])) + (", ..." if len(listed) > 8 else "")
            text = f"{len(listed)} of {len(still)} components of {name} never changed: {which}"
            yield Finding("note", "observations", text)
    if blind:
        text = "no observation ever changed in random steps: the policy is blind, so check what is observed"
        yield Finding("warning", "observations", text)


def _actions(trial: Trial) -> Iterator[Finding]:
    action = trial.spec.action
    if isinstance(action, Continuous):
        bounds = sorted({(low, high) for low, high in zip(action.low, action.high, strict=True)})
        ranges = ", ".join(f"{low:g}..{high:g}" for low, high in bounds[:4]) + (", ..." if len(bounds) > 4 else "")
        yield Finding("ok", "actions", f"{counted(action.dim, 'number')} in {ranges}")
        if not action.bounded:
            text = (
                "not all actions have finite bounds: there the policy's samples, of size about 1 at first, reach the "
                "environment as drawn, up to a bound. Give the space bounds if it means something else by 1"
            )
            yield Finding("note", "actions", text)
        if any(low >= high for low, high in bounds):
            yield Finding("warning", "actions", "a component whose bounds are equal leaves nothing to decide")
        return
    masked = ", some of them forbidden at times by a mask" if ACTION_MASK in trial.spec.obs else ""
    yield Finding("ok", "actions", f"{' x '.join(map(str, action.nvec))} choices{masked}")
    if max(action.nvec) < 2:
        yield Finding("warning", "actions", "with a single choice there is nothing to decide")


def _autoreset(trial: Trial) -> Iterator[Finding]:
    """How the next episode begins, and whether ends look as declared."""
    if trial.spec.final_obs != "in_place":
        yield Finding("ok", "autoreset", "a finished environment restarts within the same step; no row is wasted")
        groups = [name for name in trial.obs if name != ACTION_MASK]
        ended = [(t, row) for t, row in trial.done.nonzero().tolist()]
        same = [all(_equal(trial, name, t, row) for name in groups) for t, row in ended]
        varied = any(bool((trial.obs[name] != trial.obs[name][:1]).any()) for name in groups)
        if ended and all(same) and varied:
            text = (
                "the last observation of every ended episode equals the first of the next: it looks as if the true "
                "last one is lost, and a truncated episode would be valued by the wrong observation"
            )
            yield Finding("warning", "autoreset", text)
        return
    yield Finding("ok", "autoreset", "the step after an end only resets; such rows are left out of learning")
    missed = trial.done[:-1] & trial.valid[1:]
    if missed.any():
        t, row = missed.nonzero()[0].tolist()
        text = f"environment {row} ended at step {t + 1} and its next row is marked valid, though it must be the reset"
        yield Finding("error", "autoreset", text)


def _equal(trial: Trial, name: str, t: int, row: int) -> bool:
    final = trial.final_obs[t]
    return final is not None and torch.equal(final[name][row], trial.obs[name][t + 1, row])


def _episodes(trial: Trial) -> Iterator[Finding]:
    episodes, steps = trial.episodes(), len(trial.reward)
    if not episodes:
        text = f"none ended within {steps} random steps"
        if trial.spec.truncates:
            yield Finding("ok", "episodes", f"{text}; a time limit will end them")
        else:
            advice = (
                "no time limit is declared. Without ends there are no returns to report and the worst state is never "
                "left; give max_episode_steps if there is none"
            )
            yield Finding("warning", "episodes", f"{text}, and {advice}")
        return
    lengths = [length for _, length, _ in episodes]
    ended = sum(terminated for _, _, terminated in episodes)
    text = (
        f"{len(episodes)} ended in {steps} random steps, after {_span(lengths)} steps; "
        f"{ended} terminated, {len(episodes) - ended} truncated"
    )
    yield Finding("ok", "episodes", text)
    if max(lengths) == 1:
        text = "every episode ended at its first step: no action has a consequence, unless that is the task"
        yield Finding("warning", "episodes", text)


def _rewards(trial: Trial) -> Iterator[Finding]:
    reward = trial.reward[trial.valid]
    if not len(reward):
        return
    low, high = reward.min().item() + 0.0, reward.max().item() + 0.0  # never -0
    text = f"between {low:.3g} and {high:.3g} a step"
    if returns := [return_ for return_, _, _ in trial.episodes()]:
        text += f"; random actions earn {np.mean(returns):.4g} an episode ({_span(returns)}): the score to beat"
    yield Finding("ok", "rewards", text)
    if max(abs(low), abs(high)) > HUGE_REWARD:
        text = (
            f"they reach {max(abs(low), abs(high)):.3g}: divide them by a constant so that they are of order 1, and "
            "keep normalize_value on"
        )
        yield Finding("warning", "rewards", text)
    if low == high == 0:
        text = (
            f"all {len(reward):,} were 0: chance finds nothing to learn from here, so training may never start. "
            "A reward for partial success, or easier starts, would help"
        )
        yield Finding("warning", "rewards", text)


def _seeds(trial: Trial, again: Trial, other: Trial) -> Iterator[Finding]:
    steps = min(len(again.reward), len(trial.reward))
    if not _same(trial, again, steps):
        text = (
            "the same seed and actions gave two different trajectories: the environment draws from a source that "
            "reset(seed=...) does not set, so runs cannot be repeated"
        )
        yield Finding("warning", "seeds", text)
    elif _same(trial, other, min(steps, len(other.reward))):
        text = (
            f"two seeds gave the same {steps} steps: either nothing here is left to chance, which is fine, or "
            "reset(seed=...) is ignored"
        )
        yield Finding("note", "seeds", text)
    else:
        yield Finding("ok", "seeds", f"the same seed gave the same {steps} steps twice, another seed other ones")


def _speed(trial: Trial, env: Env, num_envs: int) -> Iterator[Finding]:
    each, others = trial.seconds / env.spec.num_envs, min(getattr(env, "idle_cores", 0), num_envs - 1)
    if others > 0 and each > LONG_STEP:
        text = f"a step of one environment takes about {1e3 * each:.2g} ms, and {num_envs} take turns"
        yield Finding("note", "speed", f"{text}; --env.vectorization forked would share them among {others + 1} cores")


def _same(one: Trial, other: Trial, steps: int) -> bool:
    seen = all(torch.equal(one.obs[name][: steps + 1], other.obs[name][: steps + 1]) for name in one.obs)
    came = ("reward", "terminated", "truncated")
    return seen and all(torch.equal(getattr(one, name)[:steps], getattr(other, name)[:steps]) for name in came)


def _span(values: list[Any]) -> str:
    low, high = min(values), max(values)
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def _raised(error: BaseException) -> str:
    """An error with the environment and the place that it comes from."""
    row = error.row if isinstance(error, EnvFailed) else row_of(error.__traceback__)
    who = "" if row is None else f" (environment {row})"
    if isinstance(error, ContractBroken | EnvFailed):
        return f"random actions showed a broken contract{who}: {text_of(error)}"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"random actions ended in {type(error).__name__}: {text_of(error)}{place}{who}"


@contextlib.contextmanager
def _random_streams_kept(device: str) -> Iterator[None]:
    """An environment that draws from the process's own streams must not move those of the run."""
    python, array = random.getstate(), np.random.get_state()
    devices = [device] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(array)
