"""Read checkpoints of rl_games and RSL-RL, train them further and write them back.

    python benchmarks/parity/checkpoints.py PARENTS_PYTHON [RSL_RL_FOLDER ...]

PARENTS_PYTHON is a Python with rsl-rl-lib 5.5.1 and rl_games 1.6.5; each RSL_RL_FOLDER holds the package `rsl_rl` of
another version (`pip install --no-deps --target FOLDER rsl-rl-lib==2.3.3`; 1.0.2 is in its
repository only).

For every update case the parent saves a checkpoint after the first of two updates. Canter loads it, makes the second
update and compares all parameters and statistics with the parent's; then it writes the checkpoint in the parent's
layout, which the parent loads by its own functions, strictly, and compares with its own, moments included. For other
versions of RSL-RL their own runner trains and saves, then makes one further update of a recorded rollout; Canter's
actions, and its parameters and moments after the same update, are compared with the runner's. The file that Canter
writes in that version's layout goes through the runner's `load` and `save` again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import canter
from canter.compat import import_config
from canter.compat.pickled_file import read_pickled
from canter.compat.rl_games import checkpoint as rl_games
from canter.compat.rsl_rl import checkpoint as rsl_rl
from canter.compat.rsl_rl.policy import InferenceCritic
from canter.compat.rsl_rl.runner import bounded_std_type
from canter.compat.weights import Weights
from canter.core.plain import from_plain, nest
from canter.functional import optimization as functional_order

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "parity"))
from update_cases import INSTALLED, ITERATIONS, LOGGED, N, rollouts
from update_here import collect, curious, drawn, first_value, named, spec_of, statistics

HERE = Path(__file__).parent
SCRIPT = HERE / "parent_checkpoints.py"


def read(library: Any, path: Path) -> Weights:
    """The weights of a file, by the names of its library."""
    return library.weights_in(read_pickled(path), path)


def file_name(case: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in case)


def continued(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """Numbers after the second update, begun from the parent's checkpoint; writes it back on the way."""
    case = INSTALLED[name]
    algorithm = from_plain(nest(dict(case["here"]), {}), canter.PPOConfig()).build(spec_of(case), 0)
    algorithm.use_engine("autograd")
    data, parameters = rollouts(case), named(algorithm.model) | curious(algorithm)
    with torch.no_grad():
        for key, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(first_value(key, tuple(parameter.shape))))
    state, rollout = algorithm.policy.initial_state(N), None
    theirs = rsl_rl if case["parent"] == "rsl_rl" else rl_games
    suffix = "pt" if theirs is rsl_rl else "pth"
    for iteration in range(ITERATIONS):
        rollout, state = collect(algorithm, data, iteration, state, rollout)
        monkeypatch.setattr(functional_order, "permutation", drawn(iteration, algorithm.config.num_minibatches))
        algorithm.update(rollout)
        if iteration == 0:
            spoil(algorithm)
            theirs.load(algorithm, read(theirs, folder / f"{file_name(name)}.{suffix}"))
            written = theirs.dump(algorithm, 1) if theirs is rsl_rl else theirs.dump(algorithm, 1, 64, -3.5)
            torch.save(written, folder / f"ours_{file_name(name)}.{suffix}")
    rate = next(iter(algorithm.optimizers["policy"].groups.values())).learning_rate
    found = {key: p.detach().double().flatten().numpy() for key, p in parameters.items()}
    return found | statistics(algorithm.model) | {"learning_rate": rate.view(1).numpy()}


@torch.no_grad()
def spoil(algorithm: canter.PPO) -> None:
    """Forget everything that a checkpoint holds, so that it has to come from the file."""
    curiosity = [
        part for name, part in algorithm.extensions.named_buffers() if not name.endswith(("running", "weight"))
    ]
    for tensor in (*algorithm.model.parameters(), *algorithm.model.buffers(), *curious(algorithm).values(), *curiosity):
        tensor.fill_(0.123)  # the running sum of bonuses is in no file
    for phase in algorithm.phases.values():
        for group in phase.optimizer.groups.values():
            for tensor in group.state().values():
                tensor.fill_(0.0)


def versions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, float]]:
    """For each version's own file: differences of actions, and of parameters and moments after a further update."""
    kinds = ("actions_of_versions", "values_of_versions", "further_update_of_versions")
    found: dict[str, dict[str, float]] = {kind: {} for kind in kinds}
    for path in sorted(folder.glob("rsl_rl_*.json")):
        row = json.loads(path.read_text())
        weights = read(rsl_rl, path.with_suffix(".pt"))
        rate = weights.optimizers["policy"].learning_rate  # a fixed schedule has the rate of its settings
        row["settings"]["algorithm"] |= {"schedule": "fixed", "learning_rate": rate}
        config = import_config(row["settings"], parity=True, num_envs=N).config.algorithm
        obs = {name: torch.tensor(value) for name, value in row["obs"].items()}
        specs = {name: canter.TensorSpec(tuple(value.shape[1:])) for name, value in obs.items()}
        action = canter.Continuous((-float("inf"),) * 2, (float("inf"),) * 2)
        spec = canter.EnvSpec(specs, action, N, final_obs="unknown", truncates=True)
        mine, theirs = config.build(spec, 0), config.build(spec, 0)
        mine.use_engine("autograd")
        rsl_rl.load(mine, weights)
        rsl_rl.load(theirs, read(rsl_rl, folder / f"after_{path.stem}.pt"))
        std = bounded_std_type(row["settings"])
        written = rsl_rl.dump(mine, weights.iteration, generation=row["generation"], std=std)
        torch.save(written, folder / f"ours_{path.stem}.pt")
        taken = weights.optimizers["policy"]
        assert weights.iteration >= 1 and taken.steps > 0 and taken.learning_rate
        acted, _ = mine.policy.act(obs, mine.policy.initial_state(N), torch.ones(N, dtype=torch.bool))
        if "beta" not in path.stem:  # deterministic actions are the peak here and the mean there
            found["actions_of_versions"][path.stem] = float((acted - torch.tensor(row["action"])).abs().max())
        if "value" in row:
            value = InferenceCritic(mine.critic, lambda groups: groups)(obs)
            found["values_of_versions"][path.stem] = float((value - torch.tensor(row["value"])).abs().max())
        if path.stem.endswith(("beta", "range")):  # a std of another form, and another distribution
            continue
        rollout, _ = collect(mine, rollouts(INSTALLED["rsl_rl scalar"]), 0, mine.policy.initial_state(N), None)
        monkeypatch.setattr(functional_order, "permutation", drawn(0, config.num_minibatches))
        before = torch.cat([parameter.detach().flatten().clone() for parameter in mine.model.parameters()])
        mine.update(rollout)
        assert (torch.cat([p.detach().flatten() for p in mine.model.parameters()]) - before).abs().max() > 1e-4
        found["further_update_of_versions"][path.stem] = max(
            float((a - b).abs().max().detach()) for a, b in zip(numbers(mine), numbers(theirs), strict=True)
        )
    return found


def numbers(algorithm: canter.PPO) -> list[torch.Tensor]:
    """Parameters, and what the optimiser keeps of them."""
    groups = [group for optimizer in algorithm.optimizers.values() for group in optimizer.groups.values()]
    return [*algorithm.model.parameters(), *(tensor for group in groups for tensor in group.state().values())]


def main(python: str, *rsl_rl_folders: str) -> None:
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    subprocess.run([python, SCRIPT, "make", folder], check=True)
    for other in ("", *rsl_rl_folders):
        subprocess.run([python, SCRIPT, "runner", folder], check=True, env=os.environ | {"PYTHONPATH": other})
    expected = json.loads((folder / "expected.json").read_text())
    updates = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in INSTALLED:
            found = continued(name, folder, monkeypatch)
            wanted = {key: np.asarray(value) for key, value in expected[name].items() if key not in LOGGED}
            assert wanted.keys() <= found.keys(), wanted.keys() - found.keys()
            updates[name] = max(float(np.abs(found[key] - wanted[key]).max()) for key in wanted)
    subprocess.run([python, SCRIPT, "verify", folder], check=True)
    written = json.loads((folder / "verified.json").read_text())
    with pytest.MonkeyPatch.context() as monkeypatch:
        results = {"further_update": updates, "written_and_loaded": written, **versions(folder, monkeypatch)}
    results["written_for_versions"] = {}
    for other in ("", *rsl_rl_folders):
        subprocess.run([python, SCRIPT, "reload", folder], check=True, env=os.environ | {"PYTHONPATH": other})
    for path in sorted(folder.glob("reloaded_*.json")):
        results["written_for_versions"] |= json.loads(path.read_text())
    for what, rows in results.items():
        for name, difference in rows.items():
            print(f"{what:28} {name:56} {difference:.1e}")
    (HERE / "checkpoints.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
