"""A GPU's kernels compiled side by side before the first iteration, instead of one after another during it.

Triton compiles a kernel when it is first launched, for the types and sizes that it is launched with. Half a second for
each of some thirty kernels is a long time to wait, and nothing of it needs the kernel before.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from canter.core.distributed import cores
from canter.engines.triton.kernels import has_triton, load_kernels

logger = logging.getLogger(__name__)

PATIENCE = 1.5
"""Seconds after which a line says what takes so long; with kernels from an earlier run it does not."""
LOADER = "canter-compiler"
"""Name of the thread in which Triton gets ready."""
PLAIN = (int, float, str, type(None), torch.dtype)


def load_compiler(device: str) -> None:
    """Let Triton get ready in the background: it reads all of itself, for half a second, to know its cache by."""

    def load() -> None:
        with suppress(Exception), torch.cuda.device(device):  # what is wrong is said where a kernel is launched
            load_kernels()
            kernel = import_module("canter.engines.triton.kernels.optimizer")._follow_kl
            kernel.warmup(torch.float32, torch.float32, *[0.5] * 5, num_warps=1, grid=(1,))

    if has_triton():
        threading.Thread(target=load, name=LOADER, daemon=True).start()


def compile_ahead(functions: Iterable[Callable[[], Any]], generators: Iterable[torch.Generator]) -> None:
    """Compile every kernel that the functions launch on the current GPU, without running any of them.

    Each must be one that a CUDA graph can capture. Nothing that they write is written; `generators`, which they draw
    from, are left as they were.
    """
    if not has_triton() or not hasattr(import_module("triton"), "AsyncCompileMode"):  # an older Triton
        return
    start, generators = time.perf_counter(), list(generators)
    line = "compiling kernels for the GPU; they are kept for the next run"
    notice = threading.Timer(PATIENCE, logger.warning, (line,))
    notice.daemon = True
    notice.start()
    try:
        for thread in threading.enumerate():
            if thread.name == LOADER:
                thread.join()
        with _compiling_only() as met:
            for function in functions:
                _walk_through(function, generators)
    finally:
        notice.cancel()
    torch.cuda.empty_cache()  # what the walk had reserved
    logger.info("%d kernels are ready after %.1f s", len(met), time.perf_counter() - start)


@contextmanager
def _compiling_only() -> Iterator[dict[int, Any]]:
    """Inside, a launch is no more than a task to compile the kernel; at the end all of them are done."""
    from triton import AsyncCompileMode
    from triton.runtime.jit import JITFunction

    launch, met, known = JITFunction.run, dict[int, Any](), set[Any]()
    workers = ThreadPoolExecutor(cores(), initializer=torch.cuda.set_device, initargs=(torch.cuda.current_device(),))
    with workers, AsyncCompileMode(workers):
        context = copy_context()  # autograd runs backward passes in threads that do not know the mode above

        def compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            key = function, *map(_kind, args), *((name, _kind(value)) for name, value in options.items())
            if key not in known:  # asking Triton takes as long as a launch
                kernel = context.copy().run(launch, function, *args, grid=grid, warmup=True, **options)
                known.add(key)
                met[id(kernel)] = kernel

        JITFunction.run = compile_only
        try:
            yield met
        finally:
            JITFunction.run = launch
        list(workers.map(_load, met.values()))


def _kind(argument: Any) -> Any:
    """All that a kernel could be compiled for: type and alignment of a tensor, plain things as they are."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16
    return type(argument), argument if isinstance(argument, PLAIN) else object()


def _load(kernel: Any) -> None:
    """Put a compiled kernel on the GPU, with what launches it, which is compiled too."""
    compiled = kernel.result() if hasattr(kernel, "result") else kernel
    with suppress(Exception):  # one that asks for more than the GPU has says so again when it is launched
        compiled.run  # noqa: B018


def _walk_through(function: Callable[[], Any], generators: list[torch.Generator]) -> None:
    """Record a function in a CUDA graph that is thrown away."""
    states = [generator.get_state() for generator in generators]
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    try:
        # Relaxed: libraries that have not run before set themselves up on the way.
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            function()
    except Exception as error:  # kernels that would have come later are compiled when they are launched
        logger.debug("a walk through kernels ended early: %s", error)
        _record_nothing(generators)
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _record_nothing(generators: list[torch.Generator]) -> None:
    """A recording that succeeds: after one that failed, random streams believe that it still goes on."""
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    with suppress(RuntimeError), torch.cuda.graph(graph):
        torch.zeros(1, device="cuda")
