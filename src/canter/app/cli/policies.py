"""`canter play`, `canter eval` and `canter export`: a trained policy in an environment."""

from __future__ import annotations

import argparse
import copy
import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from canter.app.cli.arguments import EXPORT_OBSERVATIONS
from canter.app.cli.commands import PLAY_MAX_STEPS, STDOUT
from canter.app.cli.opening import Adapt, OpenEnv, OpenPolicy, open_env, open_policy
from canter.app.cli.parser import UsageError
from canter.app.experiments.folders import stored_config
from canter.compat import export_run
from canter.compat.runs import FORMS
from canter.core.interface import Interface
from canter.core.specs import ACTION_MASK
from canter.core.storage.files import replace_file
from canter.envs import EnvConfig
from canter.envs.robots import mjlab
from canter.nn.actor_critic import Policy
from canter.play.callbacks import renderable_env_config
from canter.play.contract import check_vectors, contract_file, leapp_file, read_contract, write_leapp
from canter.play.evaluation import EpisodesUnfinished, Evaluation, evaluate, long_run_average
from canter.play.export import SUFFIXES, Format, check_output, collect_inputs, export_policy
from canter.play.latency import measure_latency
from canter.play.player import AGENTS, FixedStd, Player, PlayResult, players
from canter.play.program import Inputs
from canter.play.video import (
    VIEWER_HINT,
    Recorder,
    draw_without_display,
    has_display,
    pictures_explained,
    play_in_viewer,
    viewer_env_config,
)

NUM_ENVS = "env.num_envs"
EXPORT_NUM_ENVS = 8


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
        opened.policy, opened.env, steps, warm_up=warm_up, seed=opened.eval_seed, deterministic=not arguments.stochastic
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
    if video is not None:
        draw_without_display()

    def adapt(env: EnvConfig) -> EnvConfig:
        return visible_env(env, video, arguments.viewer)

    play = play_policy if arguments.agent is None else play_agent
    with pictures_explained():
        games = play(arguments, adapt)
    print_games(games)
    if video is not None:
        print(f"The video is in {video}")


def play_policy(arguments: argparse.Namespace, adapt: Adapt) -> PlayResult:
    """Play with the policy of a run."""
    noisy = arguments.stochastic or arguments.override_std is not None
    with open_policy(arguments, adapt) as opened:
        policy = opened.policy
        if arguments.override_std is not None:
            policy = FixedStd(policy, arguments.override_std)
        player = players[arguments.player](policy, opened.env, deterministic=not noisy, seed=opened.eval_seed)
        print(f"Playing {opened.source} in {opened.env_text}, {'with' if noisy else 'without'} noise")
        return play_games(player, opened, arguments)


def play_agent(arguments: argparse.Namespace, adapt: Adapt) -> PlayResult:
    """Play with zero or random actions."""
    unused = {
        "--policy": arguments.policy,
        "--stochastic": arguments.stochastic,
        "--override-std": arguments.override_std,
    }
    for flag, value in unused.items():
        if value:
            raise UsageError(f"{flag} has no effect with --agent {arguments.agent}, which plays without a policy")
    with open_env(arguments, adapt) as opened:
        agent = AGENTS[arguments.agent](opened.env.spec, opened.eval_seed)
        player = players[arguments.player](agent, opened.env, seed=opened.eval_seed)
        print(f"Playing {arguments.agent} actions in {opened.env_text}")
        return play_games(player, opened, arguments)


def play_games(player: Player, opened: OpenEnv, arguments: argparse.Namespace) -> PlayResult:
    """Play one episode or until the viewer is closed, or up to `--episodes` or `--max-steps`."""
    video: Path | None = arguments.video
    viewer = choose_viewer(opened.env.spec.env_id, video, arguments.viewer)
    if viewer is not None:
        print(f"In mjlab's viewer {viewer}, until it is closed or Ctrl+C is pressed", flush=True)
        return play_in_viewer(player, viewer, arguments.episodes, arguments.max_steps)
    recorder = None if video is None else Recorder(player.env, video, caption=arguments.caption)
    with nullcontext() if recorder is None else recorder as on_step:
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
        reason = "no window: neither DISPLAY nor WAYLAND_DISPLAY is set"
        hint = "--video FILE.mp4 records one"
    elif env.id.startswith("mjlab:"):
        reason = "no window: neither DISPLAY nor WAYLAND_DISPLAY is set"
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
    """Write a policy as ONNX, torch.export, C or NumPy files that run without Canter."""
    output: Path | None = arguments.output
    if output is not None and arguments.to is not None:
        raise UsageError(f"--output {output} and --to {','.join(arguments.to)}: pass only one of them")
    suffixes = (*SUFFIXES.values(), *FORMS)
    if output is not None and output.suffix not in suffixes:
        raise UsageError(f"--output {output}: must end in {' or '.join(suffixes)}")
    names: list[Format | Literal["leapp"]] = arguments.to or ["onnx", "torch"]
    if output is not None:
        names = [format for format, suffix in SUFFIXES.items() if suffix == output.suffix]
    if arguments.int8 and names != ["c"]:
        raise UsageError(f"--int8 is for a C header alone: --to c, not {','.join(names) or output}")
    wanted = {"onnx", *names} if "leapp" in names else {*names}
    formats: list[Format] = [format for format in SUFFIXES if format in wanted]

    def adapt(env: EnvConfig) -> EnvConfig:
        return replace(env, num_envs=min(env.num_envs, EXPORT_NUM_ENVS))

    with open_policy(arguments, adapt) as opened:
        if output is not None and output.suffix in FORMS:
            export_for_source_library(opened, output)
            return
        files = export_files(opened, output, formats, "-int8" if arguments.int8 else "")
        for path in files.values():
            check_output(path)
        if "leapp" in names:
            leapp_file(files["onnx"])
        print(f"Exporting {opened.source}, tried in {opened.env_text}")
        inputs = collect_inputs(opened.policy, opened.env, arguments.observations, opened.eval_seed)
        metadata = mjlab.onnx_metadata(opened.env, str(opened.run or opened.source))
    policy = with_interface(opened.policy, opened.env.spec.interface)
    for format, path in files.items():
        result = export_policy(policy, path, format, *inputs, weights="int8" if arguments.int8 else "float32")
        tried = f"{result.observations:,} observations, largest difference {result.max_difference:.1e}"
        print(f"{path}: the same actions on {tried}")
        if result.quantization_error is not None:
            print(f"{path}: weights of 8 bits change actions by at most {result.quantization_error:.2g}")
        if metadata and format == "onnx":
            mjlab.attach_metadata(str(path), metadata)
            print(f"{path}: mjlab's metadata was added ({', '.join(metadata)})")
    print(f"{contract_file(next(iter(files.values())))}: what the numbers mean")
    if "leapp" in names:
        print(f"{write_leapp(files['onnx'])}: the ONNX file for LEAPP")
    if arguments.bench:
        print_latency(files, opened.policy, inputs)


def sim2sim_command(arguments: argparse.Namespace) -> None:
    """Run an exported policy in plain MuJoCo, and compare its tracking with the training simulator's."""
    try:
        from canter.app import sim2sim
    except ImportError as error:
        raise ImportError(f'canter sim2sim needs MuJoCo: pip install "canter[mujoco]" ({error})') from error
    if not arguments.model.is_file():
        raise UsageError(f"{arguments.model}: no such file; pass the robot's XML file of MuJoCo")

    def adapt(env: EnvConfig) -> EnvConfig:
        options = {"play": True, **env.options} if env.id.startswith("mjlab:") else env.options
        return replace(env, num_envs=arguments.robots, options=options)

    with open_policy(arguments, adapt) as opened:
        header = export_files(opened, None, ["c"], "")["c"]
        if not header.exists():
            inputs = collect_inputs(opened.policy, opened.env, EXPORT_OBSERVATIONS, opened.eval_seed)
            export_policy(with_interface(opened.policy, opened.env.spec.interface), header, "c", *inputs)
        contract = read_contract(contract_file(header))
        check_vectors(contract, opened.policy, header)
        sim2sim.check_contract(contract, opened.env.spec.interface)
        sim2sim.build_model(contract, arguments.model)  # refuses other names before the simulation
        print(f"Running {header} in {opened.env_text} and in {arguments.model}")
        terms = sim2sim.VelocityTerms.find(opened.env.spec.interface)
        steps = round(arguments.seconds / contract["control_period"])
        commands, trained = sim2sim.record_training(opened.policy, opened.env, steps, opened.eval_seed)
    tracked = sim2sim.run_robots(header, arguments.model, commands, terms)
    print(sim2sim.compare_tracking(trained, tracked))


def with_interface(policy: Policy, interface: Interface) -> Policy:
    """Return the policy with the environment's declarations, if its file has none."""
    if policy.spec.interface != Interface():
        return policy
    declared = copy.copy(policy)
    declared.spec = replace(policy.spec, interface=interface)
    return declared


def print_latency(files: dict[Format, Path], policy: Policy, inputs: Inputs) -> None:
    """Print the time of one step of each file."""
    obs, state = inputs
    groups = (*policy.actor.network.groups, *[ACTION_MASK] * policy.actor.masked)
    print("One step, batch 1, one core:")
    for format, path in files.items():
        p50, p99 = measure_latency(path, ({name: obs[name] for name in groups}, state))
        print(f"  {format:6} p50 {1e6 * p50:7.1f} us   p99 {1e6 * p99:7.1f} us")


def export_for_source_library(opened: OpenPolicy, output: Path) -> None:
    """Write a file that scripts of RSL-RL or rl_games load, with the critic and the optimizer."""
    if opened.run is None:
        raise UsageError(f"--output {output}: pass the run's folder, because the file needs more than the policy")
    iteration = export_run(opened.run, stored_config(opened.run), opened.policy, output)
    print(f"{output}: {opened.source} of iteration {iteration}, in the layout of {FORMS[output.suffix]}")


def export_files(opened: OpenPolicy, output: Path | None, formats: list[Format], ending: str) -> dict[Format, Path]:
    """Return the files to write by format: `output`, or the defaults in the run's folder."""
    if output is not None:
        return dict.fromkeys(formats, output)
    folder = opened.source.parent if opened.run is None else opened.run / "exports"
    return {format: folder / f"{opened.source.stem}{ending}{SUFFIXES[format]}" for format in formats}
