"""A policy as one C99 header: constants, layers, `policy_reset`, `policy_step` and `policy_selftest`.

The header needs only `math.h`, allocates nothing, and its functions are static. It is compiled and
compared with the policy before it is kept.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from canter.core.interface import UNKNOWN
from canter.play.program import ExportError, Program, Weights, quantization_scale

KERNELS = Path(__file__).with_name("policy_kernels.h")
TILE = 32
"""POLICY_TILE of the kernels."""
HEAD = """\
/* A control policy, written by Canter {version}. Environment: {env}
   Contract: {contract}, sha256 {sha256}

   policy_reset();                  at the start of an episode
   policy_step(obs, action);        obs[POLICY_OBS_SIZE] -> action[POLICY_ACTION_SIZE]
   policy_selftest();               0 if this build returns the policy's actions

   policy_step returns 0, or 1 if an action is NaN or infinite: then stop the robot and call policy_reset.
   All functions are static and use one shared memory. For several robots pass a policy_memory of each to
   policy_reset_of and policy_step_of. Compile with -O2 or -O3 and link with -lm. */
#ifndef POLICY_H
#define POLICY_H

#include <math.h>

"""


def write_header(program: Program, contract: dict[str, Any], contract_name: str, weights: Weights) -> str:
    """Return the header of a program and its contract."""
    parts = [
        HEAD.format(
            contract=_comment(contract_name),
            sha256=contract["sha256"],
            version=contract["canter"],
            env=_comment(contract["env"]),
        ),
        *_constants(program, contract),
        KERNELS.read_text(),
        *_step(program, contract, weights),
        *_names(contract),
        *_selftest(program, contract),
        "#endif\n",
    ]
    return "\n".join(parts)


def _comment(text: str) -> str:
    return text.replace("*/", "* /")


# Constants by name


def _constants(program: Program, contract: dict[str, Any]) -> Iterator[str]:
    action = contract["action"]
    entries: dict[str, int] = {
        "OBS_SIZE": sum(entry["size"] for entry in program.inputs),
        "ACTION_SIZE": action_size(contract),
        "STATE_SIZE": sum(program.state),
    }
    start = 0
    for group, entry in zip(contract["observations"], program.inputs, strict=True):
        name = f"OBS_{group['group']}"
        entries[name] = start
        terms = [] if group["terms"] == UNKNOWN else group["terms"]
        for term in terms:
            entries |= _indices(f"{name}_{term['name']}", start + term["start"], term)
        start += entry["size"]
    for term in [] if action["terms"] == UNKNOWN else action["terms"]:
        entries |= _indices(f"ACTION_{term['name']}", term["start"], term)
    names: dict[str, str] = {}
    for name in entries:
        identifier = f"POLICY_{re.sub('[^A-Z0-9]', '_', name.upper())}"
        if identifier in names:
            raise ExportError(f"{name} and {names[identifier]} would both be {identifier} in C; rename one of them")
        names[identifier] = name
    lines = [f"  {identifier} = {entries[name]}" for identifier, name in names.items()]
    yield "enum {\n" + ",\n".join(lines) + "\n};\n"
    yield f'#define POLICY_CONTRACT "{contract["sha256"]}"'
    if contract["control_period"] != UNKNOWN:
        yield f"#define POLICY_CONTROL_PERIOD {contract['control_period']!r} /* seconds */"
    if action["kind"] == "continuous":
        clip = math.inf if action["clip_actions"] == UNKNOWN else action["clip_actions"]
        yield f"#define POLICY_CLIP_ACTIONS {_number(clip)} /* bound before actions are scaled and observed */"
    yield f"typedef {'float' if action['kind'] == 'continuous' else 'int'} policy_action;\n"


def _indices(name: str, start: int, term: dict[str, Any]) -> dict[str, int]:
    indices = {name: start, f"{name}_SIZE": term["size"]}
    if term["components"] != UNKNOWN and len(term["components"]) == term["size"]:
        indices |= {f"{name}_{component}": start + i for i, component in enumerate(term["components"])}
    return indices


def action_size(contract: dict[str, Any]) -> int:
    """Return the numbers of an action: components, or discrete actions."""
    action = contract["action"]
    return 1 if action["kind"] == "discrete" else len(action.get("nvec") or action["low"])


def _names(contract: dict[str, Any]) -> Iterator[str]:
    """Yield the transform from actions to commands and the table of joints, as far as they are known."""
    action = contract["action"]
    terms = action["terms"]
    keys = ("scale", "offset", "low", "high")
    if action["kind"] == "continuous" and terms != UNKNOWN and all(term[k] != UNKNOWN for term in terms for k in keys):
        rows = {k: [float(v) for term in terms for v in _spread(term[k], term["size"])] for k in keys}
        tables = "\n".join(f"  static const float {k}[] = {{{_list(values)}}};" for k, values in rows.items())
        yield (
            "/* Commands to the robot: clip(action * scale + offset). */\n"
            "static inline void policy_command(const policy_action *action, float *command) {\n"
            f"{tables}\n  int i;\n  for (i = 0; i < POLICY_ACTION_SIZE; i++) {{\n"
            "    const float a = policy_clamp(action[i], -POLICY_CLIP_ACTIONS, POLICY_CLIP_ACTIONS);\n"
            "    command[i] = policy_clamp(a * scale[i] + offset[i], low[i], high[i]);\n  }\n}\n"
        )
    if contract["joints"] != UNKNOWN:
        rows = [
            "{" + ", ".join([json.dumps(joint["name"]), *(_number(joint[k]) for k in JOINT)]) + "}"
            for joint in contract["joints"]
        ]
        yield (
            "typedef struct {\n  const char *name;\n  float default_position, stiffness, damping; /* NaN: unknown */\n"
            f"}} policy_joint;\n\nenum {{ POLICY_JOINTS = {len(rows)} }};\n\n"
            "static inline const policy_joint *policy_joint_at(int index) {\n"
            f"  static const policy_joint joints[] = {{{', '.join(rows)}}};\n  return &joints[index];\n}}\n"
        )


JOINT = ("default_position", "stiffness", "damping")


def _spread(values: Sequence[Any], size: int) -> list[Any]:
    return list(values) * size if len(values) == 1 else list(values)


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


def _step(program: Program, contract: dict[str, Any], weights: Weights) -> Iterator[str]:
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
    yield from writer.constants
    saved = "".join(f"  float saved_{slot}[{size}];\n" for slot, size in writer.saved.items())
    yield (
        f"typedef struct {{\n  float state[{max(1, sum(program.state))}]; /* recurrent state */\n"
        f"  float a[{writer.widest}], b[{writer.widest}], own[{writer.gates}], recurrent[{writer.gates}];\n{saved}"
        "} policy_memory;\n"
    )
    body = "\n  ".join(writer.body)
    yield (
        "static inline void policy_reset_of(policy_memory *m) {\n  int i;\n"
        f"  for (i = 0; i < {max(1, sum(program.state))}; i++) m->state[i] = 0.0f;\n}}\n\n"
        "static inline int policy_step_of(policy_memory *m, const float *obs, policy_action *action) {\n"
        f"  int i, bad = 0;\n  {body}\n  return bad;\n}}\n\n"
        "static policy_memory policy_shared;\n\n"
        "static inline void policy_reset(void) { policy_reset_of(&policy_shared); }\n\n"
        "static inline int policy_step(const float *obs, policy_action *action) {\n"
        "  return policy_step_of(&policy_shared, obs, action);\n}\n"
    )


def _selftest(program: Program, contract: dict[str, Any]) -> Iterator[str]:
    """Yield `policy_selftest`, which plays the test vectors from the start of an episode."""
    vectors = contract["test_vectors"]
    if not vectors:
        yield "/* Return -1: there are no test vectors. */\nstatic inline int policy_selftest(void) { return -1; }\n"
        return
    names = [entry["group"] for entry in program.inputs]
    observations = [float(x) for vector in vectors for name in names for x in vector["obs"][name]]
    actions = [x for vector in vectors for x in vector["action"]]
    kind = "float" if contract["action"]["kind"] == "continuous" else "int"
    values = _list(actions) if kind == "float" else ", ".join(map(str, actions))
    size = action_size(contract)
    yield (
        "/* Return 0, or the number of the first test vector whose action differs; resets the memory. */\n"
        "static inline int policy_selftest(void) {\n"
        f"  static const float obs[] = {{{_list(observations)}}};\n"
        f"  static const policy_action expected[] = {{{values}}};\n"
        f"  policy_action action[{size}];\n  int i, k, wrong = 0;\n  policy_reset();\n"
        f"  for (k = 0; k < {len(vectors)} && !wrong; k++) {{\n"
        "    if (policy_step(obs + k * POLICY_OBS_SIZE, action)) wrong = k + 1;\n"
        f"    for (i = 0; i < {size}; i++) {{\n"
        f"      const float right = (float)expected[k * {size} + i];\n"
        "      const float size = fabsf(right) > 1.0f ? fabsf(right) : 1.0f;\n"
        "      if (!(fabsf((float)action[i] - right) <= 1e-5f * size)) wrong = k + 1;\n    }\n  }\n"
        "  policy_reset();\n  return wrong;\n}\n"
    )
