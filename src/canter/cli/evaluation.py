"""`canter eval`: how good a policy is."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from canter.cli.parser import Parser, UsageError, config_overrides
from canter.cli.trained import Trained, add_acting_flags, count, open_trained, trained_parser
from canter.envs import EnvConfig
from canter.play.evaluation import EpisodesUnfinished, Evaluation, evaluate
from canter.play.lta import long_run_average
from canter.play.player import players
from canter.storage.durable import replace_file

STDOUT = "-"
EPISODES = 100
NUM_ENVS = "env.num_envs"
EVAL_MAX_STEPS = 1_000_000


def eval_command(argv: list[str]) -> None:
    """Play many episodes and say how good a policy is."""
    arguments = eval_parser(argv).parse(argv)
    file = None if arguments.json in (None, STDOUT) else Path(arguments.json)
    if file is not None and file.exists():
        raise UsageError(f"--json {file} exists already; remove it or give another name")

    def sized(env: EnvConfig) -> EnvConfig:
        if arguments.average is not None:
            return replace(env, reset_steps=None)
        given = NUM_ENVS in config_overrides(arguments)
        return env if given else replace(env, num_envs=min(env.num_envs, arguments.episodes))

    with open_trained(arguments, sized) as trained:
        result, words = measure(trained, arguments)
    spec = trained.env.spec
    circumstances = {  # what was evaluated, and how: enough to do it again
        "env": spec.env_id,
        "policy": str(trained.source),
        "deterministic": not arguments.stochastic,
        "seed": trained.seed,
        "num_envs": spec.num_envs,
        "changes": trained.changes,
    }
    text = json.dumps(circumstances | result, indent=2, allow_nan=False)
    if arguments.json == STDOUT:
        print(text)
        return
    noise = "with" if arguments.stochastic else "without"
    print(f"{trained.source} in {trained.where}, acting {noise} noise, seed {trained.seed}")
    print(words)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, f"{text}\n".encode(), 0o666)
        print(f"All of it is in {file}")


def eval_parser(argv: list[str]) -> Parser:
    """The arguments of `canter eval`."""
    parser = trained_parser(
        "eval",
        argv,
        "[--episodes N] [--json [FILE]] [--stochastic] [--num-envs N] [--policy NAME] [--env ID]",
        "Play many episodes and say how good a policy is; the first ones of every environment count.",
    )
    parser.flag("--episodes", "N", f"episodes to play (default {EPISODES})", type=count, default=EPISODES)
    parser.flag("--json", "FILE", "write statistics and every episode, to a new FILE or out", nargs="?", const=STDOUT)
    rate = "for tasks that never end: reward per unit of time over so many steps of every environment"
    parser.flag("--average", "STEPS", rate, type=count)
    add_acting_flags(parser)
    together = "environments stepped together; by default as in the run, and no more than episodes"
    parser.flag("--num-envs", "N", together, dest=f"key:{NUM_ENVS}")
    parser.flag("--max-steps", "N", f"steps of each to stop after ({EVAL_MAX_STEPS:,})", type=count, default=MAX_STEPS)
    return parser


def measure(trained: Trained, arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The result as plain data and in words.

    Where some episodes have not ended there is no mean return: those that have would be the short ones.
    """
    deterministic, player = not arguments.stochastic, players[arguments.player]
    if arguments.average is not None:
        return measure_average(trained, arguments.average, deterministic=deterministic)
    options = {"deterministic": deterministic, "max_steps": arguments.max_steps, "player": player}
    try:
        result = evaluate(trained.policy, trained.env, arguments.episodes, trained.stream, **options)
    except EpisodesUnfinished as error:
        games, rate = error.games, error.games.reward_per_step
        result = {"episodes": len(games.finished), "unfinished": len(games.unfinished), "reward_per_step": rate}
        return result, f"{error}, so there is no mean return; mean reward per step {rate:.4g}"
    return result.to_dict(), in_words(result)


def measure_average(trained: Trained, steps: int, *, deterministic: bool) -> tuple[dict[str, Any], str]:
    """Reward per unit of time, after a tenth of the steps to warm up; as plain data and in words."""
    warm_up = steps // 10
    average = long_run_average(
        trained.policy, trained.env, steps, warm_up=warm_up, seed=trained.stream, deterministic=deterministic
    )
    interval = [average.mean - average.ci, average.mean + average.ci]
    result = {"steps": steps, "warm_up": warm_up, "long_run_average": average.mean, "confidence_interval_95": interval}
    words = f"{average.mean:.4g} (95 % interval {interval[0]:.4g} to {interval[1]:.4g})"
    return result, f"long-run average of the reward per unit of time: {words}"


def in_words(result: Evaluation) -> str:
    """Two lines."""
    low, high = result.confidence_interval
    return (
        f"return over {len(result.return_)} episodes: mean {result.mean:.1f} (95 % interval {low:.1f} to {high:.1f}), "
        f"std {result.std:.1f}, median {result.median:.1f}, IQM {result.iqm:.1f}, "
        f"from {min(result.return_):.1f} to {max(result.return_):.1f}\n"
        f"length: mean {sum(result.length) / len(result.length):.1f}, from {min(result.length)} to {max(result.length)}"
    )
