"""Motion clips: recorded robot motions from `.npz` and CSV files, and a library to sample them.

M frames, D joints, B bodies. Quaternions are (w, x, y, z); velocities are in the world frame.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from canter.core.registry import UserError, nearest
from canter.core.seeding import MemberStreams, draw_for_rank

AXES = {
    "dof_positions": "",
    "dof_velocities": "",
    "body_positions": "xyz",
    "body_rotations": "wxyz",
    "body_linear_velocities": "xyz",
    "body_angular_velocities": "xyz",
}
"""Fields of a frame, per joint or body, by Isaac Lab's names, and their components."""
OTHER_NAMES = {
    "joint_names": "dof_names",
    "joint_pos": "dof_positions",
    "joint_vel": "dof_velocities",
    "body_pos_w": "body_positions",
    "body_quat_w": "body_rotations",
    "body_lin_vel_w": "body_linear_velocities",
    "body_ang_vel_w": "body_angular_velocities",
}
"""The same fields by the names of mjlab's files."""
OWN = "canter:"
"""Prefix of the names of clips that are included in Canter."""
Frames = dict[str, Tensor]
"""Fields by name: `[..., D]` for joints, `[..., B, 3]` or `[..., B, 4]` for bodies."""


@dataclass(frozen=True)
class Clip:
    """One motion whose data have been checked."""

    name: str
    fps: float
    joints: tuple[str, ...]
    bodies: tuple[str, ...]
    fields: Mapping[str, np.ndarray]
    """`[M, D]` for joints, `[M, B, 3]` or `[M, B, 4]` for bodies."""

    @property
    def length(self) -> int:
        """M."""
        return len(next(iter(self.fields.values())))

    @property
    def duration(self) -> float:
        """Seconds from the first frame to the last."""
        return (self.length - 1) / self.fps


def load_clip(file: str) -> Clip:
    """Read and check a clip, `.npz` or CSV; raise UserError that says what is wrong and where."""
    try:
        return _checked(_read(file), file)
    except ValueError as error:
        raise UserError(f"motion {file!r}: {error}") from error


def _read(file: str) -> dict[str, Any]:
    """Return the arrays of a file by Isaac Lab's names."""
    path = Path(__file__).parent / "motions" / file.removeprefix(OWN) if file.startswith(OWN) else Path(file)
    if not path.is_file():
        own = f": {nearest(path.name, [p.name for p in path.parent.glob('*.npz')])}" if file.startswith(OWN) else ""
        raise UserError(f"there is no such file{own}")
    if path.suffix == ".csv":
        return _read_csv(path)
    if path.suffix != ".npz":
        raise UserError(f"clips are .npz or .csv files, not {path.suffix or 'files without an extension'}")
    try:
        with np.load(path) as opened:  # refuses everything but plain arrays
            return {OTHER_NAMES.get(str(key), str(key)): opened[key] for key in opened.files}
    except (ValueError, OSError, KeyError) as error:
        raise UserError(f"cannot be read as plain arrays: {error}") from error


def _read_csv(path: Path) -> dict[str, Any]:
    """Return the columns `time` and `FIELD/NAME[/AXIS]` as the arrays of an `.npz` file."""
    with path.open(newline="") as opened:
        header, *lines = csv.reader(opened)
    try:
        table = np.array(lines, dtype=np.float64)
    except ValueError as error:
        raise UserError(f"every cell below the header must be a number: {error}") from error
    if table.ndim != 2 or len(table) < 2 or "time" not in header:
        raise UserError(f"needs a column 'time' and at least two frames, has {header[:5]}")
    column = dict(zip(header, table.T, strict=True))
    steps = np.diff(column.pop("time"))
    if not steps.min() > 0 or np.ptp(steps) > 0.01 * steps.mean():
        wrong = int(np.abs(steps - np.median(steps)).argmax())
        raise UserError(f"frames {wrong} and {wrong + 1} are {steps[wrong]:g} s apart, others not")
    raw: dict[str, Any] = {"fps": 1 / steps.mean()}
    for field, axes in AXES.items():
        names = list(dict.fromkeys(key.split("/")[1] for key in column if key.startswith(f"{field}/")))
        if not names:
            continue
        raw.setdefault("dof_names" if field.startswith("dof") else "body_names", np.array(names))
        expected = [f"{field}/{name}/{axis}".rstrip("/") for name in names for axis in (axes or ("",))]
        for key in expected:
            if key not in column:
                raise UserError(f"column {key!r} is missing, {nearest(key, column)}")
        shape = (len(table), len(names), len(axes)) if axes else (len(table), len(names))
        raw[field] = np.stack([column.pop(key) for key in expected], -1).reshape(shape)
    if column:
        key = next(iter(column))
        near = nearest(key.partition("/")[0], AXES)
        raise UserError(f"column {key!r} is not FIELD/NAME or FIELD/NAME/AXIS, {near}")
    return raw


def _checked(raw: dict[str, Any], file: str) -> Clip:
    """Return a clip after checking rate, names, shapes, numbers, quaternions and velocities."""
    if "fps" not in raw:
        raise UserError(f"fps is missing, {nearest('fps', raw)}")
    fps = float(np.ravel(raw["fps"])[0])
    if not 1 <= fps <= 10_000:
        raise UserError(f"fps={fps:g} must lie in 1..10000")
    names = {kind: tuple(map(str, np.ravel(raw.get(f"{kind}_names", ())))) for kind in ("dof", "body")}
    fields = {field: np.asarray(raw[field], np.float64) for field in AXES if field in raw}
    if not fields:
        raise UserError(f"it has none of {', '.join(AXES)}; it has {', '.join(raw)}")
    length = len(next(iter(fields.values())))
    for kind, own in names.items():
        if len(set(own)) < len(own):
            raise UserError(f"{kind}_names names {next(name for name in own if own.count(name) > 1)!r} twice")
    for field, values in fields.items():
        kind = field.partition("_")[0]
        shape = (length, len(names[kind]), *([len(AXES[field])] if AXES[field] else []))
        if not names[kind]:
            raise UserError(f"{field} needs {kind}_names, which is missing")
        if values.shape != shape or length < 2:
            raise UserError(f"{field} has shape {values.shape}, and {len(names[kind])} {kind}_names need (2 or more,"
                         f"{str(shape[1:])[1:]}, frames as many as in other fields")  # fmt: skip
        if not np.isfinite(values).all():
            raise UserError(f"{field} is NaN or infinite in frame {int(np.argwhere(~np.isfinite(values))[0, 0])}")
    _check_rates(fields, fps)
    if "body_rotations" in fields:
        fields["body_rotations"] = _check_rotations(fields, fps)
    return Clip(file, fps, names["dof"], names["body"], fields)


def _check_rates(fields: dict[str, np.ndarray], fps: float) -> None:
    """Raise UserError if velocities differ from the differences of positions, as with degrees."""
    for position, velocity in (("dof_positions", "dof_velocities"), ("body_positions", "body_linear_velocities")):
        if position not in fields or velocity not in fields:
            continue
        moved = np.diff(fields[position], axis=0) * fps
        given = 0.5 * (fields[velocity][1:] + fields[velocity][:-1])
        size = float((moved * moved).mean())
        ratio = float((moved * given).mean()) / size if size > 1e-6 else 1.0
        if not 2 / 3 < ratio < 3 / 2:
            raise UserError(
                f"{velocity} are {ratio:.2g} times the differences of {position} at fps={fps:g}: rate, units or the "
                "order of frames are wrong"
            )


def _check_rotations(fields: dict[str, np.ndarray], fps: float) -> np.ndarray:
    """Return unit quaternions; raise UserError for others, and if w is last.

    The order is checked with the angular velocities, if the clip has them.
    """
    given = fields["body_rotations"]
    lengths = np.linalg.norm(given, axis=-1)
    if np.abs(lengths - 1).max() > 0.01:
        frame, body = np.unravel_index(np.abs(lengths - 1).argmax(), lengths.shape)
        raise UserError(
            f"body_rotations of body {body} in frame {frame} has length {lengths[frame, body]:.3g} and not 1"
        )
    unit = given / lengths[..., None]
    if "body_angular_velocities" in fields:
        angular = 0.5 * (fields["body_angular_velocities"][1:] + fields["body_angular_velocities"][:-1])
        first, last = (
            np.square(_angular_velocity(unit[..., order], fps) - angular).sum()
            for order in ([0, 1, 2, 3], [3, 0, 1, 2])
        )
        if last < 0.5 * first and first > 0.1 * np.square(angular).sum():
            raise UserError("body_rotations turn as body_angular_velocities say if w is last; (w, x, y, z) is needed")
    return unit


def _angular_velocity(unit: np.ndarray, fps: float) -> np.ndarray:
    """Return the angular velocities `[M - 1, B, 3]` between frames of unit quaternions."""
    (w, v), (w0, v0) = ((q[..., :1], q[..., 1:]) for q in (unit[1:], unit[:-1]))
    real = w * w0 + (v * v0).sum(-1, keepdims=True)
    imaginary = v * w0 - w * v0 - np.cross(v, v0)
    imaginary = np.where(real < 0, -imaginary, imaginary)
    half = np.arctan2(np.linalg.norm(imaginary, axis=-1, keepdims=True), np.abs(real))
    return 2 * fps * half / np.maximum(np.sin(half), 1e-12) * imaginary


class MotionLibrary(nn.Module):
    """Clips on a device, from which frames are sampled at any time."""

    chance: Tensor
    start: Tensor
    last: Tensor
    fps: Tensor

    def __init__(
        self,
        clips: Sequence[Clip],
        weights: Sequence[float] | None = None,
        joints: Sequence[str] = (),
        bodies: Sequence[str] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        """Concatenate clips; joints and bodies are ordered as given, or as in the first clip.

        `weights` are the relative frequencies with which clips are drawn.
        """
        super().__init__()
        self.joints = tuple(joints) or clips[0].joints
        self.bodies = tuple(bodies) or clips[0].bodies
        self.durations = [clip.duration for clip in clips]
        self.fields = [field for field in AXES if all(field in clip.fields for clip in clips)]
        share = np.cumsum(np.ones(len(clips)) if weights is None else np.asarray(weights, np.float64))
        lengths = np.array([clip.length for clip in clips])
        self._add("chance", share / share[-1], device)
        self._add("start", np.cumsum(lengths) - lengths, device)
        self._add("last", lengths - 1, device)
        self._add("fps", np.array([clip.fps for clip in clips]), device)
        for field in self.fields:
            if field.startswith("dof"):
                parts = [_reorder(clip, field, "joints", clip.joints, self.joints) for clip in clips]
            else:
                parts = [_reorder(clip, field, "bodies", clip.bodies, self.bodies) for clip in clips]
            self._add(field, np.concatenate(parts), device)

    def _add(self, name: str, values: np.ndarray, device: torch.device | str) -> None:
        kind = torch.int64 if values.dtype.kind == "i" else torch.float32
        self.register_buffer(name, torch.tensor(values, dtype=kind, device=device), persistent=False)

    def sample(
        self, count: int, generator: torch.Generator | MemberStreams, span: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Draw clips `[count]` by weight, and times uniformly from `span` to their ends."""
        drawn = draw_for_rank(torch.rand, (count, 2), generator=generator, device=self.chance.device).T.contiguous()
        clip = torch.searchsorted(self.chance, drawn[0], right=True).clamp(max=len(self.chance) - 1)
        return clip, span + drawn[1] * (self.last[clip] / self.fps[clip] - span)

    def at(self, clip: Tensor, time: Tensor) -> Frames:
        """Return interpolated frames of clips `[...]` at times `[...]`."""
        place = time * self.fps[clip]
        below = torch.minimum(place.long().clamp(min=0), self.last[clip] - 1)
        share = (place - below).clamp(0.0, 1.0)
        first = self.start[clip] + below
        frames: Frames = {}
        for field in self.fields:
            values = self.get_buffer(field)
            way = share.reshape(*share.shape, *[1] * (values.ndim - 1))
            before = values[first]
            after = values[first + 1]
            frames[field] = _slerp(before, after, way) if field == "body_rotations" else before.lerp(after, way)
        return frames

    def every(self, time_step: float) -> tuple[Frames, Tensor]:
        """Return all clips in equal time steps, concatenated, and a bool tensor: a clip begins."""
        counts = [int(duration / time_step) + 1 for duration in self.durations]
        clip = torch.cat([torch.full((count,), k) for k, count in enumerate(counts)]).to(self.start.device)
        time = torch.cat([time_step * torch.arange(count) for count in counts]).to(self.start.device)
        return self.at(clip, time), time == 0


def _reorder(clip: Clip, field: str, kind: str, own: Sequence[str], names: Sequence[str]) -> np.ndarray:
    """Return a field with its joints or bodies in the order of `names`."""
    for name in names:
        if name not in own:
            raise UserError(f"motion {clip.name!r}: {kind} have no {name!r}, {nearest(name, own)}")
    return clip.fields[field][:, [own.index(name) for name in names]]


def _slerp(a: Tensor, b: Tensor, share: Tensor) -> Tensor:
    """Return unit quaternions `[..., 4]` on the shorter arc from `a` to `b`."""
    cos = (a * b).sum(-1, keepdim=True)
    b, cos = torch.where(cos < 0, -b, b), cos.abs().clamp(max=1.0)
    angle = torch.arccos(cos)
    near = angle < 1e-3  # avoid 0 / 0: interpolate linearly
    sin = torch.where(near, 1.0, angle.sin())
    weights = torch.where(near, 1 - share, ((1 - share) * angle).sin() / sin), (share * angle).sin() / sin
    mixed = weights[0] * a + torch.where(near, share, weights[1]) * b
    return mixed / mixed.norm(dim=-1, keepdim=True)


def column(frames: Frames, motions: MotionLibrary, name: str) -> Tensor:
    """Return one component `[...]` of frames by its column name, `FIELD/NAME[/AXIS]`."""
    field, _, rest = name.partition("/")
    part, _, axis = rest.partition("/")
    if field not in frames:
        raise UserError(f"columns: {name!r}: {nearest(field, frames)}")
    known = motions.joints if field.startswith("dof") else motions.bodies
    if part not in known:
        raise UserError(f"columns: {name!r}: {nearest(part, known)}")
    axes = AXES[field]
    if axis not in (tuple(axes) or ("",)):
        raise UserError(f"columns: {name!r} must end in one of {', '.join(axes) or 'no axis'}")
    index = known.index(part)
    return frames[field][..., index, axes.index(axis)] if axes else frames[field][..., index]


@torch.no_grad()
def pose_error(poses: Tensor, reset: Tensor, reference: Tensor, begins: Tensor) -> Tensor:
    """Return the mean distance `[E]` of poses `[T, E, J]` from a reference `[M, J]`, time-warped.

    Dynamic time warping: with each pose the reference advances by 0, 1 or 2 frames, and it may
    start and end at any frame. It does not cross the beginning of a clip (`begins` `[M]`), and
    restarts where an episode does (`reset` `[T, E]`). A distance is the root mean square over J.
    """
    distance = torch.cdist(poses, reference.expand(len(poses), -1, -1), compute_mode="donot_use_mm_for_euclid_dist")
    distance = distance / poses.shape[-1] ** 0.5
    one = torch.where(begins, float("inf"), 0.0)
    two = one + one.roll(1)
    total = distance[0]
    for now, starts in zip(distance[1:], reset[1:], strict=True):
        advanced = torch.minimum(total, torch.minimum(total.roll(1, -1) + one, total.roll(2, -1) + two))
        total = now + torch.where(starts[:, None], total.amin(-1, keepdim=True), advanced)
    return total.amin(-1) / len(poses)
