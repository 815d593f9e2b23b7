"""Settings of a run, from presets and from what is given by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass, replace
from operator import attrgetter
from typing import Any

from canter.algorithms.base import algorithms
from canter.app.experiments.foreign import translated_key
from canter.config import TrainConfig
from canter.config.presets import name_for, preset_for, presets
from canter.core.plain import ConfigError, from_plain, nest, to_plain
from canter.core.storage.validity import flatten

FREE = ("env.options", "env.wrappers")
"""Settings whose keys are the user's own."""
ABSENT = "(absent)"
SHORT = {"num_envs": "env.num_envs"}
"""Settings that have a short name in Python too."""


def starting_point(
    env_id: str | None, preset: str | None, algorithm: str | None = None, device: str | None = None
) -> tuple[TrainConfig, str]:
    """The settings to begin with: a named preset, or the environment's own for the algorithm, or the defaults."""
    if preset is not None:
        return presets[preset], f"the preset {preset}"
    defaults = TrainConfig()
    env_id = env_id or defaults.env.id
    if algorithm in (None, algorithms.default) and env_id.startswith(("mjlab:", "isaaclab:")):
        from canter.compat import task_settings

        if (own := task_settings(env_id, device)) is not None:
            return own.config, f"the task's own settings for {own.deviations.dialect}"
    device = device or defaults.device
    found = preset_for(env_id, algorithm, device)
    if found is None:
        env = replace(defaults.env, id=env_id)
        return replace(defaults, env=env), "the default settings (no preset is known for it)"
    if algorithm in (None, algorithms.default):
        return found, "its preset"
    return replace(found, device=device), f"the preset {name_for(env_id, algorithm, device)}"


def _paths(given: Mapping[str, Any], key: str) -> Iterator[tuple[str, Any]]:
    """Key paths to values; at every level a key may be a path itself."""
    for name, value in given.items():
        path = f"{key}.{name}" if key else str(name)
        if isinstance(value, Mapping) and value and path not in FREE:
            yield from _paths(value, path)
        else:
            yield path, value


def with_overrides(config: TrainConfig, overrides: Mapping[str, Any]) -> TrainConfig:
    """`config` with plain settings put over it, by their key paths."""
    return from_plain(nest(overrides, {key: attrgetter(key)(config) for key in FREE}), config)


def with_settings(config: TrainConfig, given: Mapping[str, Any]) -> TrainConfig:
    """`config` with settings put over it: plain ones by their names or paths, and parts such as a `PPOConfig`."""
    plain = {SHORT.get(name, name): value for name, value in given.items()}
    parts = {name: value for name, value in plain.items() if is_dataclass(value)}
    for name, part in parts.items():
        if not hasattr(config, name):
            raise ConfigError(f"{name}: a {type(part).__name__} stands for no section of the settings", name)
    config = replace(config, **parts)
    rest = dict(_paths({name: value for name, value in plain.items() if name not in parts}, ""))
    try:
        return with_overrides(config, rest)
    except ConfigError as error:
        theirs = translated_key(error.key) if "unknown key" in str(error) else None
        if theirs is None:
            raise
        raise ConfigError(f"{error.key}: unknown key, {theirs}", error.key) from error


def spelled(config: TrainConfig) -> dict[str, str]:
    """Every setting by its key, spelled out."""
    return {key: repr(value) for key, value in flatten(to_plain(config)).items()}


def differences(old: dict[str, str], new: dict[str, str]) -> dict[str, list[str]]:
    """Keys whose value differs, with both values."""
    pairs = {key: [old.get(key, ABSENT), new.get(key, ABSENT)] for key in old | new}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def in_words(changes: dict[str, list[str]]) -> str:
    """Old and new value of each."""
    return ", ".join(f"{key} {old} -> {new}" for key, (old, new) in changes.items())
