"""Two gaits of the swimmer at equal speed, written as motion clips in Isaac Lab's form.

    python benchmarks/extensions/gaits.py          writes src/canter/core/data/motions/swimmer_{wide,narrow}.npz

Joint i moves as `amplitude * sin(2 pi frequency t - i * 60 degrees)`. The rest follows from the physics of the
environment, in float64: without inertia the velocity of the body is that of its joints.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from canter.envs.tensor.swimmer import JOINTS, body_velocity

FOLDER = Path(__file__).parents[2] / "src" / "canter" / "core" / "data" / "motions"
GAITS = {"wide": (0.8, 0.5), "narrow": (0.4, 1.715)}
"""Amplitude in rad and frequency in Hz."""
PHASE = math.radians(60)
FPS, SECONDS, FINE = 60, 10, 32
"""Frames a second, and steps of the integration between two."""


def shape(amplitude: float, frequency: float, time: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Angles and rates of the joints `[..., 3]`."""
    speed = 2 * math.pi * frequency
    phase = speed * time.unsqueeze(-1) - PHASE * torch.arange(JOINTS)
    return amplitude * phase.sin(), amplitude * speed * phase.cos()


def gait(amplitude: float, frequency: float) -> dict[str, np.ndarray]:
    """The arrays of a clip."""
    step = 1 / (FPS * FINE)
    count = FPS * SECONDS * FINE
    # Midpoint rule; a straight line of headings first, then of positions.
    middle = step * (torch.arange(count, dtype=torch.float64) + 0.5)
    forward, left, turning = body_velocity(*shape(amplitude, frequency, middle)).unbind(-1)
    heading = torch.cat((torch.zeros(1, dtype=torch.float64), (step * turning).cumsum(0)))
    halfway = 0.5 * (heading[1:] + heading[:-1])
    velocity = torch.stack(
        (halfway.cos() * forward - halfway.sin() * left, halfway.sin() * forward + halfway.cos() * left), -1
    )
    position = torch.cat((torch.zeros(1, 2, dtype=torch.float64), (step * velocity).cumsum(0)))[::FINE]
    heading, time = heading[::FINE], torch.arange(FPS * SECONDS + 1, dtype=torch.float64) / FPS
    joints, rates = shape(amplitude, frequency, time)
    forward, left, turning = body_velocity(joints, rates).unbind(-1)
    zero, cos, sin = torch.zeros_like(heading), heading.cos(), heading.sin()
    bodies = {
        "body_positions": (*position.unbind(-1), zero),
        "body_rotations": ((heading / 2).cos(), zero, zero, (heading / 2).sin()),
        "body_linear_velocities": (cos * forward - sin * left, sin * forward + cos * left, zero),
        "body_angular_velocities": (zero, zero, turning),
    }
    return {
        "fps": np.array(FPS),
        "dof_names": np.array([f"joint_{number}" for number in range(1, JOINTS + 1)]),
        "body_names": np.array(["head"]),
        "dof_positions": joints.float().numpy(),
        "dof_velocities": rates.float().numpy(),
    } | {name: torch.stack(columns, -1).unsqueeze(1).float().numpy() for name, columns in bodies.items()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, numbers in GAITS.items():
        arrays = gait(*numbers)
        np.savez_compressed(FOLDER / f"swimmer_{name}.npz", **arrays)
        way = arrays["body_positions"][:, 0, :2]
        periods = int(SECONDS * numbers[1]) / numbers[1]
        end = way[min(round(periods * FPS), len(way) - 1)]
        print(name, "links per second:", float(np.linalg.norm(end - way[0]) / periods), "towards", end)
