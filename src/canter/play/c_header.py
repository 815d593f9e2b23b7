"""A policy as one C99 header: constants, layers, `policy_reset`, `policy_step` and `policy_selftest`.

The header needs only `math.h`, allocates nothing, and its functions are static. It is compiled and
compared with the policy before it is kept.
"""

from __future__ import annotations

import json
import math
import re
import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from canter.core.interface import UNKNOWN
from canter.core.specs import ACTION_MASK
from canter.play.contract import bound, known
from canter.play.program import ExportError, Program, Weights, quantization_scale
from canter.runtime import SCALING

TILE = 32
"""Outputs of a layer that are computed together."""
TEMPLATE = Path(__file__).with_name("policy_template.h")


def write_header(program: Program, contract: dict[str, Any], contract_name: str, weights: Weights) -> str:
    """Return the header of a program and its contract."""
    layers, body = _step(program, weights)
    vectors = contract["test_vectors"]
    inputs = [entry["group"] for entry in program.inputs]
    actions = [number for vector in vectors for number in vector["action"]]
    continuous = contract["action"]["kind"] == "continuous"
    return string.Template(TEMPLATE.read_text()).substitute(
        version=contract["canter"],
        env=_comment(contract["env"]),
        contract=_comment(contract_name),
        sha256=contract["sha256"],
        guard=contract["sha256"][:16].upper(),
        constants="\n".join(_constants(program, contract)),
        layers=layers,
        body=body,
        robot="\n".join([*_transforms(contract), *_joints(contract)]),
        observations=_list(x for vector in vectors for name in inputs for x in vector["obs"][name]) or "0",
        actions=(_list(actions) if continuous else ", ".join(map(str, actions))) or "0",
    )


def _comment(text: str) -> str:
    return text.replace("*/", "* /")


# Constants by name


def _constants(program: Program, contract: dict[str, Any]) -> Iterator[str]:
    action = contract["action"]
    entries: dict[str, tuple[int, str]] = {
        "OBS_SIZE": (sum(entry["size"] for entry in program.inputs), ""),
        "ACTION_SIZE": (action_size(contract), ""),
        "STATE_SIZE": (sum(program.state), "numbers of the recurrent state"),
        "TEST_VECTORS": (len(contract["test_vectors"]), ""),
        "TILE": (TILE, "outputs computed together, in registers"),
    }
    start = 0
    for group, entry in zip(contract["observations"], program.inputs, strict=True):
        name = f"OBS_{group['group']}"
        unknown = "an action mask: 0 is not allowed" if group["group"] == ACTION_MASK else "its terms are unknown"
        entries[name] = (start, f"{entry['size']} numbers" + f"; {unknown}" * (group["terms"] == UNKNOWN))
        for term in known(group["terms"]):
            entries |= _indices(f"{name}_{term['name']}", start + term["start"], term)
        start += entry["size"]
    for index, term in enumerate(known(action["terms"])):
        name = f"ACTION_{term['name']}"
        if action["kind"] != "multi_discrete":
            entries |= _indices(name, term["start"], term)
        elif [term["size"] for term in action["terms"]] == action["nvec"]:
            values = {f"{name}_{option}": (i, "") for i, option in enumerate(known(term["components"]))}
            entries |= {name: (index, f"a discrete action, 0..{term['size'] - 1}"), **values}
    names: dict[str, str] = {}
    for name in entries:
        identifier = f"POLICY_{re.sub('[^A-Z0-9]', '_', name.upper())}"
        if identifier in names:
            raise ExportError(f"{name} and {names[identifier]} would both be {identifier} in C; rename one of them")
        names[identifier] = name
    lines: list[str] = []
    for identifier, name in names.items():
        value, note = entries[name]
        lines.append(f"  {identifier} = {value}," + f" /* {_comment(note)} */" * bool(note))
    yield "\n".join(["enum {", *lines, "};\n"])
    yield f'#define POLICY_CONTRACT "{contract["sha256"]}"'
    if contract["control_period"] == UNKNOWN:
        yield "/* POLICY_CONTROL_PERIOD is unknown: the environment does not declare it. */"
    else:
        yield f"#define POLICY_CONTROL_PERIOD {contract['control_period']!r} /* seconds */"
    if action["kind"] == "continuous":
        note = " (the environment declares none)" * (action["clip_actions"] == UNKNOWN)
        clip = _number(bound(action["clip_actions"]))
        yield f"#define POLICY_CLIP_ACTIONS {clip} /* bound before actions are scaled and observed{note} */"
    yield f"typedef {'float' if action['kind'] == 'continuous' else 'int'} policy_action;\n"


def _indices(name: str, start: int, term: dict[str, Any]) -> dict[str, tuple[int, str]]:
    """Return constants of a term, with comments; the components are those of the newest frame of a history."""
    components = known(term["components"])
    note = f"unit: {term['unit']}"
    if len(components) < term["size"] and components:
        note += f"; {term['size'] // len(components)} frames, the oldest first, components are of the newest"
    newest = start + term["size"] - len(components)
    indices = {f"{name}_{component}": (newest + i, "") for i, component in enumerate(components)}
    return {name: (start, note), f"{name}_SIZE": (term["size"], ""), **indices}


def action_size(contract: dict[str, Any]) -> int:
    """Return the numbers of an action: components, or discrete actions."""
    action = contract["action"]
    return 1 if action["kind"] == "discrete" else len(action.get("nvec") or action["low"])


def _transforms(contract: dict[str, Any]) -> Iterator[str]:
    """Yield `policy_observe` and `policy_command`; empty where scale, offset or bounds are unknown."""
    groups = contract["observations"]
    whole = {"name": ACTION_MASK, "scale": [1.0], "offset": [0.0], "low": [-math.inf], "high": [math.inf]}
    mask = [whole | {"size": math.prod(group["shape"])} for group in groups if group["group"] == ACTION_MASK]
    terms = [mask if group["group"] == ACTION_MASK else group["terms"] for group in groups]
    limit = _number(bound(contract["clip_observations"]))
    yield _transform(
        terms,
        "/* Observations from measurements in the units above: clip(measured) * scale + offset. */\n"
        "static inline void policy_observe(const float *measured, float *obs) {\n",
        "    const float x = policy_clamp(measured[i], low[i], high[i]) * scale[i] + offset[i];\n"
        f"    obs[i] = policy_clamp(x, -{limit}, {limit});\n",
        "POLICY_OBS_SIZE",
    )
    action = contract["action"]
    yield _transform(
        [action["terms"] if action["kind"] == "continuous" else UNKNOWN],
        "/* Commands to the robot in the units above: clip(action * scale + offset). */\n"
        "static inline void policy_command(const policy_action *action, float *command) {\n",
        "    const float a = policy_clamp(action[i], -POLICY_CLIP_ACTIONS, POLICY_CLIP_ACTIONS);\n"
        "    command[i] = policy_clamp(a * scale[i] + offset[i], low[i], high[i]);\n",
        "POLICY_ACTION_SIZE",
    )


def _transform(groups: list[Any], head: str, body: str, size: str) -> str:
    """Return a function over all terms, with tables of their scaling; empty if one is unknown."""
    terms = [term for group in groups for term in (group if group != UNKNOWN else [{}])]
    if any(term.get(key, UNKNOWN) == UNKNOWN for term in terms for key in SCALING):
        return ""
    rows = {key: [float(v) for term in terms for v in np.resize(term[key], term["size"])] for key in SCALING}
    tables = "\n".join(f"  static const float {key}[] = {{{_list(values)}}};" for key, values in rows.items())
    return f"{head}{tables}\n  int i;\n  for (i = 0; i < {size}; i++) {{\n{body}  }}\n}}\n"


JOINT = {"default_position": "rad", "stiffness": "N m/rad", "damping": "N m s/rad", "effort_limit": "N m"}
"""Fields of the table of joints with their units."""


def _joints(contract: dict[str, Any]) -> Iterator[str]:
    """Yield the table of joints, if they are known."""
    if contract["joints"] == UNKNOWN:
        return
    rows = [
        "{" + ", ".join([json.dumps(joint["name"]), *(_number(joint[key]) for key in JOINT)]) + "}"
        for joint in contract["joints"]
    ]
    fields = "".join(f"  float {name}; /* {unit} */\n" for name, unit in JOINT.items())
    table = ",\n    ".join(rows)
    yield (
        "/* A joint in the order of the simulator; NaN is unknown, units of sliding joints have m instead of rad. */\n"
        f"typedef struct {{\n  const char *name;\n{fields}}} policy_joint;\n\n"
        f"enum {{ POLICY_JOINTS = {len(rows)} }};\n\n"
        "static inline const policy_joint *policy_joint_at(int index) {\n"
        f"  static const policy_joint joints[] = {{\n    {table}}};\n  return &joints[index];\n}}\n"
    )


def _number(value: Any) -> str:
    """Return a float32 as a C constant."""
    number = math.nan if value == UNKNOWN else float(value)
    if math.isnan(number):
        return "NAN"
    if math.isinf(number):
        return "INFINITY" if number > 0 else "-INFINITY"
    text = format(np.float32(number), ".9g")
    return f"{text}f" if set(text) & {".", "e"} else f"{text}.0f"


def _list(values: Iterable[Any]) -> str:
    texts = [_number(value) for value in values]
    lines = [", ".join(texts[start : start + 10]) for start in range(0, len(texts), 10)]
    return ",\n  ".join(lines)


# One step


@dataclass
class _Writer:
    """Writes the body of `policy_step_of`: a vector moves between two buffers."""

    program: Program
    weights: Weights
    constants: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    size: int = 0
    widest: int = 1
    gates: int = 1
    saved: dict[int, int] = field(default_factory=dict)
    here: str = "m->a"
    there: str = "m->b"

    def swap(self, size: int) -> None:
        """Continue with the vector in the other buffer."""
        self.here, self.there = self.there, self.here
        self.resize(size)

    def resize(self, size: int) -> None:
        """Continue with another length."""
        self.size = size
        self.widest = max(self.widest, size)

    def constant(self, name: str) -> str:
        """Define a vector; return its C name."""
        array = self.program.arrays[name]
        self.constants.append(f"static const float policy_{name}[{max(1, array.size)}] = {{{_list(array) or '0'}}};\n")
        return f"policy_{name}"

    def linear(self, weight: str, bias: str, source: str, target: str) -> int:
        """Write a product of a matrix; return its length."""
        matrix = self.program.arrays[weight]
        outputs, inputs = matrix.shape
        name = f"policy_{weight}"
        function = "policy_linear"
        arguments = name
        if self.weights == "int8":
            scale = quantization_scale(torch.from_numpy(matrix)).numpy()
            values = ", ".join(map(str, _tiles(np.rint(matrix / scale).astype(np.int8))))
            self.constants.append(f"static const signed char {name}[{matrix.size}] = {{{values}}};\n")
            self.constants.append(f"static const float {name}_scale[{outputs}] = {{{_list(scale[:, 0])}}};\n")
            function = "policy_linear_int8"
            arguments = f"{name}, {name}_scale"
        else:
            self.constants.append(f"static const float {name}[{matrix.size}] = {{{_list(_tiles(matrix))}}};\n")
        self.body.append(f"{function}({source}, {inputs}, {arguments}, {self.constant(bias)}, {outputs}, {target});")
        return outputs

    def write(self, step: dict[str, Any]) -> None:
        """Write one step of the program."""
        match step["op"]:
            case "linear":
                self.swap(self.linear(step["weight"], step["bias"], self.here, self.there))
            case "activation":
                self.loop(f"{self.here}[i] = policy_{step['name']}({self.here}[i]);")
            case "layer_norm":
                arguments = f"{self.constant(step['weight'])}, {self.constant(step['bias'])}, {_number(step['eps'])}"
                self.body.append(f"policy_layer_norm({self.here}, {self.size}, {arguments});")
            case "lstm" | "gru":
                self.cell(step)
            case "save":
                self.saved[step["slot"]] = self.size
                self.body.append(f"policy_copy({self.here}, {self.size}, m->saved_{step['slot']});")
            case "join":
                extra = self.saved[step["slot"]]
                self.body.append(f"policy_copy(m->saved_{step['slot']}, {extra}, {self.here} + {self.size});")
                self.resize(self.size + extra)
            case "beta_mode":
                self.body.append(f"policy_beta_mode({self.here}, {self.size // 2}, {self.there});")
                self.swap(self.size // 2)
            case "affine":
                scale, offset, low, high = (self.constant(step[key]) for key in ("scale", "offset", "low", "high"))
                value = f"policy_clamp({self.here}[i] * {scale}[i] + {offset}[i], {low}[i], {high}[i])"
                self.loop(f"action[i] = {value};")
                self.loop("if (!(action[i] - action[i] == 0.0f)) bad = 1;")
            case "argmax":
                self.argmax(step["nvec"])

    def loop(self, statement: str) -> None:
        """Write a loop over the vector."""
        self.body.append(f"for (i = 0; i < {self.size}; i++) {statement}")

    def cell(self, step: dict[str, Any]) -> None:
        """Write a recurrent cell; its hidden state is the next vector."""
        index = step["state"]
        size = self.program.state[index]
        hidden, cell = (f"m->state + {sum(self.program.state[: index + part])}" for part in range(2))
        gates = self.linear(step["weight_ih"], step["bias_ih"], self.here, "m->own")
        self.linear(step["weight_hh"], step["bias_hh"], hidden, "m->recurrent")
        self.gates = max(self.gates, gates)
        states = f"{hidden}, {cell}" if step["op"] == "lstm" else hidden
        self.body.append(f"policy_{step['op']}(m->own, m->recurrent, {size}, {states});")
        self.body.append(f"policy_copy({hidden}, {size}, {self.there});")
        self.swap(size)

    def argmax(self, nvec: list[int]) -> None:
        """Write the choice of each discrete action, among those that the mask allows."""
        mask = next((entry for entry in self.program.inputs if entry["group"] == "action_mask"), None)
        self.loop(f"if (!({self.here}[i] - {self.here}[i] == 0.0f)) bad = 1;")
        if mask is not None:
            self.loop(f"if (obs[POLICY_OBS_ACTION_MASK + i] == 0.0f) {self.here}[i] = -1e8f;")
        start = 0
        for head, options in enumerate(nvec):
            self.body.append(f"action[{head}] = policy_argmax({self.here} + {start}, {options});")
            start += options


def _tiles(matrix: np.ndarray) -> np.ndarray:
    """Return weights `[out, in]` in the order of `policy_linear`."""
    return np.concatenate([matrix[start : start + TILE].T.ravel() for start in range(0, len(matrix), TILE)])


def _step(program: Program, weights: Weights) -> tuple[str, str]:
    """Return the constants and the memory of the layers, and the body of `policy_step_of`."""
    writer = _Writer(program, weights)
    start = 0
    width = 0
    for entry in program.inputs:
        if entry["group"] != "action_mask":
            target = f"m->a + {width}"
            if "shift" in entry:
                clip = _number(math.inf if entry["clip"] is None else entry["clip"])
                constants = f"{writer.constant(entry['shift'])}, {writer.constant(entry['inverse_scale'])}"
                writer.body.append(f"policy_normalize(obs + {start}, {entry['size']}, {constants}, {clip}, {target});")
            else:
                writer.body.append(f"policy_copy(obs + {start}, {entry['size']}, {target});")
            width += entry["size"]
        start += entry["size"]
    writer.resize(width)
    for step in program.steps:
        writer.write(step)
    saved = "".join(f"  float saved_{slot}[{size}];\n" for slot, size in writer.saved.items())
    memory = (
        f"typedef struct {{\n  float state[{max(1, sum(program.state))}]; /* recurrent state */\n"
        f"  float a[{writer.widest}], b[{writer.widest}], own[{writer.gates}], recurrent[{writer.gates}];\n{saved}"
        "} policy_memory;\n"
    )
    return "\n".join([*writer.constants, memory]), "\n  ".join(writer.body)
