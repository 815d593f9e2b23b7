"""How many threads learn on a CPU.

Small networks are slowed down by a second thread and wide ones sped up. Sums are rounded differently by another number
of threads, so the number follows from sizes alone, never from a stopwatch: the same command on the same machine gives
the same bits. It is part of the run's state, and a resumed run keeps it. `canter check --threads` measures which number
is the fastest.

Ways to run the same collection and update: eagerly, or as captured CUDA graphs.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from canter.algorithms.base import Algorithm
from canter.core import distributed
from canter.core.data.rollout import Rollout
from canter.core.distributed import cores
from canter.core.specs import Capturable
from canter.core.struct import Metrics, tree_copy_, tree_map
from canter.engines.choose import EngineName
from canter.engines.triton.kernels.compile_ahead import compile_ahead, load_compiler
from canter.training.collector import Collector

WIDE, LONG = 2**14, 2**12
"""Weights of the widest layer and steps of a rollout below which one thread is taken: waiting for each other costs
threads more than there is to share, and on a busy machine a hundred times as much."""


def choose_threads(widest: int, steps: int, cores: int, *, shares_rows: bool = False) -> int:
    """Threads for a network whose widest layer has so many weights, and rollouts of so many steps over all envs.

    Where an algorithm `shares_rows`, short rollouts are as good as long ones.
    """
    return cores if widest >= WIDE and (shares_rows or steps >= LONG) else 1


def widest_layer(algorithm: Algorithm[Any]) -> int:
    """Weights of the largest matrix of the policy."""
    return max((p.numel() for p in algorithm.policy.actor.parameters() if p.ndim == 2), default=0)


def time_updates(collector: Collector, counts: list[int], repeats: int = 3, warmup: int = 0) -> dict[int, float]:
    """Seconds of an update with each number of threads, the best of `repeats`; do not use the algorithm afterwards.

    The first `warmup` transitions are collected before: an update of what they hold learns nothing yet.
    """
    algorithm, rows = collector.algorithm, collector.rollout.reward.numel()
    for _ in range(max(0, math.ceil(warmup / rows) - 1)):
        algorithm.begin_iteration()
        algorithm.update(collector.collect())
    algorithm.begin_iteration()
    rollout, before = collector.collect(), algorithm.state_dict()

    def seconds() -> float:
        # Every update begins with the same weights: one that stops early would otherwise be taken for a fast one.
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


logger = logging.getLogger(__name__)

WARM_UP = 2
"""Iterations run eagerly before a capture: they allocate, load kernels and fill caches, and are real training."""


@dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """How the work is handed to the device; the mathematics are the same in every mode."""

    mode: Literal["auto", "eager", "graph"] = "auto"
    """Operation by operation, or whole collections and updates replayed as CUDA graphs. "auto" is "graph" on a GPU and
    "eager" elsewhere."""
    engine: EngineName = "auto"
    """What computes networks and loss: "auto" takes the fastest that knows every setting; "autograd" is the
    definition that the others are tested against."""
    tf32: bool = True
    """Let a GPU multiply float32 matrices with 10 bits of mantissa; False is strict float32. No effect on a CPU."""
    threads: int | None = None
    """Threads that learn on a CPU. null is 1, or all cores for wide networks (a layer of 16,384 weights or more) with
    long rollouts (4,096 steps or more) or an algorithm that shares the rows of short ones. `canter check --threads`
    measures what is fastest."""

    rank_timeout: float = 600.0
    """Seconds that a rank may keep the others waiting, or give no sign of life, before all end and say which one. Has
    no part in a run of one process."""

    def __post_init__(self) -> None:
        """Refuse values outside their range, by name."""
        if not self.rank_timeout > 0:
            raise ValueError(f"rank_timeout={self.rank_timeout} must be above 0")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads={self.threads} must be at least 1")

    def prepare(
        self, collector: Collector, algorithm: Algorithm[Any], settle: Callable[[Metrics], None] = lambda metrics: None
    ) -> Programs:
        """The two halves of an iteration, ready to be called in turn; `settle` is a part of the second."""
        on_gpu = collector.env.spec.device.type == "cuda"
        mode = ("graph" if on_gpu else "eager") if self.mode == "auto" else self.mode
        if mode == "graph" and not on_gpu:
            logger.warning("execution.mode=%s runs without graphs: a CPU has none", mode)
            mode = "eager"
        if mode == "graph":
            return capture(collector, algorithm, settle)
        if self.threads is None and not on_gpu:
            widest, steps = widest_layer(algorithm), collector.rollout.reward.numel()
            collector.threads = choose_threads(widest, steps, cores(), shares_rows=algorithm.shares_rows)
            torch.set_num_threads(collector.threads)
        return Programs(collector.collect, lambda rollout: _settled(algorithm.update(rollout), settle))

    def start(self, device: str) -> None:
        """Set threads and precision, before anything is built: even the initial weights depend on them by rounding."""
        torch.set_num_threads(self.threads or 1)
        if torch.device(device).type == "cuda":
            torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
            load_compiler(device)


@dataclass
class Programs:
    """One iteration: steps in all environments, and learning from them."""

    collect: Callable[[], Rollout[Any]]
    update: Callable[[Rollout[Any]], Metrics]


def _settled(metrics: Metrics, settle: Callable[[Metrics], None]) -> Metrics:
    settle(metrics)
    return metrics


def capture(
    collector: Collector, algorithm: Algorithm[Any], settle: Callable[[Metrics], None] = lambda metrics: None
) -> Programs:
    """Graphs of the update and of the whole collection, or only of the policy where the environment needs the host."""
    generators, env = algorithm.generators(), collector.env
    settled = lambda: _settled(algorithm.update(collector.rollout), settle)  # noqa: E731
    update = ByStage(algorithm, lambda: Graph(settled, generators, "the update"))
    # A walk through an exchange would have to be one of all ranks. With memory it has not been tried on a GPU yet.
    if distributed.world_size() == 1 and not algorithm.reads_reset:
        _compile_kernels(collector, algorithm)
    if isinstance(env, Capturable):
        streams = [*generators, *env.generators()]
        collect = ByStage(algorithm, lambda: Graph(collector.collect, streams, "the collection"))
        return Programs(collect, lambda rollout: update())
    act = ByStage(algorithm, lambda: GraphOfAct(algorithm, collector, generators))
    return Programs(lambda: collector.collect(act), lambda rollout: update())


def _compile_kernels(collector: Collector, algorithm: Algorithm[Any]) -> None:
    """Compile what the policy's step and the update launch, all at once."""
    rollout, state, distribution = collector.rollout, collector.state, algorithm.policy.distribution
    params = torch.zeros((1, distribution.param_dim), device=rollout.reward.device)
    distribution.to_env(distribution.mode(params))  # copies its bounds to the device, which no graph can
    act = lambda: algorithm.act(rollout.obs_at(0), state, rollout.reset[0])  # noqa: E731
    compile_ahead([act, lambda: algorithm.update(rollout)], algorithm.generators())


class ByStage:
    """A graph for each stage of the algorithm, made when the stage is first entered."""

    def __init__(self, algorithm: Algorithm[Any], make: Callable[[], Callable[..., Any]]) -> None:
        self.algorithm, self.make = algorithm, make
        self.made: dict[Hashable, Callable[..., Any]] = {}

    def __call__(self, *inputs: Any) -> Any:
        """That of the stage at hand."""
        stage = self.algorithm.stage
        if stage not in self.made:
            self.made[stage] = self.make()
        return self.made[stage](*inputs)


class Graph:
    """A function without arguments over tensors that stay where they are, replayed once it has run a few times.

    What it returns is the same tensors every time, with new contents. Weights, statistics, learning rates and random
    streams are read and written where they live, so checkpoints, schedules and resuming need to know nothing of it.
    """

    def __init__(self, function: Callable[[], Any], generators: list[torch.Generator], what: str) -> None:
        self.function, self.generators, self.what = function, generators, what
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.output: Any = None
        self.stream = torch.cuda.Stream()

    def __call__(self) -> Any:
        """Run eagerly at first, capture, then replay."""
        self.calls += 1
        if self.calls == WARM_UP + 1:
            self._try_capture()
        if self.graph is not None:
            self.graph.replay()
            return self.output
        # On the stream of the later capture, so that nothing of autograd is tied to another one.
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            output = self.function()
        torch.cuda.current_stream().wait_stream(self.stream)
        return output

    def _try_capture(self) -> None:
        """Record the function without running it; where that is impossible, go on eagerly and say why."""
        states = [generator.get_state() for generator in self.generators]
        graph = torch.cuda.CUDAGraph()
        for generator in self.generators:
            graph.register_generator_state(generator)
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph, stream=self.stream):
                self.output = self.function()
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            logger.warning("%s is not captured as a CUDA graph and runs eagerly: %s", self.what, reason)
            for generator, state in zip(self.generators, states, strict=True):
                generator.set_state(state)
            return
        # Where random streams begin is written on that stream too, and could come after the first replay's own word.
        torch.cuda.current_stream().wait_stream(self.stream)
        self.graph = graph


class GraphOfAct:
    """The policy's step as a graph, for environments that live outside of it."""

    def __init__(self, algorithm: Algorithm[Any], collector: Collector, generators: list[torch.Generator]) -> None:
        rollout = collector.rollout
        self.inputs = tree_map(torch.clone, (rollout.obs_at(0), collector.state, rollout.reset[0]))
        self.graph = Graph(lambda: algorithm.act(*self.inputs), generators, "the policy's step")

    def __call__(self, *inputs: Any) -> Any:
        """As `Algorithm.act`; the results are overwritten by the next call."""
        tree_copy_(self.inputs, inputs)
        return self.graph()
