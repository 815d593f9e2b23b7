"""`canter play`: watch a policy, or record it."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from canter.cli.parser import Parser, UsageError
from canter.cli.trained import add_acting_flags, count, open_trained, trained_parser
from canter.envs import EnvConfig
from canter.play.player import FixedStd, Games, players
from canter.play.video import Recorder, draw_without_display, has_display, pictures_explained
from canter.play.watching import drawn

MAX_STEPS = 10_000
"""Steps to play when nothing else is said; some tasks never end."""


def play_command(argv: list[str]) -> None:
    """Watch a policy in a window, or record a video of it."""
    arguments = play_parser(argv).parse(argv)
    video = None if arguments.video is None else Path(arguments.video)
    if arguments.caption and video is None:
        raise UsageError("--caption goes below the pictures of a video: give --video FILE.mp4 too")
    noisy = arguments.stochastic or arguments.override_std is not None
    if video is not None:
        draw_without_display()
    with pictures_explained(), open_trained(arguments, lambda env: visible(env, video)) as trained:
        policy = trained.policy
        if arguments.override_std is not None:
            policy = FixedStd(policy, arguments.override_std)
        player = players[arguments.player](policy, trained.env, deterministic=not noisy, seed=trained.stream)
        print(f"Playing {trained.source} in {trained.where}, {'with' if noisy else 'without'} noise")
        with (
            nullcontext(lambda turn: None)
            if video is None
            else Recorder(trained.env, video, caption=arguments.caption) as on_turn
        ):
            games = player.play(arguments.episodes, arguments.max_steps, on_turn)
    print_games(games)
    if video is not None:
        print(f"The video is in {video}")


def play_parser(argv: list[str]) -> Parser:
    """The arguments of `canter play`."""
    parser = trained_parser(
        "play",
        argv,
        usage="[--video FILE.mp4 [--caption]] [--episodes N] [--max-steps N] [--stochastic] [--policy NAME] [--env ID]",
        description="Watch a policy in a window, or record a video of it.",
    )
    parser.flag("--video", metavar="FILE", help="record to this new .mp4 or .gif file instead of opening a window")
    parser.flag("--caption", action="store_true", help="with step, return and action in a strip below the picture")
    parser.flag("--episodes", metavar="N", type=count, default=1, help="episodes to play (default 1)")
    parser.flag(
        "--max-steps",
        metavar="N",
        type=count,
        default=MAX_STEPS,
        help=f"steps after which to stop (default {MAX_STEPS})",
    )
    add_acting_flags(parser)
    parser.flag(
        "--override-std", metavar="X", type=float, help="act with noise of this standard deviation (Gaussian policies)"
    )
    return parser


def visible(env: EnvConfig, video: Path | None) -> EnvConfig:
    """One environment that draws itself, if it can, and shows the end of an episode before it restarts."""
    if video is not None:
        return drawn(env)
    if not (env.is_gymnasium and has_display()):
        reason = "no display here" if env.is_gymnasium else f"{env.id} has no window"
        hint = "--video FILE.mp4 records one" if env.is_gymnasium else "--video FILE.mp4 records one if it can be drawn"
        print(f"canter: {reason}, so it is played without a picture ({hint})", file=sys.stderr)
        return replace(env, num_envs=1)
    return drawn(env, "human")


def print_games(games: Games) -> None:
    """A line per episode."""
    for number, episode in enumerate(games.finished, start=1):
        print(f"episode {number}: return {episode.return_:.1f}, length {episode.length:,}")
    for episode in games.unfinished:
        print(
            f"unfinished after {episode.length:,} steps: return so far {episode.return_:.1f}, "
            f"{episode.return_ / episode.length:.3f} per step"
        )
