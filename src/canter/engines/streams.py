"""Work on a side stream of a GPU, concurrent with the main one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


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
