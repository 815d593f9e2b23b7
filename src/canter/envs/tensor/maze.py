"""A maze: find the end of a U-shaped corridor, before which there is no reward.

N is the number of environments; the side of a cell is the unit of length.
"""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from torch import Tensor

from canter.core.specs import Continuous, TensorSpec
from canter.core.struct import Obs
from canter.envs.tensor.base import BLUE, GREEN, GREY, EnvState, Outcome, Picture, TensorEnv

MAZE = ("#####", "#G..#", "###.#", "#S..#", "#####")
"""Walls, start and goal; the last row is at the bottom."""
SPEED = 0.08
"""Cells per step at full speed, which an action of 1 commands."""
LAG = 0.4
"""Fraction of the difference to the commanded velocity that one step makes up for."""
GOAL_RADIUS = 0.35
TIME_STEP = 0.05


@final
class Maze(TensorEnv):
    """A point in a corridor with two bends; the reward is 1 at the far end, else 0.

    Episodes terminate at the far end.

    The path is about six cells long, 75 steps at full speed; random actions hardly ever find it.
    Actions in +-1 are velocities along x and y. Walls stop the point.

    "policy" `[N, 4]`: position, from -1 to 1 across the maze, and velocity, 1 at full speed.
    Truncated after 300 steps.
    """

    render_fps = 1 / TIME_STEP

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        *,
        max_episode_steps: int | None = 300,
        random_start: bool = False,
    ) -> None:
        obs = {"policy": TensorSpec((4,))}
        action = Continuous(low=(-1.0, -1.0), high=(1.0, 1.0))
        super().__init__("tensor:maze", num_envs, device, obs, action, max_episode_steps, random_start)
        # Row y of the table is the y-th from the bottom.
        self._walls = torch.tensor([[cell == "#" for cell in row] for row in MAZE[::-1]], device=self.device)
        self._start = torch.tensor(_centre_of("S"), device=self.device)
        self._goal = torch.tensor(_centre_of("G"), device=self.device)

    def _sample_state(self) -> EnvState:
        position = self._start + self._uniform(-0.2, 0.2, 2)
        return {"position": position, "velocity": torch.zeros_like(position)}

    def _advance(self, state: EnvState, action: Tensor) -> Outcome:
        velocity = torch.lerp(state["velocity"], SPEED * action.clamp(-1.0, 1.0), LAG)
        position = state["position"]
        for axis in (0, 1):  # one after the other, so that the point slides along walls
            step = torch.zeros_like(velocity)
            step[:, axis] = velocity[:, axis]
            cell = (position + step).floor().long()
            blocked = self._walls[cell[:, 1], cell[:, 0]].unsqueeze(-1)
            position = torch.where(blocked, position, position + step)
            velocity = torch.where(blocked & (step != 0), 0.0, velocity)
        reached = (position - self._goal).norm(dim=-1) < GOAL_RADIUS
        return Outcome({"position": position, "velocity": velocity}, reached.float(), reached)

    def _observe(self, state: EnvState) -> Obs:
        middle = 0.5 * len(MAZE)
        return {"policy": torch.cat(((state["position"] - middle) / (middle - 1), state["velocity"] / SPEED), -1)}

    def render(self) -> list[np.ndarray]:
        """Return a picture of every environment, from above; the goal is green."""
        return [self._picture(point) for point in self._state["position"].cpu().numpy()]

    def _picture(self, point: np.ndarray) -> np.ndarray:
        side = len(MAZE)
        picture = Picture((side / 2, side / 2), span=side + 0.5, width=320, height=320)
        for y, x in self._walls.nonzero().tolist():
            picture.box((x, y), (x + 1, y + 1), GREY)
        picture.disc(self._goal.cpu().numpy(), GOAL_RADIUS, GREEN)
        picture.disc(point, 0.12, BLUE)
        return picture.pixels()


def _centre_of(mark: str) -> tuple[float, float]:
    """Return the centre of the cell with a mark."""
    return next((row.index(mark) + 0.5, y + 0.5) for y, row in enumerate(MAZE[::-1]) if mark in row)
