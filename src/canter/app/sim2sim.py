"""Run an exported policy in plain MuJoCo by its contract, and measure how it tracks velocity commands.

The robot is driven by names alone: joints, gains, default pose, action scale, control period and
observation terms come from the contract, geometry and masses from the model. T control steps,
N robots, D numbers of an observation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from canter.core.interface import UNKNOWN, Interface, Signal
from canter.core.registry import nearest
from canter.core.specs import Env
from canter.nn.actor_critic import Policy
from canter.play.c_library import load_header
from canter.play.contract import ContractError, bound, compare_contracts, contract_file, known, read_contract
from canter.play.player import Player
from canter.runtime import SCALING, Scaling

mujoco: Any = import_module("mujoco")  # without types
Array = np.ndarray

POSITION_COMMAND = "rad (m for a sliding joint)"
"""Unit of the commands that are run: positions of joints."""
SETTLING = 1.0
"""Seconds that a robot stands in its default pose before the policy acts."""
FALLEN = math.cos(math.radians(70.0))
"""Cosine of the tilt at which a robot has fallen."""
LINEAR_SCALE = 0.25
ANGULAR_SCALE = 0.5
"""Squared errors in (m/s)^2 and (rad/s)^2 at which tracking is 1/e, as in the rewards of velocity tasks."""


@dataclass(frozen=True)
class Tracking:
    """How velocity commands were followed, over all steps of all robots."""

    linear_error: float
    """Mean distance between commanded and actual velocity in the plane of the base, in m/s."""
    angular_error: float
    """Mean absolute error of the yaw rate, in rad/s."""
    linear: float
    """Mean of exp(-error^2 / 0.25), the reward of velocity tasks: 1 is perfect."""
    angular: float
    """Mean of exp(-error^2 / 0.5) of the yaw rate."""
    falls: int
    """Episodes that ended with a fall."""


def measure_tracking(commands: Array, linear: Array, angular: Array, falls: int) -> Tracking:
    """Return the tracking of commands `[T, N, 3]` by velocities `[T, N, 3]` of the base."""
    plane = np.linalg.norm(linear[..., :2] - commands[..., :2], axis=-1)
    yaw = np.abs(angular[..., 2] - commands[..., 2])
    return Tracking(
        linear_error=float(plane.mean()),
        angular_error=float(yaw.mean()),
        linear=float(np.exp(-np.square(plane) / LINEAR_SCALE).mean()),
        angular=float(np.exp(-np.square(yaw) / ANGULAR_SCALE).mean()),
        falls=falls,
    )


def compare_tracking(training: Tracking, here: Tracking) -> str:
    """Return a table of both, with the share of the training simulator's tracking."""
    rows = [
        ("velocity error", "linear_error", " m/s"),
        ("yaw rate error", "angular_error", " rad/s"),
        ("velocity tracking", "linear", ""),
        ("yaw rate tracking", "angular", ""),
    ]
    lines = [f"{'':18} {'training':>12} {'MuJoCo':>12}"]
    for title, name, unit in rows:
        before, after = vars(training)[name], vars(here)[name]
        share = "" if unit or not before else f"   {after / before:.0%}"
        lines.append(f"{title:18} {before:12.3f} {after:12.3f}{unit}{share}")
    lines.append(f"{'falls':18} {training.falls:12} {here.falls:12}")
    return "\n".join(lines)


# The training simulator


@dataclass(frozen=True)
class VelocityTerms:
    """Observation terms that tell how a command is followed: group, first index and term of each."""

    command: tuple[str, int, Signal]
    linear: tuple[str, int, Signal]
    angular: tuple[str, int, Signal]

    @staticmethod
    def find(interface: Interface) -> VelocityTerms:
        """Return the terms `base_lin_vel` and `base_ang_vel` and the command; raise ContractError without one."""
        found: dict[str, tuple[str, int, Signal]] = {}
        for group, signals in interface.obs.items():
            start = 0
            for signal in signals:
                kind = "command" if (signal.source or "").startswith("command ") else signal.name
                found.setdefault(kind, (group, start, signal))
                start += signal.size
        for name in ("command", "base_lin_vel", "base_ang_vel"):
            if name not in found or found[name][2].size // (found[name][2].history or 1) != 3:
                raise ContractError(
                    f"tracking is of velocity commands, and the environment has no observation term {name} "
                    f"with 3 components; it has {', '.join(found) or 'none that is known'}"
                )
        return VelocityTerms(found["command"], found["base_lin_vel"], found["base_ang_vel"])


@torch.no_grad()
def record_training(policy: Policy, env: Env, steps: int, seed: int) -> tuple[Array, Tracking]:
    """Play the training simulator; return its commands `[T, N, 3]` and the tracking."""
    terms = VelocityTerms.find(env.spec.interface)
    rows: list[list[Array]] = []
    falls = 0
    for played in islice(Player(policy, env, seed=seed).steps(), steps):
        falls += int(played.step.terminated.sum())
        rows.append([_measured(played.step.obs[group], at, term) for group, at, term in vars(terms).values()])
    commands, linear, angular = (np.stack(column) for column in zip(*rows, strict=True))
    return commands, measure_tracking(commands, linear, angular, falls)


def _measured(obs: torch.Tensor, start: int, signal: Signal) -> Array:
    """Return the newest frame of a term as it was measured, `[N, size]`: without its scale and offset."""
    end = start + signal.size
    frame = obs[:, end - signal.size // (signal.history or 1) : end].double().cpu().numpy()
    scale, offset = signal.scale or (1.0,), signal.offset or (0.0,)
    return (frame - np.array(offset)) / np.array(scale)


# The contract


def check_contract(contract: dict[str, Any], interface: Interface) -> None:
    """Raise ContractError if the contract differs from the training simulator, or does not say how to run a robot."""
    unknown = ("cannot be verified", "expected unknown")  # refused below if it is needed
    problems = [line for line in compare_contracts(contract, interface) if not line.endswith(unknown)]
    if problems:
        raise ContractError(f"the contract and the training simulator differ: {'; '.join(problems)}")
    needed = {name: contract[name] for name in ("control_period", "decimation", "joints")}
    needed["action.terms"] = contract["action"]["terms"]
    for term in known(contract["action"]["terms"]):
        needed |= {f"action.{term['name']}.{key}": term.get(key, UNKNOWN) for key in ("components", *SCALING)}
    for group in contract["observations"]:
        needed[f"obs.{group['group']}.terms"] = group["terms"]
        for term in known(group["terms"]):
            keys = ("source", "history", *SCALING)
            needed |= {f"obs.{term['name']}.{key}": term.get(key, UNKNOWN) for key in keys}
    moved = {name for term in known(contract["action"]["terms"]) for name in known(term["components"])}
    for joint in known(contract["joints"]):
        keys = ("default_position", *("stiffness", "damping") * (joint["name"] in moved))
        needed |= {f"{key} of {joint['name']}": joint[key] for key in keys}
    if missing := [name for name, value in needed.items() if value == UNKNOWN]:
        raise ContractError(f"the contract does not say what a robot needs to know: {', '.join(missing)}")
    for term in contract["action"]["terms"]:
        if term["unit"] != POSITION_COMMAND:
            raise ContractError(f"action {term['name']}: {term['unit']}; only positions of joints can be commanded")


# Plain MuJoCo


def build_model(contract: dict[str, Any], path: Path) -> Any:
    """Return the model of an XML file, with motors and time steps of the contract, on a floor."""
    try:
        spec = mujoco.MjSpec.from_file(str(path))
    except (ValueError, OSError) as error:
        raise ContractError(f"{path} is no model of MuJoCo: {error}") from error
    joints = {joint.name.split("/")[-1]: joint for joint in spec.joints if joint.type != mujoco.mjtJoint.mjJNT_FREE}
    declared = {joint["name"]: joint for joint in contract["joints"]}
    if joints.keys() != declared.keys():
        lines = [f"{name} of the contract: {nearest(name, joints)}" for name in declared.keys() - joints.keys()]
        lines += [f"{name} of the model is not in the contract" for name in joints.keys() - declared.keys()]
        raise ContractError(f"the joints of {path} are not those of the contract: {'; '.join(sorted(lines))}")
    for old in (*spec.actuators, *spec.keys):
        spec.delete(old)
    for name in action_joints(contract):
        if name not in declared:
            raise ContractError(f"action component {name!r} is no joint of the contract: {nearest(name, declared)}")
        _add_motor(spec, joints[name], declared[name])
    if not any(geom.type in (mujoco.mjtGeom.mjGEOM_PLANE, mujoco.mjtGeom.mjGEOM_HFIELD) for geom in spec.geoms):
        spec.worldbody.add_geom(type=mujoco.mjtGeom.mjGEOM_PLANE, size=[0, 0, 0.05])
    spec.option.timestep = contract["control_period"] / contract["decimation"]
    spec.option.integrator = mujoco.mjtIntegrator.mjINT_IMPLICITFAST  # stiff gains are unstable with Euler's
    return spec.compile()


def action_joints(contract: dict[str, Any]) -> list[str]:
    """Return the name of the joint that each component of the action moves."""
    return [name for term in contract["action"]["terms"] for name in term["components"]]


def _add_motor(spec: Any, joint: Any, declared: dict[str, Any]) -> None:
    motor = spec.add_actuator(name=f"{declared['name']}_motor", target=joint.name)
    motor.trntype = mujoco.mjtTrn.mjTRN_JOINT
    motor.gaintype = mujoco.mjtGain.mjGAIN_FIXED
    motor.biastype = mujoco.mjtBias.mjBIAS_AFFINE
    motor.gainprm[0] = declared["stiffness"]
    motor.biasprm[1] = -declared["stiffness"]
    motor.biasprm[2] = -declared["damping"]
    motor.ctrllimited = False
    limit = bound(declared.get("effort_limit", UNKNOWN))
    if math.isfinite(limit):
        motor.forcelimited = True
        motor.forcerange[:] = (-limit, limit)
    if declared.get("armature", UNKNOWN) != UNKNOWN:
        joint.armature = declared["armature"]


def run_robots(
    header: Path, model: Path, commands: Array, terms: VelocityTerms, robot_contract: dict[str, Any] | None = None
) -> Tracking:
    """Run the policy of a C header on a robot for each of the commands `[T, N, 3]`; return the tracking.

    `robot_contract` describes robots that differ from the policy's contract.
    """
    contract = read_contract(contract_file(header))
    declared = robot_contract or contract
    built = build_model(declared, model)
    policy = load_header(header, contract)
    robots = [Robot(declared, built) for _ in range(commands.shape[1])]
    for robot in robots:
        robot.reset()
    state = [torch.zeros(len(robots), *part["shape"]) for part in contract["state"]]
    rows: list[Array] = []
    falls = 0
    for row in commands:
        seen = [robot.observe(command) for robot, command in zip(robots, row, strict=True)]
        rows.append(np.stack([robot.velocities(terms) for robot in robots], 1))
        obs = {name: torch.from_numpy(np.stack([groups[name] for groups in seen])).float() for name in seen[0]}
        action, *state = policy((obs, tuple(state)))
        for index, robot in enumerate(robots):
            robot.step(action[index].double().numpy())
            if robot.fallen:
                falls += 1
                robot.reset()
                for part in state:
                    part[index] = 0.0
    linear, angular = np.stack(rows, 1)
    return measure_tracking(commands, linear, angular, falls)


class Robot:
    """One robot in plain MuJoCo: observations by the names of the contract, commands to its joints."""

    def __init__(self, contract: dict[str, Any], model: Any) -> None:
        self.model = model
        self.data = mujoco.MjData(model)
        self.decimation = int(contract["decimation"])
        self.joints = {model.joint(i).name.split("/")[-1]: model.joint(i) for i in range(model.njnt)}
        self.default = {joint["name"]: joint["default_position"] for joint in contract["joints"]}
        self.base = int(model.body_rootid[model.jnt_bodyid[0]])
        self.groups = {group["group"]: group["terms"] for group in contract["observations"]}
        limit = contract["clip_observations"]
        self.scaling = {group: Scaling(terms, limit, group) for group, terms in self.groups.items()}
        action = contract["action"]
        self.commands = Scaling(action["terms"], action["clip_actions"], "the action")
        self.action = np.zeros(len(self.commands.scale))
        self.history: dict[tuple[str, str], list[Array]] = {}
        for terms in self.groups.values():
            for term in terms:
                self.measure(term["source"], known(term["components"]), np.zeros(3))  # raises for an unknown source

    def reset(self) -> None:
        """Let the robot stand in its default pose for a second."""
        mujoco.mj_resetData(self.model, self.data)
        for name, position in self.default.items():
            self.data.qpos[self.joints[name].qposadr] = position
        self.action = np.zeros(len(self.commands.scale))
        self.history = {}
        self.data.ctrl[:] = [
            self.default[self.model.joint(j).name.split("/")[-1]] for j in self.model.actuator_trnid[:, 0]
        ]
        mujoco.mj_step(self.model, self.data, nstep=round(SETTLING / self.model.opt.timestep))
        mujoco.mj_forward(self.model, self.data)

    def observe(self, command: Array) -> dict[str, Array]:
        """Return every observation group `[D]` for a command `[3]`."""
        return {
            group: self.scaling[group].observe(np.concatenate([self._frames(group, term, command) for term in terms]))
            for group, terms in self.groups.items()
        }

    def _frames(self, group: str, term: dict[str, Any], command: Array) -> Array:
        """Return the measurements of a term, the oldest frame first."""
        frame = self.measure(term["source"], known(term["components"]), command)
        frames = self.history.setdefault((group, term["name"]), [frame] * term["history"])
        frames[:] = [*frames[1:], frame]
        return np.concatenate(frames)

    def measure(self, source: str, components: Sequence[str], command: Array) -> Array:
        """Return what a source of the contract measures; raise ContractError for one that is not known."""
        kind, _, name = source.partition(" ")
        if kind in ("joint_pos", "joint_pos_rel", "joint_vel", "joint_vel_rel") and components:
            joints = [self.joints[joint] for joint in components]
            if kind.startswith("joint_vel"):
                return self.data.qvel[[joint.dofadr[0] for joint in joints]]
            default = np.array([self.default[joint] for joint in components]) * (kind == "joint_pos_rel")
            return self.data.qpos[[joint.qposadr[0] for joint in joints]] - default
        if kind in ("base_lin_vel", "base_ang_vel"):
            velocity = np.zeros(6)
            mujoco.mj_objectVelocity(self.model, self.data, mujoco.mjtObj.mjOBJ_XBODY, self.base, velocity, 1)
            return velocity[3:] if kind == "base_lin_vel" else velocity[:3]
        if kind == "projected_gravity":
            return -self.data.xmat[self.base].reshape(3, 3)[2]
        if kind == "last_action":
            return self.action
        if kind == "command":
            return command
        if kind == "sensor":
            sensors = {self.model.sensor(i).name.split("/")[-1]: i for i in range(self.model.nsensor)}
            if name in sensors:
                return self.data.sensor(sensors[name]).data.copy()
            raise ContractError(f"the model has no sensor {name!r} of the contract: {nearest(name, sensors)}")
        raise ContractError(f"plain MuJoCo cannot measure {source!r}: only joints, base, sensors, command and action")

    def velocities(self, terms: VelocityTerms) -> Array:
        """Return the velocities `[2, 3]` of the base, linear and angular, as the training simulator measures them."""
        signals = (terms.linear[2], terms.angular[2])
        return np.stack([self.measure(signal.source or signal.name, (), self.action) for signal in signals])

    @property
    def fallen(self) -> bool:
        """The base is tilted by more than 70 degrees."""
        return bool(self.data.xmat[self.base, 8] < FALLEN)

    def step(self, action: Array) -> None:
        """Apply an action `[A]` of the policy for one control period."""
        self.action = np.clip(action, -self.commands.limit, self.commands.limit)
        self.data.ctrl[:] = self.commands.command(action)
        mujoco.mj_step(self.model, self.data, nstep=self.decimation)
        mujoco.mj_forward(self.model, self.data)  # sensors of the new state
