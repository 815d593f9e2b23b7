"""Read files of rl_games' SAC, train further, write them back and load them with rl_games again.

    python benchmarks/parity/sac.py PARENTS_PYTHON [--write]

PARENTS_PYTHON is a Python with rl_games 1.6.5. Its SACAgent makes two updates of recorded batches with recorded noise
and saves; another one restores the file, acts and makes two more, in the second of which the policy and the
temperature learn too. Canter does the same from the same file and writes it back; a third agent loads that and saves
it again. `--write` keeps file and numbers of one case for `tests/parity/test_sac_files.py`.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "parity"))
from sac_cases import CASES, OBS, batches, settings

HERE = Path(__file__).parent
TESTS = HERE.parents[1] / "tests" / "parity"
Numbers = dict[str, list[float]]


# with rl_games, without Canter ---------------------------------------------------------------------------------------


def new_agent(case: str) -> Any:
    """The parent's agent by its own runner's builders, without an environment."""
    import gymnasium
    from rl_games.algos_torch.sac_agent import SACAgent

    torch.manual_seed(CASES[case]["seed"])
    params = settings(case)["params"]
    low, high = (np.array(bound, dtype=np.float32) for bound in CASES[case]["bounds"])
    spaces = {
        "observation_space": gymnasium.spaces.Box(-9.0, 9.0, (OBS,)),
        "action_space": gymnasium.spaces.Box(low, high),
    }
    given = {"env_info": spaces, "reward_shaper": None, "features": {"observer": None}, "train_dir": tempfile.mkdtemp()}
    params["config"] |= given
    with contextlib.redirect_stdout(io.StringIO()):
        agent = SACAgent("run", params)
    agent.vec_env = None
    return agent


def learn(agent: Any, numbers: range) -> None:
    """Updates of recorded batches, with recorded noise."""
    for number in numbers:
        batch = batches(number)
        noise = iter(torch.from_numpy(batch.pop("noise")))
        agent.replay_buffer.sample = lambda _, rows=batch: tuple(map(torch.from_numpy, rows.values()))
        agent.update_counter = number
        with mock.patch("torch.distributions.normal._standard_normal", lambda *_, given=noise, **__: next(given)):
            agent.update(0)


def numbers_of(agent: Any) -> Numbers:
    """All parameters after training, and actions."""
    state = agent.get_weights()
    parts = {f"{part}.{name}": x for part in ("actor", "critic", "critic_target") for name, x in state[part].items()}
    return {
        name: x.double().flatten().tolist() for name, x in (parts | {"log_alpha": agent.log_alpha.detach()}).items()
    }


def make(folder: Path) -> None:
    for case in CASES:
        agent = new_agent(case)
        agent.set_train()  # the statistics move
        learn(agent, range(2))
        agent.epoch_num, agent.frame = 40, 160
        with contextlib.redirect_stdout(io.StringIO()):
            agent.save(str(folder / case))
            agent = new_agent(case)
            agent.restore(str(folder / f"{case}.pth"))
        agent.model.train(False)
        obs = torch.from_numpy(batches(9)["obs"])
        with torch.no_grad():
            seen, action = agent.preproc_obs(obs), agent.act(obs, None)
            given = {"action": action, "std": agent.model.actor(seen).scale}
            given["value"] = torch.stack(agent.model.critic(seen, action))
        found = {name: tensor.flatten().tolist() for name, tensor in given.items()}
        learn(agent, range(2, 4))
        (folder / f"{case}.json").write_text(json.dumps(found | numbers_of(agent)))


def verify(folder: Path) -> None:
    """What Canter wrote, restored and saved again, beside the file that Canter read."""
    worst = {}
    for case in CASES:
        trees = []
        for name in (case, f"ours_{case}"):
            with contextlib.redirect_stdout(io.StringIO()):
                agent = new_agent(case)
                agent.restore(str(folder / f"{name}.pth"))
            trees.append({})
            walk(agent.get_full_state_weights(), "", trees[-1])
        assert trees[0].keys() == trees[1].keys()
        worst[case] = max(float((trees[0][name] - trees[1][name]).abs().max()) for name in trees[0])
    (folder / "verified.json").write_text(json.dumps(worst))


def walk(value: Any, key: str, flat: dict[str, torch.Tensor]) -> None:
    """All tensors and numbers of a tree by their paths."""
    if isinstance(value, torch.Tensor | int | float):
        flat[key] = torch.as_tensor(value).double().clone()
    elif isinstance(value, dict):
        for name, item in value.items():
            walk(item, f"{key}/{name}", flat)


# with Canter ---------------------------------------------------------------------------------------------------------


def main(python: str, *options: str) -> None:
    from sac_here import differences

    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    subprocess.run([python, __file__, "make", folder], check=True)
    results = {}
    for case in CASES:
        expected = json.loads((folder / f"{case}.json").read_text())
        results[case] = differences(case, folder / f"{case}.pth", expected, folder / f"ours_{case}.pth")
    subprocess.run([python, __file__, "verify", folder], check=True)
    for case, difference in json.loads((folder / "verified.json").read_text()).items():
        results[case]["written_and_loaded"] = difference
    for case, rows in results.items():
        print(f"{case:12}", "  ".join(f"{what} {difference:.1e}" for what, difference in rows.items()))
    (HERE / "sac.json").write_text(json.dumps(results, indent=1) + "\n")
    if "--write" in options:
        for suffix in ("pth", "json"):
            shutil.copy(folder / f"normalised.{suffix}", TESTS / f"rl_games_sac.{suffix}")


if __name__ == "__main__":
    if sys.argv[1] in ("make", "verify"):
        torch.set_num_threads(1)
        {"make": make, "verify": verify}[sys.argv[1]](Path(sys.argv[2]))
    else:
        main(*sys.argv[1:])
