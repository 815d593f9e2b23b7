"""Run an exported policy with NumPy alone: `policy.npz`, written by `canter export RUN --to numpy`.

This file imports nothing of Canter and no torch, so it can be copied next to the policy:

    policy = Policy("policy.npz")
    policy.reset()                      # at the start of an episode
    action = policy.step(observation)   # [A] floats, or integers for discrete actions

`python runtime.py policy.npz` checks the policy's test vectors and measures one step.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

SCHEMA = 1
"""Version of the layout of a file; other versions are refused."""
TOLERANCE = 1e-5
"""Largest allowed difference from a test vector, relative to the number if that is above 1."""
UNKNOWN = "unknown"
"""Value of the contract that nobody declared."""
SCALING = ("scale", "offset", "low", "high")
"""Fields of a term that make an observation of a measurement, and a command of an action."""
MASKED = np.float32(-1e8)
"""Logit of an action that the mask excludes."""

Array = np.ndarray


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _softplus(x: Array) -> Array:
    return np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 20))))


def _elu(x: Array) -> Array:
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


def _selu(x: Array) -> Array:
    return np.float32(1.0507009873554805) * np.where(x > 0, x, np.float32(1.6732632423543772) * _elu(x))


def _gelu(x: Array) -> Array:
    return x * np.array([0.5 + 0.5 * math.erf(v) for v in x / math.sqrt(2)], np.float32)


def _check_finite(x: Array) -> Array:
    if not np.isfinite(x).all():
        raise ValueError("the action is NaN or infinite: stop the robot, and call reset() before the next step")
    return x


class Scaling:
    """Clipping, scale and offset of the terms of an observation group or of the action."""

    def __init__(self, terms: Any, limit: Any, name: str) -> None:
        """Read terms of a contract; raise ValueError if one does not declare its scaling."""
        if terms == UNKNOWN or any(term[key] == UNKNOWN for term in terms for key in SCALING):
            raise ValueError(f"the contract does not declare scale, offset and bounds of {name}")
        self.scale, self.offset, self.low, self.high = (
            np.concatenate([np.resize(np.array(t[key], np.float32), t["size"]) for t in terms]) for key in SCALING
        )
        self.limit = np.float32(np.inf if limit == UNKNOWN else float(limit))

    def observe(self, measured: Array) -> Array:
        """Return the observation of measurements."""
        return np.clip(np.clip(measured, self.low, self.high) * self.scale + self.offset, -self.limit, self.limit)

    def command(self, action: Array) -> Array:
        """Return the command of an action."""
        return np.clip(np.clip(action, -self.limit, self.limit) * self.scale + self.offset, self.low, self.high)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "elu": _elu,
    "celu": _elu,
    "silu": lambda x: x * _sigmoid(x),
    "gelu": _gelu,
    "leaky_relu": lambda x: np.where(x > 0, x, np.float32(0.01) * x),
    "selu": _selu,
    "mish": lambda x: x * np.tanh(_softplus(x)),
    "sigmoid": _sigmoid,
    "softplus": _softplus,
}


class Policy:
    """A deterministic policy with its recurrent state, for one robot."""

    contract: dict[str, Any]
    """Meaning of the numbers: the content of `policy.contract.yaml`."""
    state: list[Array]
    """Parts of the recurrent state; empty for a feed-forward policy."""

    def __init__(self, path: str | Path) -> None:
        """Read a file; raise ValueError if it is no policy, was changed or is of another version."""
        with open(path, "rb") as file:
            if file.read(2) != b"PK":
                raise ValueError(f"{path} is no policy: expected a file of `canter export RUN --to numpy`")
            file.seek(0)
            try:
                with np.load(file) as arrays:  # it refuses objects by default
                    self._arrays = dict(arrays)
            except zipfile.BadZipFile as error:
                raise ValueError(f"{path} is damaged: {error}") from error
        if "sha256" not in self._arrays or self._arrays.pop("sha256").tobytes() != hash_arrays(self._arrays):
            raise ValueError(f"{path}: sha256 does not match: the file was changed, or is no policy")
        document = json.loads(self._arrays["document"].tobytes())
        if document["schema"] != SCHEMA:
            raise ValueError(f"{path}: schema {document['schema']}, this runtime reads {SCHEMA}")
        self.contract = document["contract"]
        self.sizes: dict[str, int] = {entry["group"]: entry["size"] for entry in document["inputs"]}
        """Numbers of each observation group, in the order of `step`."""
        self._inputs = document["inputs"]
        self._steps = document["steps"]
        self._state_sizes = document["state"]
        self._scaling: dict[str, Scaling] = {}
        self.reset()

    def reset(self) -> None:
        """Set the recurrent state to that at the start of an episode."""
        self.state = [np.zeros(size, np.float32) for size in self._state_sizes]

    def step(self, obs: Array | Mapping[str, Array]) -> Array:
        """Return the action for one observation: all groups in one array, or each by name.

        Raise ValueError if the action is NaN or infinite: then stop the robot, and call `reset`.
        """
        groups = self._split(obs)
        with np.errstate(over="ignore"):
            x = np.concatenate([self._normalize(entry, groups[entry["group"]]) for entry in self._inputs])
            saved: dict[int, Array] = {}
            for step in self._steps:
                if step["op"] == "argmax":
                    _check_finite(x)
                x = self._run(step, x, saved)
        return _check_finite(x)

    def command(self, action: Array) -> Array:
        """Return the command `[A]` of an action, as the simulator made it: clipped, scaled and shifted.

        Raise ValueError if the contract does not declare the action's scaling.
        """
        if "action" not in self._scaling:
            declared = self.contract["action"]
            self._scaling["action"] = Scaling(declared["terms"], declared["clip_actions"], "the action")
        return self._scaling["action"].command(action)

    def observe(self, measured: Array | Mapping[str, Array]) -> Array:
        """Return the observation `[D]` for `step`, from measurements in the units of the contract.

        They are clipped, scaled and shifted as in the simulator. Raise ValueError if the contract does not declare it.
        """
        groups = self._split(measured)
        for group in self.contract["observations"]:
            name = f"observation group {group['group']!r}"
            if name not in self._scaling and group["group"] != "action_mask":
                self._scaling[name] = Scaling(group["terms"], self.contract["clip_observations"], name)
            if name in self._scaling:
                groups[group["group"]] = self._scaling[name].observe(groups[group["group"]])
        return np.concatenate([*groups.values()])

    def _split(self, obs: Array | Mapping[str, Array]) -> dict[str, Array]:
        if isinstance(obs, Mapping):
            if missing := sorted(self.sizes.keys() - obs.keys()):
                raise ValueError(f"observation lacks {', '.join(missing)}, expected {self.sizes}")
            groups = {name: np.asarray(obs[name], np.float32).reshape(-1) for name in self.sizes}
        else:
            flat = np.asarray(obs, np.float32).reshape(-1)
            if len(flat) != sum(self.sizes.values()):
                raise ValueError(f"observation has {len(flat)} numbers, expected {self.sizes}")
            groups = dict(zip(self.sizes, np.split(flat, np.cumsum([*self.sizes.values()])[:-1]), strict=True))
        for name, group in groups.items():
            if len(group) != self.sizes[name]:
                raise ValueError(f"observation group {name!r} has {len(group)} numbers, expected {self.sizes[name]}")
        self._mask = groups.get("action_mask")
        return groups

    def _normalize(self, entry: dict[str, Any], x: Array) -> Array:
        if entry["group"] == "action_mask":
            return x[:0]
        if "shift" in entry:
            x = (x - self._arrays[entry["shift"]]) * self._arrays[entry["inverse_scale"]]
            if entry["clip"] is not None:
                x = np.clip(x, -np.float32(entry["clip"]), np.float32(entry["clip"]))
        return x

    def _run(self, step: dict[str, Any], x: Array, saved: dict[int, Array]) -> Array:
        arrays = self._arrays
        match step["op"]:
            case "linear":
                return arrays[step["weight"]] @ x + arrays[step["bias"]]
            case "activation":
                return ACTIVATIONS[step["name"]](x)
            case "layer_norm":
                centred = x - x.mean()
                scaled = centred / np.sqrt(np.square(centred).mean() + np.float32(step["eps"]))
                return scaled * arrays[step["weight"]] + arrays[step["bias"]]
            case "lstm" | "gru":
                return self._run_cell(step, x)
            case "save":
                saved[step["slot"]] = x
                return x
            case "join":
                return np.concatenate([x, saved[step["slot"]]])
            case "beta_mode":
                return self._beta_mode(x)
            case "affine":
                x = x * arrays[step["scale"]] + arrays[step["offset"]]
                return np.clip(x, arrays[step["low"]], arrays[step["high"]])
            case "argmax":
                if self._mask is not None:
                    x = np.where(self._mask != 0, x, MASKED)
                heads = np.split(x, np.cumsum(step["nvec"])[:-1])
                return np.array([head.argmax() for head in heads], np.int64)
            case other:
                raise ValueError(f"step {other!r} is unknown to this runtime")

    def _run_cell(self, step: dict[str, Any], x: Array) -> Array:
        index = step["state"]
        hidden = self.state[index]
        own = self._arrays[step["weight_ih"]] @ x + self._arrays[step["bias_ih"]]
        recurrent = self._arrays[step["weight_hh"]] @ hidden + self._arrays[step["bias_hh"]]
        if step["op"] == "gru":
            reset, update, new = np.split(own, 3)
            reset_h, update_h, new_h = np.split(recurrent, 3)
            update = _sigmoid(update + update_h)
            new = np.tanh(new + _sigmoid(reset + reset_h) * new_h)
            self.state[index] = (1 - update) * new + update * hidden
            return self.state[index]
        into, forget, cell, out = np.split(own + recurrent, 4)
        self.state[index + 1] = _sigmoid(forget) * self.state[index + 1] + _sigmoid(into) * np.tanh(cell)
        self.state[index] = _sigmoid(out) * np.tanh(self.state[index + 1])
        return self.state[index]

    @staticmethod
    def _beta_mode(x: Array) -> Array:
        above_a, above_b = np.split(_softplus(x), 2)
        total = above_a + above_b
        mode = np.where(total == 0, np.float32(0.5), above_a / np.where(total == 0, 1, total))  # NaN stays NaN
        return 2 * np.clip(mode, np.float32(1e-6), np.float32(1 - 1e-6)) - 1

    def selftest(self) -> float:
        """Return the largest difference from the test vectors; raise ValueError above the tolerance."""
        self.reset()
        largest = 0.0
        for number, vector in enumerate(self.contract["test_vectors"], 1):
            action = self.step({name: np.array(group, np.float32) for name, group in vector["obs"].items()})
            expected = np.array(vector["action"])
            difference = float(np.abs(action - expected).max())
            if not difference <= TOLERANCE * max(1.0, float(np.abs(expected).max())):  # also for NaN
                raise ValueError(f"test vector {number}: the action differs by {difference:g}")
            largest = max(largest, difference)
        self.reset()
        return largest


def hash_arrays(arrays: Mapping[str, Array]) -> bytes:
    """Return the SHA-256 of the names, types, shapes and bytes of all arrays."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.digest()


def measure(policy: Policy, steps: int = 2000) -> list[float]:
    """Return the seconds of each of some steps with random observations."""
    observations = np.random.default_rng(0).standard_normal((steps, sum(policy.sizes.values()))).astype(np.float32)
    seconds: list[float] = []
    for observation in observations:
        start = time.perf_counter()
        policy.step(observation)
        seconds.append(time.perf_counter() - start)
    policy.reset()
    return seconds


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python runtime.py policy.npz")
    try:
        loaded = Policy(sys.argv[1])
        print(f"test vectors: largest difference {loaded.selftest():.1e}")
    except (OSError, ValueError) as problem:
        sys.exit(str(problem))
    median, slow = np.percentile(measure(loaded), [50, 99]) * 1e6
    print(f"one step: p50 {median:.1f} us, p99 {slow:.1f} us")
