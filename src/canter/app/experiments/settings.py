"""Settings of a run: presets as the base, overrides by key, and differences between two configs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass, replace
from operator import attrgetter
from typing import Any

from canter.algorithms.base import algorithms
from canter.app.experiments.foreign import translate_key
from canter.config import TrainConfig
from canter.config.presets import name_for, preset_for, presets
from canter.core.plain import ConfigError, from_plain, nest
from canter.envs import EnvConfig

FREE_SETTINGS = ("env.options", "env.wrappers")
"""Settings whose keys are chosen by the user."""
SHORT_NAMES = {"num_envs": "env.num_envs"}
"""Settings with a short name in Python."""
NO_PRESET = "none"
"""Name of the defaults among the presets."""


def base_config(
    env_id: str | None, preset: str | None, algorithm: str | None = None, device: str | None = None
) -> tuple[TrainConfig, str]:
    """Return the config that overrides are applied to, and its source in words.

    It is the named preset, the task's own settings (mjlab, Isaac Lab), the preset for environment
    and algorithm, or the defaults. The preset `none` means the defaults.
    """
    env_id = env_id or EnvConfig().id
    defaults = TrainConfig(env=EnvConfig(id=env_id))
    if preset == NO_PRESET:
        return defaults, "the default settings"
    if preset is not None:
        return presets[preset], f"the preset {preset}"
    is_default_algorithm = algorithm in (None, algorithms.default)
    if is_default_algorithm and env_id.startswith(("mjlab:", "isaaclab:")):
        from canter.compat import task_settings

        own = task_settings(env_id, device)
        if own is not None:
            return own.config, f"the task's own settings for {own.report.dialect}"
    device = device or defaults.device
    found = preset_for(env_id, algorithm, device)
    if found is None:
        return defaults, "the default settings (no preset is known for it)"
    if is_default_algorithm:
        return found, "its preset"
    return replace(found, device=device), f"the preset {name_for(env_id, algorithm, device)}"


def with_overrides(config: TrainConfig, overrides: Mapping[str, Any]) -> TrainConfig:
    """Return the config with plain settings replaced, by their keys."""
    free = {key: attrgetter(key)(config) for key in FREE_SETTINGS}
    return from_plain(nest(overrides, free), config)


def with_settings(config: TrainConfig, given: Mapping[str, Any]) -> TrainConfig:
    """Return the config with settings from Python: plain values by key, and whole sections."""
    named = {SHORT_NAMES.get(name, name): value for name, value in given.items()}
    sections = {name: value for name, value in named.items() if is_dataclass(value)}
    for name, section in sections.items():
        if not hasattr(config, name):
            raise ConfigError(f"{name}: the settings have no section {name} for a {type(section).__name__}", name)
    config = replace(config, **sections)
    plain = {name: value for name, value in named.items() if name not in sections}
    try:
        return with_overrides(config, dict(_flatten_given(plain, "")))
    except ConfigError as error:
        advice = translate_key(error.key) if "unknown key" in str(error) else None
        if advice is None:
            raise
        raise ConfigError(f"{error.key}: unknown key, {advice}", error.key) from error


def _flatten_given(given: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield key and value of all settings in nested mappings; names may be dotted keys."""
    for name, value in given.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(value, Mapping) and value and key not in FREE_SETTINGS:
            yield from _flatten_given(value, key)
        else:
            yield key, value
