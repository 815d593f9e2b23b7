"""Motion clips: what is read, what is refused, and what lies between two frames."""

import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from canter.core.data.motion import AXES, MotionLibrary, column, load_clip, pose_error

ROOT = Path(__file__).parents[3]
WIDE, NARROW = (f"canter:swimmer_{name}.npz" for name in ("wide", "narrow"))


def turning(frames=61, fps=30, seed=0):
    """The arrays of a clip: two joints, two bodies that turn about random axes at 2 rad/s."""
    time, rng = np.arange(frames) / fps, np.random.default_rng(seed)
    axes = rng.normal(size=(2, 3))
    axes /= np.linalg.norm(axes, axis=-1, keepdims=True)
    half = time[:, None, None]
    return {
        "fps": fps,
        "dof_names": np.array(["hip", "knee"]),
        "body_names": np.array(["trunk", "foot"]),
        "dof_positions": np.stack([np.sin(3 * time), time], -1),
        "dof_velocities": np.stack([3 * np.cos(3 * time), np.ones_like(time)], -1),
        "body_positions": np.stack([time * 2, time, 0 * time], -1)[:, None].repeat(2, 1),
        "body_rotations": np.concatenate([np.cos(half) * np.ones((1, 2, 1)), np.sin(half) * axes], -1),
        "body_linear_velocities": np.broadcast_to([2.0, 1.0, 0.0], (frames, 2, 3)),
        "body_angular_velocities": np.broadcast_to(2 * axes, (frames, 2, 3)),
    }


def saved(folder, **changes):
    arrays = {key: value for key, value in (turning() | changes).items() if value is not None}
    np.savez(folder / "clip.npz", **arrays)
    return str(folder / "clip.npz")


def test_a_clip_in_isaac_labs_form_is_read(tmp_path):
    clip, given = load_clip(saved(tmp_path)), turning()
    assert (clip.fps, clip.joints, clip.bodies) == (30, ("hip", "knee"), ("trunk", "foot"))
    assert clip.length == 61 and clip.duration == pytest.approx(2.0)
    assert all(np.allclose(clip.fields[field], given[field]) for field in AXES)


def test_names_of_mjlabs_files_are_known(tmp_path):
    given = turning()
    names = {"joint_names": "dof_names", "joint_pos": "dof_positions", "body_quat_w": "body_rotations"}
    arrays = {"fps": 30, "body_names": given["body_names"]} | {new: given[old] for new, old in names.items()}
    np.savez(tmp_path / "clip.npz", **arrays)
    clip = load_clip(str(tmp_path / "clip.npz"))
    assert set(clip.fields) == {"dof_positions", "body_rotations"} and clip.joints == ("hip", "knee")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fps": None}, "fps is missing"),
        ({"fps": 0}, r"fps=0 must lie in 1\.\.10000"),
        ({"fps": 60}, r"dof_velocities are 0\.5 times the differences of dof_positions at fps=60: rate, units"),
        ({"dof_velocities": np.degrees(turning()["dof_velocities"])}, r"dof_velocities are 57 times the differences"),
        ({"body_linear_velocities": -turning()["body_linear_velocities"]}, "body_linear_velocities are -1 times"),
        ({"dof_names": np.array(["hip", "hip"])}, "dof_names names 'hip' twice"),
        ({"dof_names": None}, "dof_positions needs dof_names, which is missing"),
        ({"body_names": np.array(["trunk"])}, r"body_positions has shape \(61, 2, 3\), and 1 body_names need"),
        ({"dof_positions": turning()["dof_positions"][:60]}, r"dof_velocities has shape \(61, 2\)"),
        ({"dof_velocities": np.full((61, 2), np.nan)}, "dof_velocities is NaN or infinite in frame 0"),
        ({"body_rotations": 1.1 * turning()["body_rotations"]}, r"has length 1\.1 and not 1"),
        ({"body_rotations": turning()["body_rotations"][..., [1, 2, 3, 0]]}, r"if w is last; \(w, x, y, z\) is needed"),
        ({"dof_names": np.array([{"a": 1}], dtype=object)}, "cannot be read as plain arrays"),
    ],
)
def test_mismatched_clips_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        load_clip(saved(tmp_path, **changes))


def test_files_that_are_none_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no such file: did you mean swimmer_wide\.npz"):
        load_clip("canter:swimmer_wild.npz")
    (tmp_path / "clip.bvh").write_text("x")
    with pytest.raises(ValueError, match=r"clips are \.npz or \.csv files, not \.bvh"):
        load_clip(str(tmp_path / "clip.bvh"))
    (tmp_path / "clip.npz").write_text("not a zip")
    with pytest.raises(ValueError, match="cannot be read as plain arrays"):
        load_clip(str(tmp_path / "clip.npz"))


def as_csv(clip, path, uneven=0.0):
    """A clip as a table, written without the reader's help."""
    header, columns = ["time"], [np.arange(clip.length) / clip.fps]
    columns[0][5] += uneven
    for field, axes in AXES.items():
        for number, name in enumerate(clip.joints if field.startswith("dof") else clip.bodies):
            for axis, letter in enumerate(axes) if axes else [(None, "")]:
                header.append(f"{field}/{name}" + (f"/{letter}" if letter else ""))
                values = clip.fields[field][:, number]
                columns.append(values if axis is None else values[:, axis])
    rows = [",".join(header), *(",".join(repr(float(x)) for x in row) for row in zip(*columns, strict=True))]
    path.write_text("\n".join(rows) + "\n")
    return path


def test_a_table_holds_the_same(tmp_path):
    clip = load_clip(saved(tmp_path))
    read = load_clip(str(as_csv(clip, tmp_path / "clip.csv")))
    assert (read.joints, read.bodies) == (clip.joints, clip.bodies) and read.fps == pytest.approx(30)
    assert all(np.allclose(read.fields[field], clip.fields[field], atol=1e-12) for field in AXES)
    path = tmp_path / "clip.csv"
    text = path.read_text()
    for old, new, message in (
        ("body_rotations/foot/z", "body_rotations/foot/q", "column 'body_rotations/foot/z' is missing"),
        ("dof_positions/", "dof_position/", "'dof_position/hip' is not FIELD/NAME .*did you mean dof_positions"),
        ("time", "seconds", "needs a column 'time'"),
        ("\n0.0,", "\nx,", "every cell below the header must be a number"),
    ):
        path.write_text(text.replace(old, new))
        with pytest.raises(ValueError, match=message):
            load_clip(str(path))
    with pytest.raises(ValueError, match=r"frames [45] and [56] are .* s apart, others not"):
        load_clip(str(as_csv(clip, path, uneven=0.01)))


def test_frames_between_two_are_linear_and_rotations_lie_on_the_sphere(tmp_path):
    given = turning()
    motions = MotionLibrary([load_clip(saved(tmp_path))])
    time = torch.tensor([0.0, 0.513, 1.99, 2.0, 2.5])
    frames = motions.at(torch.zeros(5, dtype=torch.int64), time)
    kept = time.double().numpy().clip(0, 2)
    for joint in range(2):
        expected = np.interp(kept, np.arange(61) / 30, given["dof_positions"][:, joint])
        np.testing.assert_allclose(frames["dof_positions"][:, joint], expected, atol=1e-6)
    # A steady turn stays one between frames: half the angle is the time, about the same axis.
    axes = given["body_rotations"][1, :, 1:] / np.linalg.norm(given["body_rotations"][1, :, 1:], axis=-1, keepdims=True)
    expected = np.concatenate([np.cos(kept)[:, None, None].repeat(2, 1), np.sin(kept)[:, None, None] * axes], -1)
    np.testing.assert_allclose(frames["body_rotations"], expected, atol=1e-5)


def test_each_clip_starts_at_its_own_first_frame(tmp_path):
    clips = [load_clip(saved(tmp_path, **turning(frames, seed=frames))) for frames in (61, 20, 7)]
    frames = MotionLibrary(clips).at(torch.arange(3), torch.zeros(3))
    for field in AXES:
        np.testing.assert_allclose(frames[field], np.stack([clip.fields[field][0] for clip in clips]), atol=1e-6)


def test_either_sign_of_a_quaternion_is_the_same_rotation(tmp_path):
    flipped = turning()["body_rotations"].copy()
    flipped[7:, 0] *= -1
    plain, other = (
        MotionLibrary([load_clip(saved(tmp_path, **changes))]).at(
            torch.zeros(1, dtype=torch.int64), torch.tensor([6.5 / 30])
        )
        for changes in ({}, {"body_rotations": flipped})
    )
    torch.testing.assert_close(plain["body_rotations"], other["body_rotations"])


def test_clips_are_drawn_by_weight_and_times_alike_from_the_span_on():
    motions = MotionLibrary([load_clip(WIDE), load_clip(NARROW), load_clip(WIDE)], weights=(1, 3, 0))
    clip, time = motions.sample(20_000, torch.Generator().manual_seed(0), span=4.0)
    # Three standard deviations of a share of 3/4 in 20,000 draws are 0.0092.
    assert abs((clip == 1).float().mean() - 0.75) < 0.0092 and (clip < 2).all()
    assert time.min() >= 4.0 and time.max() <= 10.0
    assert abs(time.mean() - 7.0) < 3 * 6 / 12**0.5 / 20_000**0.5


def test_joints_come_in_the_requested_order(tmp_path):
    clip = load_clip(saved(tmp_path))
    turned = MotionLibrary([clip], joints=("knee", "hip"), bodies=("foot",))
    frames = turned.at(torch.zeros(1, dtype=torch.int64), torch.tensor([1.0]))
    assert frames["dof_positions"].tolist() == [pytest.approx([1.0, np.sin(3.0)])]
    assert frames["body_positions"].shape == (1, 1, 3)
    assert column(frames, turned, "dof_positions/knee").tolist() == [pytest.approx(1.0)]
    assert column(frames, turned, "body_positions/foot/y").tolist() == [pytest.approx(1.0)]
    for name in ("dof_position/knee", "dof_positions/kne", "body_positions/foot", "body_positions/foot/w"):
        with pytest.raises(ValueError, match="columns: "):
            column(frames, turned, name)
    with pytest.raises(ValueError, match=r"joints have no 'ankle'"):
        MotionLibrary([clip], joints=("ankle",))


def warped(poses, reset, reference, begins):
    """Dynamic time warping by recursion over every path, in float64 and plain Python."""
    best = [[np.inf] * len(reference) for _ in poses]
    for t, pose in enumerate(poses):
        for m, frame in enumerate(reference):
            cost = np.sqrt(np.mean((pose - frame) ** 2))
            if t == 0:
                before = 0.0
            elif reset[t]:
                before = min(best[t - 1])
            else:
                before = best[t - 1][m]
                if m >= 1 and not begins[m]:
                    before = min(before, best[t - 1][m - 1])
                if m >= 2 and not begins[m] and not begins[m - 1]:
                    before = min(before, best[t - 1][m - 2])
            best[t][m] = cost + before
    return min(best[-1]) / len(poses)


def test_the_pose_error_is_that_of_the_best_warping():
    rng = np.random.default_rng(0)
    poses, reference = rng.normal(size=(9, 4, 2)), rng.normal(size=(12, 2))
    reset, begins = rng.random((9, 4)) < 0.2, np.arange(12) % 5 == 0
    found = pose_error(*(torch.tensor(x) for x in (poses, reset, reference, begins)))
    expected = [warped(poses[:, n], reset[:, n], reference, begins) for n in range(4)]
    np.testing.assert_allclose(found, expected, atol=1e-12)
    whole = torch.tensor(reference[None, 5:10]).transpose(0, 1)  # a part of the reference itself
    never = torch.zeros(5, 1, dtype=torch.bool)
    assert pose_error(whole, never, torch.tensor(reference), torch.tensor(begins)).item() == 0.0


def test_the_gaits_that_come_along_are_those_of_the_script_at_equal_speed():
    path = ROOT / "benchmarks" / "extensions" / "gaits.py"
    loaded = importlib.util.spec_from_file_location("gaits", path)
    assert loaded is not None and loaded.loader is not None
    gaits = importlib.util.module_from_spec(loaded)
    loaded.loader.exec_module(gaits)
    speeds = []
    for name, (amplitude, frequency) in gaits.GAITS.items():
        clip, arrays = load_clip(f"canter:swimmer_{name}.npz"), gaits.gait(amplitude, frequency)
        for field in clip.fields:
            np.testing.assert_allclose(clip.fields[field], arrays[field], atol=2e-6)
        way, last = clip.fields["body_positions"][:, 0], round(int(10 * frequency) / frequency * 60)
        speeds.append(np.linalg.norm(way[last] - way[0]) / (last / 60))
    assert speeds == pytest.approx([0.15, 0.15], rel=0.01)


@pytest.mark.parametrize("form", ["MimicKit", "PHC"])
def test_files_of_others_are_converted_by_a_script_and_pass_all_checks(tmp_path, form):
    """A root that turns about z at 2 rad/s and moves, and two joints."""
    time = np.arange(61) / 30
    position, joints = np.stack([time, 0.5 * time, 0 * time + 1], -1), np.stack([np.sin(3 * time), time], -1)
    if form == "MimicKit":
        turned = np.stack([0 * time, 0 * time, 2 * time], -1)
        content = {"loop_mode": 0, "fps": 30, "frames": np.concatenate([position, turned, joints], -1).tolist()}
    else:
        rotation = np.stack([0 * time, 0 * time, np.sin(time), np.cos(time)], -1)
        clip = {"root_trans_offset": position, "root_rot": rotation, "dof": joints[..., None], "fps": 30}
        content = {"walk": clip, "run": {}}
    (tmp_path / "clip.pkl").write_bytes(pickle.dumps(content))
    script = [sys.executable, str(ROOT / "examples" / "convert_motion.py")]
    call = [*script, str(tmp_path / "clip.pkl"), str(tmp_path / "clip.npz"), "--joints", "hip,knee"]
    if form == "PHC":
        refused = subprocess.run(call, capture_output=True, text=True)
        assert refused.returncode and "--clip must be one of: walk, run" in refused.stderr
        call += ["--clip", "walk"]
    subprocess.run(call, check=True)
    clip = load_clip(str(tmp_path / "clip.npz"))
    assert clip.joints == ("hip", "knee") and clip.bodies == ("root",) and clip.fps == 30
    np.testing.assert_allclose(clip.fields["dof_positions"], joints, atol=1e-6)
    half = np.stack([np.cos(time), 0 * time, 0 * time, np.sin(time)], -1)
    np.testing.assert_allclose(clip.fields["body_rotations"][:, 0], half, atol=1e-6)
    np.testing.assert_allclose(clip.fields["body_angular_velocities"][:, 0], [[0, 0, 2]] * 61, atol=1e-5)
    np.testing.assert_allclose(clip.fields["body_linear_velocities"][:, 0], [[1, 0.5, 0]] * 61, atol=1e-5)
