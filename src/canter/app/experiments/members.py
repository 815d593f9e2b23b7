"""The final evaluation of a population: every member plays new episodes, all side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from canter.algorithms.ppo.population import PopulationPPO
from canter.config import TrainConfig
from canter.core.seeding import derive_seed
from canter.envs import closed_quietly
from canter.play.evaluation import EpisodesUnfinished, Evaluation, evaluate
from canter.runs.records import write_score
from canter.training.members import member_name

MEMBER_EPISODES = 32
"""Episodes in which each member is evaluated by default."""
EVAL_STEPS = 100_000
"""Steps of each environment after which the evaluation is given up."""


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
            played = evaluate(population.all_policies, playing, env.num_envs, seed, max_steps=EVAL_STEPS)
        except EpisodesUnfinished:
            return [
                None
            ] * population.size, f"Final scores: none, as some episodes did not end within {EVAL_STEPS:,} steps"
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
