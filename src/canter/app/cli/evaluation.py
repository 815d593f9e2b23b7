"""`canter eval`: how good a policy is.

`canter play`: watch a policy, or record it.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from canter.app.cli.parser import Parser, UsageError, config_overrides
from canter.app.cli.trained import Trained, add_acting_flags, count, open_trained, trained_parser
from canter.core.storage.files import replace_file
from canter.envs import EnvConfig
from canter.play.evaluation import EpisodesUnfinished, Evaluation, evaluate, long_run_average
from canter.play.player import FixedStd, Games, Player, players
from canter.play.video import (
    OTHERWISE,
    VIEWERS,
    Recorder,
    draw_without_display,
    has_display,
    pictures_explained,
    viewed,
    watch,
)
from canter.play.watching import drawn

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
    parser.flag(
        "--max-steps", "N", f"steps of each to stop after ({EVAL_MAX_STEPS:,})", type=count, default=EVAL_MAX_STEPS
    )
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


PLAY_MAX_STEPS = 10_000
"""Steps to play when nothing else is said; some tasks never end."""


def play_command(argv: list[str]) -> None:
    """Watch a policy in a window, or record a video of it."""
    arguments = play_parser(argv).parse(argv)
    video: Path | None = arguments.video
    if arguments.caption and video is None:
        raise UsageError("--caption goes below the pictures of a video: give --video FILE.mp4 too")
    if arguments.viewer is not None and video is not None:
        raise UsageError(f"--viewer {arguments.viewer} and --video {video}: give one of them")
    noisy = arguments.stochastic or arguments.override_std is not None
    if video is not None:
        draw_without_display()
    with pictures_explained(), open_trained(arguments, lambda env: visible(env, video, arguments.viewer)) as trained:
        policy = trained.policy
        if arguments.override_std is not None:
            policy = FixedStd(policy, arguments.override_std)
        player = players[arguments.player](policy, trained.env, deterministic=not noisy, seed=trained.stream)
        print(f"Playing {trained.source} in {trained.where}, {'with' if noisy else 'without'} noise")
        games = played(player, video, viewer_for(trained.env.spec.env_id, video, arguments.viewer), arguments)
    print_games(games)
    if video is not None:
        print(f"The video is in {video}")


def played(player: Player, video: Path | None, viewer: str | None, arguments: argparse.Namespace) -> Games:
    """The games, in a viewer until it is closed, or else one of them; both end earlier, or later, as was asked for."""
    if viewer is not None:
        print(f"In mjlab's viewer {viewer}, until it is closed or Ctrl+C is pressed", flush=True)
        return watch(player, viewer, arguments.episodes, arguments.max_steps)
    recorder = None if video is None else Recorder(player.env, video, caption=arguments.caption)
    with nullcontext(lambda turn: None) if recorder is None else recorder as on_turn:
        return player.play(arguments.episodes or 1, arguments.max_steps or PLAY_MAX_STEPS, on_turn)


def play_parser(argv: list[str]) -> Parser:
    """The arguments of `canter play`."""
    parser = trained_parser(
        "play",
        argv,
        "[--video FILE.mp4 [--caption] | --viewer NAME] [--episodes N] [--max-steps N] [--stochastic] [--env ID]",
        "Watch a policy in a window, or record a video of it.",
    )
    parser.flag("--video", "FILE", "record to this new .mp4 or .gif file instead of opening a window", type=Path)
    parser.switch("--caption", "with step, return and action in a strip below the picture")
    which = "a viewer of mjlab: native, a window (what its tasks open where there is a display), or viser, a browser"
    parser.flag("--viewer", "NAME", which, choices=VIEWERS)
    until = "no end in a viewer"
    parser.flag("--episodes", "N", f"episodes to play (default 1; {until})", type=count)
    parser.flag("--max-steps", "N", f"steps after which to stop (default {PLAY_MAX_STEPS}; {until})", type=count)
    add_acting_flags(parser)
    parser.flag("--override-std", "X", "act with noise of this standard deviation (Gaussian policies)", type=float)
    return parser


def viewer_for(env_id: str, video: Path | None, asked: str | None) -> str | None:
    """The viewer of mjlab that shows an environment: the one that was asked for, or a window where there can be one."""
    shown = env_id.startswith("mjlab:") and video is None and has_display()
    return asked or ("native" if shown else None)


def visible(env: EnvConfig, video: Path | None, viewer: str | None) -> EnvConfig:
    """One environment that draws itself, if it can, and shows the end of an episode before it restarts."""
    if video is not None:
        return drawn(env)
    viewer = viewer_for(env.id, video, viewer)
    if viewer is not None:
        return viewed(env, viewer)
    if env.is_gymnasium and has_display():
        return drawn(env, "human")
    reason, hint = f"{env.id} has no window", "--video FILE.mp4 records one if it can be drawn"
    if env.is_gymnasium:
        reason, hint = "no display here", "--video FILE.mp4 records one"
    elif env.id.startswith("mjlab:"):
        reason, hint = "no display here", OTHERWISE
    print(f"canter: {reason}, so it is played without a picture ({hint})", file=sys.stderr)
    return replace(env, num_envs=1)


def print_games(games: Games) -> None:
    """A line per episode."""
    for number, episode in enumerate(games.finished, start=1):
        print(f"episode {number}: return {episode.return_:.1f}, length {episode.length:,}")
    for episode in games.unfinished:
        rate = f"{episode.return_ / episode.length:.3f} per step"
        print(f"unfinished after {episode.length:,} steps: return so far {episode.return_:.1f}, {rate}")
