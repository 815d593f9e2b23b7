"""Compile a GPU's kernels in parallel before the first iteration.

Triton compiles a kernel at its first launch, for the types and sizes of that launch: half a second
for each of about thirty kernels, which do not depend on each other.
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
"""Seconds after which a line explains the wait; kernels cached by an earlier run take less."""
LOADER = "canter-compiler"
"""Name of the thread that loads Triton."""
PLAIN = (int, float, str, type(None), torch.dtype)


def load_compiler(device: str) -> None:
    """Load Triton in the background, which hashes its own files for half a second."""

    def load() -> None:
        with suppress(Exception), torch.cuda.device(device):  # errors are raised again at the launch of a kernel
            load_kernels()
            kernel = import_module("canter.engines.triton.kernels.optimizer")._follow_kl
            kernel.warmup(torch.float32, torch.float32, *[0.5] * 5, num_warps=1, grid=(1,))

    if has_triton():
        threading.Thread(target=load, name=LOADER, daemon=True).start()


def compile_ahead(functions: Iterable[Callable[[], Any]], generators: Iterable[torch.Generator]) -> None:
    """Compile every kernel that the functions launch on the current GPU, without running it.

    Each must be capturable by a CUDA graph. Nothing is written, and the `generators` that they draw
    from are restored.
    """
    if not has_triton() or not hasattr(import_module("triton"), "AsyncCompileMode"):  # an older Triton
        return
    start = time.perf_counter()
    generators = list(generators)
    line = "compiling kernels for the GPU; they are kept for the next run"
    notice = threading.Timer(PATIENCE, logger.warning, (line,))
    notice.daemon = True
    notice.start()
    try:
        for thread in threading.enumerate():
            if thread.name == LOADER:
                thread.join()
        with _compiling_only() as compiled:
            for function in functions:
                _walk_through(function, generators)
    finally:
        notice.cancel()
    torch.cuda.empty_cache()  # reserved by the captures
    logger.info("%d kernels are ready after %.1f s", len(compiled), time.perf_counter() - start)


@contextmanager
def _compiling_only() -> Iterator[dict[int, Any]]:
    """Turn launches inside the block into tasks that compile the kernel.

    All are done at its end.
    """
    from triton import AsyncCompileMode
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run
    compiled = dict[int, Any]()
    known = set[Any]()
    workers = ThreadPoolExecutor(cores(), initializer=torch.cuda.set_device, initargs=(torch.cuda.current_device(),))
    with workers, AsyncCompileMode(workers):
        context = copy_context()  # autograd runs backward passes in threads without the mode above

        def compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            key = function, *map(_kind, args), *((name, _kind(value)) for name, value in options.items())
            if key not in known:  # a lookup in Triton takes as long as a launch
                kernel = context.copy().run(launch, function, *args, grid=grid, warmup=True, **options)
                known.add(key)
                compiled[id(kernel)] = kernel

        JITFunction.run = compile_only
        try:
            yield compiled
        finally:
            JITFunction.run = launch
        list(workers.map(_load, compiled.values()))


def _kind(argument: Any) -> Any:
    """Return what a kernel is specialised for: dtype and alignment of a tensor, plain values."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16
    return type(argument), argument if isinstance(argument, PLAIN) else object()


def _load(kernel: Any) -> None:
    """Load a compiled kernel on the GPU, with its launcher, which is compiled too."""
    loaded = kernel.result() if hasattr(kernel, "result") else kernel
    with suppress(Exception):  # a kernel that needs more than the GPU has raises again at its launch
        loaded.run  # noqa: B018


def _walk_through(function: Callable[[], Any], generators: list[torch.Generator]) -> None:
    """Capture a function in a CUDA graph that is discarded."""
    states = [generator.get_state() for generator in generators]
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    try:
        # Relaxed: libraries may initialise themselves during the capture.
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            function()
    except Exception as error:  # later kernels are compiled at their launch
        logger.debug("a walk through kernels ended early: %s", error)
        _record_nothing(generators)
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _record_nothing(generators: list[torch.Generator]) -> None:
    """Capture an empty graph, so that generators no longer count as captured after a failure."""
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    with suppress(RuntimeError), torch.cuda.graph(graph):
        torch.zeros(1, device="cuda")
