"""Draw `docs/_static/go1.png`, a stride of a trained Go1, and `go1-curve.svg`, its learning curve.

    MUJOCO_GL=egl python docs/pictures/robots.py RUN

RUN is a run or a policy file of `mjlab:Mjlab-Velocity-Flat-Unitree-Go1`. Its command is to walk ahead at 0.8 m/s;
pictures are 0.06 s apart. The curve uses the files that `benchmarks/robots/mjlab_trainers.py` writes. Without RUN
only the curve is drawn.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from curves import BLUE, GREY, chart, svg

STATIC = Path(__file__).parents[1] / "_static"
RESULTS = Path(__file__).parents[2] / "benchmarks" / "robots" / "results"
TASK, SPEED = "Mjlab-Velocity-Flat-Unitree-Go1", 0.8
COUNT, APART, BEFORE = 8, 3, 100
"""Pictures, steps between them, and steps before the first."""


@torch.no_grad()
def stride(run: str) -> np.ndarray:
    """Return pictures in two rows, seen from the left of the robot."""
    import mujoco

    import canter
    from canter.envs.robots.mjlab import make_mjlab

    policy, env = canter.load_policy(run), make_mjlab(TASK, 1, "cpu", play=True)
    inner, obs, pictures = env.env, env.reset(0), []
    model, data = inner.sim.mj_model, inner.sim.mj_data
    renderer, camera = mujoco.Renderer(model, 150, 210), mujoco.MjvCamera()
    command = inner.command_manager.get_term("twist")
    for step in range(BEFORE + COUNT * APART):
        command.is_standing_env[:] = command.is_heading_env[:] = False
        command.time_left[:] = 10.0
        command.vel_command_b[:] = torch.tensor([SPEED, 0.0, 0.0])
        obs = env.step(policy.act(obs)[0]).obs
        if step >= BEFORE and (step - BEFORE) % APART == 0:
            data.qpos[:] = inner.sim.data.qpos[0].numpy()
            mujoco.mj_forward(model, data)
            w, x, y, z = data.qpos[3:7]
            camera.azimuth = float(np.degrees(np.arctan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z)))) + 90
            camera.lookat[:], camera.distance, camera.elevation = (*data.qpos[:2], 0.17), 1.0, -24
            renderer.update_scene(data, camera)
            pictures.append(renderer.render())
    half = COUNT // 2
    return np.concatenate([np.concatenate(pictures[:half], 1), np.concatenate(pictures[half:], 1)])


def curve() -> str:
    """Return the chart of return against seconds since the environment was ready, a line per seed."""
    kinds = {"canter": ("Canter", BLUE), "theirs": ("mjlab's trainer", GREY)}
    curves = {
        label: [_points(file) for file in sorted(RESULTS.glob(f"mjlab_{n}_*.json"))] for n, label in kinds.items()
    }
    return svg(chart(curves, range(0, 141, 20), range(0, 71, 10), "seconds"))


def _points(file: Path) -> list[tuple[float, float]]:
    return [(row["at"], row["return"]) for row in json.loads(file.read_text())["rows"]]


if __name__ == "__main__":
    (STATIC / "go1-curve.svg").write_text(curve())
    if len(sys.argv) > 1:
        from PIL import Image

        picture = Image.fromarray(stride(sys.argv[1])).quantize(64)
        picture.save(STATIC / "go1.png", optimize=True)
