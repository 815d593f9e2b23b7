"""The final evaluation of a run: its policy plays new episodes without noise, in a population every member."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from canter.algorithms.ppo.population import PopulationPPO
from canter.app.console.text import format_count
from canter.app.experiments.task import open_env
from canter.config import TrainConfig
from canter.core.seeding import derive_seed
from canter.core.specs import Env
from canter.envs import closed_quietly
from canter.envs.failures import failure
from canter.nn.actor_critic import Policy
from canter.play.evaluation import EpisodesUnfinished, Evaluation, evaluate, long_run_average
from canter.play.player import PlayStep
from canter.runs.hall_of_fame import enter_by_average, enter_hall_of_fame
from canter.runs.records import write_score
from canter.training.members import member_name
from canter.training.progress import RunProgress

EVAL_EPISODES = 100
EVAL_SHARE = 0.2
"""Share of a run's steps that the final evaluation takes at most, if its episodes are as long."""
EVAL_STEPS = 20_000
"""Steps of each environment after which the final evaluation gives up on a task that does not
end."""
AVERAGE_STEPS = 2_000
"""Steps of each environment in a long-run average; a tenth as many warm up."""
PROGRESS_SECONDS = 10.0
"""Seconds between progress lines of a long evaluation."""
MEMBER_EPISODES = 32
"""Episodes in which each member is evaluated by default."""
MEMBER_STEPS = 100_000
"""Steps of each environment after which the evaluation of a population is given up."""

Notify = Callable[[str], Any]
"""Takes the lines that a run prints."""


def affordable_episodes(progress: RunProgress) -> int:
    """Return how many episodes of the recent length take a fifth of the run's steps, 1 to `EVAL_EPISODES`."""
    lengths = [length for _, length, _ in progress.recent]
    if not lengths:
        return EVAL_EPISODES
    return min(max(int(EVAL_SHARE * progress.env_steps * len(lengths) / sum(lengths)), 1), EVAL_EPISODES)


def final_score(
    config: TrainConfig,
    policy: Policy,
    run: Path | None,
    env: Env | None = None,
    notify: Notify = print,
    episodes: int = EVAL_EPISODES,
) -> tuple[Evaluation | None, str]:
    """Evaluate the policy in new episodes; return the result and a comparison with earlier runs.

    The text has a reward rate if episodes do not end. Episodes are played in `env`, or in an
    environment that is built here. Without a `run` nothing is compared.
    """
    with open_env(config, env) as playing:
        seed = derive_seed(config.seed, "eval")
        try:
            on_step = EvalProgress(notify)
            result = evaluate(policy, playing, episodes, seed, max_steps=EVAL_STEPS, on_step=on_step)
        except EpisodesUnfinished as error:
            rate = error.result.reward_per_step
            reason = f"fewer than {format_count(episodes, 'episode')} ended within {EVAL_STEPS:,} steps"
            text = f"Final score: reward {rate:.4g} per step without noise; {reason}"
            if run is None:
                return None, text
            record = {"reward_per_step": rate, "steps": EVAL_STEPS}
            return None, f"{text}\n{average_score(config, policy, run, playing, record)}"
        except Exception as error:  # the training state is saved already
            reason = failure(error, "step", None)
            return None, f"Final score: none, as the environment failed during the evaluation. {reason}"
    played = format_count(episodes, "new episode")
    mean = f"mean return {result.mean:.1f} over {played}, acting without noise"
    text = f"Episodes: {mean}" if config.by_average else f"Final score: {mean}"
    if run is None:
        return result, text
    if config.by_average:
        uncut = env if config.env.reset_steps is None else None
        return result, f"{average_score(config, policy, run, uncut, result.record)}\n{text}"
    write_score(run, result.record)
    return result, f"{text}\n{enter_hall_of_fame(run, config.env, result.return_, config.seed)}"


def average_score(config: TrainConfig, policy: Policy, run: Path, env: Env | None, record: dict[str, Any]) -> str:
    """Measure the reward per unit of time without noise; return a comparison with earlier runs.

    The run's record keeps it together with the scores in `record`. It is measured in `env`, or in
    an environment that is built here and cuts no episodes.
    """
    endless = replace(config, env=replace(config.env, reset_steps=None))
    try:
        with open_env(endless, env) as playing:
            seed = derive_seed(config.seed, "eval")
            average = long_run_average(policy, playing, AVERAGE_STEPS, warm_up=AVERAGE_STEPS // 10, seed=seed)
    except Exception as error:  # the training state is saved already
        write_score(run, record)
        return f"Long-run average: none. {failure(error, 'step', None)}"
    write_score(run, {**record, "long_run_average": average.mean, "ci": average.ci})
    name = "Final score: long-run average" if config.by_average else "Long-run average:"
    text = f"{name} {average.mean:.4g} ± {average.ci:.2g} per unit of time, acting without noise"
    return f"{text}\n{enter_by_average(run, config.env, (average.mean, average.ci), config.seed)}"


class EvalProgress:
    """Prints the progress of an evaluation every few seconds."""

    def __init__(self, notify: Notify, every: float = PROGRESS_SECONDS) -> None:
        self.notify = notify
        self.every = every
        self.episodes = 0
        self.steps = 0
        self.last = time.perf_counter()

    def __call__(self, turn: PlayStep) -> None:
        """Count a step of all environments."""
        self.steps += 1
        self.episodes += int((turn.step.terminated | turn.step.truncated).sum())
        if time.perf_counter() - self.last > self.every:
            self.last = time.perf_counter()
            self.notify(f"Evaluating: {self.episodes:,} episodes ended after {self.steps:,} steps of each environment")


def score_members(
    config: TrainConfig, population: PopulationPPO, folder: Path | None, episodes: bool | int = True
) -> tuple[list[Evaluation | None], str]:
    """Evaluate all members without noise; note the scores in their folders, and the leader's in that of the run.

    `episodes` is their number for each, True for the default. Return the scores, None for all if
    some episodes do not end, and a line about them.
    """
    episodes = MEMBER_EPISODES if episodes is True else int(episodes)
    env = replace(config.env, num_envs=episodes * population.size)
    with closed_quietly(env.build(config.device)) as playing:
        try:
            seed = derive_seed(config.seed, "eval")
            played = evaluate(population.all_policies, playing, env.num_envs, seed, max_steps=MEMBER_STEPS)
        except EpisodesUnfinished:
            text = f"Final scores: none, as some episodes did not end within {MEMBER_STEPS:,} steps"
            return [None] * population.size, text
    scores = [
        Evaluation(played.return_[i : i + episodes], played.length[i : i + episodes])
        for i in range(0, env.num_envs, episodes)
    ]
    if folder is not None:
        for member, score in enumerate(scores):
            write_score(folder / member_name(member), score.record)
        write_score(folder, scores[population.leader].record)
    means = [score.mean for score in scores]
    best = member_name(means.index(max(means)))
    spread = f"mean returns {min(means):.1f} to {max(means):.1f}, the best of {best}"
    return [*scores], f"Final scores of {len(means)} members: {spread}, in {episodes} new episodes each, without noise"
