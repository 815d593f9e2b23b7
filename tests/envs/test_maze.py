"""The U-shaped maze and deep sea: walls, what is paid and where, and their pictures."""

import numpy as np
import pytest
import torch

from canter.envs.probes import DeepSea
from canter.envs.tensor import Maze
from canter.envs.tensor.maze import SPEED

RIGHT, UP, LEFT = ([1.0, 0.0], [0.0, 1.0], [-1.0, 0.0])


def drive(env, *legs):
    """Return the last step of driving some steps each way."""
    for direction, steps in legs:
        for _ in range(steps):
            step = env.step(torch.tensor(direction).expand(env.num_envs, 2))
    return step


def test_the_way_round_is_paid_once_at_its_end():
    env = Maze(4)
    env.reset(seed=0)
    step = drive(env, (RIGHT, 30), (UP, 27))
    assert not step.reward.any() and not step.terminated.any()
    paid, goal = torch.zeros(4), torch.tensor([-2 / 3, 2 / 3])
    for _ in range(40):
        step = env.step(torch.tensor(LEFT).expand(4, 2))
        paid += step.reward
        assert torch.equal(step.reward > 0, step.terminated)
        if step.terminated.any():
            assert (step.final_obs["policy"][step.terminated, :2] - goal).norm(dim=-1).max() < 0.25
    assert (paid == 1).all()


def test_walls_stop_and_let_slide():
    env = Maze(2)
    env.reset(seed=0)
    step = drive(env, (UP, 60))  # there is a wall above the start
    position = env.state_dict()["state"]["position"]
    assert (position[:, 1] < 2).all() and (position[:, 1] > 2 - SPEED).all()
    assert (step.obs["policy"][:, 3] == 0).all()
    drive(env, ([1.0, 1.0], 60))
    position = env.state_dict()["state"]["position"]
    assert (position[:, 0] > 3.9).all() and (position[:, 1] > 3.9).all()


def test_chance_does_not_find_the_goal():
    env, generator = Maze(64), torch.Generator().manual_seed(0)
    env.reset(seed=0)
    for _ in range(300):
        assert not env.step(torch.randn((64, 2), generator=generator)).reward.any()


def test_the_picture_shows_walls_goal_and_point():
    env = Maze(1)
    env.reset(seed=0)
    (picture,) = env.render()
    blue, green = ((picture == np.array(colour)).all(-1).sum() for colour in ((52, 101, 164), (60, 160, 90)))
    assert picture.shape == (320, 320, 3) and 50 < blue < green


@pytest.mark.parametrize("size", [2, 7])
def test_only_the_way_to_the_right_finds_the_treasure(size):
    env = DeepSea(3, size=size)
    env.reset(seed=0)
    row = torch.arange(size)
    paid = torch.zeros(3)
    for t in range(size):
        right = env.goes_right[row[t], row[t]]
        wrong = 1 - right
        step = env.step(torch.stack((right, wrong if t == 0 else right, wrong if t == size - 1 else right)))
        paid += step.reward
        assert step.terminated.tolist() == [t == size - 1] * 3
    assert paid[0].item() == pytest.approx(0.99)
    assert paid[1].item() <= 0 and paid[2].item() == pytest.approx(-0.01 * (size - 1) / size)
    assert step.obs["policy"][:, 0].tolist() == [1.0] * 3  # anew at the top left


def test_a_sea_without_depth_is_refused():
    with pytest.raises(ValueError, match="size=1 must be at least 2"):
        DeepSea(1, size=1)
