"""Populations from Python: folders of members that are used like single runs, and resuming."""

import json

import pytest
import torch

import canter
from canter.app.cli import main
from canter.app.experiments.population import population_config
from canter.config.files import read_config
from canter.core.storage.checkpoint import load_checkpoint
from canter.runs.metrics import read_rows

SETTINGS = {"env": {"num_envs": 4}, "algorithm": {"horizon": 16, "num_minibatches": 4, "epochs": 2}, "preset": "none"}
MEMBERS = [{"learning_rate": 1e-3}, {"learning_rate": 3e-3, "clip_ratio": 0.1, "seed": 9}]


def test_members_have_folders_like_single_runs_that_learn_the_same(tmp_path):
    result = canter.train_population(
        "tensor:cartpole", MEMBERS, run_dir=tmp_path, console="quiet", episodes=2, total_steps=256, **SETTINGS
    )
    assert len(result.members) == 2
    assert result.best.score.mean == max(member.score.mean for member in result.members)
    for member in result.members:
        config = read_config(member.path / "config.yaml", within=member.path).over(canter.TrainConfig())
        assert config == member.config
        rows = list(read_rows(member.path / "metrics.jsonl"))
        assert [row["env_steps"] for row in rows] == [64, 128, 192, 256]
        assert json.loads((member.path / "run.json").read_text())["score"]["mean"] == member.score.mean
        single = canter.train(
            config, console="quiet", folder=False, final_evaluation=False, execution={"engine": "plain"}
        )
        saved = canter.load(member.path)
        for name, weight in single.policy.actor.state_dict().items():
            assert torch.allclose(weight, saved.actor.state_dict()[name], rtol=2e-5, atol=2e-5), name
        assert canter.evaluate(member.path, episodes=2).mean > 0
    assert result.members[1].config.seed == 9


def test_members_need_not_be_evaluated(tmp_path):
    result = canter.train_population(
        "tensor:cartpole", 2, run_dir=tmp_path, console="quiet", episodes=0, total_steps=64, **SETTINGS
    )
    assert [member.score for member in result.members] == [None, None]
    assert all(member.path.is_dir() for member in result.members)


def test_a_population_that_is_resumed_by_command_scores_its_members(tmp_path, capsys):
    options = {"run_dir": tmp_path, "name": "run", "console": "quiet", "episodes": 2}
    first = canter.train_population("tensor:cartpole", MEMBERS, total_steps=64, **options, **SETTINGS)
    main(["resume", str(first.path), "--total-steps", "256", "--final-episodes", "3", "--console", "lines"])
    assert "Final scores of 2 members: mean returns " in capsys.readouterr().out
    records = [json.loads((path / "run.json").read_text()) for path in (first.path, *(m.path for m in first.members))]
    assert [record["score"]["episodes"] for record in records] == [3, 3, 3]
    assert records[0]["score"]["mean"] in [record["score"]["mean"] for record in records[1:]]


def trainer(path):
    settings = {**SETTINGS, "preset": None}
    config = canter.TrainConfig(
        env=canter.EnvConfig(id="tensor:cartpole", num_envs=4),
        algorithm=canter.PPOConfig(**settings["algorithm"]),
        total_steps=384,
    )
    return canter.Trainer(population_config(config, MEMBERS), folder=canter.RunFolder(path))


def member_rows(path):
    """Rows of the second member, without times."""
    rows = read_rows(path / "member-001" / "metrics.jsonl")
    return [{name: value for name, value in row.items() if name not in ("seconds", "wall_time")} for row in rows]


def test_a_population_that_is_interrupted_continues_to_the_bit(tmp_path):
    with trainer(tmp_path / "whole") as whole:
        whole.learn()
    with trainer(tmp_path / "paused") as paused:
        paused.learn(2)
        paused.learn(1)
    with (tmp_path / "paused" / "member-001" / "metrics.jsonl").open("a") as log:
        log.write(json.dumps({**member_rows(tmp_path / "paused")[-1], "iteration": 4}) + "\n")  # lost by a kill
    with trainer(tmp_path / "paused") as resumed:
        assert resumed.progress.iteration == 3
        resumed.learn()
    assert whole.progress.iteration == resumed.progress.iteration == 6
    trees = [load_checkpoint(tmp_path / name / "checkpoints" / "step-000000000006") for name in ("whole", "paused")]
    left, right = (flat_tensors(tree["algorithm"]) | flat_tensors(tree["collector"]) for tree in trees)
    assert left.keys() == right.keys()
    assert all(left[name].equal(right[name]) for name in left)
    assert member_rows(tmp_path / "whole") == member_rows(tmp_path / "paused")


def flat_tensors(tree, prefix=""):
    found = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            found |= flat_tensors(value, f"{prefix}{name}.")
        elif isinstance(value, torch.Tensor):
            found[prefix + name] = value
    return found


def test_what_a_population_cannot_do_is_refused_before_a_folder_is_made(tmp_path):
    def refused(task, members, text, **settings):
        with pytest.raises(ValueError, match=text):
            canter.train_population(task, members, run_dir=tmp_path, console="quiet", **{**SETTINGS, **settings})

    refused("tensor:cartpole", [{"learning_rates": 1e-3}], "learning_rate")
    refused("tensor:cartpole", 0, "at least one")
    refused("tensor:cartpole", [{"gamma": 1.5}], "gamma=1.5")
    refused("tensor:cartpole", 2, "central_value", algorithm={"central_value": {}, "horizon": 16})
    refused("CartPole-v1", 2, "tensor environment")
    assert not list(tmp_path.iterdir())
