"""The swimmer against what is known of swimming without inertia, and its picture."""

import math

import numpy as np
import pytest
import torch

from canter.envs.tensor import Swimmer
from canter.envs.tensor.swimmer import MAX_ANGLE, body, body_velocity, links, solve_symmetric


def cycles(amplitude, phase, frequency=1.0, *, along=1.0, across=2.0, steps=500, midpoint=True):
    """Return the head's displacement [B, 3] by cycles of joint angles `A sin(2 pi f t - i phase)`: x, y, angle.

    Amplitudes, phases and frequencies are numbers, or lists of B.
    """
    columns = [torch.tensor(value, dtype=torch.float64).view(-1, 1) for value in (amplitude, phase, frequency)]
    amplitude, phase, frequency = columns
    number, rate = torch.arange(3, dtype=torch.float64), 2 * math.pi * frequency
    time = 1 / frequency / steps

    def slope(t, angle):
        bent, bending = amplitude * torch.sin(rate * t - number * phase), torch.cos(rate * t - number * phase)
        v = body_velocity(bent, amplitude * rate * bending, along, across)
        cos, sin = angle.cos(), angle.sin()
        return torch.stack((cos * v[:, 0] - sin * v[:, 1], sin * v[:, 0] + cos * v[:, 1], v[:, 2]), -1)

    where = torch.zeros((len(amplitude + phase + frequency), 3), dtype=torch.float64)
    for k in range(steps):
        change = slope(k * time, where[:, 2])
        if midpoint:
            change = slope((k + 0.5) * time, where[:, 2] + 0.5 * (time * change)[:, 2])
        where = where + time * change
    return where


def distances(*arguments, **options):
    return cycles(*arguments, **options)[:, :2].norm(dim=-1)


def test_moving_there_and_back_the_same_way_leads_nowhere():
    """The scallop theorem; Euler's rule would seem to break it."""
    assert distances(0.8, 0.0) < 1e-5
    assert distances(0.8, 0.0, steps=1000, midpoint=False) > 1e-3


def test_without_a_difference_between_drag_along_and_across_there_is_no_swimming():
    assert distances(0.8, math.pi / 3, across=1.0) < 5e-5


def test_how_far_a_cycle_leads_does_not_depend_on_its_speed():
    slow, fast = distances(0.8, math.pi / 3, [1.0, 2.0]).tolist()
    assert slow == pytest.approx(fast, abs=1e-4)


def test_lengths_per_cycle():
    """Known values of this body, found by another implementation with the same rule."""
    known = torch.tensor([0.0503, 0.0875, 0.1850, 0.3002, 0.4133], dtype=torch.float64)
    torch.testing.assert_close(distances([0.3, 0.4, 0.6, 0.8, 1.0], math.pi / 3), known, atol=2e-4, rtol=0)


def test_a_wave_the_other_way_swims_the_other_way():
    forward, backward = cycles(0.8, [math.pi / 3, -math.pi / 3])
    assert forward[0] > 0.25 and float(forward[2].abs()) < 1e-9
    torch.testing.assert_close(backward[0], -forward[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(backward[1], forward[1], atol=1e-4, rtol=0)


def test_forces_and_torques_on_the_whole_body_vanish():
    """By the drag of 200 points on each link, at velocities from finite differences of where the points are."""
    generator = torch.Generator().manual_seed(0)
    joints, rates = (torch.randn((1, 3), generator=generator, dtype=torch.float64) for _ in range(2))
    v = body_velocity(joints, rates)[0]
    along = (torch.arange(200, dtype=torch.float64) + 0.5) / 200 - 0.5

    def points(time):
        zero = torch.zeros((1, 1), dtype=torch.float64)
        state = {"joints": joints + time * rates, "position": time * v[None, :2], "heading": zero + time * v[2]}
        angles = torch.cat((state["heading"], state["joints"]), -1).cumsum(-1)[0]
        axes = torch.stack((angles.cos(), angles.sin()), -1)
        return body(state)[0][:, None] + along[None, :, None] * axes[:, None], axes

    (there, axes), (later, _), (before, _) = points(0.0), points(1e-5), points(-1e-5)
    moving = (later - before) / 2e-5
    forward = (moving * axes[:, None]).sum(-1, keepdim=True) * axes[:, None]
    force = -(1.0 * forward + 2.0 * (moving - forward)) / 200
    torque = there[..., 0] * force[..., 1] - there[..., 1] * force[..., 0]
    assert force.sum((0, 1)).abs().max() < 1e-6 and abs(float(torque.sum())) < 1e-4


def test_the_solver_solves():
    generator = torch.Generator().manual_seed(0)
    root = torch.randn((16, 3, 3), generator=generator, dtype=torch.float64)
    matrix, right = root @ root.mT + torch.eye(3), torch.randn((3, 16), generator=generator, dtype=torch.float64)
    rows, columns = torch.triu_indices(3, 3)
    found = solve_symmetric(matrix[:, rows, columns].T, right)
    torch.testing.assert_close(found.T, torch.linalg.solve(matrix, right.T), rtol=1e-9, atol=1e-12)


def test_joints_follow_the_actions_and_a_wave_is_rewarded():
    env = Swimmer(2)
    env.reset(seed=0)
    for _ in range(60):
        env.step(torch.tensor([[1.0, -1.0, 0.5]]).expand(2, 3))
    expected = MAX_ANGLE * torch.tensor([1.0, -1.0, 0.5])
    torch.testing.assert_close(env.state_dict()["state"]["joints"], expected.expand(2, 3), atol=1e-3, rtol=0)

    env.reset(seed=0)
    env._state["heading"].zero_()
    earned = 0.0
    for t in range(100):  # one cycle a second, two of them
        phase = torch.tensor([2 * math.pi * t / 50 - i * math.pi / 3 for i in range(3)])
        earned += env.step(0.7 * torch.sin(phase).expand(2, 3)).reward / 50
    assert (earned > 0.3).all()
    moved = body(env.state_dict()["state"]).mean(1)[:, 0]
    assert (moved + 1.5 - earned).abs().max() < 0.1  # it began with its centre 1.5 links behind the head


def test_the_motion_group_is_the_first_part_of_the_policys():
    env = Swimmer(3, motion=True)
    obs = env.reset(seed=0)
    assert torch.equal(obs["motion"], obs["policy"][:, :9])
    assert "motion" not in Swimmer(3).reset(seed=0)


def test_the_picture_shows_the_links():
    env = Swimmer(2)
    env.reset(seed=0)
    pictures = env.render()
    assert len(pictures) == 2 and pictures[0].shape == (320, 480, 3) and pictures[0].dtype == np.uint8
    red = (pictures[0] == np.array((204, 60, 50))).all(-1)
    assert 100 < red.sum() < 2000
    tip = links(env.state_dict()["state"])[0, :2].mean(0)
    centre = links(env.state_dict()["state"])[0].mean(0)
    rows, columns = np.nonzero(red)
    assert abs((columns.mean() - 240) / 60 - float(tip[0] - centre[0])) < 0.1
    assert abs((160 - rows.mean()) / 60 - float(tip[1] - centre[1])) < 0.1


def test_speed_beyond_the_pace_does_not_pay():
    steps = {}
    for pace in (None, 0.1):
        env = Swimmer(64, pace=pace)
        env.reset(0)
        phase = torch.arange(3) * math.radians(60)
        actions = [0.7 * torch.sin(2 * math.pi * 0.02 * t - phase).expand(64, 3) for t in range(60)]
        steps[pace] = torch.stack([env.step(action).reward for action in actions])
    assert steps[None].max() > 0.1
    assert torch.equal(steps[0.1], steps[None].clamp(max=0.1))


def test_heads_point_at_most_so_far_from_x_at_first():
    env = Swimmer(1000, heading=0.5)
    env.reset(0)
    assert 0.45 < env.state_dict()["state"]["heading"].abs().max() <= 0.5
    with pytest.raises(ValueError, match=r"heading=4.0 must lie in 0..pi"):
        Swimmer(1, heading=4.0)
