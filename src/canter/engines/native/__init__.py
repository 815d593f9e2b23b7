"""The CPU's own engine: acting, values, whole minibatches and optimiser steps in C.

The C sources are built when Canter is installed. On a machine without a compiler `declines` says so for every model.
"""

from canter.engines.native import kernels
from canter.engines.native.declines import AVAILABLE, declines
from canter.engines.native.engine import NativeEngine

__all__ = ["AVAILABLE", "NativeEngine", "declines", "kernels"]
