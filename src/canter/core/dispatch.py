"""Plain functions that have kernels for some devices: one table, filled by `canter.engines.triton.kernels`.

The plain function is the definition and asks nothing about devices. A kernel is entered beside it with a test of the
arguments that it knows; tests hold each against its plain function.

    @has_kernels
    def gae(reward, ...): ...                       # in canter.functional

    @kernel(of=gae, accepts=on_gpu)
    def gae_on_gpu(reward, ...): ...                # in canter.engines.triton.kernels
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
Accepts = Callable[..., bool]


class Dispatched(Generic[P, R]):
    """A plain function and its kernels; calling it runs the first kernel that accepts the arguments, else `plain`."""

    def __init__(self, plain: Callable[P, R]) -> None:
        self.plain = plain
        self.kernels: list[tuple[Accepts, Callable[P, R]]] = []
        wraps(plain)(self)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """As the plain function."""
        for accepts, function in self.kernels:
            if accepts(*args, **kwargs):
                return function(*args, **kwargs)
        return self.plain(*args, **kwargs)


has_kernels = Dispatched
"""Decorator of a plain function that kernels may be entered for."""


def kernel(of: Callable[..., Any], accepts: Accepts) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator that enters a kernel for the plain function `of`, where `accepts` holds of the arguments."""

    def enter(function: Callable[P, R]) -> Callable[P, R]:
        cast(Dispatched[P, R], of).kernels.append((accepts, function))
        return function

    return enter


def on_gpu(*args: Any, **named: Any) -> bool:
    """Whether the first argument is float32, or whole numbers, on a GPU, outside of a trace: what kernels know."""
    tensor: Tensor = args[0] if args else next(iter(named.values()))
    return tensor.is_cuda and tensor.dtype != torch.float64 and not torch.compiler.is_compiling()


def differentiate_again(
    plain: Callable[..., Tensor], inputs: tuple[Tensor, ...], gradient: Tensor, others: tuple[Any, ...] = ()
) -> tuple[Tensor | None, ...]:
    """The backward pass of a kernel by its plain function, for gradients that are themselves differentiated."""
    needed = [tensor for tensor in inputs if tensor.requires_grad]
    found = iter(torch.autograd.grad(plain(*inputs, *others), needed, gradient, create_graph=True))
    return tuple(next(found) if tensor.requires_grad else None for tensor in inputs)
