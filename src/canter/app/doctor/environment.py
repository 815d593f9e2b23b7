"""The diagnosis of an environment before a run: what random and constant actions earn.

T steps, N environments, A components of an action.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from canter.algorithms.base import Algorithm, report_spec_of
from canter.algorithms.doctor.findings import Evidence, Finding, Rule, Rules, Signals, diagnose_signals
from canter.algorithms.doctor.ppo import no_effect, success_from_start
from canter.algorithms.doctor.signals import PREFIX, action_effect, episode_signals, measure
from canter.algorithms.doctor.task import (
    blind,
    broken_env,
    constant_reward,
    deadline_terminates,
    final_obs,
    no_reward,
    short_discount,
)
from canter.app.experiments.task import open_env, plan_run
from canter.config import TrainConfig
from canter.core.data.rollout import Rollout
from canter.core.plain import to_plain
from canter.core.seeding import derive_seed
from canter.core.specs import ACTION_MASK, Continuous, Discrete, Env, EnvSpec
from canter.core.struct import Metrics, Obs, State, TensorStruct
from canter.play.player import random_actions, zero_actions
from canter.runs.records import flatten
from canter.training.collector import Collector
from canter.training.progress import RunProgress

HORIZON = 128
ROLLOUTS = 8
"""Rollouts of each baseline, of `HORIZON` steps."""
SECONDS = 1.0
"""Time after which the baseline of a slow environment ends early, once it has the rollouts that rules need."""
MAX_ENVS = 16
MAX_ACTIONS = 6
"""Discrete actions that are tried as constant ones."""
RANDOM = "random"
RUN_SHARE = 0.2
"""Share of a run that the rules take the baselines for: a goal may still be found later."""
SHORTER_IS_BETTER = -0.9
"""Correlation of returns and lengths from which early ends pay."""


@dataclass
class BaselineRecord(TensorStruct):
    """Record of a step."""

    action: Tensor


class BaselinePolicy(Algorithm[BaselineRecord]):
    """Takes random actions, or one constant action `[N, ...]`; learns nothing."""

    horizon = HORIZON
    policy: Any = None

    def __init__(self, spec: EnvSpec, constant: Tensor | None, seed: int) -> None:
        self.spec = spec
        self.constant = constant
        self.generator = torch.Generator().manual_seed(seed)
        self.policy = self

    def initial_state(self, num_envs: int) -> State:
        """Return `()`: there is no recurrent state."""
        return ()

    def empty_record(self) -> BaselineRecord:
        """Return an action of every environment."""
        return BaselineRecord(zero_actions(self.spec, {}).to(self.spec.device))

    def act(self, obs: Obs, state: State, reset: Tensor) -> tuple[Tensor, BaselineRecord, State]:
        """Return the actions `[N, ...]`."""
        action = random_actions(self.spec, obs, self.generator) if self.constant is None else self.constant
        action = action.to(self.spec.device)
        return action, BaselineRecord(action), state

    def update(self, rollout: Rollout[BaselineRecord]) -> Metrics:
        """Return {}: nothing is learned."""
        return {}

    def signals(self, rollout: Rollout[BaselineRecord]) -> Metrics:
        """Return how surely random actions move observations or rewards; {} for constant ones."""
        action = rollout.record.action
        space = self.spec.action
        if self.constant is not None or ACTION_MASK in self.spec.obs:
            return {}
        if isinstance(space, Continuous):
            centred = action - action.mean((0, 1))
            return action_effect(torch.cat([centred, centred.abs()], -1), rollout)
        return action_effect(one_hot(action, space.n) - 1.0 / space.n, rollout) if isinstance(space, Discrete) else {}


@dataclass(frozen=True)
class Baseline:
    """Episodes and signals of a policy that learns nothing."""

    name: str
    episodes: Sequence[tuple[float, int, bool]]
    """Return, length and whether it terminated."""
    rows: Sequence[Mapping[str, Any]]
    """One for each rollout, as in the log of a run."""

    def plain(self) -> dict[str, Any]:
        """Return means as plain data; null if no episode ended."""
        returns = [return_ for return_, _, _ in self.episodes]
        lengths = [length for _, length, _ in self.episodes]
        return {
            "policy": self.name,
            "episodes": len(returns),
            "return": statistics.fmean(returns) if returns else None,
            "return_std": statistics.stdev(returns) if len(returns) > 1 else None,
            "length": statistics.fmean(lengths) if lengths else None,
            "terminated": statistics.fmean(end for _, _, end in self.episodes) if returns else None,
            "reward": statistics.fmean(row["rollout_reward"] for row in self.rows),
            "reward_min": min((row.get(f"{PREFIX}reward_min", 0.0) for row in self.rows), default=None),
            "reward_max": max((row.get(f"{PREFIX}reward_max", 0.0) for row in self.rows), default=None),
        }


@dataclass(frozen=True)
class EnvDiagnosis:
    """Returns of policies that learn nothing, and at most three findings; none if all is well."""

    env_id: str
    baselines: list[Baseline]
    """Random actions first, then constant ones."""
    findings: list[Finding]

    def json(self) -> str:
        """Return everything as JSON."""
        baselines = [baseline.plain() for baseline in self.baselines]
        found = [finding.plain() for finding in self.findings]
        return json.dumps({"env": self.env_id, "baselines": baselines, "findings": found}, indent=1)

    def table(self) -> str:
        """Return the baselines as a table."""
        lines = [f"{'policy':<16}{'episodes':>9}{'return':>22}{'length':>9}{'terminated':>12}{'reward per step':>28}"]
        for numbers in (baseline.plain() for baseline in self.baselines):
            spread = "" if numbers["return_std"] is None else f" ± {numbers['return_std']:.3g}"
            ends = ["-"] * 3
            if numbers["return"] is not None:
                ends = [f"{numbers['return']:.4g}{spread}", f"{numbers['length']:.4g}", f"{numbers['terminated']:.0%}"]
            rewards = f"{numbers['reward']:.3g} ({numbers['reward_min']:.3g} to {numbers['reward_max']:.3g})"
            lines.append(f"{numbers['policy']:<16}{numbers['episodes']:>9}{ends[0]:>22}{ends[1]:>9}{ends[2]:>12}"
                         f"{rewards:>28}")  # fmt: skip
        return "\n".join(lines)

    @property
    def flags(self) -> str:
        """Flags of all changes on the command line."""
        return " ".join(finding.flags for finding in self.findings if finding.flags)


def diagnose_env(
    task: Any, *, config: TrainConfig | None = None, preset: str | None = None, **settings: Any
) -> EnvDiagnosis:
    """Try random and constant actions in an environment, and look for faults before anything is trained.

    The arguments are those of `canter.train`.

        print(canter.diagnose_env("Pendulum-v1").findings)
    """
    plan = plan_run(task, None, config, preset, settings)
    config = replace(plan.config, env=replace(plan.config.env, num_envs=min(plan.config.env.num_envs, MAX_ENVS)))
    with open_env(config, plan.env) as env:
        actions = {RANDOM: None} | constant_actions(env.spec)
        baselines = [measure_baseline(name, env, config, action) for name, action in actions.items()]
    plain = dict(flatten(to_plain(config)))
    plain["total_steps"] = baselines[0].rows[-1]["env_steps"] / RUN_SHARE
    findings = find_faults(plain, baselines, report_spec_of(config.algorithm).rules)
    return EnvDiagnosis(config.env.id, baselines, findings)


def constant_actions(spec: EnvSpec) -> dict[str, Tensor]:
    """Return constant actions `[N, ...]` to try, by name."""
    action = spec.action
    n = spec.num_envs
    if ACTION_MASK in spec.obs:
        return {}  # an action may be forbidden
    zero = zero_actions(spec, {})
    if isinstance(action, Continuous):
        low = torch.tensor(action.low).nan_to_num(neginf=-1.0).expand(n, -1).clone()
        high = torch.tensor(action.high).nan_to_num(posinf=1.0).expand(n, -1).clone()
        return {"zero": zero, "all lowest": low, "all highest": high}
    if isinstance(action, Discrete):
        return {f"action {k}": torch.full_like(zero, k) for k in range(min(action.n, MAX_ACTIONS))}
    highest = torch.tensor(action.nvec).expand(n, -1) - 1
    return {"all first": zero, "all last": highest.to(zero.dtype)}


def measure_baseline(name: str, env: Env, config: TrainConfig, constant: Tensor | None) -> Baseline:
    """Play some rollouts; return their episodes and rows."""
    seed = derive_seed(config.seed, "eval")
    policy = BaselinePolicy(env.spec, constant, seed)
    collector = Collector(env, policy, seed)
    progress = RunProgress(None, config.success, collector.clock)
    std = dict(flatten(to_plain(config))).get("algorithm.model.std.initial")
    rows = []
    start = time.perf_counter()
    needed = 6 if constant is None else 3
    while len(rows) < ROLLOUTS and (len(rows) < needed or time.perf_counter() - start < SECONDS):
        rollout = collector.collect()
        signals = measure(rollout, policy.signals)
        progress.add(signals, rollout.valid)
        report = progress.report(collector.read_episodes())
        row = report.row() | episode_signals(list(progress.recent))
        # As of an untrained policy: all its noise is there.
        rows.append(row | {"policy/entropy": 1.0, "policy/std": std})
    return Baseline(name, list(progress.recent), rows)


def find_faults(settings: Mapping[str, Any], baselines: Sequence[Baseline], tables: Sequence[Rules]) -> list[Finding]:
    """Return the findings of the first group of rules that has any, three at most."""
    every = [Signals(settings, baseline.rows) for baseline in baselines]

    def everywhere(rule: Rule) -> Rule:
        return lambda signals: rule(signals) if all(rule(other) is not None for other in every) else None

    def anywhere(rule: Rule) -> Rule:
        return lambda signals: next((found for other in every if (found := rule(other)) is not None), None)

    rules = Rules(
        environment=(
            *map(everywhere, (no_reward, constant_reward, blind)),
            broken_env,
            *map(anywhere, (deadline_terminates, final_obs)),
            lambda signals: early_ends_pay(signals, baselines),
            no_effect,
        ),
        scales=[rule for table in tables for rule in table.groups["scales"]],
        settings=(short_discount, success_from_start),
    )
    return diagnose_signals(every[0], [rules])


def early_ends_pay(signals: Signals, baselines: Sequence[Baseline]) -> Finding | None:
    """All episodes terminate, all returns are negative, and the shorter the episode the higher its return."""
    episodes = [episode for baseline in baselines for episode in baseline.episodes]
    if signals.setting("success.ending") in ("terminated", "any") or signals.self_play or len(episodes) < 20:
        return None
    returns = [return_ for return_, _, _ in episodes]
    lengths = [float(length) for _, length, _ in episodes]
    if max(returns) >= 0.0 or min(lengths) == max(lengths) or not all(end for _, _, end in episodes):
        return None
    correlation = statistics.correlation(returns, lengths) if min(returns) < max(returns) else 0.0
    if correlation > SHORTER_IS_BETTER:
        return None
    return Finding(
        (Evidence("correlation of return and length", correlation, int(signals.steps[-1]), SHORTER_IS_BETTER),),
        "Every step costs and every episode terminates, so the best policy is the one that ends it soonest. If that "
        "is the goal, set success.ending=terminated.",
        advice="check the sign of the reward, or reward every step in which nothing has failed",
        rule="dying_pays",
        title="Ending the episode pays",
    )
