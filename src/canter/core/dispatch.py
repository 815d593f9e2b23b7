"""Functions with kernels for some devices, which `canter.engines.triton.kernels` registers.

The plain function is the definition and does not depend on the device. A kernel is registered for
it together with a predicate of the arguments that it supports; tests compare it with the plain
function.

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
    """A function that runs the first of its kernels that accepts the arguments, else `plain`."""

    def __init__(self, plain: Callable[P, R]) -> None:
        self.plain = plain
        self.kernels: list[tuple[Accepts, Callable[P, R]]] = []
        wraps(plain)(self)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the first kernel that accepts the arguments, else the plain function."""
        for accepts, function in self.kernels:
            if accepts(*args, **kwargs):
                return function(*args, **kwargs)
        return self.plain(*args, **kwargs)


has_kernels = Dispatched
"""Decorator of a plain function for which kernels may be registered."""


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
