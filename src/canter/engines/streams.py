"""Work that runs at the same time as other work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def beside(stream: torch.cuda.Stream | None) -> Iterator[Callable[..., None]]:
    """Let what is done inside run at the same time as what follows, up to a call of the function given.

    That function takes the results that are used from then on. Only while a CUDA graph is captured: small kernels leave
    parts of a GPU idle that others can use. Autograd runs each backward step on the stream of its forward step, so
    gradients gain as well.
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
    """A stream for `beside`; None where there are none."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None
