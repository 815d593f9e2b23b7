"""Draw `docs/_static/gaits.png`: the swimmer's two clips, and the gaits learned from each.

    python docs/pictures/gaits.py                          the clips alone, in blue
    python docs/pictures/gaits.py RUN_WIDE RUN_NARROW      with runs of the presets swimmer-wide and swimmer-narrow

Each clip is a row; the gait learned from it, in green, is the row below. Pictures are 0.25 s apart.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import canter
from canter.core.data.motion import MotionLibrary, load_clip
from canter.envs.tensor import Swimmer
from canter.envs.tensor.base import BLACK, BLUE, GREEN, RED, Picture
from canter.envs.tensor.swimmer import links

STATIC = Path(__file__).parents[1] / "_static"
COUNT, APART = 9, 0.25


def bodies_of_clip(gait: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of the links `[COUNT, 5, 2]` in the clip, and its displacement `[2]`."""
    motions = MotionLibrary([load_clip(f"canter:swimmer_{gait}.npz")])
    frames = motions.at(torch.zeros(COUNT, dtype=torch.int64), 2.0 + APART * torch.arange(COUNT))
    rotation = frames["body_rotations"][:, 0]
    heading = 2 * torch.atan2(rotation[:, 3:], rotation[:, :1])
    position = frames["body_positions"][:, 0, :2]
    bodies = links({"joints": frames["dof_positions"], "heading": heading, "position": position}).numpy()
    return bodies, (motions.body_positions[-1, 0, :2] - motions.body_positions[0, 0, :2]).numpy()


@torch.no_grad()
def bodies_of_policy(run: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the same for a run's policy without noise, from 5 s on; the displacement is that of 10 s."""
    policy, env, found = canter.load_policy(run), Swimmer(1, motion=True, max_episode_steps=None), []
    obs = env.reset(0)
    for _ in range(750):
        found.append(links(env.state_dict()["state"])[0].numpy())
        obs = env.step(policy.act(obs)[0]).obs
    shown = [found[250 + round(50 * APART * number)] for number in range(COUNT)]
    return np.stack(shown), found[-1].mean(0) - found[250].mean(0)


def strip(bodies: np.ndarray, way: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    """Return pictures side by side, rotated so that the swimmer moves to the right."""
    angle = np.arctan2(way[1], way[0])
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    turned = (bodies - bodies[0].mean(0)) @ turn.T
    pictures = []
    for points in turned:
        x = float(points[:, 0].mean())
        picture = Picture((x, 0.0), span=5.0, width=200, height=110)
        picture.grid(1.0)
        picture.line(points, 0.16, colour)
        picture.line(points[:2], 0.16, RED)
        for point in points[1:-1]:
            picture.disc(point, 0.05, BLACK)
        pictures.append(picture.pixels())
    return np.concatenate(pictures, 1)


def main(runs: list[str]) -> None:
    """Write a row for each clip and one for each run."""
    rows = []
    for number, gait in enumerate(("wide", "narrow")):
        rows.append(strip(*bodies_of_clip(gait), BLUE))
        if runs:
            rows.append(strip(*bodies_of_policy(runs[number]), GREEN))
    Image.fromarray(np.concatenate(rows)).save(STATIC / "gaits.png", optimize=True)


if __name__ == "__main__":
    if len(sys.argv) not in (1, 3):
        sys.exit(__doc__)
    main(sys.argv[1:])
