"""Drawing actions in NumPy, for models evaluated by hand.

M rows, P distribution parameters. The distributions stay the definition: tests hold these against them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Generator

from canter.distributions import Categorical, DiagGaussian, Distribution
from canter.functional.densities import BELOW_ONE, TINY
from canter.kernels.host_layers import Array

Choose = Callable[[Array, Generator], tuple[Array, Array]]
"""From distribution parameters `[M, P]` to what the environment receives and the action as drawn."""


def choice(distribution: Distribution) -> Choose | None:
    """How to draw from a distribution; None where that is not known here."""
    match distribution:
        case DiagGaussian():
            return _gaussian(distribution)
        case Categorical():
            return _categorical
        case _:
            return None


def _gaussian(distribution: DiagGaussian) -> Choose:
    dim = distribution.dim
    scale, centre, minimum, maximum = (np.asarray(column, np.float32) for column in distribution.interval())

    def choose(params: Array, generator: Generator) -> tuple[Array, Array]:
        noise = torch.randn((len(params), dim), generator=generator).numpy()
        action = params[:, :dim] + np.exp(params[:, dim:]) * noise
        if distribution.bounds == "none":
            return action, action
        return np.minimum(np.maximum(action * scale + centre, minimum), maximum), action

    return choose


def _categorical(params: Array, generator: Generator) -> tuple[Array, Array]:
    # In the open interval, for the reasons of `gumbel`.
    uniform = torch.rand(params.shape, generator=generator).numpy()
    np.maximum(uniform, TINY, out=uniform)
    np.minimum(uniform, BELOW_ONE, out=uniform)
    action = (params - np.log(-np.log(uniform))).argmax(1)
    return action, action
