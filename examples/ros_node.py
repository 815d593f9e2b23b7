"""A ROS 2 node that runs a policy for velocity commands by the names of its contract, with NumPy alone.

    canter export go1 --to numpy
    scp runs/go1/exports/best.npz src/canter/runtime.py examples/ros_node.py robot:
    ssh robot python3 ros_node.py best.npz

Joint states may come in any order: they are found by name. Base velocities come from /odom, in the frame of the base.
"""

import sys

import numpy as np
import rclpy
from geometry_msgs.msg import Twist
from nav_msgs.msg import Odometry
from rclpy.node import Node
from sensor_msgs.msg import Imu, JointState

try:
    from runtime import Policy
except ImportError:
    from canter.runtime import Policy


class PolicyNode(Node):
    """Reads sensors and commands, and publishes joint targets at the contract's period."""

    def __init__(self, path):
        super().__init__("policy")
        self.policy = Policy(path)
        self.policy.selftest()
        contract = self.policy.contract
        self.default = {joint["name"]: joint["default_position"] for joint in contract["joints"]}
        (self.group,) = contract["observations"]
        (self.action_term,) = contract["action"]["terms"]
        self.action = np.zeros(self.action_term["size"], np.float32)
        self.bound = float(contract["action"]["clip_actions"])
        self.joints = None
        self.values = {name: np.zeros(3) for name in ("base_lin_vel", "base_ang_vel", "command")}
        self.values["projected_gravity"] = np.array([0.0, 0.0, -1.0])
        known = {*self.values, "joint_pos", "joint_vel", "actions"}
        if unknown := [term["name"] for term in self.group["terms"] if term["name"] not in known]:
            raise ValueError(f"no sensor for the observation terms {unknown}")
        if stacked := [term["name"] for term in self.group["terms"] if term["history"] not in (1, "unknown")]:
            raise ValueError(f"the observation terms {stacked} have a history, which this node does not keep")
        self.create_subscription(JointState, "joint_states", self.on_joints, 1)
        self.create_subscription(Imu, "imu", self.on_imu, 1)
        self.create_subscription(Odometry, "odom", self.on_odometry, 1)
        self.create_subscription(Twist, "cmd_vel", self.on_command, 1)
        self.targets = self.create_publisher(JointState, "joint_targets", 1)
        self.create_timer(contract["control_period"], self.on_timer)

    def on_joints(self, message):
        """Keep the joint states by name."""
        self.joints = {
            name: (position, velocity)
            for name, position, velocity in zip(message.name, message.position, message.velocity, strict=True)
        }

    def on_imu(self, message):
        """Keep the angular velocity and the direction of gravity in the frame of the base."""
        rate, q = message.angular_velocity, message.orientation
        self.values["base_ang_vel"] = np.array([rate.x, rate.y, rate.z])
        up = [2 * (q.x * q.z - q.w * q.y), 2 * (q.y * q.z + q.w * q.x), 1 - 2 * (q.x**2 + q.y**2)]
        self.values["projected_gravity"] = -np.array(up)

    def on_odometry(self, message):
        """Keep the velocity of the base in its own frame."""
        linear = message.twist.twist.linear
        self.values["base_lin_vel"] = np.array([linear.x, linear.y, linear.z])

    def on_command(self, message):
        """Keep the commanded velocity."""
        self.values["command"] = np.array([message.linear.x, message.linear.y, message.angular.z])

    def measure(self, term):
        """Return the measurements of an observation term, in its unit."""
        name = term["name"]
        if name == "joint_pos":
            return np.array([self.joints[joint][0] - self.default[joint] for joint in term["components"]])
        if name == "joint_vel":
            return np.array([self.joints[joint][1] for joint in term["components"]])
        return self.action if name == "actions" else self.values[name]

    def on_timer(self):
        """Act once, as soon as joint states have arrived."""
        if self.joints is None:
            return
        obs = self.policy.observe(np.concatenate([self.measure(term) for term in self.group["terms"]]))
        self.action = np.clip(self.policy.step(obs), -self.bound, self.bound)  # raises for NaN: stop the robot
        command = self.policy.command(self.action)
        self.targets.publish(JointState(name=self.action_term["components"], position=command.tolist()))


if __name__ == "__main__":
    rclpy.init()
    rclpy.spin(PolicyNode(sys.argv[1]))
