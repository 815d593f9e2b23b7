"""A parent's settings, from a file or a mapping, as settings of a run here and a report about every key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canter.compat.settings import rl_games, rsl_rl
from canter.compat.settings.interpolation import merge, resolve, surroundings, with_defaults
from canter.compat.settings.python_config import read_python_config
from canter.compat.settings.report import ImportReport
from canter.compat.settings.rl_games import is_rl_games
from canter.compat.settings.rsl_rl_network import generation_of
from canter.compat.settings.section import Import
from canter.config import TrainConfig
from canter.config.files import read_config
from canter.core.plain import ConfigError, to_plain


@dataclass(frozen=True)
class Imported:
    """Settings of a run, and how they came about."""

    config: TrainConfig
    report: ImportReport
    names_env: bool
    """Whether the environment is known; else its id in `config` is only the default."""

    @property
    def deviations(self) -> ImportReport:
        """The former name of `report`."""
        return self.report

    def plain(self) -> dict[str, Any]:
        """The settings as plain data, without an environment that nobody named."""
        plain = to_plain(self.config)
        if not self.names_env:
            del plain["env"]["id"]
        return plain


def import_config(
    source: str | Path | Mapping[str, Any],
    *,
    parity: bool = False,
    env: str | None = None,
    num_envs: int | None = None,
    agents: int = 1,
    given: Mapping[str, Any] | None = None,
    without: tuple[str, ...] = (),
) -> Imported:
    """Settings of rl_games (YAML) or RSL-RL (YAML, a Python file without running it, or a mapping) as Canter's.

    `FILE.py:NAME` names one class of several. `parity` asks for the parent's numbers instead of Canter's own forms.
    `given` resolves `${...}`; `without` are keys to leave out though they are refused. Raises `ImportRefused`, with
    the whole report, where something in it cannot be done here, and ConfigError for input that makes no sense.
    """
    twice: list[str] = []
    name, tree, lines = read_source(source, given or {}, twice)
    run = Import(tree, ImportReport(name, "", parity), lines, without, env, num_envs, agents)
    generation = generation_of(tree)
    if is_rl_games(tree):
        run.report.dialect = "rl_games"
        rl_games.translate(run)
    elif generation is not None:
        run.report.dialect = f"RSL-RL {generation.number}.x"
        rsl_rl.translate(run, generation)
    else:
        found = ", ".join(map(str, list(tree)[:8]))
        raise ConfigError(
            f"{name}: neither rl_games' (params: ...) nor RSL-RL's (algorithm: class_name: PPO); has {found}"
        )
    for key in twice:
        run.root.difference(f"{key} is in the file twice; the last one counts, as in the source library")
    return Imported(run.config(), run.report, names_env="env.id" in run.settings)


def is_foreign(tree: Mapping[str, Any]) -> bool:
    """Whether a mapping was written for one of the parents."""
    return is_rl_games(tree) or generation_of(tree) is not None


def read_source(
    source: str | Path | Mapping[str, Any], given: Mapping[str, Any], twice: list[str]
) -> tuple[str, Mapping[str, Any], Mapping[str, int]]:
    """The name and the tree of a source, with the line of each key; keys that are there twice go to a list."""
    if isinstance(source, Mapping):
        return "settings", source, {}
    text, _, name = str(source).partition(".py:")
    if name or str(source).endswith(".py"):
        path = Path(f"{text}.py" if name else text)
        if not path.is_file():
            raise ConfigError(f"{path}: there is no such file")
        tree, found = read_python_config(path, name or None)
        return f"{path}:{found}", tree, {}
    path = Path(source)
    file = read_config(path, twice=twice)
    tree = with_defaults(path) if "defaults" in file.plain else file.plain
    around, at = surroundings(path)
    return str(path), resolve(dict(merge({}, tree)), given, around, at), file.lines
