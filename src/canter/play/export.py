"""Export of policies to files that run without Canter: ONNX, `torch.export`, C and NumPy.

The deterministic policy is exported, from raw observations to the action that the environment
receives: normalizers, networks, recurrent state, action masks and the mapping to the action bounds.
Every file is loaded and compared with the policy before it is kept. The policy's contract is
written next to it.

NOTE: a hostile `.pt2` file can make `torch.export.load` run any code (torch 2.13), so load only
files that you trust. An ONNX file contains a graph and numbers, no code.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from canter.core.machine import describe_versions
from canter.core.plain import to_plain
from canter.core.registry import nearest
from canter.core.specs import ACTION_MASK, Env
from canter.core.storage.validity import spec_to_plain
from canter.core.struct import Obs, State, tree_leaves, tree_map
from canter.nn.actor_critic import Policy
from canter.nn.network import Network
from canter.play.c_header import write_header
from canter.play.c_library import load_header
from canter.play.contract import contract_file, describe_contract, write_contract
from canter.play.player import Player
from canter.play.program import Exported, ExportError, Inputs, Weights, load_numpy, make_program, quantize_, write_numpy

Format = Literal["onnx", "torch", "c", "numpy"]
SUFFIXES: dict[Format, str] = {"onnx": ".onnx", "torch": ".pt2", "c": ".h", "numpy": ".npz"}
"""File suffix of each format."""
TOLERANCE = 1e-5
"""Largest allowed difference between file and policy, relative to the largest number if above 1."""
BATCH = "batch"
"""Name of the first axis of every input and output."""


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """Description of a verified file; also stored as JSON next to it."""

    path: str
    """Name of the file."""
    contract: str
    """Name of the policy's contract, a YAML file next to it."""
    format: Format
    env: str
    """Id of the environment that the policy was trained in."""
    action: dict[str, Any]
    """Actions of the environment: bounds, or numbers of discrete actions."""
    own_arrays: dict[str, Any]
    """Differences between these tensors and the arrays of the environment's own spaces."""
    versions: dict[str, str]
    """Versions of the software that wrote the file."""
    inputs: dict[str, dict[str, Any]]
    """Name -> dtype and shape. The recurrent state (`state_0`, ...) is zero at the start of an
    episode."""
    outputs: dict[str, dict[str, Any]]
    """The action, and the recurrent state to pass with the next observation (`next_state_0`,
    ...)."""
    observations: int
    """Number of observations on which file and policy were compared."""
    max_difference: float
    """Largest absolute difference in actions and recurrent state."""
    quantization_error: float | None = None
    """Largest absolute difference in actions between weights of 8 bits, which the file has, and the
    policy's; None for the policy's weights."""


def collect_inputs(policy: Policy, env: Env, count: int, seed: int) -> Inputs:
    """Return `count` observations and recurrent states from playing with noise."""
    steps = Player(policy, env, deterministic=False, seed=seed).steps()
    samples = [
        tree_map(lambda leaf: leaf.to("cpu", copy=True), (played.step.obs, played.state))
        for played in islice(steps, math.ceil(count / env.spec.num_envs))
    ]
    return tree_map(lambda *parts: torch.cat(parts)[:count], *samples)


def export_policy(
    policy: Policy, path: str | Path, format: Format, obs: Obs, state: State = (), *, weights: Weights = "float32"
) -> ExportResult:
    """Write a policy to a new file and verify it on real `obs` `[M, ...]`.

    A recurrent policy also needs `state`. The inputs of an ONNX file are the observation groups and
    the parts of the recurrent state by name; its metadata has the content of the JSON file under
    `canter`. A torch file is called as `torch.export.load(path).module()(obs)` and returns the
    action; `obs` is a tensor if there is one group, else a dict. For a recurrent policy it is
    called with `(obs, state)` and returns action and next state. Both take batches of any size. A C
    header and a NumPy file (`canter.runtime`) act for one robot and keep the state themselves; a
    header may have `weights` of 8 bits.
    """
    if not isinstance(policy, Policy):
        raise ExportError(f"policy is {policy!r}, expected a Policy: canter.load_policy returns that of a run or file")
    path = Path(path)
    report = report_file(path)
    contract_path = contract_file(path)
    check_output(path)
    if format not in SUFFIXES:
        raise ExportError(f"format {format!r} is unknown: {nearest(format, SUFFIXES)}")
    if path.suffix != SUFFIXES[format] and path.suffix in SUFFIXES.values():
        raise ExportError(f"{path}: expected the suffix {SUFFIXES[format]} for the format {format}")
    if weights not in get_args(Weights):
        raise ExportError(f"weights {weights!r} are unknown: {nearest(weights, get_args(Weights))}")
    if weights == "int8" and format != "c":
        raise ExportError(f"weights of int8 are for a C header, not for {format}")
    function = _Function(policy)
    inputs = function.select(obs, state)
    if _batch_size(inputs) < 2:  # torch would treat an axis of length 1 as constant
        raise ExportError(f"{_batch_size(inputs)} observations are too few to export with; at least 2 are needed")
    error = _quantize(function, inputs) if weights == "int8" else None
    contract = describe_contract(function.policy, inputs[0])
    write, read = _FORMATS[format]
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder, _quiet():
        scratch = Path(folder) / path.name  # the same name, as it becomes part of a torch file
        about = {"format": format, "versions": describe_versions(), **_describe(function, inputs)}
        write(_Draft(function, inputs, scratch, about, contract, weights))
        difference = _verify(function, read(scratch, contract), inputs)
        result = ExportResult(
            path=path.name,
            contract=contract_path.name,
            observations=_batch_size(inputs),
            max_difference=difference,
            quantization_error=error,
            **about,
        )
        report_scratch = Path(folder) / report.name
        report_scratch.write_text(json.dumps(asdict(result), indent=2) + "\n")
        write_contract(contract_path, contract)
        os.replace(scratch, path)
        os.replace(report_scratch, report)
    return result


def report_file(path: Path) -> Path:
    """Return the JSON file that describes an exported file."""
    return path.with_name(f"{path.name}.json")


def check_output(path: Path) -> None:
    """Raise ExportError if a file or the JSON file next to it exists, or their folder cannot be written."""
    for file in (path, report_file(path)):
        if file.exists():
            raise ExportError(f"{file} already exists; remove it or export to another name")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise ExportError(f"{path} cannot be written: {folder} is no folder; export to another one")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ExportError(f"{path} cannot be written: no permission for {folder}; export to another folder")


class _Function(nn.Module):
    """The deterministic policy as a module on the CPU: `(obs, state) -> (action, state)`.

    All tensors are `[B, ...]`. A single group may be passed as a tensor. A feed-forward policy
    takes and returns no state.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = copy.copy(policy)
        self.policy.actor = self.actor = copy.deepcopy(policy.actor).cpu().requires_grad_(False).train(False)
        if isinstance(self.actor.network, Network):
            self.actor.network.in_bfloat16 = False  # few runtimes support it on a CPU
        self.groups = (*self.actor.network.groups, *[ACTION_MASK] * self.actor.masked)

    def select(self, obs: Obs, state: State) -> Inputs:
        """Return the groups that the policy reads, in the order of the inputs, and the state."""
        if not isinstance(obs, Mapping):
            raise ExportError(f"obs is a {type(obs).__name__}, expected a dict of the groups {', '.join(self.groups)}")
        for name in self.groups:
            if name not in obs:
                raise ExportError(f"obs lacks the group {name!r} that the policy reads: {nearest(name, obs)}")
            spec = self.policy.spec.obs[name]
            if (obs[name].shape[1:], obs[name].dtype) != (spec.shape, spec.dtype):
                got = f"{list(obs[name].shape)}, {obs[name].dtype}"
                raise ExportError(f"obs {name!r} is {got}, expected {['M', *spec.shape]}, {spec.dtype}")
            if not obs[name].isfinite().all():
                raise ExportError(f"obs {name!r} has NaN or infinity, and the file is verified on it: pass other obs")
        parts = len(tree_leaves(self.policy.initial_state(1)))
        if len(tree_leaves(state)) != parts:
            raise ExportError(
                f"state has {len(tree_leaves(state))} tensors, but the policy's recurrent state has {parts}"
            )
        return {name: obs[name].cpu() for name in self.groups}, tree_map(lambda leaf: leaf.cpu(), state)

    def forward(self, obs: Obs | Tensor, state: State = ()) -> Any:
        """Return the action for the environment, and the next state of a recurrent policy."""
        groups = {self.groups[0]: obs} if isinstance(obs, Tensor) else obs
        params, state = self.policy.params(groups, state)
        action = self.policy.distribution.to_env(self.policy.distribution.mode(params))
        return (action, state) if tree_leaves(state) else action


@dataclass(frozen=True)
class _Draft:
    """Everything that a format may write to its file."""

    function: _Function
    inputs: Inputs
    path: Path
    about: dict[str, Any]
    contract: dict[str, Any]
    weights: Weights


def _quantize(function: _Function, inputs: Inputs) -> float:
    """Round the function's weights to 8 bits; return the largest difference of its actions."""
    before = tree_leaves(function(*inputs))[0]
    quantize_(function.actor)
    return float((tree_leaves(function(*inputs))[0] - before).abs().max())


def call_arguments(inputs: Inputs) -> tuple[Any, ...]:
    """Return the arguments of a torch file."""
    obs, state = inputs
    if tree_leaves(state):
        return inputs
    if len(obs) == 1:
        return (next(iter(obs.values())),)
    return (obs,)


def _trace(function: nn.Module, inputs: Any) -> ExportedProgram:
    batch = Dim(BATCH, min=1)
    shapes = tree_map(lambda leaf: {0: batch}, inputs)
    return torch.export.export(function, tree_map(lambda leaf: leaf[:2], inputs), dynamic_shapes=shapes)


def _write_torch(draft: _Draft) -> None:
    program = _trace(draft.function, call_arguments(draft.inputs))
    torch.export.save(program, draft.path, extra_files={"canter.json": json.dumps(draft.about)})


def _write_onnx(draft: _Draft) -> None:
    try:
        import onnxruntime as onnxruntime
        import onnxscript as onnxscript
    except ImportError as error:
        raise ImportError(f'ONNX needs further packages: pip install "canter[onnx]" ({error})') from error
    names, names_out = _names(draft.inputs)
    written = torch.onnx.export(
        _trace(draft.function, draft.inputs),
        input_names=names,
        output_names=names_out,
        # The program has these shapes already; this names the axis.
        dynamic_shapes=[{0: Dim(BATCH, min=1)}] * len(names),
        verbose=False,
    )
    assert written is not None
    written.model.metadata_props["canter"] = json.dumps(draft.about)
    written.save(draft.path, external_data=False)


def _write_c(draft: _Draft) -> None:
    program = make_program(draft.function.policy)
    draft.path.write_text(write_header(program, draft.contract, contract_file(draft.path).name, draft.weights))


def _write_numpy(draft: _Draft) -> None:
    write_numpy(make_program(draft.function.policy), draft.contract, draft.path)


def _read_onnx(path: Path, contract: dict[str, Any]) -> Exported:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(inputs: Inputs) -> list[Tensor]:
        names, names_out = _names(inputs)
        feed = {name: leaf.numpy() for name, leaf in zip(names, tree_leaves(inputs), strict=True)}
        return [torch.as_tensor(output) for output in session.run(names_out, feed)]

    return run


def _read_torch(path: Path, contract: dict[str, Any]) -> Exported:
    module = torch.export.load(path).module()
    return lambda inputs: tree_leaves(module(*call_arguments(inputs)))


_FORMATS: dict[Format, tuple[Callable[[_Draft], None], Callable[[Path, dict[str, Any]], Exported]]] = {
    "onnx": (_write_onnx, _read_onnx),
    "torch": (_write_torch, _read_torch),
    "c": (_write_c, load_header),
    "numpy": (_write_numpy, load_numpy),
}
"""Writer and reader of each format."""


def _verify(function: _Function, exported: Exported, inputs: Inputs) -> float:
    """Compare the whole batch and one observation alone; return the largest difference."""
    largest = 0.0
    for batch in (inputs, tree_map(lambda leaf: leaf[:1], inputs)):
        outputs = zip(_names(inputs)[1], tree_leaves(function(*batch)), exported(batch), strict=True)
        for name, expected, got in outputs:
            if (got.dtype, got.shape) != (expected.dtype, expected.shape):
                raise ExportError(
                    f"{name}: the file returns {got.dtype} {got.shape}, not {expected.dtype} {expected.shape}"
                )
            difference = float((got.double() - expected.double()).abs().max())
            if not difference <= TOLERANCE * max(1.0, float(expected.double().abs().max())):  # also for NaN
                raise ExportError(f"{name}: file and policy differ by {difference:g}, more than {TOLERANCE:g}")
            largest = max(largest, difference)
    return largest


def _describe(function: _Function, inputs: Inputs) -> dict[str, Any]:
    """Return environment, action, inputs and outputs as plain data."""

    def describe(names: list[str], tree: Any) -> dict[str, dict[str, Any]]:
        return {
            name: {"dtype": str(leaf.dtype).removeprefix("torch."), "shape": [BATCH, *leaf.shape[1:]]}
            for name, leaf in zip(names, tree_leaves(tree), strict=True)
        }

    spec = function.policy.spec
    names_in, names_out = _names(inputs)
    return {
        "env": spec.env_id,
        "action": spec_to_plain(spec)["action"],
        "own_arrays": to_plain(spec.own_arrays),
        "inputs": describe(names_in, inputs),
        "outputs": describe(names_out, function(*inputs)),
    }


def _names(inputs: Inputs) -> tuple[list[str], list[str]]:
    """Return the names of inputs and outputs."""
    obs, state = inputs
    parts = [f"state_{i}" for i in range(len(tree_leaves(state)))]
    return [*obs, *parts], ["action", *(f"next_{part}" for part in parts)]


def _batch_size(inputs: Inputs) -> int:
    return len(tree_leaves(inputs)[0])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch's own warnings during an export."""
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
