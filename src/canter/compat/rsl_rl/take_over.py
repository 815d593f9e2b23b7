"""The former name of `canter.compat.rsl_rl.install_shim`."""

import warnings

import canter.compat.rsl_rl.install_shim  # noqa: F401

warnings.warn("canter.compat.rsl_rl.take_over is now install_shim", DeprecationWarning, stacklevel=2)
