"""`canter play`: watch a policy, or record it."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from canter.cli.parser import Parser, UsageError
from canter.cli.trained import add_acting_flags, count, open_trained, trained_parser
from canter.envs import EnvConfig
from canter.play.player import FixedStd, Games, Player, players
from canter.play.video import Recorder, draw_without_display, has_display, pictures_explained
from canter.play.viewer import OTHERWISE, VIEWERS, viewed, watch
from canter.play.watching import drawn

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
