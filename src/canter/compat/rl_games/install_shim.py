"""Installs Canter's runner in place of rl_games' when imported.

For scripts that import `rl_games` themselves, such as Isaac Lab's; import it before them:

    import canter.compat.rl_games.install_shim
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from canter.compat.drop_in import replace_classes
from canter.compat.rl_games.env import env_configurations, model_builder, vecenv
from canter.compat.rl_games.hooks import AlgoObserver, DefaultAlgoObserver, IsaacAlgoObserver
from canter.compat.rl_games.player import PpoPlayer
from canter.compat.rl_games.runner import Runner


class IVecEnv:
    """Base class of wrappers for rl_games.

    Canter calls their `reset`, `step` and `get_env_info`.
    """


def safe_filesystem_op(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function once; errors are raised."""
    return func(*args, **kwargs)


OBSERVERS = {cls.__name__: cls for cls in (AlgoObserver, DefaultAlgoObserver, IsaacAlgoObserver)}
MODULES: dict[str, dict[str, Any]] = {
    "rl_games": {},
    "rl_games.torch_runner": {"Runner": Runner},
    "rl_games.common": {},
    "rl_games.common.env_configurations": vars(env_configurations),
    "rl_games.common.vecenv": {"IVecEnv": IVecEnv, **vars(vecenv)},
    "rl_games.common.ivecenv": {"IVecEnv": IVecEnv},
    "rl_games.common.algo_observer": OBSERVERS,
    "rl_games.common.player": {"BasePlayer": PpoPlayer},
    "rl_games.algos_torch": {},
    "rl_games.algos_torch.model_builder": vars(model_builder),
    "rl_games.algos_torch.torch_ext": {"safe_filesystem_op": safe_filesystem_op, "safe_save": torch.save},
}
"""Modules added if rl_games is not installed: the names that scripts and Isaac Lab's wrappers
import."""


replace_classes("rl_games", "rl_games.torch_runner", MODULES)
