"""Runs of a few iterations, by one process or as a rank: `python equality.py FOLDER CASE...`, or that under torchrun.

Rank 0 leaves weights and rows of the log of these cases in FOLDER, as `<case>-<ranks>.pt`. The case `sac`, which is
only for ranks, leaves the state of every rank as `sac-<rank>-of-<ranks>.pt`.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

import canter
from canter.config import TrainConfig
from canter.core import distributed
from canter.core.distributed.world import world
from canter.core.plain import from_plain

LSTM = {"policy": {"hidden": [16], "rnn": {"cell": "lstm", "hidden": 8}}}
LEARN = {"horizon": 32, "epochs": 2, "num_minibatches": 4, "shuffle_blocks": 4}
LEARN |= {"optimizer": {"learning_rate": 0.003}}
CARTPOLE = {"id": "CartPole-v1", "num_envs": 8, "reset_steps": 40}
PENDULUM = {"id": "tensor:pendulum", "num_envs": 8, "reset_steps": 40}
STRICT = {"advantage_normalization": "minibatch", "target_kl": 0.02, "reward": {"normalize": True}}
ADAPTIVE = {"optimizer": {"learning_rate": {"kind": "adaptive_kl", "start": 1e-3}}, "objective": "average"}
CURIOUS = {"extensions": [{"kind": "rnd"}], "central_value": {"epochs": 2}}
CASES = {
    "gymnasium": {"env": CARTPOLE, "algorithm": LEARN},
    # Rows in which an environment only resets, so that ranks have more or fewer valid ones.
    "uneven": {"env": CARTPOLE | {"autoreset": "next_step"}, "algorithm": LEARN | STRICT},
    "gymnasium_lstm": {"env": CARTPOLE, "algorithm": LEARN | {"sequence_length": 8, "model": LSTM}},
    "tensor": {"env": PENDULUM, "algorithm": LEARN | ADAPTIVE},
    "tensor_lstm": {"env": PENDULUM, "algorithm": LEARN | {"sequence_length": 8, "model": LSTM}},
    "phases": {"env": CARTPOLE | {"id": "tensor:cartpole"}, "algorithm": LEARN | CURIOUS},
    "agents": {"env": {"id": "tensor:rendezvous", "num_envs": 8, "reset_steps": 40}, "algorithm": LEARN},
    "self_play": {"env": {"id": "tensor:rps", "num_envs": 8}, "algorithm": LEARN},
    "native": {"env": CARTPOLE, "algorithm": LEARN, "execution": {"engine": "native"}, "iterations": 2},
}

ITERATIONS = 3
RARE = ("gymnasium_lstm", "agents", "self_play")
"""Cases that only the long tests run."""


class InDouble:
    """An environment whose observations are float64; rewards stay float32, as the contract says."""

    seeds_by_row = True

    def __init__(self, env):
        self.env, self.close = env, env.close
        self.spec = replace(env.spec, obs={k: replace(v, dtype=torch.float64) for k, v in env.spec.obs.items()})

    def reset(self, seed=None):
        return double(self.env.reset(seed))

    def step(self, action):
        step = self.env.step(action.float() if action.is_floating_point() else action)
        reward, final_obs = step.reward.float(), step.final_obs and double(step.final_obs)
        return replace(step, reward=reward, obs=double(step.obs), final_obs=final_obs)


def double(obs):
    return {name: group.double() for name, group in obs.items()}


def run(case, folder):
    settings = {"execution": {"engine": "autograd"}, "total_steps": None} | CASES[case]
    settings["until"] = {"iterations": settings.pop("iterations", ITERATIONS)}
    exact = settings["execution"]["engine"] == "autograd"  # the native engine reads float32 only
    torch.set_default_dtype(torch.float64 if exact else torch.float32)
    config, rows = from_plain(settings, TrainConfig()), []
    env = InDouble(config.env.build("cpu")) if exact else config.env.build("cpu")
    with canter.Trainer(config, lambda report: rows.append(dict(report.row())), env=env) as trainer:
        trainer.learn()
        weights = trainer.algorithm.state_dict()["model"]
    env.close()
    if distributed.rank() == 0:
        torch.save({"weights": weights, "rows": rows}, folder / f"{case}-{distributed.world_size()}.pt")


def run_sac(folder):
    learn = {"kind": "sac", "batch_size": 16, "warmup_steps": 64}
    settings = {"env": {"id": "tensor:pendulum", "num_envs": 4}, "algorithm": learn, "total_steps": None}
    torch.set_default_dtype(torch.float32)
    with canter.Trainer(from_plain(settings | {"until": {"iterations": 40}}, TrainConfig())) as trainer:
        trainer.learn()
        state = trainer.algorithm.state_dict()
    kept = {name: state[name] for name in ("modules", "replay", "counters")}
    torch.save(kept, folder / f"sac-{distributed.rank()}-of-{distributed.world_size()}.pt")


if __name__ == "__main__":
    world.start()
    for name in sys.argv[2:]:
        run_sac(Path(sys.argv[1])) if name == "sac" else run(name, Path(sys.argv[1]))
    world.end()
