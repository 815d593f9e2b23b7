"""Work on a device: functions that have kernels for some devices, and side streams of a GPU.

`canter.engines.triton.kernels` and `canter.engines.native.kernels` register the kernels. The plain
function is the definition and does not depend on the device. A kernel is registered for it together
with a predicate of the arguments that it supports; tests compare it with the plain function.

    @has_kernels
    def gae(reward, ...): ...                       # in canter.functional

    @kernel(of=gae, accepts=on_gpu)
    def gae_on_gpu(reward, ...): ...                # in canter.engines.triton.kernels
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import unwrap
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
Accepts = Callable[..., bool]


class Dispatched(Generic[P, R]):
    """A function that runs the first of its kernels that accepts the arguments, else `plain`."""

    plain_only: ClassVar[bool] = False
    """True inside of `plain_functions`: no kernel is used."""

    def __init__(self, plain: Callable[P, R]) -> None:
        self.plain = plain
        self.kernels: list[tuple[Accepts, Callable[P, R]]] = []
        wraps(plain)(self)
        self.__code__ = unwrap(plain).__code__  # where a debugger sets a breakpoint on this name

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the first kernel that accepts the arguments, else the plain function."""
        for accepts, function in () if Dispatched.plain_only else self.kernels:
            if accepts(*args, **kwargs):
                return function(*args, **kwargs)
        return self.plain(*args, **kwargs)


has_kernels = Dispatched
"""Decorator of a plain function for which kernels may be registered."""


@contextmanager
def plain_functions(active: bool = True) -> Iterator[None]:
    """Run plain functions instead of their kernels within the block, so that a debugger can follow."""
    before = Dispatched.plain_only
    Dispatched.plain_only = active
    try:
        yield
    finally:
        Dispatched.plain_only = before


def kernel(of: Callable[..., Any], accepts: Accepts) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that registers a kernel of the plain function `of`.

    It is used for arguments for which `accepts` returns True.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        cast(Dispatched[P, R], of).kernels.append((accepts, function))
        return function

    return decorate


def on_gpu(*args: Any, **named: Any) -> bool:
    """Return whether the first argument is on a GPU, not float64 and not traced by torch."""
    tensor: Tensor = args[0] if args else next(iter(named.values()))
    return tensor.is_cuda and tensor.dtype != torch.float64 and not torch.compiler.is_compiling()


def double_backward(
    plain: Callable[..., Tensor], inputs: tuple[Tensor, ...], gradient: Tensor, others: tuple[Any, ...] = ()
) -> tuple[Tensor | None, ...]:
    """Return gradients, by the plain function, that can be differentiated again."""
    needed = [tensor for tensor in inputs if tensor.requires_grad]
    gradients = iter(torch.autograd.grad(plain(*inputs, *others), needed, gradient, create_graph=True))
    return tuple(next(gradients) if tensor.requires_grad else None for tensor in inputs)


@contextmanager
def concurrently(stream: torch.cuda.Stream | None) -> Iterator[Callable[..., None]]:
    """Run the block concurrently with what follows, up to a call of the yielded function.

    That function takes the results that are used from then on. Only while a CUDA graph is captured:
    small kernels leave parts of a GPU idle that others can use. Autograd runs each backward step on
    the stream of its forward step, so gradients gain as well.
    """
    if stream is None or torch.compiler.is_compiling() or not torch.cuda.is_current_stream_capturing():
        yield lambda *results: None
        return
    main = torch.cuda.current_stream()

    def join(*results: Tensor) -> None:
        main.wait_stream(stream)
        for result in results:
            result.record_stream(main)

    stream.wait_stream(main)
    with torch.cuda.stream(stream):
        yield join


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return a stream for `concurrently`; None on a CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None
