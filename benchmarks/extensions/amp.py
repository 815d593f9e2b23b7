"""Test that style follows the data: two gaits of equal speed as clips, with and without a task.

    python benchmarks/extensions/amp.py [--seeds 5] [--device cuda] [--study wide] [--steps N] [--num-envs N]

One JSON file, `results/amp.json`; runs in it are not repeated. The gait is that of 32 swimmers, without noise, from
starts of the environment and not of the clip, after 5 s: the strongest frequency of the joints in the next 15 s, their
amplitude there, and how far each joint is behind the one before it. `follows` means a frequency within 5 %, an
amplitude within 10 % and phases within 10 degrees of the clip. `pose_errors` are mean distances in rad of 4 s from each
clip, warped in time. `training` has means of the last tenth of the run; accuracies are those of the discriminator for
transitions of the policy and of the clip. `task_return` is the mean of 100 episodes without noise.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gaits import GAITS

import canter
from canter.core.data.motion import MotionLibrary, load_clip, pose_error
from canter.core.plain import from_plain, to_plain
from canter.core.seeding import derive_seed
from canter.envs.tensor import Swimmer
from canter.envs.tensor.swimmer import JOINTS, TIME_STEP, body
from canter.training.trainer import train

RESULTS = Path(__file__).parent / "results" / "amp.json"


def swimmer_style(gait: str, *, task: float = 0.0, style: float = 1.0) -> canter.TrainConfig:
    """Return the settings to swim like a clip (`gait`: wide or narrow), with these weights of task and style.

    The task is one that the clips can do: keep up a speed that they have at every moment.
    """
    preset = canter.presets[f"swimmer-{gait}"]
    options = dict(preset.env.options) if style else {"random_start": True}
    algorithm: dict[str, Any] = {}
    if task:
        options |= {"pace": 0.03, "heading": 0.5}
        # The way the body points matters to the task alone.
        algorithm |= {"gamma": 0.99, "model": {"policy": {"obs_groups": ["policy"]}}}
    if not style:
        algorithm |= {"policy_average": 0.0, "extensions": []}
    config = from_plain({"env": {"options": options}, "algorithm": algorithm}, preset)
    weighted = [replace(amp, task_weight=task, style_weight=style) for amp in config.algorithm.extensions]
    return replace(config, algorithm=replace(config.algorithm, extensions=tuple(weighted)))


STUDIES = {
    "wide": ("wide", swimmer_style("wide")),
    "narrow": ("narrow", swimmer_style("narrow")),
    "task": ("wide", swimmer_style("wide", task=1.0, style=0.0)),
    "task and style, wide": ("wide", swimmer_style("wide", task=12.0)),
    "task and style, narrow": ("narrow", swimmer_style("narrow", task=20.0)),
}
"""The clip that errors are measured from, and the settings."""
SKIP, STEPS, PIECE = 250, 750, 200


@torch.no_grad()
def swim(policy: canter.Policy, seed: int, device: str, heading: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Angles of the joints `[750, 32, 3]`, and the centre of the body `[750, 32, 2]`."""
    env = Swimmer(32, device, motion=True, heading=heading, max_episode_steps=None)
    obs, joints, centre = env.reset(seed), [], []
    for _ in range(SKIP + STEPS):
        obs = env.step(policy.act(obs)[0]).obs
        state = env.state_dict()["state"]
        joints.append(state["joints"].double().cpu())
        centre.append(body(state).mean(1).double().cpu())
    return torch.stack(joints[SKIP:]), torch.stack(centre[SKIP:])


def measure(joints: torch.Tensor, centre: torch.Tensor, gait: str) -> dict[str, Any]:
    """Frequency, amplitude and phases by a windowed Fourier transform, medians over swimmers."""
    moments = TIME_STEP * torch.arange(len(joints), dtype=torch.float64)
    frequencies = torch.arange(0.1, 5.0, 0.0025, dtype=torch.float64)
    window = torch.hann_window(len(joints), periodic=False, dtype=torch.float64)
    waves = torch.exp(-2j * math.pi * frequencies[:, None] * moments) * window
    swings = torch.einsum("ft,tnj->fnj", waves, (joints - joints.mean(0)).to(torch.complex128)) * 2 / window.sum()
    best = swings.abs().square().sum(-1).argmax(0)
    strongest = swings[best, torch.arange(joints.shape[1])]
    frequency = frequencies[best].median().item()
    behind = [torch.angle(strongest[:, k] / strongest[:, k + 1]).median().item() for k in range(JOINTS - 1)]
    amplitude = strongest.abs().median(0).values.tolist()
    period = max(1, round(1 / frequency / TIME_STEP))
    speed = (centre[period:] - centre[:-period]).norm(dim=-1).mean().item() / (period * TIME_STEP)
    wide, often = GAITS[gait]
    follows = (
        abs(frequency / often - 1) <= 0.05
        and all(abs(a / wide - 1) <= 0.10 for a in amplitude)
        and all(abs(math.degrees(angle) - 60) <= 10 for angle in behind)
    )
    return {
        "follows": follows,
        "frequency": round(frequency, 4),
        "amplitude": [round(a, 4) for a in amplitude],
        "phase": [round(math.degrees(angle), 2) for angle in behind],
        "speed": round(speed, 4),
    }


def pose_errors(joints: torch.Tensor) -> dict[str, float]:
    """The mean distance in rad from each clip, of pieces of 4 s."""
    pieces = joints[: 3 * PIECE].unflatten(0, (3, PIECE)).transpose(0, 1).flatten(1, 2)
    never = torch.zeros(pieces.shape[:2], dtype=torch.bool)
    errors: dict[str, float] = {}
    for gait in GAITS:
        frames, begins = MotionLibrary([load_clip(f"canter:swimmer_{gait}.npz")]).every(TIME_STEP)
        error = pose_error(pieces, never, frames["dof_positions"].double(), begins)
        errors[gait] = round(error.mean().item(), 4)
    return errors


def run(config: canter.TrainConfig, gait: str) -> dict[str, Any]:
    """One run, and what came of it."""
    reports: list[dict[str, float]] = []

    def follow(report: canter.Report) -> None:
        names = ("amp/accuracy_agent", "amp/accuracy_demo", "amp/style_reward", "amp/pose_error")
        reports.append({name: float(report.metrics[name]) for name in names if name in report.metrics})

    start = time.perf_counter()
    algorithm = train(config, follow)
    seconds = round(time.perf_counter() - start, 1)
    last = reports[-max(1, len(reports) // 10) :]
    task = {name: value for name, value in config.env.options.items() if name not in ("reference", "random_start")}
    env = Swimmer(100, config.device, **task)
    seed = derive_seed(config.seed, "eval")
    evaluation = canter.evaluate(algorithm.policy, env, 100, seed)
    about = {name.removeprefix("amp/"): round(sum(r[name] for r in last) / len(last), 4) for name in last[0]}
    joints, centre = swim(algorithm.policy, seed, config.device, task.get("heading", math.pi))
    found = measure(joints, centre, gait)
    found |= {"pose_errors": pose_errors(joints), "training": about}
    return {"seed": config.seed, **found, "task_return": evaluation.mean, "seconds": seconds}


def main() -> None:
    """Do the runs that are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--study", choices=STUDIES)
    parser.add_argument("--steps", type=int, help="instead of the preset's; filed under a name of their own")
    parser.add_argument("--num-envs", type=int, help="the same")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for seed in range(arguments.seeds):
        for study, (gait, config) in STUDIES.items():
            name, config = varied(study, config, arguments)
            if arguments.study not in (None, study) or seed in [done["seed"] for done in _known(name)["runs"]]:
                continue
            found = run(replace(config, seed=seed, device=arguments.device), gait)
            print(name, found, flush=True)
            entry = _known(name)  # anew: another process may have written in the meantime
            entry |= {"config": to_plain(config), "runs": [*entry["runs"], found]}
            document = (json.loads(RESULTS.read_text()) if RESULTS.exists() else {}) | {name: entry}
            RESULTS.write_text(json.dumps(document, indent=1) + "\n")


def varied(name: str, config: canter.TrainConfig, arguments: argparse.Namespace) -> tuple[str, canter.TrainConfig]:
    """A study with other steps or environments, if the command says so, and its name then."""
    if arguments.steps is not None:
        name, config = f"{name}, {arguments.steps:,} steps", replace(config, total_steps=arguments.steps)
    if arguments.num_envs is not None:
        env = replace(config.env, num_envs=arguments.num_envs)
        name, config = f"{name}, {arguments.num_envs:,} environments", replace(config, env=env)
    return name, config


def _known(name: str) -> dict[str, Any]:
    document = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return document.get(name, {"runs": []})


if __name__ == "__main__":
    main()
