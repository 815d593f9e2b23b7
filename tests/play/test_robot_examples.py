"""The control loops of examples/ for a legged robot: the C++ program compiled by g++, and the ROS node.

There is no ROS here: modules of this file stand in for rclpy and its messages.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from canter.core.interface import Interface, Joint, Signal
from canter.core.specs import Continuous, EnvSpec, TensorSpec
from canter.nn.actor_critic import ModelConfig
from canter.nn.network import NetworkConfig
from canter.play.c_library import FLAGS
from canter.play.export import export_policy
from canter.runtime import Policy

EXAMPLES = Path(__file__).parents[2] / "examples"
INF = float("inf")
JOINTS = tuple(f"{leg}_{part}_joint" for leg in ("FR", "FL", "RR", "RL") for part in ("hip", "thigh", "calf"))
DEFAULT = np.linspace(-1.5, 1.5, 12)
CLIP = 1.5
CLIP_OBSERVATIONS = 1.25
SCALE = np.linspace(0.1, 0.5, 12)


QUADRUPED = Interface(
    obs={
        "actor": tuple(
            Signal(
                name=name, size=size, components=components, scale=(scale,), offset=(0.0,), low=(-high,), high=(high,)
            )
            for name, size, components, scale, high in (
                ("base_lin_vel", 3, ("x", "y", "z"), 2.0, INF),
                ("base_ang_vel", 3, ("x", "y", "z"), 0.25, INF),
                ("projected_gravity", 3, ("x", "y", "z"), 1.0, INF),
                ("joint_pos", 12, JOINTS, 1.0, INF),
                ("joint_vel", 12, JOINTS, 0.05, 1.0),
                ("actions", 12, JOINTS, 1.0, INF),
                ("command", 3, ("lin_vel_x", "lin_vel_y", "ang_vel_z"), 0.5, INF),
            )
        )
    },
    action=(
        Signal(
            name="joint_pos",
            size=12,
            components=JOINTS,
            scale=tuple(SCALE.tolist()),
            offset=tuple(DEFAULT.tolist()),
            low=(-2.0,),
            high=(2.0,),
        ),
    ),
    clip_actions=CLIP,
    clip_observations=CLIP_OBSERVATIONS,
    control_period=0.02,
    decimation=4,
    joints=tuple(
        Joint(name=name, default_position=value) for name, value in zip(JOINTS, DEFAULT.tolist(), strict=True)
    ),
)


@pytest.fixture
def policy(tmp_path):
    torch.manual_seed(0)
    spec = EnvSpec({"actor": TensorSpec((48,))}, Continuous((-INF,) * 12, (INF,) * 12), 1, interface=QUADRUPED)
    network = NetworkConfig(hidden=(32,), obs_groups=("actor",), normalize_obs=False)
    policy = ModelConfig(policy=network, policy_gain=3.0).build_policy(spec)
    obs = {"actor": torch.randn(20, 48)}
    export_policy(policy, tmp_path / "best.h", "c", obs)
    export_policy(policy, tmp_path / "best.npz", "numpy", obs)
    return policy


def command_of(action):
    return np.clip(np.clip(action, -CLIP, CLIP) * SCALE + DEFAULT, -2, 2)


def observation(velocity, rate, gravity, position, joint_velocity, action, command):
    joint_velocity = 0.05 * np.clip(joint_velocity, -1.0, 1.0)
    scaled = (2 * np.asarray(velocity), 0.25 * np.asarray(rate), gravity, position - DEFAULT, joint_velocity, action)
    return np.clip(np.concatenate([*scaled, 0.5 * np.asarray(command)]), -CLIP_OBSERVATIONS, CLIP_OBSERVATIONS)


def act(policy, obs):
    action = policy.act({"actor": torch.tensor(obs[None], dtype=torch.float32)})[0][0].double().numpy()
    return np.clip(action, -CLIP, CLIP)  # as the simulators observe it


def test_the_cpp_loop_commands_what_the_policy_does(policy, tmp_path):
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined", f"-I{tmp_path}"]
    command = ["g++", *flags, EXAMPLES / "robot.cpp", "-o", tmp_path / "robot"]
    compiled = subprocess.run(command, capture_output=True, text=True)
    assert (compiled.returncode, compiled.stderr) == (0, "")
    done = subprocess.run([tmp_path / "robot", "3"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    position = DEFAULT.copy()
    velocity = np.zeros(12)
    action = np.zeros(12)
    for _ in range(3):
        still = np.zeros(3)
        action = act(policy, observation(still, still, [0, 0, -1], position, velocity, action, [0.5, 0, 0]))
        target = command_of(action)
        velocity = 0.2 * (target - position) / 0.02
        position = position + 0.2 * (target - position)
    printed = dict(line.split() for line in done.stdout.splitlines())
    assert [*printed] == [*reversed(JOINTS)]
    np.testing.assert_allclose([float(printed[joint]) for joint in JOINTS], target, atol=1e-5)


def test_the_c_loop_of_the_documentation_commands_what_the_policy_does(policy, tmp_path):
    page = (EXAMPLES.parent / "docs" / "deploy.md").read_text()
    source = page.partition("this is `walk.c`:\n\n```c\n")[2].partition("```")[0]
    (tmp_path / "walk.c").write_text(source.replace("step < 500", "step < 3"))
    command = ["gcc", *FLAGS, "-fsanitize=address,undefined", "walk.c", "-o", "walk", "-lm"]
    compiled = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (compiled.returncode, compiled.stderr) == (0, "")
    done = subprocess.run([tmp_path / "walk"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    target = DEFAULT
    action = np.zeros(12)
    for _ in range(3):
        still = np.zeros(3)
        action = act(policy, observation(still, still, [0, 0, -1], target, np.zeros(12), action, [0.5, 0, 0]))
        target = command_of(action)
    printed = dict(line.split() for line in done.stdout.splitlines())
    assert tuple(printed) == JOINTS
    np.testing.assert_allclose([float(value) for value in printed.values()], target, atol=1e-5)


class FakeNode:
    def __init__(self, name):
        self.callbacks = {}
        self.published = []

    def create_subscription(self, kind, topic, callback, depth):
        self.callbacks[topic] = callback

    def create_publisher(self, kind, topic, depth):
        return SimpleNamespace(publish=self.published.append)

    def create_timer(self, period, callback):
        self.period = period
        self.tick = callback


@pytest.fixture
def ros(monkeypatch):
    modules = {
        "rclpy": {},
        "rclpy.node": {"Node": FakeNode},
        "geometry_msgs": {},
        "geometry_msgs.msg": {"Twist": SimpleNamespace},
        "nav_msgs": {},
        "nav_msgs.msg": {"Odometry": SimpleNamespace},
        "sensor_msgs": {},
        "sensor_msgs.msg": {"Imu": SimpleNamespace, "JointState": SimpleNamespace},
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location("ros_node", EXAMPLES / "ros_node.py")
    node = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(node)
    return node


def vector(values):
    return SimpleNamespace(**dict(zip("xyzw", values, strict=False)))


def test_the_ros_node_commands_what_the_policy_does(policy, tmp_path, ros):
    node = ros.PolicyNode(tmp_path / "best.npz")
    node.tick()
    assert not node.published  # no joint state yet
    rng = np.random.default_rng(0)
    action = np.zeros(12)
    for _ in range(3):
        velocity, rate, command = rng.normal(size=(3, 3))
        position, joint_velocity = rng.normal(size=(2, 12))
        order = rng.permutation(12)
        node.callbacks["joint_states"](
            SimpleNamespace(
                name=[JOINTS[i] for i in order],
                position=position[order].tolist(),
                velocity=joint_velocity[order].tolist(),
            )
        )
        half = 0.3  # rolled by 0.6 rad: gravity turns towards the robot's right, which is -y
        quaternion = [np.sin(half), 0, 0, np.cos(half)]
        node.callbacks["imu"](SimpleNamespace(angular_velocity=vector(rate), orientation=vector(quaternion)))
        twist = SimpleNamespace(linear=vector(velocity), angular=vector([0, 0, 0]))
        node.callbacks["odom"](SimpleNamespace(twist=SimpleNamespace(twist=twist)))
        linear, angular = vector([command[0], command[1], 0]), vector([0, 0, command[2]])
        node.callbacks["cmd_vel"](SimpleNamespace(linear=linear, angular=angular))
        node.tick()
        gravity = [0, -np.sin(2 * half), -np.cos(2 * half)]
        obs = observation(velocity, rate, gravity, position, joint_velocity, action, command)
        action = act(policy, obs)
        message = node.published[-1]
        assert tuple(message.name) == JOINTS
        np.testing.assert_allclose(message.position, command_of(action), atol=1e-5)
    assert node.period == 0.02


def test_the_ros_node_refuses_a_term_without_a_sensor(policy, tmp_path, ros, monkeypatch):
    loaded = Policy(tmp_path / "best.npz")
    loaded.contract["observations"][0]["terms"][0]["name"] = "height_scan"
    monkeypatch.setattr(ros, "Policy", lambda path: loaded)
    with pytest.raises(ValueError, match=r"no sensor for the observation terms \['height_scan'\]"):
        ros.PolicyNode("best.npz")


def test_the_ros_node_refuses_a_history(policy, tmp_path, ros, monkeypatch):
    loaded = Policy(tmp_path / "best.npz")
    loaded.contract["observations"][0]["terms"][3]["history"] = 5
    monkeypatch.setattr(ros, "Policy", lambda path: loaded)
    with pytest.raises(ValueError, match=r"the observation terms \['joint_pos'\] have a history"):
        ros.PolicyNode("best.npz")


def test_observations_of_undeclared_terms_are_refused(policy, tmp_path):
    loaded = Policy(tmp_path / "best.npz")
    np.testing.assert_allclose(loaded.observe(np.full(48, 9.0))[[0, 3, 21]], [1.25, 1.25, 0.05])
    loaded = Policy(tmp_path / "best.npz")
    loaded.contract["observations"][0]["terms"][0]["offset"] = "unknown"
    with pytest.raises(ValueError, match="does not declare scale, offset and bounds of observation group 'actor'"):
        loaded.observe(np.zeros(48))


def test_commands_of_an_undeclared_action_are_refused(policy, tmp_path):
    loaded = Policy(tmp_path / "best.npz")
    np.testing.assert_allclose(loaded.command(np.full(12, 9.0)), command_of(np.full(12, 9.0)), atol=1e-6)
    loaded = Policy(tmp_path / "best.npz")
    loaded.contract["action"]["terms"][0]["scale"] = "unknown"
    with pytest.raises(ValueError, match="does not declare scale, offset and bounds"):
        loaded.command(np.zeros(12))
