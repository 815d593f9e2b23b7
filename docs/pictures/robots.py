"""Draws `docs/_static/go1.png`, a stride of a trained Go1, and `go1-curve.svg`, what it had learned when.

    MUJOCO_GL=egl python docs/pictures/robots.py RUN

RUN is a run or a policy file of `mjlab:Mjlab-Velocity-Flat-Unitree-Go1`. It is told to walk ahead at 0.8 m/s;
pictures are 0.06 s apart. The curve is of the files that `benchmarks/robots/mjlab_trainers.py` writes. Without RUN
only the curve.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch

STATIC = Path(__file__).parents[1] / "_static"
RESULTS = Path(__file__).parents[2] / "benchmarks" / "robots" / "results"
TASK, SPEED = "Mjlab-Velocity-Flat-Unitree-Go1", 0.8
COUNT, APART, BEFORE = 8, 3, 100
"""Pictures, steps between them, and steps before the first."""
WIDTH, HEIGHT, EDGE = 640, 300, 44
COLOURS = {"canter": "#2563eb", "theirs": "#9ca3af"}


@torch.no_grad()
def stride(run: str) -> np.ndarray:
    """Pictures in two rows, from the left of the robot."""
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
    """Return against seconds since the environment was ready, a line for each seed."""
    lines, longest, highest = [], 140.0, 65.0
    across = lambda second: EDGE + (WIDTH - EDGE - 10) * second / longest  # noqa: E731
    down = lambda value: HEIGHT - EDGE - (HEIGHT - EDGE - 10) * value / highest  # noqa: E731
    for second in range(0, 141, 20):
        x = across(second)
        lines.append(f'<text x="{x:.0f}" y="{HEIGHT - 26}" text-anchor="middle">{second}</text>')
    for value in range(0, 61, 10):
        y = down(value)
        lines.append(f'<path d="M{EDGE} {y:.1f}H{WIDTH - 10}" stroke="#8884"/>')
        lines.append(f'<text x="{EDGE - 6}" y="{y + 4:.1f}" text-anchor="end">{value}</text>')
    for name, colour in COLOURS.items():
        for file in sorted(RESULTS.glob(f"mjlab_{name}_*.json")):
            rows = json.loads(file.read_text())["rows"]
            points = [f"{across(row['at']):.1f} {down(max(row['return'], 0)):.1f}" for row in rows]
            lines.append(f'<path d="M{"L".join(points)}" fill="none" stroke="{colour}" stroke-width="2"/>')
    labels = {"canter": "Canter", "theirs": "mjlab's trainer"}
    for number, (name, colour) in enumerate(COLOURS.items()):
        lines.append(f'<text x="{EDGE + 14}" y="{28 + 18 * number}" fill="{colour}">{labels[name]}</text>')
    lines.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">seconds</text>')
    text = "\n".join(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12" fill="#888">\n{text}\n</svg>\n'
    )


if __name__ == "__main__":
    (STATIC / "go1-curve.svg").write_text(curve())
    if len(sys.argv) > 1:
        from PIL import Image

        picture = Image.fromarray(stride(sys.argv[1])).quantize(64)
        picture.save(STATIC / "go1.png", optimize=True)
