"""Style, curiosity and symmetry in one run with memory, by two ranks, killed: it ends the same."""

import os
import signal

import pytest
import torch
import yaml
from test_runs import outcome, ranks_of, rows_of, wait_for
from torchrun import launch, torchrun

MEMORY = {"hidden": [8], "rnn": {"cell": "lstm", "hidden": 8}, "obs_groups": ["policy"]}
STYLE = {"kind": "amp", "motions": ["canter:swimmer_wide.npz"], "hidden": [8], "frames": 3, "batch_size": 16}
SETTINGS = {
    "env": {"id": "tensor:swimmer", "num_envs": 4, "options": {"motion": True, "max_episode_steps": 13}},
    "until": {"iterations": 8},
    "checkpoints": {"save_every": 2},
    "algorithm": {
        "horizon": 8,
        "epochs": 2,
        "num_minibatches": 2,
        "sequence_length": 4,
        "model": {"policy": MEMORY},
        "extensions": [
            STYLE | {"replay": 64, "replay_rows": 16},
            {"kind": "rnd", "num_minibatches": 2, "hidden": [8]},
            {"kind": "symmetry", "mirror_loss": 0.5},
        ],
    },
}


@pytest.mark.long
def test_all_recurrent_extensions_on_two_ranks_resume_bit_for_bit_after_a_kill(tmp_path):
    (tmp_path / "all.yaml").write_text(yaml.safe_dump(SETTINGS))
    command = ["-m", "canter", "train", "--config", "all.yaml", "--console", "quiet", "--resume-if-present"]
    command += ["--run-dir", tmp_path, "--name"]
    torchrun(2, *command, "straight", cwd=tmp_path)
    agent = launch(2, *command, "killed", cwd=tmp_path)
    wait_for(lambda: len(rows_of(tmp_path / "killed")) >= 3, 150.0)
    for process in [*ranks_of(agent.pid).values(), agent.pid]:
        os.kill(process, signal.SIGKILL)
    agent.communicate()
    assert len(rows_of(tmp_path / "killed")) < 8
    torchrun(2, *command, "killed", cwd=tmp_path)
    (straight, rows), (killed, other_rows) = outcome(tmp_path / "straight"), outcome(tmp_path / "killed")
    assert rows == other_rows and len(rows) == 8
    for part in ("model", "extensions"):
        mine, theirs = straight["algorithm"][part], killed["algorithm"][part]
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert any(key.endswith("ring") for key in straight["algorithm"]["extensions"])
