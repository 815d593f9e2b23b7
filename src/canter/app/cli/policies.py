"""`canter play`, `canter eval` and `canter export`: a trained policy in an environment."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from canter.app.check.before_run import check_device, plan_for
from canter.app.check.plan import check_size
from canter.app.cli.commands import PLAY_MAX_STEPS, STDOUT
from canter.app.cli.parser import UsageError, flag_of
from canter.app.cli.settings import read_settings
from canter.app.experiments.folders import stored_config
from canter.app.experiments.settings import with_overrides
from canter.compat import export_run
from canter.compat.runs import FORMS
from canter.config import TrainConfig
from canter.core.registry import nearest
from canter.core.seeding import derive_seed
from canter.core.specs import Env, EnvSpec
from canter.core.storage.files import replace_file
from canter.envs import EnvConfig, closed_quietly, unused_settings
from canter.envs.robots import mjlab
from canter.nn.actor_critic import Policy
from canter.nn.policy_file import BEST, FINAL_ACTOR, POLICIES, NoPolicy, find_policy, read_policy_file
from canter.nn.policy_loading import load_policy
from canter.play.callbacks import renderable_env_config
from canter.play.evaluation import EpisodesUnfinished, Evaluation, evaluate, long_run_average
from canter.play.export import SUFFIXES, Format, collect_inputs, export_policy
from canter.play.player import FixedStd, Player, PlayResult, players
from canter.play.video import (
    VIEWER_HINT,
    Recorder,
    draw_without_display,
    has_display,
    pictures_explained,
    play_in_viewer,
    viewer_env_config,
)
from canter.runs.changes import changed_settings, flat_settings, format_changes
from canter.runs.records import find_run
from canter.runs.run_folder import CONFIG, RunFolder

POLICY_NAMES = {"best": BEST, "final": FINAL_ACTOR}
NUM_ENVS = "env.num_envs"
EXPORT_NUM_ENVS = 8


@dataclass(frozen=True)
class OpenPolicy:
    """A policy and an open environment that it fits."""

    policy: Policy
    source: Path
    """Policy file, or checkpoint folder."""
    run: Path | None
    """The run folder, if the policy is in one."""
    env: Env
    seed: int
    """The seed given, or the run's."""
    changes: dict[str, list[str]]
    """Settings of the environment that differ from the run's: key -> old and new value."""

    @property
    def env_text(self) -> str:
        """Description of the environment, with the changed settings."""
        return self.env.spec.env_id + (f" with {format_changes(self.changes)}" if self.changes else "")

    @property
    def eval_seed(self) -> int:
        """Seed of the environment and the policy's noise; no training uses it."""
        return derive_seed(self.seed, "eval")


@contextmanager
def open_policy(arguments: argparse.Namespace, adapt: Callable[[EnvConfig], EnvConfig]) -> Iterator[OpenPolicy]:
    """Open the requested policy in its environment, whose settings `adapt` changes."""
    run, place = _locate(arguments.run, arguments.run_dir, arguments.policy)
    config = _config_of(place) if run is None else stored_config(run)
    overrides = read_settings(arguments.settings)
    if "env.id" in overrides:
        config = replace(config, env=EnvConfig(id=overrides.pop("env.id"), num_envs=config.env.num_envs))
    requested = with_overrides(config, overrides)
    adapted = replace(requested, env=adapt(requested.env))
    device = arguments.device or (config.device if torch.cuda.is_available() else "cpu")
    check_device(device)
    _check_overrides(overrides, requested, adapted, device)
    seed = config.seed if arguments.seed is None else arguments.seed
    with closed_quietly(adapted.env.build(device)) as env:
        policy, source = _load(place, config, env.spec)
        changes = changed_settings(flat_settings(config), flat_settings(requested))
        yield OpenPolicy(policy, source, run, env, seed, changes)


def _check_overrides(overrides: dict[str, Any], requested: TrainConfig, adapted: TrainConfig, device: str) -> None:
    """Refuse settings that were given and would have no effect."""
    changed = changed_settings(flat_settings(requested), flat_settings(adapted))
    for key, (given, needed) in changed.items():
        if key in overrides:
            raise UsageError(f"{flag_of(key)} {given} cannot be used: this command needs {needed}")
    for line in unused_settings(requested.env, device):
        if line.partition("=")[0] in overrides:
            raise UsageError(line)


def _locate(text: str, run_dir: Path, name: str | None) -> tuple[Path | None, Path]:
    """Return the run folder, if any, and the path of the policy: a file or a run folder."""
    file = Path(text)
    if file.is_file():
        if name is not None:
            raise UsageError(f"two policies: {file} and --policy {name}")
        run = file.absolute().parent.parent
        return (run if (run / CONFIG).is_file() else None), file
    run = find_run(text, run_dir)
    if name is None:
        return run, run
    for candidate in (run / POLICIES / POLICY_NAMES.get(name, f"{name}.safetensors"), Path(name)):
        if candidate.is_file():
            return run, candidate
    stored = {path.stem for path in (run / POLICIES).glob("*.safetensors")}
    short = [short for short, file_name in POLICY_NAMES.items() if Path(file_name).stem in stored]
    raise NoPolicy(f"--policy {name}: no such file, and no such policy in {run}: {nearest(name, [*stored, *short])}")


def _config_of(file: Path) -> TrainConfig:
    """Return the settings that a policy file stores: the environment it was trained in."""
    return TrainConfig(env=EnvConfig(id=read_policy_file(file, "actor")[0].env["env_id"]))


def _load(place: Path, config: TrainConfig, spec: EnvSpec) -> tuple[Policy, Path]:
    """Return the policy and its file; without policy files, that of the newest checkpoint."""
    try:
        file = find_policy(place)
    except NoPolicy:
        store = RunFolder(place).store
        if not store.steps():
            raise
        step, tree = store.load_latest()
        check_size(plan_for(config), config)
        # As many environments as in training, so that its minibatches divide the batch.
        algorithm = config.algorithm.build(replace(spec, num_envs=config.env.num_envs), config.seed)
        algorithm.load_state_dict(tree["algorithm"])
        return algorithm.policy, store.path(step)
    return load_policy(file, env=spec, device=str(spec.device)), file


def eval_command(arguments: argparse.Namespace) -> None:
    """Evaluate a policy over many episodes."""
    file = None if arguments.json in (None, STDOUT) else Path(arguments.json)
    if file is not None and file.exists():
        raise UsageError(f"--json {file} already exists; remove it or choose another name")

    def adapt(env: EnvConfig) -> EnvConfig:
        if arguments.average is not None:
            return replace(env, reset_steps=None)
        if NUM_ENVS in arguments.settings:
            return env
        return replace(env, num_envs=min(env.num_envs, arguments.episodes))

    with open_policy(arguments, adapt) as opened:
        measure = measure_episodes if arguments.average is None else measure_average
        result, text = measure(opened, arguments)
    spec = opened.env.spec
    circumstances = {  # enough to repeat the evaluation
        "env": spec.env_id,
        "policy": str(opened.source),
        "deterministic": not arguments.stochastic,
        "seed": opened.seed,
        "num_envs": spec.num_envs,
        "changes": opened.changes,
    }
    document = json.dumps(circumstances | result, indent=2, allow_nan=False)
    if arguments.json == STDOUT:
        print(document)
        return
    noise = "with" if arguments.stochastic else "without"
    print(f"{opened.source} in {opened.env_text}, acting {noise} noise, seed {opened.seed}")
    print(text)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, f"{document}\n".encode())
        print(f"All of it is in {file}")


def measure_episodes(opened: OpenPolicy, arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Return statistics of episodes as plain data and in words.

    There is no mean return if some episodes have not ended: those that have would be the short
    ones.
    """
    try:
        result = evaluate(
            opened.policy,
            opened.env,
            arguments.episodes,
            opened.eval_seed,
            deterministic=not arguments.stochastic,
            max_steps=arguments.max_steps,
            player=players[arguments.player],
        )
    except EpisodesUnfinished as error:
        games = error.result
        rate = games.reward_per_step
        counts = {"episodes": len(games.finished), "unfinished": len(games.unfinished), "reward_per_step": rate}
        return counts, f"{error}, so there is no mean return; mean reward per step {rate:.4g}"
    return result.to_dict(), format_evaluation(result)


def measure_average(opened: OpenPolicy, arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Return the reward per unit of time after a tenth of the steps, as plain data and in words."""
    steps = arguments.average
    warm_up = steps // 10
    average = long_run_average(
        opened.policy,
        opened.env,
        steps,
        warm_up=warm_up,
        seed=opened.eval_seed,
        deterministic=not arguments.stochastic,
    )
    interval = [average.mean - average.ci, average.mean + average.ci]
    result = {"steps": steps, "warm_up": warm_up, "long_run_average": average.mean, "confidence_interval_95": interval}
    numbers = f"{average.mean:.4g} (95 % interval {interval[0]:.4g} to {interval[1]:.4g})"
    return result, f"long-run average of the reward per unit of time: {numbers}"


def format_evaluation(result: Evaluation) -> str:
    """Return the statistics of an evaluation in two lines."""
    low, high = result.confidence_interval
    return (
        f"return over {len(result.return_)} episodes: mean {result.mean:.1f} (95 % interval {low:.1f} to {high:.1f}), "
        f"std {result.std:.1f}, median {result.median:.1f}, IQM {result.iqm:.1f}, "
        f"from {min(result.return_):.1f} to {max(result.return_):.1f}\n"
        f"length: mean {sum(result.length) / len(result.length):.1f}, from {min(result.length)} to {max(result.length)}"
    )


def play_command(arguments: argparse.Namespace) -> None:
    """Watch a policy in a window, or record a video of it."""
    video: Path | None = arguments.video
    if arguments.caption and video is None:
        raise UsageError("--caption goes below the pictures of a video: add --video FILE.mp4")
    if arguments.viewer is not None and video is not None:
        raise UsageError(f"--viewer {arguments.viewer} and --video {video}: pass only one of them")
    noisy = arguments.stochastic or arguments.override_std is not None
    if video is not None:
        draw_without_display()

    def adapt(env: EnvConfig) -> EnvConfig:
        return visible_env(env, video, arguments.viewer)

    with pictures_explained(), open_policy(arguments, adapt) as opened:
        policy = opened.policy
        if arguments.override_std is not None:
            policy = FixedStd(policy, arguments.override_std)
        player = players[arguments.player](policy, opened.env, deterministic=not noisy, seed=opened.eval_seed)
        print(f"Playing {opened.source} in {opened.env_text}, {'with' if noisy else 'without'} noise")
        viewer = choose_viewer(opened.env.spec.env_id, video, arguments.viewer)
        games = play_games(player, video, viewer, arguments)
    print_games(games)
    if video is not None:
        print(f"The video is in {video}")


def play_games(player: Player, video: Path | None, viewer: str | None, arguments: argparse.Namespace) -> PlayResult:
    """Play one episode or until the viewer is closed, or up to `--episodes` or `--max-steps`."""
    if viewer is not None:
        print(f"In mjlab's viewer {viewer}, until it is closed or Ctrl+C is pressed", flush=True)
        return play_in_viewer(player, viewer, arguments.episodes, arguments.max_steps)
    recorder = None if video is None else Recorder(player.env, video, caption=arguments.caption)
    with nullcontext(lambda turn: None) if recorder is None else recorder as on_step:
        return player.play(arguments.episodes or 1, arguments.max_steps or PLAY_MAX_STEPS, on_step)


def choose_viewer(env_id: str, video: Path | None, requested: str | None) -> str | None:
    """Return mjlab's viewer that was requested, or by default a window."""
    if requested is None and env_id.startswith("mjlab:") and video is None and has_display():
        return "native"
    return requested


def visible_env(env: EnvConfig, video: Path | None, requested_viewer: str | None) -> EnvConfig:
    """Return the settings of one environment that draws itself, if it can."""
    if video is not None:
        return renderable_env_config(env)
    viewer = choose_viewer(env.id, video, requested_viewer)
    if viewer is not None:
        return viewer_env_config(env, viewer)
    if env.is_gymnasium and has_display():
        return renderable_env_config(env, "human")
    reason = f"{env.id} has no window"
    hint = "--video FILE.mp4 records one if it can be drawn"
    if env.is_gymnasium:
        reason = "no display here"
        hint = "--video FILE.mp4 records one"
    elif env.id.startswith("mjlab:"):
        reason = "no display here"
        hint = VIEWER_HINT
    print(f"canter: {reason}, so it is played without a picture ({hint})", file=sys.stderr)
    return replace(env, num_envs=1)


def print_games(games: PlayResult) -> None:
    """Print a line for each episode."""
    for number, episode in enumerate(games.finished, start=1):
        print(f"episode {number}: return {episode.return_:.1f}, length {episode.length:,}")
    for episode in games.unfinished:
        rate = f"{episode.return_ / episode.length:.3f} per step"
        print(f"unfinished after {episode.length:,} steps: return so far {episode.return_:.1f}, {rate}")


def export_command(arguments: argparse.Namespace) -> None:
    """Write a policy as ONNX and torch.export files that run without Canter."""
    output: Path | None = arguments.output
    suffixes = (*SUFFIXES.values(), *FORMS)
    if output is not None and output.suffix not in suffixes:
        raise UsageError(f"--output {output}: must end in {' or '.join(suffixes)}")

    def adapt(env: EnvConfig) -> EnvConfig:
        return replace(env, num_envs=min(env.num_envs, EXPORT_NUM_ENVS))

    with open_policy(arguments, adapt) as opened:
        if output is not None and output.suffix in FORMS:
            export_for_source_library(opened, output)
            return
        print(f"Exporting {opened.source}, tried in {opened.env_text}")
        inputs = collect_inputs(opened.policy, opened.env, arguments.observations, opened.eval_seed)
        metadata = mjlab.onnx_metadata(opened.env, str(opened.run or opened.source))
    for format, path in export_files(opened, output).items():
        result = export_policy(opened.policy, path, format, *inputs)
        tried = f"{result.observations:,} observations, largest difference {result.max_difference:.1e}"
        print(f"{path}: the same actions on {tried}")
        if metadata and format == "onnx":
            mjlab.attach_metadata(str(path), metadata)
            print(f"{path}: mjlab's metadata was added ({', '.join(metadata)})")


def export_for_source_library(opened: OpenPolicy, output: Path) -> None:
    """Write a file that scripts of RSL-RL or rl_games load, with the critic and the optimizer."""
    if opened.run is None:
        raise UsageError(f"--output {output}: pass the run's folder, because the file needs more than the policy")
    iteration = export_run(opened.run, stored_config(opened.run), opened.policy, output)
    print(f"{output}: {opened.source} of iteration {iteration}, in the layout of {FORMS[output.suffix]}")


def export_files(opened: OpenPolicy, output: Path | None) -> dict[Format, Path]:
    """Return the files to write by format: `output`, or the defaults in the run's folder."""
    if output is not None:
        return {format: output for format, suffix in SUFFIXES.items() if suffix == output.suffix}
    folder = opened.source.parent if opened.run is None else opened.run / "exports"
    return {format: folder / f"{opened.source.stem}{suffix}" for format, suffix in SUFFIXES.items()}
