"""Names, units and scaling of observations and actions, read from the managers of mjlab and Isaac Lab.

Both have the same managers. What neither a manager nor a term says stays unknown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from canter.core.interface import Floats, Interface, Joint, Signal
from canter.core.struct import Obs

AXES = ("x", "y", "z")
JOINT_TERMS = {
    "joint_pos": "rad (m for a sliding joint)",
    "joint_pos_rel": "rad (m for a sliding joint), minus the default position",
    "joint_vel": "rad/s (m/s for a sliding joint)",
    "joint_vel_rel": "rad/s (m/s for a sliding joint)",
}
"""Observation functions of both simulators with a component for each joint, and their units."""
AXIS_TERMS = {"base_lin_vel": "m/s", "base_ang_vel": "rad/s", "projected_gravity": "1"}
"""Observation functions with a component for each axis of the base, and their units."""
UNITS = {**JOINT_TERMS, **AXIS_TERMS, "last_action": "1, the action after clip_actions, before scale and offset"}
"""Units of observation functions."""
SENSORS = {"gyro": "rad/s", "velocimeter": "m/s", "accelerometer": "m/s^2"}
"""Sensors of MuJoCo with a component for each axis of their site, and their units."""
VELOCITY_COMMAND = ("lin_vel_x", "lin_vel_y", "ang_vel_z")
"""Components of the velocity commands of both simulators, in m/s and rad/s along the axes of the base."""
COMMANDS = {
    "JointPositionAction": "rad (m for a sliding joint)",
    "RelativeJointPositionAction": "rad (m for a sliding joint), added to the measured position",
    "JointVelocityAction": "rad/s (m/s for a sliding joint)",
    "JointEffortAction": "N m (N for a sliding joint)",
}
"""Action terms and the units of their commands."""


MISSING = (AttributeError, KeyError, IndexError, TypeError, ValueError)
"""Errors of reading a part that a direct environment or another generation does not have."""


def read_interface(env: Any, obs: Obs, clip_actions: float | None, clip_observations: float | None) -> Interface:
    """Return the interface of a manager-based environment; a part that is missing is unknown."""
    parts: dict[str, Any] = {}
    for name, read in {"action": _read_action, "joints": _read_joints, "obs": _read_obs}.items():
        with suppress(*MISSING):
            parts[name] = read(env)
    sizes = {group: math.prod(tensor.shape[1:]) for group, tensor in obs.items()}
    groups = parts.get("obs", {})
    parts["obs"] = {name: terms for name, terms in groups.items() if _count(terms) == sizes.get(name)}
    if _count(parts.get("action", ())) != env.single_action_space.shape[0]:
        parts["action"] = None
    with suppress(AttributeError):
        parts["control_period"] = float(env.step_dt)
        parts["decimation"] = int(env.cfg.decimation)
    for name, bound in {"clip_actions": clip_actions, "clip_observations": clip_observations}.items():
        parts[name] = math.inf if bound is None else bound
    return Interface(**parts)


def _count(signals: tuple[Signal, ...]) -> int:
    return sum(signal.size for signal in signals)


def _read_obs(env: Any) -> dict[str, tuple[Signal, ...]]:
    manager = env.observation_manager
    groups: dict[str, tuple[Signal, ...]] = {}
    for group, names in manager.active_terms.items():
        # Both simulators keep the settings of a group's terms under this name.
        terms = zip(names, manager.group_obs_term_dim[group], manager._group_obs_term_cfgs[group], strict=True)
        signals = [_read_term(env, name, tuple(shape), cfg) for name, shape, cfg in terms]
        if manager.group_obs_concatenate[group]:
            groups[group] = tuple(signals)
        else:
            groups |= {f"{group}/{signal.name}": (signal,) for signal in signals}
    return groups


def _read_term(env: Any, name: str, shape: tuple[int, ...], cfg: Any) -> Signal:
    size = math.prod(shape)
    history = max(1, int(cfg.history_length or 0))
    frame = size // history
    source, components, unit = _describe_function(env, cfg)
    known = components is not None and len(components) == frame
    clip = (-math.inf, math.inf) if cfg.clip is None else cfg.clip
    scale = (1.0,) if cfg.scale is None else _floats(cfg.scale)
    modified = bool(vars(cfg).get("modifiers"))  # Isaac Lab's, which are any functions before the clipping
    return Signal(
        name=name,
        size=size,
        components=components if known else None,
        unit=unit,
        source=source,
        scale=scale if len(scale) in (1, frame) and not modified else None,
        offset=None if modified else (0.0,),
        low=(float(clip[0]),),
        high=(float(clip[1]),),
        history=history,
    )


def _describe_function(env: Any, cfg: Any) -> tuple[str | None, tuple[str, ...] | None, str | None]:
    """Return source, components and unit of an observation function of the simulator itself."""
    function = vars(cfg.func).get("__wrapped__", cfg.func) if callable(cfg.func) else cfg.func
    module, name = function.__module__, function.__name__
    if not module.startswith(("mjlab.envs.mdp", "isaaclab.envs.mdp")):
        return None, None, None
    components: tuple[str, ...] | None = None
    if name in JOINT_TERMS:
        asset = cfg.params.get("asset_cfg")
        joints = tuple(env.scene["robot" if asset is None else asset.name].joint_names)
        ids = slice(None) if asset is None else asset.joint_ids
        components = joints[ids] if isinstance(ids, slice) else tuple(joints[int(i)] for i in ids)
    elif name == "last_action" and cfg.params.get("action_name") is None:
        components = tuple(joint for signal in _read_action(env) for joint in signal.components or ())
    elif name in AXIS_TERMS:
        components = AXES
    elif name == "builtin_sensor":
        return _describe_sensor(env, cfg.params["sensor_name"])
    elif name == "generated_commands":
        command = cfg.params["command_name"]
        uniform = type(env.command_manager.get_term(command)).__name__ == "UniformVelocityCommand"
        return f"command {command}", VELOCITY_COMMAND if uniform else None, "m/s and rad/s" if uniform else None
    return name, components, UNITS.get(name)


def _describe_sensor(env: Any, name: str) -> tuple[str, tuple[str, ...] | None, str | None]:
    """Return source, components and unit of a sensor of the MuJoCo model."""
    sensor = env.sim.mj_model.sensor(name)
    kind = import_module("mujoco").mjtSensor(int(sensor.type[0])).name.removeprefix("mjSENS_").lower()
    unit = SENSORS.get(kind)
    return f"sensor {name.split('/')[-1]}", None if unit is None else AXES, unit


def _read_action(env: Any) -> tuple[Signal, ...]:
    manager = env.action_manager
    return tuple(_read_action_term(name, manager.get_term(name)) for name in manager.active_terms)


def _read_action_term(name: str, term: Any) -> Signal:
    fields: dict[str, Any] = {"unit": COMMANDS.get(type(term).__name__)}
    size = int(term.action_dim)
    own = vars(term)  # mjlab has properties for these, Isaac Lab has none
    targets = own.get("_target_names", own.get("_joint_names"))
    if targets is not None and len(targets) == size:
        fields["components"] = tuple(targets)
    if type(term).__name__ in COMMANDS:
        fields |= {key: _floats(own[f"_{key}"]) for key in ("scale", "offset") if f"_{key}" in own}
        fields |= {"low": (-math.inf,), "high": (math.inf,)}
        if term.cfg.clip is not None:
            fields |= {"low": _floats(own["_clip"][..., 0]), "high": _floats(own["_clip"][..., 1])}
    return Signal(name=name, size=size, history=1, **fields)


def _read_joints(env: Any) -> tuple[Joint, ...]:
    """Return the joints of the asset `robot`, with the gains of position control where they are known."""
    robot = env.scene["robot"]
    columns: dict[str, list[float]] = {"default_position": _row(robot.data.default_joint_pos)}
    gains: dict[str, dict[str, float]] = {}
    with suppress(*MISSING):
        columns |= {
            "stiffness": _row(robot.data.default_joint_stiffness),
            "damping": _row(robot.data.default_joint_damping),
            "effort_limit": _row(robot.data.joint_effort_limits),
            "armature": _row(robot.data.joint_armature),
        }
    with suppress(*MISSING):
        gains = _mujoco_gains(env, robot)
    names = robot.joint_names
    rows = [{key: column[index] for key, column in columns.items()} for index in range(len(names))]
    return tuple(Joint(name=name, **row, **gains.get(name, {})) for name, row in zip(names, rows, strict=True))


def _mujoco_gains(env: Any, robot: Any) -> dict[str, dict[str, float]]:
    """Return the motors of the joints that a position actuator of MuJoCo moves."""
    model = env.sim.mj_model
    gains: dict[str, dict[str, float]] = {}
    for actuator in robot.spec.actuators:
        gain = float(model.actuator_gainprm[actuator.id, 0])
        bias = model.actuator_biasprm[actuator.id]
        if gain and float(bias[1]) == -gain:  # force = gain * (target - position) - damping * velocity
            limited = model.actuator_forcelimited[actuator.id]
            gains[actuator.target.split("/")[-1]] = {
                "stiffness": gain,
                "damping": -float(bias[2]),
                "effort_limit": float(model.actuator_forcerange[actuator.id, 1]) if limited else math.inf,
                "armature": float(model.dof_armature[model.joint(actuator.target).dofadr[0]]),
            }
    return gains


def _floats(value: Any) -> Floats:
    """Return a number, a sequence, or the first row of a tensor `[N, A]` as floats."""
    if isinstance(value, Tensor):
        return tuple(_row(value))
    return tuple(map(float, value)) if isinstance(value, Iterable) else (float(value),)


def _row(values: Any) -> list[float]:
    """Return the first row of a tensor, or of an array of Warp."""
    if not isinstance(values, Tensor):
        values = torch.as_tensor(values.numpy())
    # Doubles of float32 numbers would be written with 17 digits.
    flat = values[0] if values.ndim > 1 else values.reshape(-1)
    return [float(f"{number:.7g}") for number in flat.tolist()]
