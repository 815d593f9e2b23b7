"""The contract beside an export: what a program needs to know, and the mistakes that it detects."""

from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch

from canter.core.interface import Interface, Joint, Signal
from canter.core.registry import UserError
from canter.core.specs import Continuous, Discrete, EnvSpec, TensorSpec
from canter.core.storage.validity import Mismatch
from canter.envs import EnvConfig
from canter.nn.actor_critic import ModelConfig
from canter.nn.network import NetworkConfig
from canter.nn.policy_loading import check_fits, load_policy
from canter.nn.rnn import RNNConfig
from canter.play.contract import (
    TEST_VECTORS,
    ContractError,
    compare_contracts,
    describe_contract,
    read_contract,
    write_contract,
)

LEGS = ("hip", "knee")
INF = float("inf")
ROBOT = Interface(
    obs={
        "policy": (
            Signal(name="gravity", size=3, components=("x", "y", "z"), unit="1", scale=(1.0,), offset=(0.0,)),
            Signal(name="joint_pos", size=4, components=LEGS, unit="rad", low=(-INF,), high=(2.0,), history=2),
        )
    },
    action=(Signal(name="joint_pos", size=2, components=LEGS, unit="rad", scale=(0.5,), offset=(0.1, -0.2)),),
    clip_actions=INF,
    control_period=0.02,
    decimation=4,
    joints=(Joint(name="hip", default_position=0.1, stiffness=20.0), Joint(name="knee", default_position=-0.2)),
)
SPEC = EnvSpec({"policy": TensorSpec((7,))}, Continuous((-1.0, -INF), (1.0, INF)), 1, env_id="a", interface=ROBOT)


def contract_of(interface=ROBOT, **network):
    torch.manual_seed(0)
    policy = ModelConfig(policy=NetworkConfig(hidden=(8,), **network)).build_policy(replace(SPEC, interface=interface))
    return policy, describe_contract(policy, {"policy": torch.randn(20, 7)})


def test_a_contract_says_what_is_declared_and_what_is_unknown():
    _, contract = contract_of()
    (group,) = contract["observations"]
    assert [(term["name"], term["start"], term["size"]) for term in group["terms"]] == [
        ("gravity", 0, 3),
        ("joint_pos", 3, 4),
    ]
    assert group["terms"][1]["low"] == ["-inf"] and group["terms"][1]["scale"] == "unknown"
    assert group["normalizer"] == {"mean": [0.0] * 7, "std": [1.0] * 7, "clip": 10.0}
    assert contract["action"]["terms"][0]["offset"] == [0.1, -0.2]
    assert (contract["action"]["low"], contract["control_period"]) == ([-1.0, "-inf"], 0.02)
    assert contract["joints"][1] == {
        "name": "knee",
        "default_position": -0.2,
        "stiffness": "unknown",
        "damping": "unknown",
        "effort_limit": "unknown",
        "armature": "unknown",
    }
    policy, plain = contract_of(normalize_obs=False)
    assert plain["observations"][0]["normalizer"] == "none"
    policy.actor.network.normalizers[0] = torch.nn.Identity()  # a part of the user's own
    own = describe_contract(policy, {"policy": torch.randn(2, 7)})
    assert own["observations"][0]["normalizer"] == "unknown"
    _, bare = contract_of(Interface())
    assert bare["observations"][0]["terms"] == bare["action"]["terms"] == bare["joints"] == "unknown"
    assert bare["control_period"] == "unknown"


def test_test_vectors_are_one_episode_of_a_recurrent_policy():
    policy, contract = contract_of(rnn=RNNConfig(hidden=5))
    assert [part["shape"] for part in contract["state"]] == [[5], [5]]
    state = policy.initial_state(1)
    assert len(contract["test_vectors"]) == TEST_VECTORS
    for vector in contract["test_vectors"]:
        action, state = policy.act({"policy": torch.tensor([vector["obs"]["policy"]])}, state)
        assert torch.equal(action[0], torch.tensor(vector["action"]))


def test_a_contract_is_read_as_it_was_written_and_never_overwritten(tmp_path):
    _, contract = contract_of()
    file = tmp_path / "policy.yaml"
    write_contract(file, contract)
    write_contract(file, contract)
    assert read_contract(file) == contract
    assert file.read_text().startswith("# The contract of a control policy.")
    _, other = contract_of(Interface())
    with pytest.raises(ContractError, match="is the contract of another policy"):
        write_contract(file, other)
    file.write_text(file.read_text().replace("control_period: 0.02", "control_period: 0.01"))
    with pytest.raises(ContractError, match="sha256 does not match"):
        read_contract(file)
    file.write_text("schema: 99")
    with pytest.raises(ContractError, match="no contract of schema 1"):
        read_contract(file)


def swapped(interface):
    (action,) = interface.action
    return replace(interface, action=(replace(action, components=("knee", "hip")),))


def rescaled(interface):
    (action,) = interface.action
    return replace(interface, action=(replace(action, scale=(0.25,)),))


def without_pose(interface):
    return replace(interface, joints=tuple(replace(joint, default_position=None) for joint in interface.joints))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (swapped, "action.0.components is ['knee', 'hip'], expected ['hip', 'knee']"),
        (rescaled, "action.0.scale is [0.25], expected [0.5]"),
        (without_pose, "joints.0.default_position is unknown, expected 0.1"),
        (lambda robot: replace(robot, clip_actions=2.0), "clip_actions is 2.0, expected inf"),
    ],
)
def test_a_robot_that_differs_from_the_contract_is_detected(change, expected):
    _, contract = contract_of()
    assert all("cannot be verified" in line for line in compare_contracts(contract, ROBOT))
    assert expected in compare_contracts(contract, change(ROBOT))


def test_a_policy_file_keeps_the_interface_and_refuses_swapped_joints(tmp_path):
    policy, _ = contract_of()
    policy.save(tmp_path / "a.safetensors")
    loaded = load_policy(tmp_path / "a.safetensors")
    assert loaded.spec.interface == ROBOT
    check_fits(loaded, replace(SPEC, interface=rescaled(ROBOT)), "a policy")  # numbers may be changed on purpose
    with pytest.raises(Mismatch, match=r"action.joint_pos components is \('hip', 'knee'\) in what was saved"):
        check_fits(loaded, replace(SPEC, interface=swapped(ROBOT)), "a policy")
    check_fits(loaded, replace(SPEC, interface=Interface()), "a policy")  # nothing to compare with


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: Signal(name="a", size=3, components=("x",)), "a: 1 components, expected 3"),
        (lambda: Signal(name="a", size=3, scale=(1.0, 2.0)), "scale has 2 values, expected 1 or 3"),
        (lambda: Signal(name="a", size=3, history=2), "a: size=3 is no multiple of history=2"),
        (lambda: replace(SPEC, action=Discrete(3)), "interface: action: terms of 2 components, expected 3"),
        (lambda: replace(SPEC, obs={"polcy": TensorSpec((7,))}), "obs.policy: no such observation group"),
        (lambda: replace(SPEC, obs={"policy": TensorSpec((8,))}), "obs.policy: terms of 7 components, expected 8"),
    ],
)
def test_declarations_of_other_sizes_are_refused(declare, message):
    with pytest.raises(UserError, match=message):
        declare()


def test_a_gymnasium_environment_declares_its_interface_in_its_metadata():
    class Leg(gymnasium.Env):
        metadata = {"render_modes": [], "interface": replace(ROBOT, obs={})}  # noqa: RUF012
        observation_space = gymnasium.spaces.Box(-1, 1, (7,))
        action_space = gymnasium.spaces.Box(-1, 1, (2,))

        def reset(self, seed=None, options=None):
            return np.zeros(7, np.float32), {}

    gymnasium.register("Leg-v0", Leg)
    env = EnvConfig(id="Leg-v0", num_envs=2).build("cpu")
    assert env.spec.interface.action == ROBOT.action
    env.close()
    gymnasium.registry.pop("Leg-v0")
