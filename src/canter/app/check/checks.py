"""Checks of an environment and its settings before training, in about a second.

`preflight` runs them all; every finding names its subject and, for a problem, the remedy. T steps,
N environments, D components of an observation group.
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
)
from canter.app.check.random_rollout import RandomRollout, check_symmetry, run_random_actions
from canter.app.console.text import format_count
from canter.core import distributed
from canter.core.specs import (
    ACTION_MASK,
    INTERRUPTS,
    Continuous,
    ContractBroken,
    DescribesStep,
    Env,
    EnvFailed,
    EnvSpec,
    SharesCores,
)
from canter.envs import closed_quietly, unused_settings
from canter.envs.contract import absent_info
from canter.envs.failures import env_number, text_of
from canter.envs.gymnasium import GymnasiumEnv
from canter.training.config import RunConfig

STEPS = 256
"""Random steps of each environment."""
SECONDS = 0.3
"""Seconds after which the rollout of a slow environment ends early."""
SEED_STEPS = 32
"""Steps that equal seeds must repeat."""
HUGE_REWARD = 1e4
LONG_STEP = 1e-4
"""Seconds of a step of one environment above which several processes are worth suggesting."""
EXACT_IN_FLOAT32 = 2.0**24
"""Above this, float32 cannot represent all whole numbers."""
Messages = Iterator[tuple[Level, str]]
"""Levels and texts of the findings about one subject."""


def preflight(config: RunConfig, plan: Plan, env: Env | None = None) -> list[Finding]:
    """Run all checks and return their findings.

    They inspect the given environment, which is reset, stepped and left open, or a new one. `plan`
    has the numbers of the real run; the environments may be fewer. The random streams of the
    process are restored, so a run is the same with and without the checks.
    """
    with collect_warnings() as warned, ExitStack() as stack:
        # An environment may draw from the process's random streams: restore them for the run.
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        on_gpu = torch.device(config.device).type == "cuda"
        stack.enter_context(torch.random.fork_rng(devices=[config.device] if on_gpu else []))
        if env is None:
            env = stack.enter_context(closed_quietly(config.env.build(config.device)))
        findings, rollout = check_env(env, config.seed)
        plan = replace(plan, num_agents=env.spec.num_agents if config.self_play is None else 1)
        spec = replace(env.spec, num_envs=plan.num_actors // distributed.world_size())
        if rollout is not None and config.env.vectorization == "auto":
            findings += _speed(rollout, env, plan.num_envs)
        if isinstance(env, GymnasiumEnv) and env.runs_foreign_code:
            text = "the environments run in this process, and a crash of their code is a crash of the run"
            advice = "the line will be in its crash.txt; --env.vectorization forked keeps them out of it"
            findings.append(Finding("ok", "process", f"{text}: {advice}"))
        if isinstance(env, DescribesStep):
            findings.append(Finding("ok", "step", env.about()))
        lengths = [length for _, length, _ in rollout.episodes()] if rollout else []
        findings += check_plan(plan)
        findings.append(check_foresight(plan, sum(lengths) / len(lengths) if lengths else None))
        findings.append(check_truncation(spec))
        try:
            findings += _check_settings(config, plan, env, spec)
        except ValueError as error:
            findings.append(Finding("error", "settings", str(error)))
    return findings + warned


def _check_settings(config: RunConfig, plan: Plan, env: Env, spec: EnvSpec) -> Iterator[Finding]:
    """Yield findings about the settings; raise ValueError for settings that cannot work."""
    if config.self_play is not None:
        config.self_play.check(spec, plan.num_envs // distributed.world_size())
    for text in (
        *unused_settings(config.env, config.device),
        *unused_settings_of(config.algorithm, spec),
        *config.execution.unused_settings(config.device),
    ):
        yield Finding("warning", "settings", text)
    algorithm = config.algorithm.build(spec, config.seed)
    algorithm.use_engine(config.execution.engine)
    for subject, decision in algorithm.about().items():
        yield Finding("ok", subject, str(decision))
    yield check_memory(plan, spec, algorithm.empty_record(), algorithm.state_dict())
    for symmetry in symmetries_of(config.algorithm, env.spec):
        yield check_symmetry(symmetry, env, config.seed)


@contextmanager
def collect_warnings() -> Iterator[list[Finding]]:
    """Turn warnings of the block into findings, each once; Gymnasium's own checks only warn."""
    findings: list[Finding] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield findings
    texts = [re.sub(r"\x1b\[[0-9;]*m|WARN: ", "", str(item.message)) for item in caught]
    findings += [Finding("warning", "warned", " ".join(text.split())) for text in dict.fromkeys(texts)]


def check_env(env: Env, seed: int) -> tuple[list[Finding], RandomRollout | None]:
    """Take random steps in an environment; return the findings and the steps.

    The environment is left open. There are no steps if it raised an error.
    """
    try:
        rollout = run_random_actions(env, seed, steps=STEPS, seconds=SECONDS)
        same_seed = run_random_actions(env, seed, steps=min(SEED_STEPS, len(rollout.reward)), seconds=SECONDS)
        other_seed = run_random_actions(env, seed + 1, steps=len(same_seed.reward), seconds=SECONDS)
    except BaseException as error:  # any error of the environment is a finding
        if isinstance(error, INTERRUPTS):
            raise
        return [Finding("error", "environment", _describe_error(error))], None
    nonfinite = list(_nonfinite(rollout))
    if nonfinite:
        return nonfinite, rollout
    messages: dict[str, Messages] = {
        "observations": _observations(rollout),
        "actions": _actions(rollout.spec),
        "autoreset": _autoreset(rollout),
        "episodes": _episodes(rollout),
        "rewards": _rewards(rollout),
        "seeds": _seeds(rollout, same_seed, other_seed),
        "info": _info(env),
    }
    return [Finding(level, subject, text) for subject, lines in messages.items() for level, text in lines], rollout


def _nonfinite(rollout: RandomRollout) -> Iterator[Finding]:
    """Yield the first NaN or infinity of rewards and of each observation group."""
    tensors = {"reward": rollout.reward} | {f"observation {name!r}": group for name, group in rollout.obs.items()}
    for name, group in rollout.final_obs.items():
        ended = rollout.done.reshape(*rollout.done.shape, *[1] * (group.ndim - 2))
        tensors[f"final observation {name!r}"] = torch.where(ended, group, 0)
    for name, values in tensors.items():
        nonfinite = ~torch.isfinite(values)
        if nonfinite.any():
            t, env, *component = nonfinite.nonzero()[0].tolist()
            value = float(values[(t, env, *component)])
            where = f" component {component}" if component else ""
            at_reset = name.startswith("observation") and t == 0
            when = "at its reset" if at_reset else f"after {format_count(max(t, 1), 'random step')}"
            subject = "rewards" if name == "reward" else "observations"
            yield Finding("error", subject, f"environment {env} returned {name}{where} = {value} {when}")


def _observations(rollout: RandomRollout) -> Messages:
    """Yield shape, range, and components that never change."""
    constant = True
    for name, group in rollout.obs.items():
        if name == ACTION_MASK:
            continue
        low = group.amin().item()
        high = group.amax().item()
        shape = group.shape[2:]
        dtype = str(group.dtype).removeprefix("torch.")
        size = format_count(shape[0], "number") if len(shape) == 1 else f"{' x '.join(map(str, shape))} numbers"
        yield "ok", f"{name}: {size} ({dtype}) between {low:.3g} and {high:.3g} in random steps"
        largest = max(abs(low), abs(high))
        if group.dtype == torch.float32 and largest > EXACT_IN_FLOAT32:
            text = f"{name} reaches {largest:.3g}; float32 has about seven digits, so small changes are lost"
            yield "warning", f"{text}. Subtract a constant or use smaller units in the environment"
        unchanged = (group == group[:1, :1]).flatten(2).all(0).all(0)
        constant &= bool(unchanged.all())
        # Constant pixels at the borders of images are normal.
        if 0 < int(unchanged.sum()) < len(unchanged) and group.ndim == 3:
            indices = [str(i) for i in unchanged.nonzero().flatten().tolist()]
            text = f"{len(indices)} of {len(unchanged)} components of {name} never changed"
            yield "note", f"{text}: {_first(indices, 8)}"
    if constant:
        yield "warning", "no observation ever changed in random steps: the policy is blind; check the observations"


def _actions(spec: EnvSpec) -> Messages:
    action = spec.action
    if not isinstance(action, Continuous):
        masked = ", some of them forbidden at times by a mask" if ACTION_MASK in spec.obs else ""
        yield "ok", f"{' x '.join(map(str, action.nvec))} discrete actions{masked}"
        if max(action.nvec) < 2:
            yield "warning", "there is only one action, so there is nothing to learn"
        return
    bounds = sorted(set(zip(action.low, action.high, strict=True)))
    ranges = [f"{low:g}..{high:g}" for low, high in bounds]
    yield "ok", f"{format_count(action.dim, 'number')} in {_first(ranges, 4)}"
    if not action.bounded:
        text = (
            "not all actions have finite bounds: the policy's samples, of size about 1 at first, reach the environment "
            "unscaled. Give the action space bounds if its actions have another scale"
        )
        yield "note", text
    if any(low >= high for low, high in bounds):
        yield "warning", "an action component has equal bounds, so there is nothing to learn in it"


def _autoreset(rollout: RandomRollout) -> Messages:
    """Yield the way of resetting, and ends of episodes that do not look as declared."""
    if rollout.spec.final_obs == "in_place":
        yield "ok", "the step after the end of an episode only resets; such steps are left out of learning"
        unmarked = rollout.done[:-1] & rollout.valid[1:]
        if unmarked.any():
            t, env = unmarked.nonzero()[0].tolist()
            text = f"environment {env} ended at step {t + 1} and its next step is marked valid"
            yield "error", f"{text}, but it must be the reset: set Step.valid to False there"
        return
    yield "ok", "a finished environment restarts within the same step; no step is lost"
    ended = rollout.done
    last = {name: group for name, group in rollout.final_obs.items() if name != ACTION_MASK}
    same = all(torch.equal(group[ended], rollout.obs[name][1:][ended]) for name, group in last.items())
    varied = any(bool((rollout.obs[name] != rollout.obs[name][:1]).any()) for name in last)
    if ended.any() and same and varied:
        text = (
            "the last observation of every ended episode equals the first of the next: probably the true last one "
            "is lost, and truncated episodes would be bootstrapped from the wrong observation"
        )
        yield "warning", text


def _episodes(rollout: RandomRollout) -> Messages:
    episodes = rollout.episodes()
    steps = len(rollout.reward)
    none_ended = f"none ended within {steps} random steps"
    if not episodes and rollout.spec.truncates:
        yield "ok", f"{none_ended}; a time limit will end them"
    elif not episodes:
        consequence = "Without ends there are no returns to report, and bad states are never left"
        advice = "set max_episode_steps if there is none"
        yield "warning", f"{none_ended}, and no time limit is declared. {consequence}; {advice}"
    else:
        lengths = [length for _, length, _ in episodes]
        terminated = sum(end for _, _, end in episodes)
        ends = f"{terminated} terminated, {len(episodes) - terminated} truncated"
        yield "ok", f"{len(episodes)} ended in {steps} random steps, after {_span(lengths)} steps; {ends}"
        if max(lengths) == 1:
            text = "every episode ended at its first step: no action has later consequences. Is this intended?"
            yield "warning", text


def _rewards(rollout: RandomRollout) -> Messages:
    reward = rollout.reward[rollout.valid]
    if not len(reward):
        return
    low = reward.min().item() + 0.0  # + 0.0 turns -0.0 into 0.0
    high = reward.max().item() + 0.0
    text = f"between {low:.3g} and {high:.3g} a step"
    if returns := [return_ for return_, _, _ in rollout.episodes()]:
        text += f"; random actions earn {np.mean(returns):.4g} an episode ({_span(returns)}): the score to beat"
    yield "ok", text
    largest = max(abs(low), abs(high))
    if largest > HUGE_REWARD:
        advice = "divide them by a constant so that they are of order 1, and keep normalize_value on"
        yield "warning", f"they reach {largest:.3g}: {advice}"
    if largest == 0:
        text = f"all {len(reward):,} were 0: random actions find no reward, so training may never start"
        yield "warning", f"{text}. Reward partial success, or begin episodes closer to the goal"


def _seeds(rollout: RandomRollout, same_seed: RandomRollout, other_seed: RandomRollout) -> Messages:
    steps = len(same_seed.reward)
    if not _starts_with(rollout, same_seed):
        cause = "the environment draws from a source that reset(seed=...) does not set, so runs cannot be repeated"
        yield "warning", f"the same seed and actions gave two different trajectories: {cause}"
    elif _starts_with(rollout, other_seed):
        cause = "either the environment is deterministic, which is fine, or it ignores reset(seed=...)"
        yield "note", f"two seeds gave the same {steps} steps: {cause}"
    else:
        yield "ok", f"equal seeds gave equal {steps} steps, another seed different ones"


def _info(env: Env) -> Messages:
    """Yield an error for a number requested from `info` that never appeared."""
    absent = absent_info(env)
    if absent is not None:
        yield "error", absent


def _starts_with(rollout: RandomRollout, other: RandomRollout) -> bool:
    """Return whether all steps of `other` are the first ones of `rollout`."""
    steps = len(other.reward)
    return (
        all(torch.equal(rollout.obs[name][: len(group)], group) for name, group in other.obs.items())
        and torch.equal(rollout.reward[:steps], other.reward)
        and torch.equal(rollout.terminated[:steps], other.terminated)
        and torch.equal(rollout.truncated[:steps], other.truncated)
    )


def _speed(rollout: RandomRollout, env: Env, num_envs: int) -> Iterator[Finding]:
    seconds = rollout.seconds / env.spec.num_envs
    others = min(env.idle_cores, num_envs - 1) if isinstance(env, SharesCores) else 0
    if others > 0 and seconds > LONG_STEP:
        text = f"a step of one environment takes about {1e3 * seconds:.2g} ms, and {num_envs} take turns"
        advice = f"--env.vectorization forked would share them among {others + 1} cores"
        yield Finding("note", "speed", f"{text}; {advice}")


def _first(texts: list[str], count: int) -> str:
    return ", ".join(texts[:count]) + (", ..." if len(texts) > count else "")


def _span(values: list[Any]) -> str:
    low = min(values)
    high = max(values)
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def _describe_error(error: BaseException) -> str:
    """Return an error with its environment and its place in the code."""
    row = env_number(error)
    where = "" if row is None else f" (environment {row})"
    if isinstance(error, ContractBroken | EnvFailed):
        return f"random actions showed a broken contract{where}: {text_of(error)}"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"random actions ended in {type(error).__name__}: {text_of(error)}{place}{where}"
