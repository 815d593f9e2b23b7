"""Import of settings of rl_games and RSL-RL from a file, a mapping or a robot's task.

Hydra's `${...}` in a file is resolved from the caller's values (`--set KEY=VALUE`), then from the
tree, as far as it can be put together: for a file of IsaacGymEnvs, `cfg/train/AntPPO.yaml`, also
from `cfg/config.yaml` and `cfg/task/Ant.yaml`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from canter.compat.settings import rl_games, rsl_rl
from canter.compat.settings.python_config import read_python_config
from canter.compat.settings.python_syntax import Unread
from canter.compat.settings.rl_games import is_rl_games
from canter.compat.settings.rl_games_population import Population, read_pbt
from canter.compat.settings.rsl_rl_network import generation_of
from canter.compat.settings.section import ABSENT, Import, ImportReport
from canter.config import TrainConfig
from canter.config.files import read_config
from canter.core.plain import ConfigError, to_plain
from canter.core.storage.files import parse_value
from canter.envs.robots import isaaclab, mjlab

INTERPOLATION = re.compile(r"\$\{([^${}]*)\}")
"""The innermost interpolations; those around them follow once these are resolved."""
FALSE = ("", "false", "none", "null", "0")
UNRESOLVED = "\0"
"""Placeholder of the dollar of an unresolved interpolation, so that it is not tried again."""


def merge(base: Any, over: Any) -> Any:
    """Return `base` updated by `over`: mappings merge, everything else replaces."""
    if not (isinstance(base, Mapping) and isinstance(over, Mapping)):
        return over
    return {**base, **{key: merge(base.get(key), value) for key, value in over.items()}}


def with_defaults(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return a file's tree, merged over the files of its `defaults:` list."""
    tree = dict(read_config(path, twice=[]).plain)
    listed = tree.pop("defaults", None)
    if not isinstance(listed, list) or path in seen:
        return tree
    below: dict[str, Any] = {}
    for entry in listed:
        other = path.with_name(f"{entry}.yaml") if isinstance(entry, str) and re.fullmatch(r"[\w-]+", entry) else None
        if other is not None and other.is_file():
            below = merge(below, with_defaults(other, (*seen, path)))
    return merge(below, tree)


def surroundings(path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the tree that Hydra would put around a file, and the file's path in it."""
    root = path.parent.parent / "config.yaml"
    if path.parent.name != "train" or not root.is_file():
        return {}, ()
    tree = {key: value for key, value in read_config(root, twice=[]).plain.items() if key not in ("defaults", "hydra")}
    tasks = [task for task in (path.parent.parent / "task").glob("*.yaml") if path.stem.startswith(task.stem)]
    if tasks:
        tree["task"] = with_defaults(max(tasks, key=lambda task: len(task.stem)))
    return tree, ("train",)


def resolve(
    tree: dict[str, Any], given: Mapping[str, Any], around: dict[str, Any], at: tuple[str, ...]
) -> dict[str, Any]:
    """Return a file's tree with every resolvable `${...}` replaced."""
    below: Any = tree
    for part in reversed(at):
        below = {part: below}
    return _walk(tree, Scope(around | below, given), at)


def _walk(value: Any, scope: Scope, path: tuple[str, ...]) -> Any:
    if isinstance(value, Mapping):
        return {key: _walk(item, scope, (*path, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_walk(item, scope, (*path, str(i))) for i, item in enumerate(value)]
    return scope.resolve(value, path) if isinstance(value, str) and "${" in value else value


class Scope:
    """Names that interpolations refer to."""

    def __init__(self, tree: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        self.tree = tree
        self.given = given

    def resolve(self, text: str, path: tuple[str, ...], depth: int = 0) -> Any:
        """Return the value of a text with `${...}` in it, at a path of the tree."""
        if depth > 20:
            raise ConfigError(f"{'.'.join(path)}: {text!r} refers to itself")
        while found := INTERPOLATION.search(text):
            value = self._value(found[1], path, depth)
            if found[0] == text and not isinstance(value, str):
                return value
            text = text[: found.start()] + ("" if value is None else str(value)) + text[found.end() :]
        text = text.replace(UNRESOLVED, "$")
        return text if "${" in text else parse_value(text)

    def _value(self, inner: str, path: tuple[str, ...], depth: int) -> Any:
        function, colon, arguments = inner.partition(":")
        if colon:
            words = (part.strip() for part in arguments.split(","))
            known = _FUNCTIONS.get(function.strip())
            return known(*words) if known else _unresolved(inner)
        dots = len(inner) - len(inner.lstrip("."))
        name = tuple(inner.lstrip(".").split("."))
        found = self.given.get(".".join(name), ABSENT)
        if found is ABSENT:
            where = (*path[: len(path) - dots], *name) if dots else name
            found = self._at(where)
            if isinstance(found, str) and "${" in found:
                found = self.resolve(found, where, depth + 1)
        return _unresolved(inner) if found is ABSENT or isinstance(found, Mapping) else found

    def _at(self, path: tuple[str, ...]) -> Any:
        here: Any = self.tree
        for part in path:
            if not isinstance(here, Mapping) or part not in here:
                return ABSENT
            here = here[part]
        return here


def _unresolved(inner: str) -> str:
    return f"{UNRESOLVED}{{{inner}}}"


def _bare(text: str) -> str:
    return text.strip("\"'").lower()


_FUNCTIONS: dict[str, Any] = {
    "resolve_default": lambda default, given="": given if given else default,
    "if": lambda condition, yes="", no="": no if _bare(condition) in FALSE else yes,
    "eq": lambda one, other="": str(_bare(one) == _bare(other)),
    "contains": lambda part, whole="": str(_bare(part) in _bare(whole)),
}
"""Functions of IsaacGymEnvs' files; their arguments are words."""


@dataclass(frozen=True)
class Imported:
    """Imported settings of a run, with their report."""

    config: TrainConfig
    report: ImportReport
    population: Population | None = None
    """Population-based training in rl_games' section `pbt`."""

    @property
    def names_env(self) -> bool:
        """The source or the caller named the environment; otherwise its id is empty."""
        return self.config.env.id != ""

    @property
    def deviations(self) -> ImportReport:
        """Former name of `report`."""
        return self.report

    def plain(self) -> dict[str, Any]:
        """Return the settings as plain data, without an empty environment id."""
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
    without: Sequence[str] = (),
    release: str | None = None,
) -> Imported:
    """Import settings of rl_games or RSL-RL: YAML, a mapping, or a Python file that is not run.

    `FILE.py:NAME` names one class of several. With `parity` the source library's numbers replace
    Canter's own forms. `given` resolves `${...}`; `without` are refused keys to leave out; `release`
    names the rl_games that trained with the file, such as `rl_games-1.6.1`. Raise
    `ImportRefused`, with the whole report, for a key that Canter cannot honour, and ConfigError for
    values that make no sense.
    """
    if isinstance(without, str):
        raise ConfigError(f"ignore={without!r}: expected a list of keys, such as [{without!r}]")
    twice: list[str] = []
    name, tree, lines = read_source(source, given or {}, twice)
    run = Import(tree, ImportReport(name, "", parity), lines, tuple(without), env, num_envs, agents)
    run.check_left_out()
    generation = generation_of(tree)
    population = None
    if is_rl_games(tree):
        rl_games.choose_release(run, release)
        rl_games.translate(run)
        population = read_pbt(run.section("pbt"))
    elif release is not None:
        raise ConfigError(f"--source {release}: {name} is no file of rl_games; RSL-RL's show their generation")
    elif generation is not None:
        run.report.dialect = f"RSL-RL {generation.number}.x"
        rsl_rl.translate(run, generation)
    else:
        found = ", ".join(map(str, list(tree)[:8]))
        unread = "".join(f"; {key}: {value}" for key, value in tree.items() if isinstance(value, Unread))
        raise ConfigError(
            f"{name}: neither rl_games' (params: ...) nor RSL-RL's (algorithm: class_name: PPO); has {found}{unread}"
        )
    run.finish_report()
    for key in twice:
        run.root.changed("", f"{key} is in the file twice; the last one counts, as in the source library")
    run.settings.setdefault("env.id", "")
    return Imported(run.config(), run.report, population)


def is_foreign(tree: Mapping[str, Any]) -> bool:
    """Return True for settings of rl_games or RSL-RL."""
    return is_rl_games(tree) or generation_of(tree) is not None


def read_source(
    source: str | Path | Mapping[str, Any], given: Mapping[str, Any], twice: list[str]
) -> tuple[str, Mapping[str, Any], Mapping[str, int]]:
    """Return the name and the tree of a source, with the line of each key.

    Duplicate keys are added to `twice`.
    """
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


NUM_ENVS = {"cuda": 4096, "cpu": 16}
"""Number of environments by device type: the tasks do not say."""


def task_settings(env_id: str, device: str | None) -> Imported | None:
    """Return the settings that a task of mjlab or Isaac Lab is registered with.

    None for other environments.

    The default device is the GPU, if there is one.
    """
    scheme, _, task = env_id.partition(":")
    if scheme not in ("mjlab", "isaaclab"):
        return None
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    plain = mjlab.rl_settings(task) if scheme == "mjlab" else isaaclab.rl_settings(task, device)
    kind = torch.device(device).type
    imported = import_config(plain, env=env_id, num_envs=NUM_ENVS.get(kind, NUM_ENVS["cpu"]))
    return replace(imported, config=replace(imported.config, device=device))
