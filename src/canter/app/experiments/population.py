"""`canter.train_population`: members with different settings learn side by side in one program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from canter.algorithms.ppo import MemberConfig, PopulationConfig, PPOConfig
from canter.algorithms.ppo.population import PopulationPPO
from canter.app.console.console import ConsoleKind
from canter.app.experiments.scores import MEMBER_EPISODES
from canter.app.experiments.task import plan_run
from canter.app.experiments.train import train
from canter.config import TrainConfig
from canter.core.plain import from_plain
from canter.core.registry import UserError
from canter.nn.actor_critic import Policy
from canter.play.evaluation import Evaluation
from canter.runs.records import RUNS
from canter.training.members import member_name


@dataclass(frozen=True)
class MemberResult:
    """A member of a population after training."""

    config: TrainConfig
    """Settings of a single run that learns as the member did."""
    path: Path
    """Folder with its settings, metrics and policy, for `canter play` and the like."""
    policy: Policy
    """Its policy."""
    score: Evaluation | None
    """The policy in new episodes, without noise; None if some did not end, or there are to be none."""


@dataclass(frozen=True)
class PopulationResult:
    """The result of `train_population`."""

    path: Path
    """Folder of the run, with one for each member inside."""
    members: list[MemberResult]
    """The members, in the order in which they were given."""

    @property
    def best(self) -> MemberResult:
        """The member with the highest mean return in new episodes."""
        scored = [member for member in self.members if member.score is not None]
        if not scored:
            raise UserError("no member was evaluated: some episodes did not end, or episodes=0")
        return max(scored, key=lambda member: member.score.mean if member.score is not None else 0.0)


def train_population(
    task: Any,
    members: int | Sequence[MemberConfig | Mapping[str, Any]],
    *,
    config: TrainConfig | None = None,
    preset: str | None = None,
    console: ConsoleKind = "auto",
    run_dir: str | Path = RUNS,
    name: str | None = None,
    episodes: int = MEMBER_EPISODES,
    **settings: Any,
) -> PopulationResult:
    """Train members with different settings side by side in one program, on a tensor environment.

        canter.train_population("tensor:cartpole", [{"learning_rate": 1e-3}, {"learning_rate": 3e-3}])

    `members` are the settings of each (see `MemberConfig`), or their number if only the seeds differ.
    All other settings are those of a single run, as for `canter.train`: each member has `num_envs`
    environments and learns for `total_steps`. At the end each is evaluated in `episodes` new episodes,
    or in none if that is 0. An interrupted run continues with `canter resume`.
    """
    plan = plan_run(task, None, config, preset, settings)
    if plan.env is not None:
        raise UserError("a population makes its own environments: pass the id of a tensor environment")
    population = population_config(plan.config, members)
    result = train(config=population, console=console, run_dir=run_dir, name=name, final_evaluation=episodes)
    assert isinstance(result.algorithm, PopulationPPO)
    assert result.path is not None
    paths = [result.path / member_name(member) for member in range(result.algorithm.size)]
    scores = result.member_scores or [None] * len(paths)
    parts = zip(population.single_runs(), paths, result.algorithm.views, scores, strict=True)
    return PopulationResult(result.path, [MemberResult(*part) for part in parts])


def population_config(config: TrainConfig, members: int | Sequence[MemberConfig | Mapping[str, Any]]) -> TrainConfig:
    """Return the settings of a run in which members learn with the settings of a single run, or their own."""
    algorithm = config.algorithm
    if type(algorithm) is not PPOConfig:
        raise UserError(f"a population learns by ppo, not by {type(algorithm).__name__}")
    if config.self_play is not None:
        raise UserError("self_play: a population does not support it; train the members as single runs")
    given = [MemberConfig()] * members if isinstance(members, int) else list(members)
    if not given:
        raise UserError("members: expected at least one")
    own = tuple(each if isinstance(each, MemberConfig) else from_plain(dict(each), MemberConfig()) for each in given)
    shared = {each.name: getattr(algorithm, each.name) for each in fields(PPOConfig)}
    steps = None if config.total_steps is None else config.total_steps * len(own)
    limit = None if config.until.steps is None else config.until.steps * len(own)
    return replace(
        config,
        algorithm=PopulationConfig(**shared, members=own),
        env=replace(config.env, num_envs=config.env.num_envs * len(own)),
        total_steps=steps,
        until=replace(config.until, steps=limit),
    )
