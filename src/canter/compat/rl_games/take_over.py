"""The former name of `canter.compat.rl_games.install_shim`."""

import warnings

import canter.compat.rl_games.install_shim  # noqa: F401

warnings.warn("canter.compat.rl_games.take_over is now install_shim", DeprecationWarning, stacklevel=2)
