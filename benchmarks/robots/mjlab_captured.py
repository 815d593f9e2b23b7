"""mjlab on one GPU: compare CUDA graphs of the segments of a step with the eager segments, and measure both.

    python benchmarks/robots/mjlab_captured.py --out benchmarks/robots/results/mjlab_captured.json

`verified`: in consecutive steps, with episodes that end, every segment that has a graph runs twice
from the same state, eagerly and as the graph; all tensors of the simulator's managers, the result
and the random stream must have equal bits. `apart`: differences of the observations of whole steps
from those of mjlab's own step, with the same seed and actions, and differences between two runs of
mjlab's own step. `ms`: milliseconds of a step, mjlab's own and captured, in turns, of the physics
alone, and of each segment with a wait for the device after it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

if importlib.util.find_spec("mjlab_stubs") is not None:
    import mjlab_stubs  # noqa: F401  # pyright: ignore - stands in for viewers on a machine without them

import torch
from torch import Tensor

from canter.core.struct import copy_all_
from canter.envs.robots.host_state import format_path
from canter.envs.robots.mjlab import make_mjlab
from canter.envs.robots.segments import SegmentGraph, Segments

RESULTS = Path(__file__).parent / "results" / "mjlab_captured.json"


class Verifying(Segments):
    """`Segments` that compare every replay with the eager segment."""

    @staticmethod
    def over(step: Any) -> Verifying:
        """Replace the segments of a captured step, and keep their graphs."""
        own = Verifying.__new__(Verifying)
        vars(own).update(vars(step.segments))
        own.found = {}
        own.tensors = None
        step.segments = own
        return own

    found: dict[str, dict[str, Any]]
    tensors: dict[str, Tensor] | None
    copies: tuple[list[Tensor], list[Tensor]]
    """Copies of `tensors` before an eager run of a segment and after it."""

    def _use_graph(self, name: str, segment: Callable[[], Any], graph: SegmentGraph) -> Any:
        tensors = list(self._tensors().values())
        before, after = self.copies
        generator = torch.cuda.default_generators[self.device.index or 0]
        random = generator.get_state()
        log = dict(self.log())
        copy_all_(before, tensors)
        expected = [t.clone() for t in leaves(self._run_eagerly(segment))]
        copy_all_(after, tensors)
        random_after = generator.get_state()
        copy_all_(tensors, before)
        generator.set_state(random)
        self.set_log(log)
        result = super()._use_graph(name, segment, graph)
        names = [*self._tensors(), *["its result"] * len(expected)]
        actual = leaves(result)
        assert len(actual) == len(expected)
        different = differing(names, [*after, *expected], [*tensors, *actual])
        if not torch.equal(random_after, generator.get_state()):
            different.append("the random stream")
        entry = self.found.setdefault(name, {"replays": 0, "differ": 0, "where": []})
        entry["replays"] += 1
        if different:
            entry["differ"] += 1
            entry["where"] = different[:3]
        return result

    def _tensors(self) -> dict[str, Tensor]:
        """Return all tensors of the managers, each address once."""
        if self.tensors is None:
            seen: dict[tuple[Any, ...], tuple[str, Tensor]] = {}
            for path, tensor in self.roots.view().values.items():
                if isinstance(tensor, Tensor) and tensor.is_cuda and tensor.numel() and 0 not in tensor.stride():
                    seen.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()), (format_path(path), tensor))
            self.tensors = dict(seen.values())
            tensors = self.tensors.values()
            self.copies = ([torch.empty_like(t) for t in tensors], [torch.empty_like(t) for t in tensors])
        return self.tensors


def differing(names: list[str], expected: list[Tensor], actual: list[Tensor]) -> list[str]:
    """Return the names of tensors that differ; wait for the device once if all bits are equal."""
    if torch.equal(torch.cat([bits(t) for t in expected]), torch.cat([bits(t) for t in actual])):
        return []
    equal = [bool(((a == b) | ((a != a) & (b != b))).all()) for a, b in zip(expected, actual, strict=True)]
    return [name for name, same in zip(names, equal, strict=True) if not same]


def bits(tensor: Tensor) -> Tensor:
    """Return a contiguous copy of the bytes of a tensor, whatever its strides."""
    return tensor.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def leaves(tree: Any) -> list[Tensor]:
    """Return all tensors of a tree, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [t for branch in tree for t in leaves(branch)] if isinstance(tree, list | tuple) else []


def ready(options: argparse.Namespace, *, capture: bool) -> tuple[Any, Callable[[], Any]]:
    """Return environments with episodes of different ages, and a function that steps them with random actions."""
    env: Any = make_mjlab(options.task, options.num_envs, "cuda:0", capture=capture)
    env.reset(seed=0)
    env.set_progress(None)
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (options.num_envs, env.spec.action.dim)
    return env, lambda: env.step(torch.randn(shape, generator=generator, device="cuda"))


def verify(options: argparse.Namespace) -> dict[str, Any]:
    """Compare every replay with the eager segment."""
    env, step = ready(options, capture=True)
    segments = Verifying.over(env._step)
    ended = 0
    done = 0
    start = time.perf_counter()
    while done < options.steps and time.perf_counter() - start < options.seconds:
        result = step()
        done += 1
        ended += int((result.terminated | result.truncated).sum())
    return {"steps": done, "episodes_ended": ended, "about": env.about(), "parts": segments.found}


def apart(options: argparse.Namespace, count: int = 40) -> dict[str, list[float]]:
    """Return the greatest difference of an observation in each step; chaos amplifies rounding."""
    kinds = {"mjlab": False, "mjlab again": False, "captured": True}
    found = {}
    for name, capture in kinds.items():
        env, step = ready(options, capture=capture)
        found[name] = [torch.cat([group.flatten() for group in step().obs.values()]).cpu() for _ in range(count)]
        env.close()
    return {
        name: [round(float((a - b).abs().max()), 7) for a, b in zip(found["mjlab"], obs, strict=True)]
        for name, obs in found.items()
        if name != "mjlab"
    }


def speed(options: argparse.Namespace) -> dict[str, Any]:
    """Time both kinds of a step in turns, so that both see the same load of the machine."""
    envs = {name: ready(options, capture=name == "captured") for name in ("mjlab", "captured")}
    times: dict[str, list[float]] = {name: [] for name in envs}
    for turn in range(8):
        for name, (_, step) in envs.items():
            spent = timed(step, 30 if turn >= 3 else 160)
            if turn >= 3:
                times[name].append(spent)
    env, step = envs["captured"]
    found = {name: round(median(spent), 2) for name, spent in times.items()}
    found["physics alone"] = round(timed(lambda: physics(env.env), 50), 2)
    return {**found, "parts": profile(env, step), "about": env.about(), "graphs": dict(env._step.segments._num_graphs)}


def physics(env: Any) -> None:
    """Run the physics of a step."""
    for _ in range(env.cfg.decimation):
        env.sim.step()
    env.sim.forward()
    env.sim.sense()


def timed(work: Callable[[], Any], count: int) -> float:
    """Return the milliseconds of one call."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        work()
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - start) / count


def profile(env: Any, step: Callable[[], Any], count: int = 50) -> dict[str, float]:
    """Return the milliseconds of each segment, with a wait after each: the sum exceeds a step."""
    inner = env._step
    spent: dict[str, float] = {}

    def clocked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **given: Any) -> Any:
            torch.cuda.synchronize()
            start = time.perf_counter()
            result = function(*arguments, **given)
            torch.cuda.synchronize()
            label = arguments[0] if name == "run" else name
            spent[label] = spent.get(label, 0.0) + 1000 * (time.perf_counter() - start) / count
            return result

        return run

    inner.segments.run = clocked("run", inner.segments.run)
    for name in ("step", "forward", "reset"):
        setattr(env.env.sim, name, clocked(f"sim.{name}", getattr(env.env.sim, name)))
    env.env.curriculum_manager.compute = clocked("curriculum", env.env.curriculum_manager.compute)
    for _ in range(count):
        step()
    return {name: round(ms, 3) for name, ms in sorted(spent.items(), key=lambda item: -item[1])}


@torch.no_grad()
def main() -> None:
    """Measure and compare; write the results to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="Mjlab-Velocity-Flat-Unitree-Go1")
    parser.add_argument("--num-envs", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=300.0, help="at most, for the steps that are verified")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    found = {"task": options.task, "num_envs": options.num_envs, "gpu": torch.cuda.get_device_name()}
    for name, look in (("ms", speed), ("apart", apart), ("verified", verify)):
        found[name] = look(options)
        print(json.dumps({name: found[name]}, indent=1), flush=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
