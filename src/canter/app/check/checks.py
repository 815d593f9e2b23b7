"""A look at environment and settings before training starts, in about a second.

T steps, N environments, D components of an observation group.
"""

from __future__ import annotations

import random
import re
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from canter.algorithms.base import symmetries_of, unused_settings_of
from canter.app.check.plan import (
    Finding,
    Level,
    Plan,
    check_foresight,
    check_memory,
    check_plan,
    check_truncation,
    counted,
)
from canter.app.check.trial import Trial, prove, run_trial
from canter.core import distributed
from canter.core.specs import ACTION_MASK, INTERRUPTS, Continuous, ContractBroken, Env, EnvFailed
from canter.envs import closed_quietly, unused_settings
from canter.envs.failures import env_number, text_of
from canter.training.config import RunConfig

STEPS, SECONDS = 256, 0.3
"""Random steps of each environment, and after how long a slow one may stop earlier."""
SEED_STEPS = 32
"""Steps that must repeat themselves under the same seed."""
HUGE_REWARD = 1e4
LONG_STEP = 1e-4
"""Seconds of a step of one environment from which on other processes are well worth asking."""
EXACT_IN_FLOAT32 = 2.0**24
"""Above it neighbouring whole numbers are one and the same in float32."""
Told = Iterator[tuple[Level, str]]
"""What there is to say about one subject."""


def preflight(config: RunConfig, plan: Plan, env: Env | None = None) -> list[Finding]:
    """Everything there is to say before a run.

    It looks at the given environment, which is reset, stepped and left open, or at one of its own. `plan` tells the
    numbers of the real run; the environments may be fewer. The random streams of the process are left as they were, so
    a run is the same with and without it.
    """
    with heard_warnings() as heard, ExitStack() as opened:
        # An environment that draws from the process's own streams must not move those of the run.
        opened.callback(random.setstate, random.getstate())
        opened.callback(np.random.set_state, np.random.get_state())
        on_gpu = torch.device(config.device).type == "cuda"
        opened.enter_context(torch.random.fork_rng(devices=[config.device] if on_gpu else []))
        env = opened.enter_context(closed_quietly(config.env.build(config.device))) if env is None else env
        found, trial = examine(env, config.seed)
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
            unused = [
                *unused_settings(config.env, config.device),
                *unused_settings_of(config.algorithm, spec),
                *config.execution.unused_settings(config.device),
            ]
            found += [Finding("warning", "settings", line) for line in unused]
            algorithm = config.algorithm.build(spec, config.seed)
            algorithm.use_engine(config.execution.engine)
            found += [Finding("ok", what, str(chosen)) for what, chosen in algorithm.about().items()]
            found.append(check_memory(plan, spec, algorithm.empty_record(), algorithm.state_dict()))
            found += [prove(symmetry, env, config.seed) for symmetry in symmetries_of(config.algorithm, env.spec)]
        except ValueError as error:
            found.append(Finding("error", "settings", str(error)))
    return found + heard


@contextmanager
def heard_warnings() -> Iterator[list[Finding]]:
    """Warnings given inside become findings, each once, in the list; Gymnasium's own checks speak this way."""
    findings: list[Finding] = []
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        yield findings
    texts = [re.sub(r"\x1b\[[0-9;]*m|WARN: ", "", str(item.message)) for item in heard]
    findings += [Finding("warning", "warned", " ".join(text.split())) for text in dict.fromkeys(texts)]


def examine(env: Env, seed: int) -> tuple[list[Finding], Trial | None]:
    """What a few random steps show about an environment, and these steps; it is reset and stepped, and left open."""
    try:
        trial = run_trial(env, seed, steps=STEPS, seconds=SECONDS)
        again = run_trial(env, seed, steps=min(SEED_STEPS, len(trial.reward)), seconds=SECONDS)
        other = run_trial(env, seed + 1, steps=len(again.reward), seconds=SECONDS)
    except BaseException as error:  # whatever an environment raises is what there is to report
        if isinstance(error, INTERRUPTS):
            raise
        return [Finding("error", "environment", _raised(error))], None
    broken = list(_not_finite(trial))
    if broken:
        return broken, trial
    told: dict[str, Told] = {
        "observations": _observations(trial),
        "actions": _actions(trial),
        "autoreset": _autoreset(trial),
        "episodes": _episodes(trial),
        "rewards": _rewards(trial),
        "seeds": _seeds(trial, again, other),
    }
    return [Finding(level, subject, text) for subject, lines in told.items() for level, text in lines], trial


def _not_finite(trial: Trial) -> Iterator[Finding]:
    """The first NaN or infinity of each kind."""
    seen = {"reward": trial.reward} | {f"observation {name!r}": group for name, group in trial.obs.items()}
    for name, group in trial.final_obs.items():
        ended = trial.done.reshape(*trial.done.shape, *[1] * (group.ndim - 2))
        seen[f"final observation {name!r}"] = torch.where(ended, group, 0)
    for what, values in seen.items():
        bad = ~torch.isfinite(values)
        if bad.any():
            t, row, *component = bad.nonzero()[0].tolist()
            where = f" component {component}" if component else ""
            reset = what.startswith("observation") and t == 0
            when = "at its reset" if reset else f"after {counted(max(t, 1), 'random step')}"
            value, subject = float(values[(t, row, *component)]), "rewards" if what == "reward" else "observations"
            yield Finding("error", subject, f"environment {row} gave {what}{where} = {value} {when}")


def _observations(trial: Trial) -> Told:
    """Form, range, and components that never change."""
    blind = True
    for name, group in trial.obs.items():
        if name == ACTION_MASK:
            continue
        low, high = group.amin().item(), group.amax().item()
        shape, dtype = group.shape[2:], str(group.dtype).removeprefix("torch.")
        form = counted(shape[0], "number") if len(shape) == 1 else f"{' x '.join(map(str, shape))} numbers"
        yield "ok", f"{name}: {form} ({dtype}) between {low:.3g} and {high:.3g} in random steps"
        largest = max(abs(low), abs(high))
        if group.dtype == torch.float32 and largest > EXACT_IN_FLOAT32:
            text = f"{name} reaches {largest:.3g}; float32 holds about seven digits, so small changes are lost"
            yield "warning", f"{text}. Subtract a constant or use smaller units in the environment"
        still = (group == group[:1, :1]).flatten(2).all(0).all(0)
        blind &= bool(still.all())
        # Constant pixels at the borders of images are normal.
        if 0 < int(still.sum()) < len(still) and group.ndim == 3:
            listed = [str(i) for i in still.nonzero().flatten().tolist()]
            text = f"{len(listed)} of {len(still)} components of {name} never changed"
            yield "note", f"{text}: {_first_of(listed, 8)}"
    if blind:
        yield "warning", "no observation ever changed in random steps: the policy is blind, so check what is observed"


def _actions(trial: Trial) -> Told:
    action = trial.spec.action
    if not isinstance(action, Continuous):
        masked = ", some of them forbidden at times by a mask" if ACTION_MASK in trial.spec.obs else ""
        yield "ok", f"{' x '.join(map(str, action.nvec))} choices{masked}"
        if max(action.nvec) < 2:
            yield "warning", "with a single choice there is nothing to decide"
        return
    bounds = sorted(set(zip(action.low, action.high, strict=True)))
    ranges = [f"{low:g}..{high:g}" for low, high in bounds]
    yield "ok", f"{counted(action.dim, 'number')} in {_first_of(ranges, 4)}"
    if not action.bounded:
        text = (
            "not all actions have finite bounds: there the policy's samples, of size about 1 at first, reach the "
            "environment as drawn, up to a bound. Give the space bounds if it means something else by 1"
        )
        yield "note", text
    if any(low >= high for low, high in bounds):
        yield "warning", "a component whose bounds are equal leaves nothing to decide"


def _autoreset(trial: Trial) -> Told:
    """How the next episode begins, and whether ends look as declared."""
    if trial.spec.final_obs == "in_place":
        yield "ok", "the step after an end only resets; such rows are left out of learning"
        missed = trial.done[:-1] & trial.valid[1:]
        if missed.any():
            t, row = missed.nonzero()[0].tolist()
            text = f"environment {row} ended at step {t + 1} and its next row is marked valid"
            yield "error", f"{text}, though it must be the reset"
        return
    yield "ok", "a finished environment restarts within the same step; no row is wasted"
    ended, last = trial.done, {name: group for name, group in trial.final_obs.items() if name != ACTION_MASK}
    same = all(torch.equal(group[ended], trial.obs[name][1:][ended]) for name, group in last.items())
    varied = any(bool((trial.obs[name] != trial.obs[name][:1]).any()) for name in last)
    if ended.any() and same and varied:
        text = (
            "the last observation of every ended episode equals the first of the next: it looks as if the true last "
            "one is lost, and a truncated episode would be valued by the wrong observation"
        )
        yield "warning", text


def _episodes(trial: Trial) -> Told:
    episodes, steps = trial.episodes(), len(trial.reward)
    none = f"none ended within {steps} random steps"
    if not episodes and trial.spec.truncates:
        yield "ok", f"{none}; a time limit will end them"
    elif not episodes:
        why = "Without ends there are no returns to report and the worst state is never left"
        advice = "give max_episode_steps if there is none"
        yield "warning", f"{none}, and no time limit is declared. {why}; {advice}"
    else:
        lengths = [length for _, length, _ in episodes]
        ended = sum(terminated for _, _, terminated in episodes)
        how = f"{ended} terminated, {len(episodes) - ended} truncated"
        yield "ok", f"{len(episodes)} ended in {steps} random steps, after {_span(lengths)} steps; {how}"
        if max(lengths) == 1:
            text = "every episode ended at its first step: no action has a consequence, unless that is the task"
            yield "warning", text


def _rewards(trial: Trial) -> Told:
    reward = trial.reward[trial.valid]
    if not len(reward):
        return
    low, high = reward.min().item() + 0.0, reward.max().item() + 0.0  # never -0
    text = f"between {low:.3g} and {high:.3g} a step"
    if returns := [return_ for return_, _, _ in trial.episodes()]:
        text += f"; random actions earn {np.mean(returns):.4g} an episode ({_span(returns)}): the score to beat"
    yield "ok", text
    largest = max(abs(low), abs(high))
    if largest > HUGE_REWARD:
        advice = "divide them by a constant so that they are of order 1, and keep normalize_value on"
        yield "warning", f"they reach {largest:.3g}: {advice}"
    if largest == 0:
        text = f"all {len(reward):,} were 0: chance finds nothing to learn from here, so training may never start"
        yield "warning", f"{text}. A reward for partial success, or easier starts, would help"


def _seeds(trial: Trial, again: Trial, other: Trial) -> Told:
    steps = len(again.reward)
    if not _same(trial, again):
        source = "the environment draws from a source that reset(seed=...) does not set, so runs cannot be repeated"
        yield "warning", f"the same seed and actions gave two different trajectories: {source}"
    elif _same(trial, other):
        why = "either nothing here is left to chance, which is fine, or reset(seed=...) is ignored"
        yield "note", f"two seeds gave the same {steps} steps: {why}"
    else:
        yield "ok", f"the same seed gave the same {steps} steps twice, another seed other ones"


def _same(one: Trial, other: Trial) -> bool:
    """Whether all steps of `other` are the first ones of `one`."""
    seen = all(torch.equal(one.obs[name][: len(group)], group) for name, group in other.obs.items())
    came = ("reward", "terminated", "truncated")
    return seen and all(torch.equal(getattr(one, name)[: len(other.reward)], getattr(other, name)) for name in came)


def _speed(trial: Trial, env: Env, num_envs: int) -> Iterator[Finding]:
    each, others = trial.seconds / env.spec.num_envs, min(getattr(env, "idle_cores", 0), num_envs - 1)
    if others > 0 and each > LONG_STEP:
        text = f"a step of one environment takes about {1e3 * each:.2g} ms, and {num_envs} take turns"
        yield Finding("note", "speed", f"{text}; --env.vectorization forked would share them among {others + 1} cores")


def _first_of(texts: list[str], most: int) -> str:
    return ", ".join(texts[:most]) + (", ..." if len(texts) > most else "")


def _span(values: list[Any]) -> str:
    low, high = min(values), max(values)
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def _raised(error: BaseException) -> str:
    """An error with the environment and the place that it comes from."""
    row = env_number(error)
    who = "" if row is None else f" (environment {row})"
    if isinstance(error, ContractBroken | EnvFailed):
        return f"random actions showed a broken contract{who}: {text_of(error)}"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"random actions ended in {type(error).__name__}: {text_of(error)}{place}{who}"
