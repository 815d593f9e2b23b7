"""Go1 from mjlab to plain MuJoCo on the CPU: velocity tracking through the C header, and what mistakes would cost.

    pip install "canter[mjlab]"
    python benchmarks/robots/sim2sim.py runs/go1 --seconds 150 --out benchmarks/robots/results/sim2sim_go1.json

Trains the run if the folder does not exist, then plays it in mjlab and in plain MuJoCo with the
model of mjlab's Go1 as it is in its XML file: without motors, with frictions and contacts of its own. Each mistake is
a robot that differs from the contract: the result has the line that detects it, and the tracking of such a robot.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mjlab
import torch

import canter
from canter.app.sim2sim import VelocityTerms, check_contract, compare_tracking, record_training, run_robots
from canter.core.interface import Interface, Joint, decode, signals_from_plain
from canter.core.machine import describe_machine, describe_versions
from canter.nn.policy_file import find_policy
from canter.nn.policy_loading import load_policy
from canter.play.contract import compare_contracts, contract_file, read_contract
from canter.play.export import collect_inputs, export_policy

TASK = "mjlab:Mjlab-Velocity-Flat-Unitree-Go1"
MODEL = Path(mjlab.__file__).parent / "asset_zoo/robots/unitree_go1/xmls/go1.xml"
COMMANDS = {"lin_vel_x": (-1.0, 1.0), "ang_vel_z": (-0.5, 0.5)}
"""Ranges of the commands in training; the task's settings for watching have others."""
SECONDS = 10


def swap_joints(contract: dict[str, Any]) -> None:
    """Exchange the motors of two joints of a leg."""
    names = contract["action"]["terms"][0]["components"]
    names[1], names[2] = names[2], names[1]


def double_scale(contract: dict[str, Any]) -> None:
    """Scale actions by twice as much."""
    term = contract["action"]["terms"][0]
    term["scale"] = [2 * value for value in term["scale"]]


def forget_pose(contract: dict[str, Any]) -> None:
    """Measure and command joints from zero instead of the default pose."""
    contract["action"]["terms"][0]["offset"] = [0.0]
    for joint in contract["joints"]:
        joint["default_position"] = 0.0


MISTAKES: dict[str, Callable[[dict[str, Any]], None]] = {
    "two swapped joints": swap_joints,
    "a wrong scale": double_scale,
    "a missing default pose": forget_pose,
}


def interface_of(contract: dict[str, Any]) -> Interface:
    """Return the interface that a contract describes."""

    def terms(place: dict[str, Any]) -> Any:
        return signals_from_plain([{k: v for k, v in term.items() if k != "start"} for term in place["terms"]])

    return Interface(
        obs={group["group"]: terms(group) for group in contract["observations"]},
        action=terms(contract["action"]),
        clip_actions=float(contract["action"]["clip_actions"]),
        clip_observations=float(contract["clip_observations"]),
        control_period=contract["control_period"],
        decimation=contract["decimation"],
        joints=tuple(Joint(**decode(joint)) for joint in contract["joints"]),
    )


def run(folder: Path, robots: int, device: str) -> dict[str, Any]:
    """Return the tracking of both simulators and of every mistake."""
    options = {"play": True, "commands": {"twist": {"ranges": COMMANDS}}}
    env = canter.EnvConfig(id=TASK, num_envs=robots, options=options).build(device)
    policy = load_policy(find_policy(folder), env=env.spec, device=device)
    header = folder / "exports" / "sim2sim.h"
    if not header.exists():
        export_policy(policy, header, "c", *collect_inputs(policy, env, 1000, 0))
    contract = read_contract(contract_file(header))
    check_contract(contract, env.spec.interface)
    terms = VelocityTerms.find(env.spec.interface)
    steps = round(SECONDS / contract["control_period"])
    commands, trained = record_training(policy, env, steps, 1)
    tracked = run_robots(header, MODEL, commands, terms)
    print(compare_tracking(trained, tracked), flush=True)
    result: dict[str, Any] = {"robots": robots, "training": asdict(trained), "mujoco": asdict(tracked)}
    for name, change in MISTAKES.items():
        robot = copy.deepcopy(contract)
        change(robot)
        found = [line for line in compare_contracts(contract, interface_of(robot)) if "cannot be verified" not in line]
        tracked = run_robots(header, MODEL, commands, terms, robot)
        result[name] = {"detected": found, **asdict(tracked)}
        print(f"{name}: {found[0][:90]}...; tracking {tracked.linear:.3f}, falls {tracked.falls}", flush=True)
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--robots", type=int, default=16)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=150, help="time of training, if the run does not exist")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"command": f"python {' '.join(sys.argv)}"}
    if not arguments.run.exists():
        settings = {"until": {"seconds": arguments.seconds}, "device": arguments.device}
        canter.train(TASK, run_dir=arguments.run.parent, name=arguments.run.name, final_evaluation=False, **settings)
    last = json.loads((arguments.run / "metrics.jsonl").read_text().splitlines()[-1])
    result |= {name: last[name] for name in ("iteration", "env_steps", "seconds") if name in last}
    result |= run(arguments.run, arguments.robots, arguments.device)
    result |= {"machine": describe_machine(), "versions": describe_versions()}
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
