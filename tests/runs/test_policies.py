"""Which policy of a run is the best one."""

import json

import pytest

from canter.algorithms.ppo import PPOConfig
from canter.config import TrainConfig
from canter.envs import EnvConfig
from canter.nn.policy_file import read_policy_file
from canter.runs.run_folder import CheckpointConfig, RunFolder
from canter.training.trainer import RunStopped, train

CONFIG = TrainConfig(
    env=EnvConfig(id="tensor:queue", num_envs=2, options={"max_episode_steps": None}),
    algorithm=PPOConfig(horizon=8, epochs=1, num_minibatches=1, objective="average"),
    total_steps=16 * 40,
)
BY_LTA = CheckpointConfig(save_every=5, best_by="lta")


def lines(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_a_task_that_never_ends_has_a_best_policy_by_its_long_run_average(tmp_path):
    train(CONFIG, folder=RunFolder(tmp_path / "straight", BY_LTA))
    rows = [row for row in lines(tmp_path / "straight") if row["iteration"] >= 20]
    best = max(rows, key=lambda row: (row["lta/mean"], -row["env_steps"]))
    info, _ = read_policy_file(tmp_path / "straight" / "policies" / "best.safetensors")
    assert (info.lta, info.env_steps, info.return_) == (best["lta/mean"], best["env_steps"], None)
    assert info.env_steps < CONFIG.total_steps

    def stop(report):
        if report.iteration == 33:
            raise KeyboardInterrupt

    with pytest.raises((RunStopped, KeyboardInterrupt)):
        train(CONFIG, stop, folder=RunFolder(tmp_path / "stopped", BY_LTA))
    train(CONFIG, folder=RunFolder(tmp_path / "stopped", BY_LTA))
    files = [tmp_path / name / "policies" / "best.safetensors" for name in ("straight", "stopped")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_by_return_it_has_none(tmp_path):
    train(CONFIG, folder=RunFolder(tmp_path, CheckpointConfig(save_every=5)))
    assert not (tmp_path / "policies" / "best.safetensors").exists()
    assert read_policy_file(tmp_path / "policies" / "final_actor.safetensors")[0].lta is not None
