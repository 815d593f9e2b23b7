"""Convert motion clips of MimicKit and PHC to the `.npz` files that Canter reads.

    python examples/convert_motion.py walk.pkl walk.npz --joints hip,knee,ankle

Their files are pickles (PHC's written by joblib), and loading a pickle can run any code: convert only files of authors
whom you trust. Canter itself reads no pickles. Neither format names its joints, so name them in the order of the file.
A PHC file holds many clips: `--clip NAME` selects one; without it they are listed.
"""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path
from typing import Any

import numpy as np


def load(path: Path) -> Any:
    """Return the content of a file; unpickling can run any code in it."""
    try:
        with path.open("rb") as file:
            return pickle.load(file)
    except Exception:
        import joblib

        return joblib.load(path)


def from_exponential_map(rotation: np.ndarray) -> np.ndarray:
    """Rotation vectors `[N, 3]` as quaternions (w, x, y, z)."""
    angle = np.linalg.norm(rotation, axis=-1, keepdims=True)
    return np.concatenate([np.cos(angle / 2), 0.5 * np.sinc(angle / 2 / np.pi) * rotation], -1)


def angular_velocity(unit: np.ndarray, fps: float) -> np.ndarray:
    """Of quaternions `[N, 4]`, in the world, from the frames before and after each."""
    before, after = unit[[0, *range(len(unit) - 1)]], unit[[*range(1, len(unit)), len(unit) - 1]]
    (w0, v0), (w1, v1) = ((q[:, :1], q[:, 1:]) for q in (before, after))
    real, turned = w1 * w0 + (v1 * v0).sum(-1, keepdims=True), v1 * w0 - w1 * v0 - np.cross(v1, v0)
    turned = np.where(real < 0, -turned, turned)
    half = np.arctan2(np.linalg.norm(turned, axis=-1, keepdims=True), np.abs(real))
    steps = np.full((len(unit), 1), 2.0)
    steps[[0, -1]] = 1.0
    return 2 * half / np.maximum(np.sin(half), 1e-12) * turned * fps / steps


def clip_of(content: Any, name: str | None) -> tuple[float, np.ndarray, np.ndarray, np.ndarray]:
    """Rate, positions `[N, 3]` and rotations `[N, 4]` (w, x, y, z) of the root, and joints `[N, D]`."""
    if "frames" in content:  # MimicKit
        frames = np.asarray(content["frames"], np.float64)
        return float(content["fps"]), frames[:, :3], from_exponential_map(frames[:, 3:6]), frames[:, 6:]
    if name not in content:
        raise SystemExit(f"--clip must be one of: {', '.join(map(str, content))}")
    clip = content[name]
    rotation = np.asarray(clip["root_rot"], np.float64)[:, [3, 0, 1, 2]]  # (x, y, z, w) there
    joints = np.asarray(clip["dof"], np.float64).reshape(len(rotation), -1)
    return float(clip["fps"]), np.asarray(clip["root_trans_offset"], np.float64), rotation, joints


def convert(source: Path, target: Path, joints: list[str], name: str | None = None) -> None:
    """Write one clip."""
    fps, position, rotation, angles = clip_of(load(source), name)
    if len(joints) != angles.shape[1]:
        raise SystemExit(f"--joints names {len(joints)}, {source} has {angles.shape[1]}")
    bodies = {
        "body_positions": position,
        "body_rotations": rotation / np.linalg.norm(rotation, axis=-1, keepdims=True),
        "body_linear_velocities": np.gradient(position, axis=0) * fps,
        "body_angular_velocities": angular_velocity(rotation, fps),
    }
    np.savez_compressed(
        target,
        fps=fps,
        dof_names=np.array(joints),
        body_names=np.array(["root"]),
        dof_positions=angles.astype(np.float32),
        dof_velocities=(np.gradient(angles, axis=0) * fps).astype(np.float32),
        **{field: values[:, None].astype(np.float32) for field, values in bodies.items()},
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--joints", required=True, help="names of the joints, with commas between")
    parser.add_argument("--clip", help="for PHC: which clip of the file")
    arguments = parser.parse_args()
    convert(arguments.source, arguments.target, arguments.joints.split(","), arguments.clip)
