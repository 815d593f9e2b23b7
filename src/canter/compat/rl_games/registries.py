"""rl_games' registries of environments and networks, and a look into the parent's own where it is imported.

`vecenv.register` and `env_configurations.register` are used as before:

    from canter.compat.rl_games import env_configurations, vecenv
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from canter.core.plain import ConfigError

_types: dict[str, Callable[..., Any]] = {}
_environments: dict[str, Mapping[str, Any]] = {}
_networks: dict[str, Any] = {}
_models: dict[str, Any] = {}


def _theirs(module: str, name: str) -> Mapping[str, Any]:
    """A table of rl_games itself, if somebody has imported it."""
    return getattr(sys.modules.get(f"rl_games.common.{module}"), name, None) or {}


def find_environment(name: str) -> Mapping[str, Any] | None:
    """What was registered under the name of an environment, here or with the parent."""
    return _environments.get(name) or _theirs("env_configurations", "configurations").get(name)


def create_vec_env(name: str, num_actors: int, **options: Any) -> Any:
    """A vectorised environment of rl_games by its registered name; None if its type is not registered."""
    found = find_environment(name)
    if found is None:
        raise ConfigError(f"env_name={name!r}: nobody registered it with env_configurations.register")
    kind = found.get("vecenv_type", "")
    builder = _types.get(kind) or _theirs("vecenv", "vecenv_config").get(kind)
    return None if builder is None else builder(name, num_actors, **options)


def refuse_user_network(name: str, model: str) -> None:
    """A NetworkBuilder or model of the user's is code for another core."""
    for kind, wanted, table in (("network", name, _networks), ("model", model, _models)):
        if wanted in table and wanted not in ("amp", "continuous_amp"):  # IsaacGymEnvs' own, which are known here
            raise ConfigError(
                f"{kind} {wanted!r} is a class for rl_games' own agents: write it as a network of Canter, "
                f"canter.register('network', {wanted!r}), docs/extending.md; the file then names it as before"
            )


vecenv = SimpleNamespace(register=_types.__setitem__, vecenv_config=_types, create_vec_env=create_vec_env)
env_configurations = SimpleNamespace(register=_environments.__setitem__, configurations=_environments)
model_builder = SimpleNamespace(register_network=_networks.__setitem__, register_model=_models.__setitem__)
