"""Run collection and update eagerly or as CUDA graphs, with a fitting number of CPU threads."""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from canter.algorithms.base import Algorithm
from canter.core import distributed
from canter.core.data.rollout import Rollout
from canter.core.distributed import cores
from canter.core.machine import gc_paused
from canter.core.plain import check_range
from canter.core.specs import Capturable
from canter.core.struct import Metrics, tree_copy_, tree_map
from canter.engines.choose import EngineName
from canter.engines.triton.kernels.compile_ahead import compile_ahead, load_compiler
from canter.training.collector import Collector

logger = logging.getLogger(__name__)

WIDE_LAYER = 2**14
"""Least weights of the widest layer for several threads: below, threads lose more by waiting than
they gain."""
LONG_ROLLOUT = 2**12
"""Least steps of a rollout, over all environments, for several threads."""


def choose_threads(widest: int, steps: int, cores: int, *, multithreaded_update: bool = False) -> int:
    """Return the threads for a network with `widest` weights in a layer and rollouts of `steps`.

    Small networks get slower with a second thread, wide ones faster. Another number of threads
    rounds sums differently, so the number follows from sizes alone, never from a clock: equal
    commands on one machine return equal bits. It is saved with the run. `canter check --threads`
    measures which number is fastest.

    With `multithreaded_update` the algorithm profits from threads however short a rollout is.
    """
    long_enough = multithreaded_update or steps >= LONG_ROLLOUT
    return cores if widest >= WIDE_LAYER and long_enough else 1


def widest_layer(algorithm: Algorithm[Any]) -> int:
    """Return the number of weights in the policy's largest matrix."""
    return max((p.numel() for p in algorithm.policy.actor.parameters() if p.ndim == 2), default=0)


def time_updates(collector: Collector, counts: list[int], repeats: int = 3, warmup: int = 0) -> dict[int, float]:
    """Measure the seconds of an update with each number of threads, the best of `repeats`.

    The first `warmup` transitions are collected before, since an algorithm with a warm-up learns
    nothing from them. Do not use the algorithm afterwards.
    """
    algorithm = collector.algorithm
    transitions = collector.rollout.reward.numel()
    for _ in range(max(0, math.ceil(warmup / transitions) - 1)):
        algorithm.begin_iteration()
        algorithm.update(collector.collect())
    algorithm.begin_iteration()
    rollout = collector.collect()
    before = algorithm.state_dict()

    def seconds() -> float:
        # Start from the same weights: an update that stops early would look fast.
        algorithm.load_state_dict(before)
        start = time.perf_counter()
        algorithm.update(rollout)
        return time.perf_counter() - start

    seconds()  # compiles, allocates and fills caches
    best: dict[int, float] = {}
    for count in counts:
        torch.set_num_threads(count)
        best[count] = min(seconds() for _ in range(repeats))
    return best


WARM_UP = 2
"""Iterations run eagerly before a capture; they train, allocate, load kernels and fill caches."""


def copy_nothing(metrics: Metrics) -> None:
    """Do nothing: the end of an update whose state is not copied."""


@dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """How computations run: mode, engine, precision, threads. Results differ by rounding only."""

    mode: Literal["auto", "eager", "graph", "scan"] = "auto"
    """Eager operations, or whole collections and updates replayed as CUDA graphs. "auto" is "graph"
    on a GPU and "eager" elsewhere. "scan" is "auto" with the collection as one XLA program that
    contains the policy, for simulators in JAX."""
    engine: EngineName = "auto"
    """Engine that computes networks and loss. "auto" is the fastest that supports every setting;
    "autograd" is the definition that the others are tested against; "plain" is "autograd" without
    any kernel in C or Triton, so that a debugger can step through all of it."""
    tf32: bool = True
    """Multiply float32 matrices with 10 bits of mantissa on a GPU; false is strict float32. No
    effect on a CPU."""
    threads: int | None = None
    """Threads of an update on a CPU. null is 1, or all cores for wide networks (a layer of 16,384
    weights or more) with long rollouts (4,096 steps or more), or with large off-policy networks.
    `canter check --threads` measures which is fastest."""

    rank_timeout: float = 600.0
    """Seconds that a rank may keep the others waiting, or show no activity, before all end and name
    it. No effect in a run of one process."""

    def __post_init__(self) -> None:
        """Raise an error for values outside their range."""
        check_range(self, "must be above 0", "rank_timeout")
        check_range(self, "must be at least 1", "threads")

    def unused_settings(self, device: str) -> list[str]:
        """Return a line for each changed setting without effect on `device` with these ranks."""
        lines = []
        if torch.device(device).type != "cuda" and not self.tf32:
            lines.append("execution.tf32=False has no effect here: a CPU multiplies float32 in full precision")
        if distributed.world_size() == 1 and self.rank_timeout != ExecutionConfig.rank_timeout:
            lines.append(f"execution.rank_timeout={self.rank_timeout} has no effect here: the run has one process")
        return lines

    def prepare(
        self,
        collector: Collector,
        algorithm: Algorithm[Any],
        after_update: Callable[[Metrics], None] = copy_nothing,
    ) -> Programs:
        """Return both halves of an iteration; the second ends with `after_update(metrics)`."""
        on_gpu = collector.env.spec.device.type == "cuda"
        if self.mode == "scan":
            collector.fill = algorithm.compile_rollout(collector.env)
        if self.mode == "graph" and not on_gpu:
            logger.warning("execution.mode=graph has no effect on a CPU; it runs eagerly")
        if on_gpu and self.mode != "eager":
            return capture(collector, algorithm, after_update)
        if self.threads is None and not on_gpu:
            widest = widest_layer(algorithm)
            steps = collector.rollout.reward.numel()
            collector.threads = choose_threads(
                widest, steps, cores(), multithreaded_update=algorithm.multithreaded_update
            )
            torch.set_num_threads(collector.threads)
        return Programs(collector.collect, partial(_update, algorithm, after_update))

    def start(self, device: str) -> None:
        """Set threads and precision before anything is built, as initial weights depend on them."""
        torch.set_num_threads(self.threads or 1)
        if torch.device(device).type == "cuda":
            torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
            load_compiler(device)


@dataclass
class Programs:
    """The two halves of an iteration: collecting a rollout and learning from it."""

    collect: Callable[[], Rollout[Any]]
    update: Callable[[Rollout[Any]], Metrics]


def _update(algorithm: Algorithm[Any], after_update: Callable[[Metrics], None], rollout: Rollout[Any]) -> Metrics:
    metrics = algorithm.update(rollout)
    after_update(metrics)
    return metrics


def capture(collector: Collector, algorithm: Algorithm[Any], after_update: Callable[[Metrics], None]) -> Programs:
    """Return graphs of the update and of the collection, or of the policy alone."""
    generators = algorithm.generators()
    env = collector.env
    learn = partial(_update, algorithm, after_update, collector.rollout)
    update = GraphPerStage(algorithm, lambda: Graph(learn, generators, "the update"))
    # Compiling ahead runs the update without its exchanges, which several ranks cannot skip.
    # Untried for recurrent policies.
    if distributed.world_size() == 1 and not algorithm.reads_reset:
        _compile_kernels(collector, algorithm)
    if collector.fill is not None:
        return Programs(collector.collect, lambda rollout: update())
    if isinstance(env, Capturable):
        streams = [*generators, *env.generators()]
        collect = GraphPerStage(algorithm, lambda: Graph(collector.collect, streams, "the collection"))
        return Programs(collect, lambda rollout: update())
    act = GraphPerStage(algorithm, lambda: ActGraph(algorithm, collector, generators))
    return Programs(lambda: collector.collect(act), lambda rollout: update())


def _compile_kernels(collector: Collector, algorithm: Algorithm[Any]) -> None:
    """Compile the kernels of the policy's step and of the update, all at once."""
    rollout = collector.rollout
    distribution = algorithm.policy.distribution
    params = torch.zeros((1, distribution.param_dim), device=rollout.reward.device)
    distribution.to_env(distribution.mode(params))  # copies its bounds to the device, which no graph can
    act = partial(algorithm.act, rollout.obs_at(0), collector.state, rollout.reset[0])
    compile_ahead([act, partial(algorithm.update, rollout)], algorithm.generators())


@dataclass
class GraphPerStage:
    """One graph for each stage of the algorithm, made when the stage is first entered."""

    algorithm: Algorithm[Any]
    make: Callable[[], Callable[..., Any]]
    graphs: dict[Hashable, Callable[..., Any]] = field(default_factory=dict)

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph of the current stage."""
        stage = self.algorithm.stage
        if stage not in self.graphs:
            self.graphs[stage] = self.make()
        return self.graphs[stage](*inputs)


@dataclass
class Graph:
    """A function over tensors at fixed addresses, captured and replayed after a few eager runs.

    It returns the same tensors every time, with new contents. Weights, statistics, learning rates
    and random streams are read and written where they live, so checkpoints, schedules and resuming
    do not depend on the graph.
    """

    function: Callable[[], Any]
    generators: list[torch.Generator]
    what: str
    calls: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    output: Any = None
    stream: torch.cuda.Stream = field(default_factory=torch.cuda.Stream)

    def __call__(self) -> Any:
        """Run eagerly at first, then capture, then replay."""
        self.calls += 1
        if self.calls == WARM_UP + 1:
            self._try_capture()
        if self.graph is not None:
            self.graph.replay()
            return self.output
        # Use the stream of the later capture: autograd ties its nodes to the stream they ran on.
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            output = self.function()
        torch.cuda.current_stream().wait_stream(self.stream)
        return output

    def _try_capture(self) -> None:
        """Record the function without running it; on failure log the reason and stay eager."""
        states = [generator.get_state() for generator in self.generators]
        graph = torch.cuda.CUDAGraph()
        for generator in self.generators:
            graph.register_generator_state(generator)
        torch.cuda.synchronize()
        gc.collect()
        try:
            with gc_paused(), torch.cuda.graph(graph, stream=self.stream):
                self.output = self.function()
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            logger.warning("%s is not captured as a CUDA graph and runs eagerly: %s", self.what, reason)
            for generator, state in zip(self.generators, states, strict=True):
                generator.set_state(state)
            return
        # The offsets of random streams are written on that stream; the first replay must not start
        # before.
        torch.cuda.current_stream().wait_stream(self.stream)
        self.graph = graph


class ActGraph:
    """The policy's step as a graph, for environments that cannot be captured."""

    def __init__(self, algorithm: Algorithm[Any], collector: Collector, generators: list[torch.Generator]) -> None:
        rollout = collector.rollout
        self.inputs = tree_map(torch.clone, (rollout.obs_at(0), collector.state, rollout.reset[0]))
        self.graph = Graph(lambda: algorithm.act(*self.inputs), generators, "the policy's step")

    def __call__(self, *inputs: Any) -> Any:
        """Choose actions like `Algorithm.act`; the next call overwrites the results."""
        tree_copy_(self.inputs, inputs)
        return self.graph()
