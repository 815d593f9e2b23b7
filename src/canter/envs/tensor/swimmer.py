"""A swimmer of four links in a viscous fluid.

Resistive-force theory: without inertia, the drag on a link is linear in its velocity, and larger
across it than along it. Forces and torques on the whole body vanish, so its velocity follows from
the rates of the joints alone. N is the number of environments; lengths are in links, times in
seconds.
"""

from __future__ import annotations

import math
from typing import final

import numpy as np
import torch
from torch import Tensor

from canter.core.data.motion import MotionLibrary, load_clip
from canter.core.declarations import Mirror, MotionSpec, Symmetry
from canter.core.registry import UserError
from canter.core.specs import Continuous, TensorSpec
from canter.core.struct import Obs
from canter.envs.tensor.base import BLACK, BLUE, RED, EnvState, Outcome, Picture, TensorEnv

JOINTS = 3
DRAG_ALONG = 1.0
DRAG_ACROSS = 2.0
MAX_ANGLE = 1.2
"""Target of a joint for an action of 1."""
STIFFNESS = 400.0
"""Stiffness of the joints' controllers, 1/s^2."""
DAMPING = 40.0
"""Their damping, 1/s; it is critical."""
MAX_TORQUE = 80.0
"""Largest torque per inertia of a joint: an angular acceleration."""
TIME_STEP = 0.02
SUBSTEPS = 4

SIGNS = {"joints": "---", "rates": "---", "position": "+-", "heading": "-"}
LEFT_RIGHT = Symmetry(
    "left-right",
    obs={"policy": Mirror.of("--- --- +-- +-"), "motion": Mirror.of("--- --- +--")},
    action=Mirror.of("---"),
    state={name: Mirror.of(signs) for name, signs in SIGNS.items()},
)


def observe_motion(frames: dict[str, Tensor]) -> Tensor:
    """Return the group "motion" `[..., 9]`: joints and velocity of the "head"."""
    w = frames["body_rotations"][..., 0, 0]
    z = frames["body_rotations"][..., 0, 3]
    heading = 2.0 * torch.atan2(z, w)
    cos = heading.cos()
    sin = heading.sin()
    x, y = frames["body_linear_velocities"][..., 0, :2].unbind(-1)
    turning = frames["body_angular_velocities"][..., 0, 2]
    velocity = torch.stack((cos * x + sin * y, cos * y - sin * x, turning), -1)
    return torch.cat((frames["dof_positions"], frames["dof_velocities"], velocity), -1)


MOTION = MotionSpec(
    TIME_STEP,
    {"motion": observe_motion},
    joints=tuple(f"joint_{number}" for number in range(1, JOINTS + 1)),
    bodies=("head",),
    pose=tuple(range(JOINTS)),
)


def centres(along: Tensor) -> Tensor:
    """Return the links' centres `[..., 4]` relative to the head's, from their directions."""
    return 0.5 * (along + along[..., :1]) - along.cumsum(-1)


def body_velocity(joints: Tensor, rates: Tensor, along: float = DRAG_ALONG, across: float = DRAG_ACROSS) -> Tensor:
    """Return the velocity of the head `[N, 3]`: forward, to the left and turning.

    Solve `A v = -b` for the drag of all links at once: `A` is the resistance to moving as a rigid
    body `[N, 3, 3]`, and `b` the drag of bending alone.
    """
    zero = torch.zeros_like(joints[:, :1])
    angle = torch.cat((zero, joints.cumsum(-1)), -1)
    turning = torch.cat((zero, rates.cumsum(-1)), -1)
    cos = angle.cos()
    sin = angle.sin()
    x, y, bend_x, bend_y = centres(torch.stack((cos, sin, -sin * turning, cos * turning))).unbind()
    xx = along * cos**2 + across * sin**2
    xy = (along - across) * cos * sin
    yy = along * sin**2 + across * cos**2
    # Force against a unit rotation about the head's centre.
    turn_x = xy * x - xx * y
    turn_y = yy * x - xy * y
    spin = across / 12  # torque of a link against rotation about its own centre
    resistance = (xx, xy, turn_x, yy, turn_y, turn_y * x - turn_x * y + spin)
    bending = (
        xx * bend_x + xy * bend_y,
        xy * bend_x + yy * bend_y,
        turn_x * bend_x + turn_y * bend_y + spin * turning,
    )
    sums = torch.stack((*resistance, *bending)).sum(-1)
    return -solve_symmetric(sums[:6], sums[6:]).T


def solve_symmetric(matrix: Tensor, right: Tensor) -> Tensor:
    """Return `x` `[3, N]` with `A x = right`; `matrix` `[6, N]` is A's upper triangle.

    It uses cofactors, as torch's solvers report their success to the host.
    """
    a, b, c, d, e, f = matrix.unbind()
    first = d * f - e * e
    second = c * e - b * f
    third = b * e - c * d
    inverse = (
        (first, second, third),
        (second, a * f - c * c, b * c - a * e),
        (third, b * c - a * e, a * d - b * b),
    )
    determinant = a * first + b * second + c * third
    rows = [sum(entry * right[k] for k, entry in enumerate(row)) for row in inverse]
    return torch.stack(rows) / determinant  # pyright: ignore[reportArgumentType, reportCallIssue]


@final
class Swimmer(TensorEnv):
    """Swim along the x axis, wherever the head points at first; 50 actions a second.

    Actions in +-1 are targets of the three joints, 1.2 rad each; controllers pull the joints there
    with bounded torque.

    "policy" `[N, 11]`: joint angles (3) and rates (3), velocity of the head forward, to the left
    and turning (3), cosine and sine of the angle from the head to the x axis (2). With `motion`,
    "motion" `[N, 9]` contains the first nine of these. With `reference`, a motion clip, episodes
    begin with its joints and rates at a random time.

    The reward is the velocity of the body's centre along x, in links per second, at most `pace`. At
    first the head points up to `heading` rad away from x. Truncated after 400 steps.
    """

    render_fps = 1 / TIME_STEP

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        *,
        motion: bool = False,
        reference: str | None = None,
        pace: float | None = None,
        heading: float = math.pi,
        max_episode_steps: int | None = 400,
        random_start: bool = False,
    ) -> None:
        if not 0.0 <= heading <= math.pi:
            raise UserError(
                f"heading={heading} must lie in 0..pi: rad that the head may point away from the x axis at first"
            )
        obs = {"policy": TensorSpec((11,))} | ({"motion": TensorSpec((9,))} if motion else {})
        super().__init__(
            "tensor:swimmer",
            num_envs,
            device,
            obs,
            Continuous(low=(-1.0,) * JOINTS, high=(1.0,) * JOINTS),
            max_episode_steps,
            random_start,
            symmetries=(LEFT_RIGHT,),
            motion=MOTION,
        )
        self._motion = motion
        self._reference = None
        self._pace = math.inf if pace is None else pace
        self._heading = heading
        if reference is not None:
            self._reference = MotionLibrary([load_clip(reference)], joints=MOTION.joints, device=self.device)

    def _sample_state(self) -> EnvState:
        joints = self._uniform(-0.2, 0.2, JOINTS)
        rates = torch.zeros(self.num_envs, JOINTS, device=self.device)
        if self._reference is not None:
            frames = self._reference.at(*self._reference.sample(self.num_envs, self.generator))
            joints = frames["dof_positions"]
            rates = frames["dof_velocities"]
        return {
            "joints": joints,
            "rates": rates,
            "position": torch.zeros(self.num_envs, 2, device=self.device),
            "heading": self._uniform(-self._heading, self._heading, 1),
        }

    def _advance(self, state: EnvState, action: Tensor) -> Outcome:
        target = MAX_ANGLE * action.clamp(-1.0, 1.0)
        after = state
        for _ in range(SUBSTEPS):  # midpoint rule: with Euler's, even a path back and forth drifts
            middle = _integrate(after, _derivative(after, target), 0.5 * TIME_STEP / SUBSTEPS)
            after = _integrate(after, _derivative(middle, target), TIME_STEP / SUBSTEPS)
        advanced = body(after).mean(1) - body(state).mean(1)
        reward = (advanced[:, 0] / TIME_STEP).clamp(max=self._pace)
        return Outcome(after, reward, torch.zeros_like(reward, dtype=torch.bool))

    def _observe(self, state: EnvState) -> Obs:
        joints = state["joints"]
        rates = state["rates"]
        heading = state["heading"]
        motion = torch.cat((joints, rates, body_velocity(joints, rates)), -1)
        obs = {"policy": torch.cat((motion, heading.cos(), -heading.sin()), -1)}
        return obs | {"motion": motion} if self._motion else obs

    def render(self) -> list[np.ndarray]:
        """Return a picture of every environment, from above; the head is red."""
        return [_picture(points) for points in links(self._state).cpu().numpy()]


def _derivative(state: EnvState, target: Tensor) -> EnvState:
    """Return the time derivative of the state."""
    joints = state["joints"]
    rates = state["rates"]
    forward, left, turning = body_velocity(joints, rates).split(1, -1)
    cos = state["heading"].cos()
    sin = state["heading"].sin()
    return {
        "joints": rates,
        "rates": (STIFFNESS * (target - joints) - DAMPING * rates).clamp(-MAX_TORQUE, MAX_TORQUE),
        "position": torch.cat((cos * forward - sin * left, sin * forward + cos * left), -1),
        "heading": turning,
    }


def _integrate(state: EnvState, derivative: EnvState, time: float) -> EnvState:
    return {name: tensor + time * derivative[name] for name, tensor in state.items()}


def directions(state: EnvState) -> Tensor:
    """Return unit vectors `[N, 4, 2]` along the links, in the world."""
    bends = torch.cat((state["heading"], state["joints"]), -1).cumsum(-1)
    return torch.stack((bends.cos(), bends.sin()), -1)


def body(state: EnvState) -> Tensor:
    """Return the centres of the links `[N, 4, 2]` in the world."""
    return state["position"].unsqueeze(1) + centres(directions(state).mT).mT


def links(state: EnvState) -> Tensor:
    """Return the ends of the links `[N, 5, 2]`, from the tip of the head."""
    halves = 0.5 * directions(state)
    middles = body(state)
    return torch.cat((middles[:, :1] + halves[:, :1], middles - halves), 1)


def _picture(points: np.ndarray) -> np.ndarray:
    x, y = points.mean(0)
    picture = Picture((float(x), float(y)), span=8.0)
    picture.grid(1.0)
    picture.line(points, 0.16, BLUE)
    picture.line(points[:2], 0.16, RED)
    for point in points[1:-1]:
        picture.disc(point, 0.05, BLACK)
    return picture.pixels()
