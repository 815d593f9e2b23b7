"""Interfaces read from managers: those of mjlab and Isaac Lab have the same members, imitated here."""

from types import SimpleNamespace

import mujoco
import torch

from canter.core.interface import Joint
from canter.envs.robots.interface import read_interface

JOINTS = ("hip", "knee", "ankle")


def observation(name, module="mjlab.envs.mdp.observations", scale=None, clip=None, history=0, modifiers=None, **params):
    def function():
        pass

    function.__module__, function.__name__ = module, name
    return SimpleNamespace(
        func=function, params=params, scale=scale, clip=clip, history_length=history, modifiers=modifiers
    )


class JointPositionAction:
    action_dim = 2

    def __init__(self):
        self.cfg = SimpleNamespace(clip={"knee": (-1.0, 1.0)})
        self._target_names = ["hip", "knee"]
        self._scale = torch.tensor([[0.5, 0.25]])
        self._offset = torch.tensor([[0.1, -0.9]])
        self._clip = torch.tensor([[[-torch.inf, torch.inf], [-1.0, 1.0]]])


def managers():
    terms = {
        "vel": observation("base_lin_vel", scale=2.0),
        "pos": observation("joint_pos_rel", history=2, asset_cfg=SimpleNamespace(name="robot", joint_ids=[1, 2])),
        "act": observation("last_action"),
        "own": observation("joint_pos", module="my_task", clip=(-5.0, 5.0)),
    }
    data = SimpleNamespace(default_joint_pos=torch.tensor([[0.1, -0.9, 0.0]]))
    return SimpleNamespace(
        observation_manager=SimpleNamespace(
            active_terms={"actor": list(terms), "wrong": ["vel"]},
            group_obs_term_dim={"actor": [(3,), (4,), (2,), (1,)], "wrong": [(3,)]},
            group_obs_concatenate={"actor": True, "wrong": True},
            _group_obs_term_cfgs={"actor": list(terms.values()), "wrong": [terms["vel"]]},
        ),
        action_manager=SimpleNamespace(active_terms=["legs"], get_term=lambda name: JointPositionAction()),
        scene={"robot": SimpleNamespace(joint_names=JOINTS, data=data)},
        single_action_space=SimpleNamespace(shape=(2,)),
        cfg=SimpleNamespace(decimation=4),
        step_dt=0.02,
    )


def read(env):
    return read_interface(env, {"actor": torch.zeros(1, 10), "wrong": torch.zeros(1, 5)}, None, 100.0)


def test_managers_name_terms_components_units_and_scaling():
    interface = read(managers())
    vel, pos, act, own = interface.obs["actor"]
    assert (vel.components, vel.unit, vel.scale) == (("x", "y", "z"), "m/s", (2.0,))
    assert (pos.components, pos.size, pos.history) == (("knee", "ankle"), 4, 2)
    assert (act.components, act.unit) == (("hip", "knee"), "1, the action after clip_actions, before scale and offset")
    assert (vel.source, pos.source, act.source, own.source) == ("base_lin_vel", "joint_pos_rel", "last_action", None)
    assert (own.components, own.unit, own.low, own.high) == (None, None, (-5.0,), (5.0,))
    (legs,) = interface.action
    assert (legs.components, legs.scale, legs.offset) == (("hip", "knee"), (0.5, 0.25), (0.1, -0.9))
    assert (legs.low, legs.high) == ((-float("inf"), -1.0), (float("inf"), 1.0))
    assert interface.joints[1] == Joint(name="knee", default_position=-0.9)
    assert (interface.control_period, interface.decimation) == (0.02, 4)
    assert (interface.clip_actions, interface.clip_observations) == (float("inf"), 100.0)
    assert "wrong" not in interface.obs  # its terms do not add up


def test_the_scaling_of_a_modified_observation_is_unknown():
    env = managers()
    env.observation_manager._group_obs_term_cfgs["actor"][0].modifiers = ["a filter"]
    vel, pos, *_ = read(env).obs["actor"]
    assert (vel.scale, vel.offset, pos.scale, pos.offset) == (None, None, (1.0,), (0.0,))


def test_an_environment_without_managers_is_unknown():
    env = managers()
    del env.observation_manager, env.action_manager, env.scene
    interface = read(env)
    assert (interface.obs, interface.action, interface.joints) == ({}, None, None)
    assert interface.control_period == 0.02


def test_sensors_and_velocity_commands_are_named():
    model = mujoco.MjModel.from_xml_string(
        "<mujoco><worldbody><body><geom size='1'/><joint/><site name='imu'/></body></worldbody>"
        "<sensor><gyro name='robot/imu_gyro' site='imu'/><touch name='robot/touch' site='imu'/></sensor></mujoco>"
    )
    terms = {
        "gyro": observation("builtin_sensor", sensor_name="robot/imu_gyro"),
        "touch": observation("builtin_sensor", sensor_name="robot/touch"),
        "command": observation("generated_commands", command_name="twist"),
        "other": observation("generated_commands", command_name="pose"),
    }
    env = managers()
    env.observation_manager.active_terms = {"actor": list(terms)}
    env.observation_manager.group_obs_term_dim = {"actor": [(3,), (1,), (3,), (3,)]}
    env.observation_manager._group_obs_term_cfgs = {"actor": list(terms.values())}
    env.sim = SimpleNamespace(mj_model=model)
    commands = {"twist": type("UniformVelocityCommand", (), {})(), "pose": object()}
    env.command_manager = SimpleNamespace(get_term=commands.get)
    gyro, touch, command, other = read(env).obs["actor"]
    assert (gyro.source, gyro.components, gyro.unit) == ("sensor imu_gyro", ("x", "y", "z"), "rad/s")
    assert (touch.source, touch.components, touch.unit) == ("sensor touch", None, None)
    assert (command.source, command.components) == ("command twist", ("lin_vel_x", "lin_vel_y", "ang_vel_z"))
    assert (other.source, other.components, other.unit) == ("command pose", None, None)
