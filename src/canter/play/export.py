"""Policies as files that run without Canter: ONNX, and torch's own exported programs.

What is exported is the deterministic policy, from raw observations to the action that the environment receives:
normalisers, networks, memory, masks and the mapping to the bounds are all inside. No file is kept that was not loaded
again and found to give the policy's actions.

NOTE: a hostile `.pt2` file can make `torch.export.load` run any code (torch 2.13), so load only files that you trust.
An ONNX file holds a graph and numbers, no code.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from canter.core.machine import describe_versions
from canter.core.plain import to_plain
from canter.core.registry import UserError, nearest
from canter.core.specs import ACTION_MASK, Env
from canter.core.storage.validity import spec_to_plain
from canter.core.struct import Obs, State, tree_leaves, tree_map
from canter.nn.actor_critic import Policy
from canter.nn.network import Network
from canter.play.player import Player

Format = Literal["onnx", "torch"]
SUFFIXES: dict[Format, str] = {"onnx": ".onnx", "torch": ".pt2"}
"""How the files of each format end."""
TOLERANCE = 1e-5
"""Largest difference between file and policy where numbers are up to 1; larger ones may differ in proportion."""
BATCH = "batch"
"""Name of the first axis of every input and output."""

Inputs = tuple[Obs, State]
"""What the exported function reads: observation groups and memory, all `[B, ...]`."""


class ExportError(UserError):
    """A policy that cannot be exported, or a file that does not do what the policy does."""


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """A verified file; the same is stored as JSON beside it."""

    path: str
    """Name of the file."""
    format: Format
    env: str
    """Id of the environment that the policy was trained in."""
    action: dict[str, Any]
    """What the environment takes: bounds of numbers, or how many choices."""
    own_arrays: dict[str, Any]
    """How choices that are observed, and actions, look in the environment's own spaces."""
    versions: dict[str, str]
    """Of what made it."""
    inputs: dict[str, dict[str, Any]]
    """Name -> dtype and shape. The memory (`state_0`, ...) is zeros at the start of an episode."""
    outputs: dict[str, dict[str, Any]]
    """The action, and the memory to give back with the next observation (`next_state_0`, ...)."""
    observations: int
    """Rows on which file and policy were compared."""
    max_difference: float
    """Largest absolute difference that was found, in actions and memory."""


def collect_inputs(policy: Policy, env: Env, count: int, seed: int) -> Inputs:
    """`count` rows of real observations and memory, from playing with noise."""
    turns = Player(policy, env, deterministic=False, seed=seed).turns()
    rows = [
        tree_map(lambda leaf: leaf.to("cpu", copy=True), (turn.step.obs, turn.state))
        for turn in islice(turns, -(-count // env.spec.num_envs))
    ]
    return tree_map(lambda *parts: torch.cat(parts)[:count], *rows)


def export_policy(policy: Policy, path: str | Path, format: Format, obs: Obs, state: State = ()) -> ExportResult:
    """Write a policy to a new file and verify it on real `obs` `[M, ...]`, with `state` for a policy with memory.

    An ONNX file has the observation groups and the parts of the memory as inputs by name, and what the JSON file says
    in its metadata under `canter`. A torch file is called as `torch.export.load(path).module()(obs)` and gives the
    action; `obs` is a tensor where there is one group, else a dict. With memory it is `(obs, state)`, and gives action
    and next state. Both take any number of rows.
    """
    path = Path(path)
    report = path.with_name(f"{path.name}.json")
    for file in (path, report):
        if file.exists():
            raise ExportError(f"{file} exists already; remove it or export to another name")
    function = _Function(policy)
    inputs = function.select(obs, state)
    if _rows(inputs) < 2:  # torch takes an axis of length 1 for one that is always 1
        raise ExportError(f"{_rows(inputs)} observations are too few to export with; at least 2 are needed")
    write, read = _FORMATS[format]
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder, _quiet():
        scratch = Path(folder) / path.name  # of the same name, which becomes part of a torch file
        about = {"format": format, "versions": describe_versions(), **_about(function, inputs)}
        write(function, inputs, scratch, about)
        difference = _verify(function, read(scratch), inputs)
        result = ExportResult(path=path.name, observations=_rows(inputs), max_difference=difference, **about)
        report_scratch = Path(folder) / report.name
        report_scratch.write_text(json.dumps(asdict(result), indent=2) + "\n")
        os.replace(scratch, path)
        os.replace(report_scratch, report)
    return result


class _Function(nn.Module):
    """The deterministic policy as a module on the CPU: `(obs, state) -> (action, state)`, all `[B, ...]`.

    A single group may be given as it is. Without memory there is no state, neither given nor returned.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = copy.copy(policy)
        self.policy.actor = self.actor = copy.deepcopy(policy.actor).cpu().requires_grad_(False).train(False)
        if isinstance(self.actor.network, Network):
            self.actor.network.in_bfloat16 = False  # few programs that run such files on a CPU can multiply it
        self.groups = (*self.actor.network.groups, *[ACTION_MASK] * self.actor.masked)

    def select(self, obs: Obs, state: State) -> Inputs:
        """What the policy reads of these, in the order of the inputs."""
        for name in self.groups:
            if name not in obs:
                raise ExportError(f"obs lacks the group {name!r} that the policy reads: {nearest(name, obs)}")
        parts = len(tree_leaves(self.policy.initial_state(1)))
        if len(tree_leaves(state)) != parts:
            raise ExportError(f"state has {len(tree_leaves(state))} tensors, but the policy's memory has {parts}")
        return {name: obs[name].cpu() for name in self.groups}, tree_map(lambda leaf: leaf.cpu(), state)

    def forward(self, obs: Obs | Tensor, state: State = ()) -> Any:
        """What the environment receives, and the next memory."""
        params, state = self.policy.params({self.groups[0]: obs} if isinstance(obs, Tensor) else obs, state)
        action = self.policy.distribution.to_env(self.policy.distribution.mode(params))
        return (action, state) if tree_leaves(state) else action


Exported = Callable[[Inputs], list[Tensor]]
"""A file that was loaded: inputs to the action and the parts of the next memory, in their order."""


def _called(inputs: Inputs) -> tuple[Any, ...]:
    """What a torch file is called with."""
    obs, state = inputs
    if tree_leaves(state):
        return inputs
    return (next(iter(obs.values())) if len(obs) == 1 else obs,)


def _trace(function: nn.Module, inputs: Any) -> ExportedProgram:
    batch = Dim(BATCH, min=1)
    shapes = tree_map(lambda leaf: {0: batch}, inputs)
    return torch.export.export(function, tree_map(lambda leaf: leaf[:2], inputs), dynamic_shapes=shapes)


def _write_torch(function: _Function, inputs: Inputs, path: Path, about: dict[str, Any]) -> None:
    torch.export.save(_trace(function, _called(inputs)), path, extra_files={"canter.json": json.dumps(about)})


def _write_onnx(function: _Function, inputs: Inputs, path: Path, about: dict[str, Any]) -> None:
    try:
        import onnxruntime as onnxruntime
        import onnxscript as onnxscript
    except ImportError as error:
        raise ImportError(f'ONNX needs further packages: pip install "canter[onnx]" ({error})') from error
    names, names_out = _names(inputs)
    written = torch.onnx.export(
        _trace(function, inputs),
        input_names=names,
        output_names=names_out,
        dynamic_shapes=[{0: Dim(BATCH, min=1)}] * len(names),  # the program has them; these give the axis its name
        verbose=False,
    )
    assert written is not None
    written.model.metadata_props["canter"] = json.dumps(about)
    written.save(path, external_data=False)


def _read_onnx(path: Path) -> Exported:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(inputs: Inputs) -> list[Tensor]:
        names, names_out = _names(inputs)
        feed = {name: leaf.numpy() for name, leaf in zip(names, tree_leaves(inputs), strict=True)}
        return [torch.as_tensor(output) for output in session.run(names_out, feed)]

    return run


def _read_torch(path: Path) -> Exported:
    module = torch.export.load(path).module()
    return lambda inputs: tree_leaves(module(*_called(inputs)))


_Write = Callable[[_Function, Inputs, Path, dict[str, Any]], None]
_FORMATS: dict[Format, tuple[_Write, Callable[[Path], Exported]]] = {
    "onnx": (_write_onnx, _read_onnx),
    "torch": (_write_torch, _read_torch),
}
"""How to write and how to read each."""


def _verify(function: _Function, exported: Exported, inputs: Inputs) -> float:
    """Compare all rows at once and one row alone; the largest difference."""
    largest = 0.0
    for rows in (inputs, tree_map(lambda leaf: leaf[:1], inputs)):
        outputs = zip(_names(inputs)[1], tree_leaves(function(*rows)), exported(rows), strict=True)
        for name, expected, got in outputs:
            given, due = f"{got.dtype} {got.shape}", f"{expected.dtype} {expected.shape}"
            if given != due:
                raise ExportError(f"{name}: the file gives {given}, not {due}")
            difference = float((got.double() - expected.double()).abs().max())
            if not difference <= TOLERANCE * max(1.0, float(expected.double().abs().max())):  # NaN is never fine
                raise ExportError(f"{name}: file and policy differ by {difference:g}, more than {TOLERANCE:g}")
            largest = max(largest, difference)
    return largest


def _about(function: _Function, inputs: Inputs) -> dict[str, Any]:
    """Environment, action, inputs and outputs by name."""

    def describe(names: list[str], tree: Any) -> dict[str, dict[str, Any]]:
        return {
            name: {"dtype": str(leaf.dtype).removeprefix("torch."), "shape": [BATCH, *leaf.shape[1:]]}
            for name, leaf in zip(names, tree_leaves(tree), strict=True)
        }

    spec, (names_in, names_out) = function.policy.spec, _names(inputs)
    described = {"inputs": describe(names_in, inputs), "outputs": describe(names_out, function(*inputs))}
    about = {"env": spec.env_id, "action": spec_to_plain(spec)["action"], "own_arrays": to_plain(spec.own_arrays)}
    return about | described


def _names(inputs: Inputs) -> tuple[list[str], list[str]]:
    """Those of inputs and outputs."""
    obs, state = inputs
    parts = [f"state_{i}" for i in range(len(tree_leaves(state)))]
    return [*obs, *parts], ["action", *(f"next_{part}" for part in parts)]


def _rows(inputs: Inputs) -> int:
    return len(tree_leaves(inputs)[0])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch says about itself while it exports."""
    log = logging.getLogger("torch.onnx._internal.exporter._registration")  # torchvision is not installed
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec\\)` is deprecated", FutureWarning)
            warnings.filterwarnings("ignore", "# The axis name: batch will not be used", UserWarning)
            yield
    finally:
        log.setLevel(level)
