"""The way of settings from the command line to a config: defaults < preset < file < flags."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

from canter.app.cli.arguments import IMPORT_ARGUMENTS
from canter.app.cli.parser import UsageError
from canter.app.experiments.settings import NO_PRESET, base_config, with_overrides
from canter.compat import Imported, import_config, is_foreign
from canter.config import TrainConfig
from canter.config.files import ConfigFile, read_config
from canter.core.hints import accepts_none, config_keys, is_text, without_none
from canter.core.plain import ConfigError
from canter.core.storage.files import parse, parse_value
from canter.core.storage.validity import flatten


def merged_config(arguments: argparse.Namespace) -> tuple[TrainConfig, str]:
    """Return the config that the arguments mean and its source in words."""
    overrides = read_settings(arguments.settings)
    if arguments.env is not None:
        if "env.id" in overrides:
            raise UsageError(f"two environments: {arguments.env} and --env.id {overrides['env.id']}")
        overrides["env.id"] = arguments.env
    if arguments.config is not None and is_foreign_file(arguments.config):
        return imported_config(arguments, overrides)
    for argument in IMPORT_ARGUMENTS:
        if argument.is_given(arguments):
            raise UsageError(f"{argument.name} is for a settings file of rl_games or RSL-RL: add --config FILE")
    file = ConfigFile("", {}, {}) if arguments.config is None else read_config(arguments.config)
    named = {key: value for key, value in flatten(file.plain).items() if isinstance(value, str)} | overrides
    config, source = base_config(
        named.get("env.id"), arguments.preset, named.get("algorithm.kind"), named.get("device")
    )
    if arguments.config is not None:
        if "env.id" not in named and arguments.preset in (None, NO_PRESET):
            raise no_environment(arguments.config)
        config = file.over(config)
        source = f"{source}, changed by {arguments.config}"
    return with_overrides(config, overrides), source


def no_environment(file: str) -> UsageError:
    """Return the error of a settings file without an environment."""
    return UsageError(f"{file} names no environment (env.id) that is known here: canter train ENV --config {file}")


def setting_hints() -> dict[str, Any]:
    """Return the type hint of every setting of a run by key, those under old names included."""
    return config_keys(TrainConfig, with_old_names=True)


def read_settings(texts: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return the values of setting flags by key; the last text of a key wins."""
    hints = setting_hints()
    return {key: read_value(given[-1], hints.get(key, Any), key) for key, given in texts.items()}


def read_value(text: str, hint: Any, key: str) -> Any:
    """Return the text of a flag as the plain value of its setting; lists need no brackets."""
    inner = without_none(hint)
    if accepts_none(hint) and text.lower() in ("null", "none", "~"):
        return None
    if is_text(inner):
        return text
    if (get_origin(inner) is tuple or (hint is Any and _is_plain_list(text))) and not text.lstrip().startswith("["):
        text = f"[{text}]"
    try:
        return parse(text, key)[0]
    except ConfigError as error:
        raise ConfigError(f"{key}: cannot read {text!r}: {error}", key) from error


def _is_plain_list(text: str) -> bool:
    """Return True for words with commas between them, outside of brackets and quotes."""
    return "," in text and not text.lstrip().startswith(("[", "{", '"', "'"))


def is_foreign_file(file: str) -> bool:
    """Return True if a settings file is one of rl_games or RSL-RL."""
    is_python = ".py" in Path(file).suffix  # FILE.py:NAME too
    return is_python or is_foreign(read_config(file, twice=[]).plain)


def imported_config(arguments: argparse.Namespace, overrides: dict[str, Any]) -> tuple[TrainConfig, str]:
    """Return the config of a file to import, with overrides; print the report to stderr."""
    file = arguments.config
    if arguments.preset is not None:
        raise UsageError(f"--preset {arguments.preset}: {file} was written for another library and stands alone")
    imported = import_settings(arguments, file, overrides.get("env.id"), overrides.get("env.num_envs"))
    if not imported.names_env:
        raise no_environment(file)
    print(imported.report.text(), file=sys.stderr)
    return with_overrides(imported.config, overrides), f"the settings of {file}, imported"


def import_settings(arguments: argparse.Namespace, file: str, env: str | None, num_envs: int | None) -> Imported:
    """Convert another library's settings file, with the options in `IMPORT_ARGUMENTS`."""
    return import_config(
        file,
        parity=arguments.parity,
        env=env,
        num_envs=num_envs,
        agents=arguments.agents,
        given=dict(map(_assignment, arguments.set)),
        without=tuple(arguments.without),
        release=arguments.source,
    )


def _assignment(text: str) -> tuple[str, object]:
    """Return the key and the value of `KEY=VALUE`."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UsageError(f"--set {text}: expected KEY=VALUE, such as task.env.numEnvs=4096")
    return key, parse_value(value)
