"""Import every settings file that rl_games, IsaacGymEnvs, Isaac Lab and mjlab ship.

    python benchmarks/parity/sweep.py CHECKOUT... [--write]

CHECKOUT is a folder with a checkout of one of the four; rl_games' files are YAML with `params`, RSL-RL's are Python and
are read without running them. Each file is imported twice, in Canter's forms and with parity. An import counts when the
algorithm is built from it, networks, optimiser and engine, for a stand-in environment with the file's kind of
observation and action. What no file holds is added, as its user has to: a teacher for a student, clips for AMP, and
a mirror image that the environment declares. No key may be missing in the report. `--write` keeps the table in
sweep.json beside this file and in docs/imported_configs.md.

Where a file leaves the number of environments to a script, or the number of agents to the environment, the smallest
number is taken for which the file's minibatches come out even, from 4096 environments or one agent on.
"""

from __future__ import annotations

import argparse
import json
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


@dataclass(frozen=True)
class Case:
    """One settings file, or one class of a Python file."""

    checkout: str
    name: str
    source: str


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
        if "class RslRlOnPolicyRunnerCfg" in text or not any(word in text for word in CONFIG_WORDS):
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
    name, tree, _ = read_source(case.source, {}, [])
    options: dict[str, Any] = options_for(tree)
    imported = None
    row: dict[str, Any] = {"checkout": case.checkout, "name": case.name, "parity": parity, "options": options}
    try:
        release = "rl_games-2.0" if case.checkout.startswith("rl_games") else None
        imported = import_config(case.source, parity=parity, release=release, **options)
        report = imported.report
    except ImportRefused as error:
        reasons = [f"{entry.key}={entry.value!r}: {entry.why}" for entry in error.report.of("refused")]
        row |= {"status": "refused", "reason": reasons[0], "refused": len(reasons)}
        report = error.report
    except ConfigError as error:
        return row | {"status": "error", "reason": str(error).removeprefix(f"{name}: ")}
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


def algorithm_of(case: Case) -> str:
    """The algorithm that a file names."""
    _, tree, _ = read_source(case.source, {}, [])
    if is_rl_games(tree):
        return str(tree["params"]["algo"].get("name"))
    return str(tree.get("algorithm", {}).get("class_name", "PPO"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for checkout in arguments.checkouts:
        for case in cases(checkout):
            algorithm = algorithm_of(case)
            rows += [look(case, parity=parity) | {"algorithm": algorithm} for parity in (False, True)]
    print(table(rows))
    if arguments.write:
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
        PAGE.write_text(page(rows))


EXISTING = ("a2c_continuous", "a2c_discrete", "PPO", "sac", "amp_continuous", "Distillation")


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


def page(rows: list[dict[str, Any]]) -> str:
    """The table with the reason of every file that does not run."""
    failed = [row for row in rows if not row["parity"] and row["status"] not in ("mapped", "changed")]
    reasons = "\n".join(
        f"| {row['checkout']} | `{row['name']}` | {row['algorithm']} | {str(row['reason']).replace('|', '/')} |"
        for row in failed
    )
    return f"""# Shipped configurations of rl_games and RSL-RL

This page shows the result of importing every settings file that rl_games, IsaacGymEnvs, Isaac Lab
and mjlab ship. A file counts as importable if the algorithm can be built from the result, for a
stand-in environment with its kind of observation and action. What no file contains is added, as its
user must: a teacher for a student, clips for AMP, and a mirror image that the environment declares.
Every key of every file is in its report. `python benchmarks/parity/sweep.py CHECKOUT... --write`
reproduces it and writes `benchmarks/parity/sweep.json`, with a row for each file.

{table(rows)}

"As they are" means that with `--parity` no key and no behaviour of the source library differs,
except the moment at which `score_to_win` is checked.

## What is not imported

| checkout | file | algorithm | first reason |
| --- | --- | --- | --- |
{reasons}
"""


if __name__ == "__main__":
    main()
