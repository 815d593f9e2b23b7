"""A search whose trials are members of populations, `canter tune --population N`.

Its runs are those of `Search`, without halving: N at a time train side by side in one program, from
start to end. Which runs share a program is in the journal before it starts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from canter.algorithms.ppo import MemberConfig
from canter.app.experiments.population import population_config
from canter.app.tuning.plan import Job, format_score
from canter.app.tuning.search import Search, TuneConfig
from canter.app.tuning.space import default_space, plain_values
from canter.config import TrainConfig
from canter.config.files import dump_config
from canter.core.plain import ConfigError, from_plain
from canter.core.registry import UserError
from canter.core.storage.files import replace_file
from canter.envs import closed_quietly
from canter.training.members import member_name

MEMBER_SETTINGS = {
    "algorithm.optimizer.learning_rate": "learning_rate",
    "algorithm.entropy_coef": "entropy_coef",
    "algorithm.clip_ratio": "clip_ratio",
    "algorithm.gamma": "gamma",
    "algorithm.gae_lambda": "gae_lambda",
}
"""Settings in which the members of a population may differ, by key."""
EPISODES = 100
"""Episodes in which each member is evaluated."""


class PopulationSearch(Search):
    """A search whose trials train side by side."""

    def __init__(self, folder: Path, tune: TuneConfig, config: TrainConfig) -> None:
        super().__init__(folder, tune, config)
        self.rungs = [self.total]
        self.generation_size = tune.population or 1

    @classmethod
    def check(cls, plan: TuneConfig, config: TrainConfig) -> TuneConfig:
        """Refuse trials that cannot train side by side too."""
        if not plan.space:
            space = {key: spec for key, spec in default_space(config).items() if key in MEMBER_SETTINGS}
            plan = replace(plan, space=space)
        plan = super().check(plan, config)
        for key in plan.space:
            if key.removesuffix(".start") not in MEMBER_SETTINGS:
                known = ", ".join(MEMBER_SETTINGS)
                raise ConfigError(f"space.{key}: members of a population differ in {known} only", key)
        if plan.goal is not None or plan.time_limit is not None:
            raise UserError(f"objective={plan.objective!r}: members of a population have no time of their own")
        one = population_config(config, 1)
        with closed_quietly(one.env.build(one.device)) as env:
            one.algorithm.build(env.spec, one.seed).prepare_env(env)
        return plan

    @property
    def programs(self) -> list[list[str]]:
        """The keys of the runs in each program."""
        return self.study.notes.get("programs", [])

    def job(self, program: int) -> Job:
        """Return the run of a program."""
        return Job(f"population-{program:03}", self.config.seed, self.total)

    def program_of(self, job: Job) -> int:
        """Return the number of the program of a run."""
        return int(job.candidate.removeprefix("population-"))

    def path(self, job: Job) -> Path:
        """Return the folder of a member's run."""
        for number, keys in enumerate(self.programs):
            if job.key in keys:
                return self.folder / self.job(number).name / member_name(keys.index(job.key))
        return self.folder / job.name

    def next_runs(self) -> list[Job]:
        """Return the programs to run next, in any order; none once the search is done."""
        missing = [job.key for job in super().next_runs()]
        if not missing:
            return []
        known = {key for keys in self.programs for key in keys}
        new = [key for key in missing if key not in known]
        size = self.generation_size
        if new:
            made = [new[first : first + size] for first in range(0, len(new), size)]
            self.study.note("programs", [*self.programs, *made])
        return [self.job(number) for number, keys in enumerate(self.programs) if not set(keys) <= {*self.study.notes}]

    def members(self, program: int) -> list[MemberConfig]:
        """Return the settings of the members of a program."""
        found: list[MemberConfig] = []
        for run in map(Job.of_key, self.programs[program]):
            texts = {
                MEMBER_SETTINGS[key.removesuffix(".start")]: text for key, text in self.settings(run.candidate).items()
            }
            own = plain_values(texts)
            found.append(from_plain({**own, "seed": run.seed}, MemberConfig()))
        return found

    def start_flags(self, job: Job) -> list[str]:
        """Return the flags of `canter train` that describe a program."""
        file = self.folder / f"{job.candidate}.yaml"
        config = population_config(self.config, self.members(self.program_of(job)))
        replace_file(file, dump_config(config).encode())
        return ["--config", str(file)]

    def limits(self, job: Job) -> list[str]:
        """Return the flags that end a program."""
        return ["--until.steps=null", f"--final-episodes={EPISODES}"]

    def record(self, job: Job, *, failed: bool) -> str:
        """Record the results of all members of a program that has ended, and return a line about them."""
        keys = self.programs[self.program_of(job)]
        scores = [self.record_run(Job.of_key(key), failed=failed, share=1 / len(keys)) for key in keys]
        known = [score for score in scores if score is not None]
        shown = f"best {format_score(max(known))}" if known else f"failed, see {self.folder / job.name}.log"
        return f"{job.name}, {len(keys)} members, {job.steps:,} steps: {shown}"
