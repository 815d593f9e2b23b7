"""The updates of `sac_cases.py` from a file of rl_games, by Canter."""

import numpy as np
import torch
from sac_cases import ACTIONS, CASES, OBS, batches, settings

from canter import Continuous, EnvSpec, TensorSpec
from canter.compat import import_config
from canter.compat.pickled_file import read_pickled
from canter.compat.rl_games import sac as files
from canter.core.data.replay import ReplayBatch


def differences(case, path, expected, written):
    """Compare actions, stds, values and parameters after two updates with rl_games'; write a file."""
    low, high = CASES[case]["bounds"]
    spec = EnvSpec({"policy": TensorSpec((OBS,))}, Continuous(tuple(low), tuple(high)), 4, final_obs="unknown")
    sac = import_config(settings(case), parity=True).config.algorithm.build(spec, 0)
    files.load(sac, files.weights_in(read_pickled(path), path))
    torch.save(files.dump(sac, 40, 160, -1e9), written)
    obs = {"policy": torch.from_numpy(batches(9)["obs"])}
    params, _ = sac.policy.params(obs, ())
    value = sac.learner.critics(obs, torch.tanh(params[:, :ACTIONS]))
    found = {"action": sac.policy.act(obs)[0], "std": params[:, ACTIONS:].exp(), "value": value}
    for number in range(2, 4):
        sac.learner.update(*transitions(sac, number), learn_policy=number % 2 == 1)
    tree = files.dump(sac, 41, 164, -1e9)
    parts = {f"{part}.{name}": x for part in ("actor", "critic", "critic_target") for name, x in tree[part].items()}
    found |= parts | {"log_alpha": tree["log_alpha"]}
    assert found.keys() == expected.keys()
    far = {name: float(np.abs(x.detach().double().numpy().ravel() - expected[name]).max()) for name, x in found.items()}
    trained = {"further_updates": max(far[name] for name in parts), "log_alpha": far["log_alpha"]}
    return {name: far[name] for name in ("action", "std", "value")} | ({} if case == "bounds" else trained)


def transitions(sac, number):
    """A recorded batch as Canter draws it, and its noise."""
    batch = {name: torch.from_numpy(array) for name, array in batches(number).items()}
    ended = batch["done"].squeeze(-1)
    rows = ReplayBatch(
        obs={"policy": batch["obs"]},
        action=batch["action"],
        reward=batch["reward"].squeeze(-1),
        discount=sac.config.gamma * (~ended).float(),
        next_obs={"policy": batch["next_obs"]},
        valid=torch.ones_like(ended),
    )
    return rows, batch["noise"]
