"""`canter sim2sim`: a cart with two wheels, in plain MuJoCo and in a kinematic training simulator of this file.

A wheel turns at (target - angle) * stiffness / damping once it is up to speed. So a linear policy whose target is
ahead of the wheel's angle by damping / stiffness * rate follows velocity commands, in both simulators.
"""

import re
from dataclasses import asdict, replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

from canter.app import sim2sim
from canter.app.cli import main
from canter.core.interface import Interface, Joint, Signal
from canter.envs import EnvConfig
from canter.nn.actor_critic import ModelConfig
from canter.nn.network import NetworkConfig
from canter.play.contract import ContractError, read_contract
from canter.play.export import export_policy

RADIUS, TRACK = 0.1, 0.4
STIFFNESS, DAMPING = 20.0, 2.0
PERIOD = 0.02
INF = float("inf")
WHEELS = ("left", "right")
CART = """
<mujoco>
  <option timestep="0.01"/>
  <worldbody>
    <body name="cart" pos="0 0 0.1">
      <freejoint name="base"/>
      <site name="imu"/>
      <geom type="box" size="0.2 0.15 0.03" mass="4"/>
      <geom type="sphere" size="0.05" pos="0.15 0 -0.049" mass="0.1" condim="1" friction="0"/>
      <geom type="sphere" size="0.05" pos="-0.15 0 -0.049" mass="0.1" condim="1" friction="0"/>
      <body pos="0 0.2 0">
        <joint name="left" axis="0 1 0"/>
        <geom type="cylinder" size="0.1 0.02" zaxis="0 1 0" mass="0.5"/>
      </body>
      <body pos="0 -0.2 0">
        <joint name="right" axis="0 1 0"/>
        <geom type="cylinder" size="0.1 0.02" zaxis="0 1 0" mass="0.5"/>
      </body>
    </body>
  </worldbody>
  <actuator><position joint="left" kp="500"/></actuator>
  <sensor><gyro name="imu_ang_vel" site="imu"/></sensor>
</mujoco>
"""


def term(name, size, **fields):
    defaults = {"scale": (1.0,), "offset": (0.0,), "low": (-INF,), "high": (INF,), "history": 1}
    return Signal(name=name, size=size, **(defaults | fields))


CONTRACTED = Interface(
    obs={
        "policy": (
            term("base_lin_vel", 3, source="base_lin_vel", scale=(2.0,)),
            term("base_ang_vel", 3, source="sensor imu_ang_vel"),
            term("joint_pos", 2, source="joint_pos_rel", components=WHEELS),
            term("command", 3, source="command twist"),
        )
    },
    action=(term("wheels", 2, components=WHEELS, unit=sim2sim.POSITION_COMMAND, scale=(0.5,), offset=(0.4, -0.2)),),
    clip_actions=INF,
    clip_observations=INF,
    control_period=PERIOD,
    decimation=4,
    joints=(
        Joint(name="left", default_position=0.4, stiffness=STIFFNESS, damping=DAMPING, effort_limit=50.0),
        Joint(name="right", default_position=-0.2, stiffness=STIFFNESS, damping=DAMPING, effort_limit=50.0),
    ),
)


class KinematicCart(gymnasium.Env):
    """Wheels that follow their targets exactly and never slip."""

    metadata = {"render_modes": [], "interface": CONTRACTED}  # noqa: RUF012
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (11,))
    action_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,))

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.default = np.array([0.4, -0.2])
        self.angles = self.default.copy()
        self.rates = np.zeros(2)
        self.command = self.np_random.uniform([-0.5, 0.0, -0.8], [0.5, 0.0, 0.8])
        return self.observe(), {}

    def observe(self):
        left, right = self.rates * RADIUS
        linear = [(left + right) / 2, 0.0, 0.0]
        angular = [0.0, 0.0, (right - left) / TRACK]
        parts = [2.0 * np.array(linear), angular, self.angles - self.default, self.command]
        return np.concatenate(parts).astype(np.float32)

    def step(self, action):
        target = action * 0.5 + self.default
        self.rates = (target - self.angles) * STIFFNESS / DAMPING
        self.angles = self.angles + PERIOD * self.rates
        return self.observe(), 0.0, False, False, {}


@pytest.fixture(autouse=True)
def registered():
    gymnasium.register("KinematicCart-v0", KinematicCart)
    yield
    gymnasium.registry.pop("KinematicCart-v0")


def make_policy(spec):
    """Return the policy that sets each wheel's target ahead of its angle."""
    network = NetworkConfig(hidden=(), normalize_obs=False)
    policy = ModelConfig(policy=network).build_policy(spec)
    ahead = DAMPING / STIFFNESS / RADIUS
    weight = torch.zeros(2, 11)
    weight[:, 6:8] = torch.eye(2)
    weight[:, 8] = ahead
    weight[:, 10] = torch.tensor([-0.5, 0.5]) * TRACK * ahead
    with torch.no_grad():
        policy.actor.head.mean.weight.copy_(weight / 0.5)
        policy.actor.head.mean.bias.zero_()
    return policy


def build(interface=CONTRACTED):
    KinematicCart.metadata["interface"] = interface
    return EnvConfig(id="KinematicCart-v0", num_envs=4).build("cpu")


@pytest.fixture
def header(tmp_path):
    (tmp_path / "cart.xml").write_text(CART)
    env = build()
    policy = make_policy(env.spec)
    policy.save(tmp_path / "cart.safetensors")
    obs = {"policy": torch.randn(20, 11)}
    export_policy(policy, tmp_path / "cart.h", "c", obs)
    env.close()
    return tmp_path / "cart.h"


def contract_of(header):
    return read_contract(header.with_suffix(".contract.yaml"))


def test_the_command_line_compares_both_simulators(header, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["sim2sim", "cart.safetensors", "--to", "mujoco", "cart.xml", "--robots", "6", "--seconds", "4"])
    out = capsys.readouterr().out
    assert "Running cart.h in KinematicCart-v0 and in cart.xml" in out
    trained, here = map(float, re.search(r"velocity error +([\d.]+) +([\d.]+) m/s", out).groups())
    assert trained < 0.01 and here < 0.05
    assert int(re.search(r"yaw rate tracking .* (\d+)%", out)[1]) > 95
    assert re.search(r"falls +0 +0", out)


def test_the_robot_gets_gains_and_steps_of_the_contract(header):
    model = sim2sim.build_model(contract_of(header), header.with_name("cart.xml"))
    assert model.opt.timestep == pytest.approx(0.005)
    assert model.nu == 2  # the motor of the file is gone
    np.testing.assert_allclose(model.actuator_gainprm[:, 0], STIFFNESS)
    np.testing.assert_allclose(model.actuator_biasprm[:, 1:3], [[-STIFFNESS, -DAMPING]] * 2)
    np.testing.assert_allclose(model.actuator_forcerange, [[-50, 50]] * 2)


def test_observations_are_measured_by_name_scaled_and_stacked(header):
    contract = contract_of(header)
    velocity, _, angles, _ = contract["observations"][0]["terms"]
    velocity |= {"high": [1.5], "offset": [10.0]}
    angles |= {"components": ["right", "left"], "size": 4, "history": 2}
    robot = sim2sim.Robot(contract, sim2sim.build_model(contract, header.with_name("cart.xml")))
    robot.reset()
    first = robot.observe(np.array([1.0, 2.0, 3.0]))["policy"]
    np.testing.assert_allclose(first[8:10], first[6:8])  # the first frame fills the history
    robot.data.qpos[-2:] = [1.0, 2.0]  # left and right
    robot.data.qpos[3:7] = [np.sqrt(0.5), 0, 0, np.sqrt(0.5)]  # turned by 90 degrees
    robot.data.qvel[:] = [0.0, 3.0, 0.0, 0.0, 0.0, 0.7, 0.0, 0.0]
    sim2sim.mujoco.mj_forward(robot.model, robot.data)
    second = robot.observe(np.array([1.0, 2.0, 3.0]))["policy"]
    np.testing.assert_allclose(second[:3], [1.5 * 2 + 10, 10.0, 10.0], atol=1e-9)  # clipped at 1.5, then scaled
    np.testing.assert_allclose(second[3:6], [0.0, 0.0, 0.7], atol=1e-9)
    np.testing.assert_allclose(second[6:8], first[8:10])
    np.testing.assert_allclose(second[8:10], [2.0 + 0.2, 1.0 - 0.4])
    np.testing.assert_allclose(second[10:], [1.0, 2.0, 3.0])


def test_a_fall_is_counted(header):
    contract = contract_of(header)
    robot = sim2sim.Robot(contract, sim2sim.build_model(contract, header.with_name("cart.xml")))
    robot.reset()
    assert not robot.fallen
    robot.data.qpos[3:7] = [np.cos(0.7), np.sin(0.7), 0, 0]  # 80 degrees
    sim2sim.mujoco.mj_forward(robot.model, robot.data)
    assert robot.fallen


def test_tracking_is_that_of_the_rewards():
    commands = np.array([[[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]])
    linear = np.array([[[0.7, 0.4, 9.0], [0.0, 0.0, 0.0]]])
    angular = np.array([[[9.0, 9.0, 0.0], [0.0, 0.0, 0.5]]])
    tracking = sim2sim.measure_tracking(commands, linear, angular, falls=2)
    assert asdict(tracking) == pytest.approx(
        {
            "linear_error": 0.25,
            "angular_error": 0.25,
            "linear": (np.exp(-1.0) + 1) / 2,
            "angular": (1 + np.exp(-0.5)) / 2,
            "falls": 2,
        }
    )


def test_tracking_of_nothing_has_no_share():
    lost = sim2sim.Tracking(linear_error=99.0, angular_error=99.0, linear=0.0, angular=0.0, falls=0)
    assert "%" not in sim2sim.compare_tracking(lost, lost)


# Mistakes that the contract detects


def swapped():
    (action,) = CONTRACTED.action
    return replace(CONTRACTED, action=(replace(action, components=("right", "left")),))


def rescaled():
    (action,) = CONTRACTED.action
    return replace(CONTRACTED, action=(replace(action, scale=(0.25,)),))


def clipped():
    return replace(CONTRACTED, clip_actions=1.0)


def without_pose():
    joints = tuple(replace(joint, default_position=None) for joint in CONTRACTED.joints)
    return replace(CONTRACTED, joints=joints)


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (swapped, r"action.0.components is \['right', 'left'\], expected \['left', 'right'\]"),
        (rescaled, r"action.0.scale is \[0.25\], expected \[0.5\]"),
        (without_pose, "joints.0.default_position is unknown, expected 0.4"),
        (clipped, "clip_actions is 1.0, expected inf"),
    ],
)
def test_a_simulator_that_differs_from_the_contract_is_refused(declare, message, header):
    contract = contract_of(header)
    sim2sim.check_contract(contract, CONTRACTED)
    with pytest.raises(ContractError, match=message):
        sim2sim.check_contract(contract, declare())


def test_a_simulator_may_declare_more_than_the_contract_where_no_robot_needs_it(header):
    contract = contract_of(header)
    velocity, *others = CONTRACTED.obs["policy"]
    named = replace(CONTRACTED, obs={"policy": (replace(velocity, unit="m/s"), *others)})
    assert any(line.endswith("expected unknown") for line in sim2sim.compare_contracts(contract, named))
    sim2sim.check_contract(contract, named)


def test_a_policy_of_a_simulator_without_a_default_pose_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("cart.xml").write_text(CART)
    env = build(without_pose())
    make_policy(env.spec).save("cart.safetensors")
    env.close()
    with pytest.raises(SystemExit):
        main(["sim2sim", "cart.safetensors", "cart.xml", "--robots", "2"])
    error = capsys.readouterr().err
    assert "the contract does not say what a robot needs to know" in error and "default_position of left" in error


def test_a_missing_model_and_the_header_of_an_earlier_policy_are_refused(header, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["sim2sim", "cart.safetensors", "crat.xml"])
    assert "crat.xml: no such file; pass the robot's XML file of MuJoCo" in capsys.readouterr().err
    env = build()
    policy = make_policy(env.spec)
    with torch.no_grad():
        policy.actor.head.mean.weight.mul_(1.1)
    policy.save("cart.safetensors")
    env.close()
    with pytest.raises(SystemExit):
        main(["sim2sim", "cart.safetensors", "cart.xml", "--robots", "2"])
    assert "cart.h is of another policy, such as an earlier one: remove it and export again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('joint name="left"', 'joint name="lefty"', "left of the contract: did you mean lefty"),
        ('<site name="imu"/>', '<site name="imu"/><joint name="lift"/>', "lift of the model is not in the contract"),
        ('name="imu_ang_vel"', 'name="gyro"', "the model has no sensor 'imu_ang_vel' of the contract"),
        ("<mujoco>", "<mujcoo>", "is no model of MuJoCo"),
    ],
)
def test_a_model_with_other_names_is_refused(old, new, message, header):
    model = header.with_name("cart.xml")
    text = CART.replace(old, new).replace(
        '<freejoint name="base"/>', "" if "lift" in new else '<freejoint name="base"/>'
    )
    model.write_text(text.replace('joint="left"', 'joint="lefty"') if "lefty" in new else text)
    with pytest.raises(ContractError, match=message):
        sim2sim.Robot(contract_of(header), sim2sim.build_model(contract_of(header), model))


def test_what_plain_mujoco_cannot_do_is_refused_by_name(header):
    contract = contract_of(header)
    contract["observations"][0]["terms"][0]["source"] = "height_scan"
    model = sim2sim.build_model(contract, header.with_name("cart.xml"))
    with pytest.raises(ContractError, match="plain MuJoCo cannot measure 'height_scan'"):
        sim2sim.Robot(contract, model)
    (action,) = CONTRACTED.action
    torque = replace(CONTRACTED, action=(replace(action, unit="N m"),))
    contract["action"]["terms"][0]["unit"] = "N m"
    contract["observations"][0]["terms"][0]["source"] = "base_lin_vel"
    with pytest.raises(ContractError, match="action wheels: N m; only positions of joints"):
        sim2sim.check_contract(contract, torque)
    contract["action"]["terms"][0] |= {"unit": sim2sim.POSITION_COMMAND, "high": "unknown"}
    contract["observations"][0]["terms"][0]["low"] = "unknown"
    unbounded = replace(CONTRACTED, action=(replace(action, high=None),))
    velocity, *others = CONTRACTED.obs["policy"]
    unbounded = replace(unbounded, obs={"policy": (replace(velocity, low=None), *others)})
    with pytest.raises(ContractError, match=r"robot needs to know: action.wheels.high, obs.base_lin_vel.low$"):
        sim2sim.check_contract(contract, unbounded)
    with pytest.raises(ContractError, match="no observation term command with 3 components; it has gravity"):
        sim2sim.VelocityTerms.find(Interface(obs={"policy": (Signal(name="gravity", size=3),)}))
