"""The contract of a policy: what a program that runs it must know about observations and actions.

Plain data, written as YAML next to an export: terms with names, units and scaling as far as the
environment declares them, normalisation, recurrent state, action bounds, and test vectors. A value
that nothing declared is "unknown".
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from canter import __version__
from canter.core.interface import UNKNOWN, Interface, Signal, encode
from canter.core.plain import to_plain
from canter.core.registry import UserError
from canter.core.specs import ACTION_MASK
from canter.core.storage.files import replace_file
from canter.core.storage.validity import flatten, spec_to_plain
from canter.core.struct import Obs, tree_leaves
from canter.nn.actor_critic import Policy
from canter.nn.heads import WithHeads
from canter.nn.network import ModuleNetwork, Network
from canter.nn.normalizer import IdentityNormalizer, Normalizer

SCHEMA = 1
"""Version of the layout; other versions are refused."""
TEST_VECTORS = 12
"""Observations of the test vectors, one after the other from the start of an episode."""
SAME_POLICY = 1e-2
"""Largest difference from a test vector's action on any device, relative if that is above 1."""
LARGEST_VECTOR = 4096
"""Numbers of an observation above which there are no test vectors: an image would fill the file."""
LEGEND = """\
# The contract of a control policy. "unknown" is what the environment does not declare, "inf" no bound.
#   observations   terms follow each other; obs = clip(measured, low, high) * scale + offset, and then
#                  within +-clip_observations; a history has the oldest frame first
#   normalizer     inside the exported policy, do not repeat it: clip((obs - mean) / std, -clip, clip)
#   action         command = clip(clip(action, +-clip_actions) * scale + offset, low, high)
#   joints         in rad, N m/rad, N m s/rad, N m and kg m^2 (m and N for sliding joints)
#   control_period in seconds, with `decimation` physics steps
#   test_vectors   one after the other from the start of an episode, where the state is `initial`
"""
"""Comment at the top of every file."""


class ContractError(UserError):
    """A contract that cannot be read, was changed, or does not fit."""


def describe_contract(policy: Policy, obs: Obs) -> dict[str, Any]:
    """Return the contract of a policy on the CPU; the test vectors are of the first `obs` `[M, ...]`."""
    spec = policy.spec
    interface = spec.interface.to_plain()
    groups = (*policy.actor.network.groups, *[ACTION_MASK] * policy.actor.masked)
    contract: dict[str, Any] = {
        "schema": SCHEMA,
        "canter": __version__,
        "env": spec.env_id,
        **{name: interface[name] for name in ("control_period", "decimation")},
        "observations": [_describe_group(policy, name) for name in groups],
        "clip_observations": interface["clip_observations"],
        "action": {
            **spec_to_plain(spec)["action"],
            "terms": _place(spec.interface.action),
            "clip_actions": interface["clip_actions"],
        },
        "own_arrays": to_plain(spec.own_arrays),
        "state": [
            {"name": f"state_{i}", "shape": list(part.shape[1:]), "initial": 0.0}
            for i, part in enumerate(tree_leaves(policy.initial_state(1)))
        ],
        "joints": interface["joints"],
        "test_vectors": _make_vectors(policy, {name: obs[name] for name in groups}),
    }
    return contract | {"sha256": hash_contract(contract)}


def _describe_group(policy: Policy, name: str) -> dict[str, Any]:
    spec = policy.spec.obs[name]
    return {
        "group": name,
        "shape": list(spec.shape),
        "dtype": str(spec.dtype).removeprefix("torch."),
        "terms": _place(policy.spec.interface.obs.get(name)),
        "normalizer": _describe_normalizer(policy, name),
    }


def _describe_normalizer(policy: Policy, group: str) -> dict[str, Any] | str:
    network = policy.actor.network
    if group not in network.groups:
        return "none"
    if not isinstance(network, Network | ModuleNetwork | WithHeads):
        return UNKNOWN
    module = network.normalizers[network.groups.index(group)]
    if not isinstance(module, Normalizer):
        return "none" if isinstance(module, IdentityNormalizer) else UNKNOWN
    clip = "inf" if module.clip is None else module.clip
    return {"mean": _numbers(module.shift), "std": _numbers(module.scale), "clip": clip}


def _place(signals: tuple[Signal, ...] | None) -> list[dict[str, Any]] | str:
    """Return terms as plain data, each with the index of its first component."""
    if signals is None:
        return UNKNOWN
    ends = np.cumsum([signal.size for signal in signals]).tolist()
    return [{"start": end - signal.size, **encode(signal)} for signal, end in zip(signals, ends, strict=True)]


@torch.no_grad()
def _make_vectors(policy: Policy, obs: Obs) -> list[dict[str, Any]]:
    if sum(math.prod(group.shape[1:]) for group in obs.values()) > LARGEST_VECTOR:
        return []
    state = policy.initial_state(1)
    vectors: list[dict[str, Any]] = []
    for index in range(min(TEST_VECTORS, len(next(iter(obs.values()))))):
        row = {name: group[index : index + 1].cpu() for name, group in obs.items()}
        action, state = policy.act(row, state)
        vectors.append({"obs": {name: _numbers(group) for name, group in row.items()}, "action": _numbers(action)})
    return vectors


def check_vectors(contract: dict[str, Any], policy: Policy, export: Path) -> None:
    """Raise ContractError if the policy's actions are not those of the test vectors of an exported file."""
    state = policy.initial_state(1)
    specs = policy.spec.obs
    for vector in contract["test_vectors"]:
        groups = {name: torch.tensor(numbers, dtype=specs[name].dtype) for name, numbers in vector["obs"].items()}
        obs = {name: group.reshape(1, *specs[name].shape).to(policy.spec.device) for name, group in groups.items()}
        action, state = policy.act(obs, state)
        if not np.allclose(action.flatten().cpu(), vector["action"], rtol=SAME_POLICY, atol=SAME_POLICY):
            raise ContractError(f"{export} is of another policy, such as an earlier one: remove it and export again")


def _numbers(tensor: Tensor) -> list[Any]:
    """Return all numbers in a flat list; floats with as few digits as float32 needs."""
    array = tensor.detach().cpu().reshape(-1).numpy()
    return [float(str(number)) for number in array] if array.dtype == np.float32 else array.tolist()


def hash_contract(contract: dict[str, Any]) -> str:
    """Return the SHA-256 of everything but the field `sha256`."""
    content = {name: value for name, value in contract.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_contract(path: Path, contract: dict[str, Any]) -> None:
    """Write a contract as YAML; raise ContractError if the file holds another one."""
    if path.exists():
        if read_contract(path) != contract:
            raise ContractError(f"{path} is the contract of another policy; remove it or export to another name")
        return
    text = yaml.safe_dump(contract, sort_keys=False, default_flow_style=None, width=100, allow_unicode=True)
    replace_file(path, (LEGEND + text).encode())


def contract_file(export: Path) -> Path:
    """Return the file of the contract next to an exported policy."""
    return export.with_suffix(".contract.yaml")


def read_contract(path: str | Path) -> dict[str, Any]:
    """Return the contract of a file; raise ContractError if it was changed or is none."""
    try:
        contract = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ContractError(f"{path} cannot be read: {error}") from error
    if not isinstance(contract, dict) or contract.get("schema") != SCHEMA:
        raise ContractError(f"{path} is no contract of schema {SCHEMA}")
    if contract.get("sha256") != hash_contract(contract):
        raise ContractError(f"{path}: sha256 does not match: it was changed after it was written")
    return contract


def compare_contracts(contract: dict[str, Any], here: Interface) -> list[str]:
    """Return the differences between a contract and the interface of a robot or simulator.

    A part that one of them does not declare is a difference too: it cannot be verified.
    """
    declared = here.to_plain()
    plain = ("control_period", "decimation", "clip_observations", "clip_actions", "joints")
    saved: dict[str, Any] = {name: (contract | contract["action"])[name] for name in plain}
    saved["action"] = contract["action"]["terms"]
    saved |= {f"obs.{group['group']}": group["terms"] for group in contract["observations"]}
    present = {name: declared[name] for name in plain}
    present["action"] = _place(here.action)
    present |= {f"obs.{group}": _place(signals) for group, signals in here.obs.items()}
    old = flatten(saved)
    new = flatten({name: present.get(name, UNKNOWN) for name in saved})
    names = [name for name in {**old, **new} if old.get(name, UNKNOWN) != new.get(name, UNKNOWN)]
    differences = [f"{name} is {new.get(name, UNKNOWN)}, expected {old.get(name, UNKNOWN)}" for name in names]
    unverified = [name for name in old if old[name] == UNKNOWN == new.get(name, UNKNOWN)]
    return differences + [f"{name} is unknown in both and cannot be verified" for name in unverified]


def known(values: Any) -> Sequence[Any]:
    """Return the values of a field; nothing if it is unknown."""
    return () if values == UNKNOWN else values


def bound(value: Any) -> float:
    """Return the number of a field such as `clip_actions`; infinity if it is unknown."""
    return math.inf if value == UNKNOWN else float(value)


# LEAPP


LEAPP_VERSION = "1.3"
"""Version of LEAPP's layout, which Isaac Lab and Isaac ROS read."""
NODE = "policy"


def leapp_file(onnx: Path) -> Path:
    """Return LEAPP's file next to an ONNX file; raise ContractError if it exists."""
    path = onnx.with_suffix(".leapp.yaml")
    if path.exists():
        raise ContractError(f"{path} already exists; remove it or export to another name")
    return path


def write_leapp(onnx: Path) -> Path:
    """Write `NAME.leapp.yaml` next to an exported `NAME.onnx`, for a batch of one; return its path."""
    path = leapp_file(onnx)
    about = json.loads(onnx.with_name(f"{onnx.name}.json").read_text())
    contract = read_contract(contract_file(onnx))
    names = {group["group"]: _element_names(group["terms"]) for group in contract["observations"]}
    names["action"] = _element_names(contract["action"]["terms"])
    states = [part["name"] for part in contract["state"]]
    data = onnx.read_bytes()
    parameters = {
        "model_path": onnx.name,
        "md5sum": hashlib.md5(data, usedforsecurity=False).hexdigest(),
        "sha256sum": hashlib.sha256(data).hexdigest(),
        "backend": "onnx",
    }
    inputs = [_describe_tensor(name, entry, names) for name, entry in about["inputs"].items()]
    outputs = [_describe_tensor(name, entry, names) for name, entry in about["outputs"].items()]
    description = {
        "models": {NODE: {"inputs": inputs, "outputs": outputs, "parameters": parameters}},
        "pipeline": {
            "data_flow": {},
            "feedback_flow": {f"{NODE}/next_{state}": [f"{NODE}/{state}"] for state in states},
            "inputs": {NODE: [name for name in about["inputs"] if name not in states]},
            "outputs": {NODE: ["action"]},
        },
        "system information": {"leapp config version": LEAPP_VERSION, **about["versions"]},
    }
    replace_file(path, yaml.safe_dump(description, sort_keys=False, default_flow_style=None).encode())
    return path


def _describe_tensor(name: str, entry: dict[str, Any], names: dict[str, list[str]]) -> dict[str, Any]:
    shape = [1, *entry["shape"][1:]]
    described = {"name": name, "dtype": entry["dtype"], "shape": shape, "type": "tensor"}
    if len(shape) == 2 and len(names.get(name, ())) == shape[1]:
        described["element_names"] = [names[name]]
    return described


def _element_names(terms: Any) -> list[str]:
    """Return the name of every component, `term/component`; empty if one is unknown."""
    if terms == UNKNOWN:
        return []
    if any(term["components"] == UNKNOWN or len(term["components"]) != term["size"] for term in terms):
        return []
    return [f"{term['name']}/{component}" for term in terms for component in term["components"]]
