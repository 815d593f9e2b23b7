"""Runs whose objective is the average reward are shown and compared by it, not by the return of episodes."""

import json
import shutil
from dataclasses import replace
from typing import Any

import pytest

import canter
from canter.app.cli import main
from canter.app.console.dashboard import ProgressTracker
from canter.app.experiments import scores
from canter.app.report import write_report
from canter.app.report.data import aggregate_curve, goal_of, group_runs, read_run
from canter.app.report.sections import final_tile
from canter.nn.policy_file import read_policy_file
from canter.runs.records import read_record, score_value

SETTINGS: Any = {"env.options": {"max_episode_steps": 50}, "num_envs": 4, "console": "lines", "total_steps": 2_000}
PPO = {"horizon": 16, "epochs": 1, "num_minibatches": 1}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run by each objective, with episodes that end."""
    root = tmp_path_factory.mktemp("runs")
    patch = pytest.MonkeyPatch()
    patch.setattr(scores, "EVAL_EPISODES", 4)
    patch.setattr(scores, "AVERAGE_STEPS", 100)
    for objective in ("average", "discounted"):
        algorithm = PPO | {"objective": objective}
        canter.train("tensor:pendulum", algorithm=algorithm, run_dir=root, name=objective, **SETTINGS)
    patch.undo()
    return root


def test_the_objective_chooses_the_score(runs):
    average = read_run(runs / "average")
    record = read_record(runs / "average")["score"]
    assert average.goal == "lta/mean"
    assert average.score == record["long_run_average"] != record["mean"]
    title, _, text = final_tile(average) or ("", "", "")
    assert title == "Long-run average" and "±" in text
    discounted = read_run(runs / "discounted")
    assert discounted.score == read_record(runs / "discounted")["score"]["mean"]
    assert goal_of([average]) == "lta/mean"
    assert goal_of([average, discounted]) == "return"


def test_the_report_shows_the_average(runs, tmp_path):
    alone = write_report([runs / "average"], tmp_path / "alone.html").read_text()
    assert "Reward per unit of time" in alone
    assert "Return" not in alone.split("<dl")[1].split("</dl>")[0]
    shutil.copytree(runs / "average", tmp_path / "again")
    both = write_report([runs / "average", tmp_path / "again"], tmp_path / "both.html").read_text()
    assert "Final reward per unit of time: interquartile mean" in both


def test_the_curve_of_the_average_has_its_interval(runs, tmp_path):
    run = read_run(runs / "average")
    (group,) = group_runs([run])
    line = aggregate_curve(group, "lta/mean")
    _, half = run.points("lta/ci")
    assert len(line.y) > 1 and line.high - line.low == pytest.approx(2 * half)
    text = write_report([runs / "average"], tmp_path / "average.html").read_text()
    assert "in the last 20 rollouts, with its 95 % interval" in text and "Thin: mean of the last" not in text
    assert text.count('class="band') > 0
    assert "<b>Return</b>" in text and "<b>Long-run average</b>" not in text and "lta/" not in text


def test_other_runs_have_a_chart_of_the_average(runs, tmp_path):
    text = write_report([runs / "discounted"], tmp_path / "discounted.html").read_text()
    assert "<b>Long-run average</b>" in text and "<b>Return</b>" not in text and "lta/" not in text


def test_the_list_of_runs_shows_the_average(runs, capsys):
    main(["runs", "--run-dir", str(runs), "--json"])
    shown = {run["name"]: run for run in json.loads(capsys.readouterr().out)}
    assert shown["average"]["by_average"] and not shown["discounted"]["by_average"]


def test_the_console_shows_the_average():
    assert ProgressTracker({"algorithm": {"objective": "average"}}).by_average
    assert ProgressTracker({"checkpoints": {"best_by": "lta"}}).by_average
    assert not ProgressTracker({"algorithm": {"objective": "discounted"}}).by_average


def test_the_objective_chooses_the_best_policy(runs):
    rows = [json.loads(line) for line in (runs / "average/metrics.jsonl").read_text().splitlines()]
    best, _ = read_policy_file(runs / "average/policies/best.safetensors")
    assert best.lta == max(row["lta/mean"] for row in rows if row.get("lta/mean") is not None)
    assert canter.TrainConfig().checkpoint_schedule.best_by == "return"
    average = canter.TrainConfig(algorithm=canter.PPOConfig(objective="average"))
    assert average.checkpoint_schedule.best_by == "lta"
    asked = replace(average, checkpoints=canter.CheckpointConfig(best_by="return"))
    assert asked.checkpoint_schedule.best_by == "return"


def test_a_final_policy_enters_one_hall_of_fame(runs):
    problems = [json.loads(index.read_text()) for index in runs.glob("hall_of_fame/*/index.json")]
    final = [hall for hall in problems if hall["problem"].get("average") != "training"]
    entered = sorted((entry["run"], "average" in hall["problem"]) for hall in final for entry in hall["entries"])
    assert entered == [("average", True), ("discounted", False)]


def test_a_score_without_an_average_is_the_mean_return():
    assert score_value({"mean": 3.0, "long_run_average": 0.5}, average=True) == 0.5
    assert score_value({"mean": 3.0, "long_run_average": 0.5}, average=False) == 3.0
    assert score_value({"mean": 3.0}, average=True) == 3.0
    assert score_value({"long_run_average": 0.5}, average=False) == 0.5
    assert score_value(None, average=True) is None
