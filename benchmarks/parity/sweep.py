"""Import the settings files of rl_games and RSL-RL in the repositories that `repositories.json` lists.

    python benchmarks/parity/sweep.py FOLDER [--only NAME...] [--write]

FOLDER has a checkout of each repository, under the repository's name; one that is missing is fetched at the listed
commit. rl_games' files are YAML with `params`, RSL-RL's are YAML or Python, which is read without running it and
without Isaac Lab or mjlab. Each file is imported twice, in Canter's forms and with parity. An import counts when the
algorithm is built from it, networks, optimiser and engine, for a stand-in environment with the file's kind of
observation and action. What no file holds is added, as its user has to: a teacher for a student, clips for AMP, and a
mirror image that the environment declares. No key may be missing in the report. `--write` keeps the table in sweep.json
beside this file and in docs/imported_configs.md.

Where a file leaves the number of environments to a script, or the number of agents to the environment, the smallest
number is taken for which the file's minibatches come out even, from 4096 environments or one agent on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from canter.algorithms.distillation import DistillationConfig
from canter.algorithms.extensions.amp import AMPConfig
from canter.algorithms.ppo import PPOConfig
from canter.algorithms.sac import SACConfig
from canter.compat import Imported, ImportRefused, import_config
from canter.compat.settings.importing import is_foreign, read_source
from canter.compat.settings.python_config import CONFIG_WORDS, runs_in
from canter.compat.settings.rl_games import is_rl_games
from canter.config.files import ConfigError, read_config
from canter.core.declarations import Mirror, Symmetry
from canter.core.specs import ActionSpec, Continuous, Discrete, EnvSpec, MultiDiscrete, TensorSpec
from canter.nn.policy_file import save_policy

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "sweep.json", HERE.parents[1] / "docs" / "imported_configs.md"
REPOSITORIES: dict[str, dict[str, str]] = json.loads((HERE / "repositories.json").read_text())
"""Commit of each repository, by its group."""
SHIPPED, OTHERS, CHANGED, ELSEWHERE = REPOSITORIES


@dataclass(frozen=True)
class Case:
    """One settings file, or one class of a Python file."""

    checkout: str
    name: str
    source: str


def fetch(repository: str, commit: str, folder: Path) -> Path:
    """Return the checkout of a repository, fetched if it is not there."""
    checkout = folder / repository.partition("/")[2]
    if not checkout.is_dir():
        git = ["git", "-C", str(checkout)]
        subprocess.run(["git", "init", "--quiet", str(checkout)], check=True)
        source = f"https://github.com/{repository}"
        subprocess.run([*git, "fetch", "--quiet", "--depth", "1", source, commit], check=True)
        subprocess.run([*git, "checkout", "--quiet", "FETCH_HEAD"], check=True)
    return checkout


def cases(checkout: Path) -> Iterator[Case]:
    """All settings files of a checkout."""
    for path in sorted(checkout.rglob("*.yaml")):
        try:
            tree = read_config(path, twice=[]).plain
        except ConfigError:
            continue
        if is_foreign(tree) or ("params" in tree and "defaults" in tree):
            yield Case(checkout.name, str(path.relative_to(checkout)), str(path))
    for path in sorted(checkout.rglob("*.py")):
        text = path.read_text(errors="replace")
        if "class RslRlOnPolicyRunnerCfg" in text or not any(word in text for word in (*CONFIG_WORDS, "AgentCfg")):
            continue
        for name in runs_in(path):
            if not name.startswith("RslRl"):
                yield Case(checkout.name, f"{path.relative_to(checkout)}:{name}", f"{path}:{name}")


def leaves(tree: Any, key: str = "") -> Iterator[str]:
    if isinstance(tree, Mapping) and tree:
        for name, value in tree.items():
            yield from leaves(value, f"{key}.{name}" if key else str(name))
    else:
        yield key


def options_for(tree: Mapping[str, Any]) -> dict[str, int]:
    """Numbers that a file leaves to a script or to the environment."""
    if not is_rl_games(tree):
        return {"num_envs": 4096}
    config = tree["params"]["config"]
    horizon, actors = config.get("horizon_length"), config.get("num_actors")
    if tree["params"]["algo"].get("name") == "sac":
        return {"num_envs": 64} if isinstance(actors, str) else {}
    sizes = [section.get("minibatch_size") for section in (config, config.get("central_value_config") or {})]
    sizes = [size for size in sizes if isinstance(size, int)]
    if not isinstance(horizon, int) or not sizes:
        return {}
    if not isinstance(actors, int) or actors < 1:
        return {
            "num_envs": next((n for n in range(4096, 2**17) if all(horizon * n % size == 0 for size in sizes)), 4096)
        }
    agents = next((k for k in range(1, 65) if all(horizon * actors * k % size == 0 for size in sizes)), 1)
    return {"agents": agents}


def stand_in(imported: Imported, tree: Mapping[str, Any], agents: int) -> EnvSpec:
    """An environment with the observations and actions that the networks are for."""
    algorithm = imported.config.algorithm
    if isinstance(algorithm, DistillationConfig):
        named: list[str] = [*(getattr(algorithm.policy, "obs_groups", None) or ()), "policy"]
        shown = {name: TensorSpec((24,)) for name in named}
        action = Continuous((-1.0,) * 6, (1.0,) * 6)
        return EnvSpec(shown, action, imported.config.env.num_envs, torch.device("cpu"), final_obs="unknown")
    if isinstance(algorithm, SACConfig):
        action = Continuous((-1.0,) * 6, (1.0,) * 6)
        return EnvSpec({"policy": TensorSpec((24,))}, action, imported.config.env.num_envs, torch.device("cpu"))
    model = algorithm.model
    shape: tuple[int, ...] = (24,)
    network = (tree.get("params") or {}).get("network") or {}
    cnn = network.get("cnn") or {}
    if cnn.get("type") == "conv1d":
        shape = (4, 64)
    elif cnn:
        shape = (84, 84, 4) if cnn.get("permute_input", True) else (4, 84, 84)
    groups = {name for part in (model.policy, model.critic) for name in (part and part.obs_groups) or ()} or {"policy"}
    action: ActionSpec = Continuous((-1.0,) * 6, (1.0,) * 6)
    if model.distribution == "categorical":
        action = Discrete(6)
    elif model.distribution == "multi_categorical":
        action = MultiDiscrete((3, 4))
    obs = {name: TensorSpec(shape) for name in sorted(groups)} | {"amp": TensorSpec((1,))}
    num_envs = imported.config.env.num_envs * agents
    same = {name: Mirror((1,) * shape[-1]) for name in groups}
    symmetries = (Symmetry("none", same, Mirror((1,) * 6)),) if isinstance(action, Continuous) else ()
    return EnvSpec(obs, action, num_envs, torch.device("cpu"), final_obs="unknown", symmetries=symmetries)


def completed(algorithm: Any, spec: EnvSpec, folder: Path) -> Any:
    """Settings with what no file holds."""
    if isinstance(algorithm, DistillationConfig):
        save_policy(folder / "teacher.safetensors", PPOConfig().build(spec, 0).policy)
        return replace(algorithm, teacher=str(folder / "teacher.safetensors"))
    clips = {"motions": ("canter:swimmer_wide.npz",), "columns": ("dof_positions/joint_1",), "time_step": 0.02}
    own = [
        replace(each, **clips) if isinstance(each, AMPConfig) else each for each in getattr(algorithm, "extensions", ())
    ]
    return replace(algorithm, extensions=tuple(own)) if own else algorithm


def look(case: Case, *, parity: bool) -> dict[str, Any]:
    """What became of one file."""
    row: dict[str, Any] = {"checkout": case.checkout, "name": case.name, "parity": parity}
    try:
        name, tree, _ = read_source(case.source, {}, [])
    except ConfigError as error:
        return row | {"algorithm": "unknown", "status": "error", "reason": without_folder(error, case)}
    options: dict[str, Any] = options_for(tree)
    imported = None
    row |= {"options": options, "algorithm": algorithm_of(tree)}
    try:
        release = "rl_games-2.0" if case.checkout.startswith("rl_games") else None
        imported = import_config(case.source, parity=parity, release=release, **options)
        report = imported.report
    except ImportRefused as error:
        reasons = [f"{entry.key}={entry.value!r}: {entry.why}" for entry in error.report.of("refused")]
        row |= {"status": "refused", "reason": reasons[0], "refused": len(reasons)}
        report = error.report
    except ConfigError as error:
        return row | {"status": "error", "reason": without_folder(error, case).removeprefix(f"{name}: ")}
    counted = Counter(entry.key for entry in report.entries if entry.key)
    wanted = set(leaves(tree))
    silent, twice = wanted - set(counted), [key for key, count in counted.items() if count > 1]
    assert not silent, f"{case.name}: silent keys {sorted(silent)}"
    assert not twice, f"{case.name}: keys with two verdicts {twice}"
    row |= {"counts": report.counts()}
    if imported is None:
        return row
    try:
        with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
            warnings.simplefilter("ignore")
            spec = stand_in(imported, tree, options.get("agents", 1))
            completed(imported.config.algorithm, spec, Path(folder)).build(spec, seed=0)
    except ValueError as error:
        return row | {"status": "not built", "reason": str(error)}
    differences = [entry for entry in report.of("changed") if not entry.key.endswith(".score_to_win")]
    return row | {"status": "changed" if differences else "mapped"}


def without_folder(error: ConfigError, case: Case) -> str:
    """Return the message of an error, without the folder of the checkouts."""
    return str(error).replace(case.source.removesuffix(case.name), "")


def algorithm_of(tree: Mapping[str, Any]) -> str:
    """Return the algorithm that a file names."""
    if is_rl_games(tree):
        return str(tree["params"]["algo"].get("name"))
    runner = tree.get("runner") or {}
    return str((tree.get("algorithm") or {}).get("class_name", runner.get("algorithm_class_name", "PPO")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", help="names of repositories, without their owners")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for group in (SHIPPED, OTHERS, CHANGED):
        for repository, commit in REPOSITORIES[group].items():
            if arguments.only and repository.partition("/")[2] not in arguments.only:
                continue
            found = [*cases(fetch(repository, commit, arguments.folder.resolve()))]
            assert found, f"{repository}: no files"
            rows += [{"group": group} | look(case, parity=parity) for case in found for parity in (False, True)]
    for group in (SHIPPED, OTHERS, CHANGED):
        print(table([row for row in rows if row["group"] == group]))
    if arguments.write:
        RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
        PAGE.write_text(page(rows))


EXISTING = ("a2c_continuous", "a2c_discrete", "PPO", "sac", "amp_continuous", "amp", "Distillation")


def table(rows: list[dict[str, Any]]) -> str:
    """How many files run as they are, with a difference and not at all."""
    heads = (
        "checkout",
        "files",
        "algorithm exists",
        "as they are (parity)",
        "with a difference",
        "not at all",
        "importable",
    )
    lines = [f"| {' | '.join(heads)} |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    plain = [row for row in rows if not row["parity"]]
    names = [*dict.fromkeys(row["checkout"] for row in plain)]
    for name in [*names, "all"]:
        own = [row for row in plain if name in (row["checkout"], "all")]
        known = [row for row in own if row["algorithm"] in EXISTING]
        exact = [r for r in rows if r["parity"] and name in (r["checkout"], "all") and r["status"] == "mapped"]
        runs = [row for row in known if row["status"] in ("mapped", "changed")]
        share = f"{100 * len(runs) / max(len(known), 1):.1f} %"
        lines.append(
            f"| {name} | {len(own)} | {len(known)} | {len(exact)} | {len(runs) - len(exact)} "
            f"| {len(own) - len(runs)} | {share} |"
        )
    return "\n".join(lines)


def failures(rows: list[dict[str, Any]]) -> str:
    """A table with the reason of every file that does not run, one row for files of a repository that share it."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if not row["parity"] and row["status"] not in ("mapped", "changed"):
            reason = str(row["reason"]).replace(row["name"].partition(":")[0], "FILE").replace("|", "/")
            groups.setdefault((row["checkout"], row["algorithm"], reason), []).append(row["name"])
    lines = ["| checkout | file | algorithm | first reason |", "| --- | --- | --- | --- |"]
    for (checkout, algorithm, reason), names in groups.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines.append(f"| {checkout} | `{names[0]}`{more} | {algorithm} | {reason} |")
    return "\n".join(lines)


def page(rows: list[dict[str, Any]]) -> str:
    """The tables of all groups."""
    shipped, others, changed = ([row for row in rows if row["group"] == group] for group in (SHIPPED, OTHERS, CHANGED))
    elsewhere = "\n".join(f"- {repository}" for repository in REPOSITORIES[ELSEWHERE])
    return f"""# Imported configurations of rl_games and RSL-RL

This page shows the result of importing every settings file of the repositories that
`benchmarks/parity/repositories.json` lists, with their commits. A file counts as importable if the
algorithm can be built from the result, for a stand-in environment with its kind of observation and
action. What no file contains is added, as its user must: a teacher for a student, clips for AMP,
and a mirror image that the environment declares. Every key of every file is in its report. Python
files are read without running them and without Isaac Lab or mjlab. The share in the last column is
of the files whose algorithm exists here. `python benchmarks/parity/sweep.py FOLDER --write` fetches
the repositories, reproduces the tables, and writes `benchmarks/parity/sweep.json`, with a row for
each file.

"As they are" means that with `--parity` no key and no behaviour of the source library differs,
except the moment at which `score_to_win` is checked. rl_games' own files are read as its release
2.0, which multiplies in bfloat16 on a GPU where a file does not forbid it: none of them is as it is.

## Files that rl_games, IsaacGymEnvs, Isaac Lab and mjlab ship

{table(shipped)}

## Repositories that train with rl_games or RSL-RL

{table(others)}

## Repositories with a changed copy of the library

Their files have keys and algorithms of that copy. `--without KEY` leaves out a refused key, if its
part of the algorithm is not needed.

{table(changed)}

Looked at and left out, as they train with a library of their own or keep the settings in scripts:

{elsewhere}

## What is not imported

{failures(shipped)}

{failures(others)}

{failures(changed)}
"""


if __name__ == "__main__":
    main()
