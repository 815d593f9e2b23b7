# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportOptionalOperand=false
"""`canter.train`, `canter.load` and `canter.evaluate`, as a program uses them."""

import base64
import functools
import json
import re

import gymnasium
import numpy as np
import pytest
import torch
from my_walk import Walk, make_walk
from torch import nn

import canter
from canter.app.cli import main
from canter.app.experiments import scores
from canter.envs import imports
from canter.envs.gymnasium import GymnasiumEnv
from canter.envs.tensor import CartPole
from canter.nn.policy_file import read_policy_file
from canter.training.self_play import SelfPlayEnv

SMALL = {"total_steps": 256, "algorithm": {"horizon": 16, "epochs": 1, "num_minibatches": 2}}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(imports, "_allowed", {})
    monkeypatch.setattr(imports, "_factories", {})


def rows(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("what", "env_id", "num_envs"),
    [
        (lambda: "tensor:cartpole", "tensor:cartpole", 8),
        (lambda: Walk, "my_walk:Walk", 8),
        pytest.param(lambda: make_walk, "my_walk:make_walk", 8, marks=pytest.mark.long),
        pytest.param(lambda: lambda: Walk(2.0), "python:environment", 8, marks=pytest.mark.long),
        (lambda: Walk(), "python:Walk", 1),
        (lambda: gymnasium.vector.SyncVectorEnv([Walk] * 2), "python:SyncVectorEnv", 2),
        pytest.param(lambda: CartPole(4), "tensor:cartpole", 4, marks=pytest.mark.long),
        pytest.param(
            lambda: GymnasiumEnv(gymnasium.vector.SyncVectorEnv([Walk] * 2)),
            "python:SyncVectorEnv",
            2,
            marks=pytest.mark.long,
        ),
    ],
    ids=["id", "class", "function", "lambda", "instance", "vector", "canter", "canter_own"],
)
def test_it_takes_every_kind_of_environment_and_leaves_a_whole_run(what, env_id, num_envs, capsys):
    result = canter.train(what(), **SMALL)
    said = capsys.readouterr().out
    assert f"on {env_id} " in said
    assert "Final score: mean return" in said or "Final score: reward" in said
    assert {"config.yaml", "metrics.jsonl", "run.json", "report.html", "policies"} <= {
        path.name for path in result.path.iterdir()
    }
    settings = (result.path / "config.yaml").read_text()
    assert f"num_envs: {num_envs}\n" in settings
    assert result.ended_by == "total_steps"
    assert ("no name that other commands could use" in said) == env_id.startswith("python:")
    assert (" play runs/" in said and " resume runs/" in said) == (not env_id.startswith("python:"))
    assert " report runs/" in said


def test_one_instance_says_that_one_is_stepped(capsys):
    canter.train(Walk(), **SMALL)
    assert "Only this one environment is stepped" in capsys.readouterr().out


def test_a_wrong_object_is_named_with_what_is_expected():
    with pytest.raises(
        TypeError, match=r"3 \(int\) is not a task to train on: expected an environment id, a Gymnasium"
    ):
        canter.train(3)
    with pytest.raises(TypeError, match="preset='CartPole' has no effect on a config"):
        canter.train(config=canter.TrainConfig(), preset="CartPole")
    with pytest.raises(TypeError, match="two environments"):
        canter.train("CartPole-v1", env=Walk)


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        ({"console": "verbos"}, ValueError, "console='verbos': unknown name, did you mean verbose"),
        ({"log": ["tensorbord"]}, ValueError, "log='tensorbord': unknown name, did you mean tensorboard"),
        ({"folder": "runs/mine"}, TypeError, "folder='runs/mine': expected True, False or a canter.RunFolder"),
    ],
)
def test_misspelt_names_are_refused_before_anything_is_made(wrong, kind, message, tmp_path, capsys):
    with pytest.raises(kind, match=message):
        canter.train(Walk, **SMALL, **wrong)
    assert capsys.readouterr().out == "" and not list(tmp_path.iterdir())


def test_an_environment_that_does_not_fit_the_policy_is_refused():
    result = canter.train(Walk, **SMALL, console="quiet", folder=False, final_evaluation=False)
    with pytest.raises(ValueError, match=r"the policy .*obs"):
        canter.evaluate(result, "CartPole-v1", episodes=2)


def test_settings_are_keywords_by_their_names_and_may_be_parts():
    algorithm = canter.PPOConfig(horizon=8, epochs=1, num_minibatches=2)
    result = canter.train(Walk, seed=3, total_steps=128.0, num_envs=4, algorithm=algorithm, console="quiet")
    text = (result.path / "config.yaml").read_text()
    for line in ("seed: 3", "total_steps: 128", "num_envs: 4", "horizon: 8"):
        assert re.search(rf"^ *{line}$", text, re.MULTILINE), line
    with pytest.raises(ValueError, match=r"algorithm\.gama: unknown key, did you mean gamma"):
        canter.train(Walk, algorithm={"gama": 0.9})
    for theirs, ours in (
        ({"lr": 1e-3}, r"lr: unknown key, here it is algorithm\.optimizer\.learning_rate \(the same number\)"),
        ({"algorithm": {"learning_rate": 1e-3}}, r"here it is algorithm\.optimizer\.learning_rate"),
        ({"algorithm": {"n_steps": 8}}, r"algorithm\.n_steps: unknown key, here it is algorithm\.horizon"),
        ({"algorithm": {"normalize_obs": False}}, r"did you mean algorithm\.model\.policy\.normalize_obs or"),
    ):
        with pytest.raises(ValueError, match=ours):
            canter.train(Walk, **theirs)


@pytest.mark.parametrize("episodes", [-1, 2.5, "3", None])
def test_a_final_evaluation_of_no_number_of_episodes_is_refused(episodes):
    with pytest.raises(ValueError, match=r"final_evaluation=.*expected True, False or a number of episodes"):
        canter.train(Walk, **SMALL, console="quiet", final_evaluation=episodes)


def test_settings_may_be_objects_deep_inside_of_a_dict():
    model = {"policy": canter.NetworkConfig(hidden=(8,)), "critic": canter.network(nn.Linear, out_features=4)}
    result = canter.train(Walk, **SMALL | {"algorithm": {"model": model}}, console="quiet", final_evaluation=False)
    text = (result.path / "config.yaml").read_text()
    assert "hidden: [8]" in text and "module: torch.nn.modules.linear:Linear" in text
    with pytest.raises(ValueError, match=r"algorithm\.model\.policy: expected a mapping"):
        canter.train(Walk, algorithm={"model": {"policy": canter.RNNConfig()}})


def test_quiet_says_nothing_and_without_a_folder_nothing_is_left(tmp_path, capsys):
    result = canter.train("tensor:cartpole", **SMALL, console="quiet", folder=False, final_evaluation=False)
    assert capsys.readouterr().out == ""
    assert not list(tmp_path.iterdir())
    assert (result.path, result.score) == (None, None)


@pytest.mark.parametrize("answer", [canter.STOP, False])
def test_a_callback_gets_report_policy_and_trainer_and_may_end_the_run(answer):
    seen = []

    def look(report, policy, trainer):
        seen.append((report.iteration, policy is trainer.algorithm.policy))
        return answer if report.iteration == 2 else None

    result = canter.train("tensor:cartpole", look, **SMALL | {"total_steps": 10_000}, console="quiet")
    assert seen == [(1, True), (2, True)]
    assert result.ended_by == "on_iteration"
    assert json.loads((result.path / "run.json").read_text())["status"] == "finished"


def test_evaluations_while_training_make_a_curve_keep_the_best_and_change_nothing_else():
    often = {"evaluate": {"every": 512, "episodes": 3}, "checkpoints": {"best_by": "evaluation"}}
    base = SMALL | {"total_steps": 2048, "console": "quiet"}
    with_, without = canter.train(Walk, **base, **often), canter.train(Walk, **base)
    curve = {row["env_steps"]: row["eval/return"] for row in rows(with_.path) if "eval/return" in row}
    assert list(curve) == [512, 1024, 1536, 2048]
    best = read_policy_file(with_.path / "policies" / "best.safetensors")[0]
    assert best.evaluation == max(curve.values())
    assert best.env_steps == max(curve, key=curve.__getitem__)

    def learned(run):
        own = [{key: row[key] for key in row if not key.startswith(("eval/", "time/"))} for row in rows(run.path)]
        return [{key: row[key] for key in row if key not in ("seconds", "wall_time")} for row in own]

    assert learned(with_) == learned(without)


def test_the_best_by_evaluation_needs_evaluations():
    with pytest.raises(ValueError, match=r"best_by=evaluation needs evaluations: set evaluate\.every"):
        canter.train(Walk, checkpoints={"best_by": "evaluation"})


def test_an_environment_that_cannot_be_made_again_cannot_be_evaluated_in_between():
    with pytest.raises(ValueError, match="existed only in the program that trained it"):
        canter.train(Walk(), evaluate={"every": 100}, **SMALL)


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_videos_while_training_lie_in_the_run():
    env = {"num_envs": 4, "reset_steps": 5}
    result = canter.train(
        "tensor:maze", env=env, **SMALL, video={"every": 128}, console="quiet", final_evaluation=False
    )
    names = [path.name for path in sorted((result.path / "videos").iterdir())]
    assert names == [f"step-000000{step}.{kind}" for step in (128, 256) for kind in ("mp4", "png")]
    strip = base64.b64encode((result.path / "videos" / names[-1]).read_bytes()).decode()
    assert f'<img src="data:image/png;base64,{strip}"' in (result.path / "report.html").read_text()


def test_a_video_needs_a_folder():
    with pytest.raises(ValueError, match=r"video\.every=128 needs a run folder"):
        canter.train("tensor:maze", **SMALL, video={"every": 128}, folder=False)


def test_load_and_evaluate_take_a_run_by_name_and_agree_with_the_command(capsys):
    result = canter.train(Walk, **SMALL, console="quiet", name="mine")
    action, state = canter.load("mine").predict(np.zeros(1))
    assert action.shape == ()
    assert state == ()
    by_name, by_result = canter.evaluate("mine", episodes=4), canter.evaluate(result, Walk, 4)
    assert by_name.length == [9] * 4
    assert by_result.return_ == [canter.evaluate(result.policy, Walk, 1).return_[0]] * 4
    main(["eval", "mine", "--episodes", "4"])
    assert f"mean {by_name.mean:.1f}" in capsys.readouterr().out
    assert canter.evaluate(result.policy, episodes=4).return_ == by_name.return_


def test_it_starts_with_the_weights_of_another_run(capsys):
    first = canter.train(Walk, **SMALL, console="quiet", name="first")
    for begin in (first.path, first.path / "policies/final_actor.safetensors"):  # refused before anything is made
        with pytest.raises(ValueError, match=r"does not fit: .*network\.hidden\.0\.weight is float32 \[64, 1\]"):
            canter.train(Walk, init_from=begin, algorithm={"model": {"policy": {"hidden": [8]}}}, console="quiet")
    assert len(list(first.path.parent.iterdir())) == 3  # it, latest and the hall of fame
    still = SMALL | {"algorithm": {**SMALL["algorithm"], "optimizer.learning_rate": 1e-12}}
    second = canter.train(Walk, init_from="first", name="second", seed=5, **still, final_evaluation=False)
    assert "Starting with the weights of runs/first after 2 iterations" in capsys.readouterr().out
    assert json.loads((second.path / "run.json").read_text())["init_from"] == {"run": "runs/first", "iteration": 2}
    weights = [dict(run.policy.actor.named_parameters()) for run in (first, second)]
    for name, value in weights[0].items():
        assert torch.allclose(value, weights[1][name], atol=1e-6), name


def test_a_resumed_run_keeps_its_weights(capsys):
    first = canter.train("tensor:cartpole", name="first", **SMALL)
    begun = ["train", "tensor:cartpole", "--name", "second", "--init-from", "first", "--num-envs=8", "--console=quiet"]
    begun += ["--algorithm.horizon=16", "--algorithm.num-minibatches=2", "--resume-if-present"]
    main([*begun, "--total-steps=256"])
    learned = canter.load("runs/second").actor.state_dict()
    assert "Starting with the weights of runs/first" in capsys.readouterr().out
    main([*begun, "--total-steps=256"])  # nothing is left to do, and nothing is taken again
    assert "It begins with" not in capsys.readouterr().out
    again = canter.load("runs/second").actor.state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in learned.items())
    other = first.policy.actor.state_dict()
    assert not all(torch.equal(other[name], weight) for name, weight in learned.items())


def test_evaluations_that_never_happen_have_no_settings():
    with pytest.raises(ValueError, match=r"evaluate\.episodes=3 has no effect without every"):
        canter.train("tensor:cartpole", evaluate={"episodes": 3}, **SMALL)


def halls(path):
    found = [json.loads(index.read_text()) for index in path.glob("hall_of_fame/*/index.json")]
    return {"average" if "average" in hall["problem"] else "return": hall for hall in found}


def test_the_hall_of_fame_keeps_long_run_averages_also_during_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scores, "EVAL_STEPS", 100)
    monkeypatch.setattr(scores, "AVERAGE_STEPS", 100)
    runs, during = tmp_path / "runs", []

    def look(report):
        during.append((report.iteration, [hall["problem"].get("average") for hall in halls(runs).values()]))

    settings = {"env": {"num_envs": 8}, "checkpoints": {"best_by": "lta", "save_every": 2}, "total_steps": 8 * 16 * 26}
    settings |= {"algorithm": {"horizon": 16, "epochs": 1, "num_minibatches": 2, "objective": "average"}}
    canter.train("tensor:queue", look, name="first", **settings)
    assert "First result on tensor:queue by long-run average: -" in capsys.readouterr().out
    assert dict(during)[20] == [] and dict(during)[26] == ["training"]
    canter.train("tensor:queue", name="second", seed=1, **settings)
    assert "on tensor:queue by long-run average: -" in capsys.readouterr().out
    names = {tuple(sorted(entry["run"] for entry in hall["entries"])) for hall in halls(runs).values()}
    assert names == {("first", "second")}
    score = json.loads((runs / "first" / "run.json").read_text())["score"]
    assert score["long_run_average"] < 0 < score["ci"]


def test_a_game_that_has_its_opponents_gets_no_others_from_a_preset():
    env = SelfPlayEnv(canter.EnvConfig(id="tensor:rps", num_envs=8).build("cpu"), canter.SelfPlayConfig(), seed=0)
    canter.train(env, console="quiet", final_evaluation=False, total_steps=64)
    assert len(env.pool) > 0


def test_a_long_evaluation_says_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setattr(scores, "EvalProgress", functools.partial(scores.EvalProgress, every=0.0))
    canter.train("tensor:probe-recall", **SMALL | {"total_steps": 128})
    said = capsys.readouterr().out
    assert "Evaluating: 0 episodes ended after 1 steps of each environment" in said
    assert "Evaluating: 8 episodes ended after 5 steps of each environment" in said
