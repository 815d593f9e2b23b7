"""Callbacks: when they are called, the metrics that they log, and how they end a run or fail."""

import io
import json
import re
from contextlib import redirect_stdout
from typing import Any

import numpy as np
import pytest
import torch

import canter
from canter.app.console.console import LineConsole, VerboseConsole
from canter.core.registry import UserError

SHORT: dict[str, Any] = {
    "num_envs": 2,
    "total_steps": 48,
    "algorithm": {"horizon": 8, "epochs": 1, "num_minibatches": 1},
}


def train(path, *arguments, **keywords):
    """Train for three iterations and return the rows of the log."""
    folder = canter.RunFolder(path)
    options = {"console": "quiet", "final_evaluation": False, "folder": folder} | SHORT | keywords
    canter.train("CartPole-v1", *arguments, **options)
    return read(path)


def read(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


class Recorder(canter.Callback):
    def __init__(self):
        self.calls = []

    def on_training_start(self, trainer):
        self.calls.append("start")

    def on_rollout_start(self, trainer):
        self.calls.append("rollout start")

    def on_rollout_end(self, rollout, trainer):
        self.calls.append(f"rollout end {tuple(rollout.reward.shape)}")

    def on_evaluation(self, metrics, trainer):
        self.calls.append(sorted(metrics))

    def on_iteration(self, report, policy, trainer):
        self.calls.append(f"iteration {report.iteration}")

    def on_training_end(self, trainer):
        self.calls.append("end")


def test_a_callback_follows_the_run_in_order(tmp_path):
    recorder = Recorder()
    train(tmp_path, callbacks=[recorder], total_steps=32, evaluate={"every": 32, "episodes": 1})
    iteration = ["rollout start", "rollout end (8, 2)"]
    evaluation = ["eval/length", "eval/return"]
    assert recorder.calls == ["start", *iteration, "iteration 1", *iteration, evaluation, "iteration 2", "end"]


def test_a_returned_dict_is_in_the_row_of_that_iteration(tmp_path):
    rows = train(tmp_path, lambda report: {"coverage": report.iteration, "share": np.float32(0.5)})
    assert [row["coverage"] for row in rows] == [1, 2, 3]
    assert rows[0]["share"] == 0.5


def test_log_metric_reaches_the_next_row_from_every_method(tmp_path):
    class Logs(canter.Callback):
        def on_rollout_end(self, rollout, trainer):
            trainer.log_metric("rollout/reward", rollout.reward.mean())

        def on_iteration(self, report, policy, trainer):
            trainer.log_metric("late", report.iteration)
            if report.iteration == 2:
                trainer.log_metric("once", torch.tensor(7))

    rows = train(tmp_path, callbacks=[Logs()])
    assert [row["rollout/reward"] for row in rows] == [1, 1, 1]
    assert [row["late"] for row in rows] == [1, 2, 3]
    assert ["once" in row for row in rows] == [False, True, False]


def test_what_is_written_into_the_report_is_logged(tmp_path):
    def watch(report):
        report.metrics["x"] = 1

    assert [row["x"] for row in train(tmp_path, watch)] == [1, 1, 1]


def test_metrics_of_callbacks_are_on_consoles_and_in_the_report(tmp_path):
    out = io.StringIO()
    kept = []

    class Kept:
        def start(self, settings):
            pass

        def write(self, row):
            kept.append(row)

        def close(self):
            pass

    with redirect_stdout(out):
        train(tmp_path, lambda r: {"my/coverage": r.iteration}, writers=[LineConsole(0), VerboseConsole(), Kept()])
    assert "my/coverage 3" in out.getvalue()
    assert "callbacks\n  my/coverage" in out.getvalue()
    assert kept[-1]["my/coverage"] == 3
    assert "my/coverage" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"x": "high"}, "x='high' (str) is no number"),
        ({"x": "1"}, "x='1' (str) is no number"),
        ({"x": torch.zeros(2)}, "(Tensor) is no number"),
        ({"x": None}, "x=None (NoneType) is no number"),
        ({3: 1.0}, "3 is no name of a metric"),
        ({"return": 1.0}, "the log has a column 'return' already; choose another name, such as my/return"),
        ({"loss/policy": 1.0}, "'loss/policy', which this run logs itself"),
    ],
)
def test_a_metric_that_cannot_be_logged_is_refused_and_the_row_is_kept(tmp_path, metrics, message):
    with pytest.raises(UserError) as raised:
        train(tmp_path, lambda report: metrics)
    assert message in str(raised.value)
    assert len(read(tmp_path)) == 1


def test_a_callback_ends_the_run_and_its_end_is_called_after_an_error(tmp_path):
    class Stops(canter.Callback):
        def on_iteration(self, report, policy, trainer):
            return canter.STOP

    class Fails(Recorder):
        def on_rollout_end(self, rollout, trainer):
            raise RuntimeError("full")

    assert len(train(tmp_path / "a", callbacks=[Stops()])) == 1
    fails = Fails()
    with pytest.raises(RuntimeError, match="full"):
        train(tmp_path / "b", callbacks=[fails])
    assert fails.calls == ["start", "rollout start", "end"]


def test_a_function_is_no_callback():
    not_callbacks: Any = [print]
    with pytest.raises(UserError, match="pass a function as on_iteration"):
        canter.train("CartPole-v1", callbacks=not_callbacks, folder=False, console="quiet", **SHORT)


@pytest.mark.parametrize("function", [3, "stop", lambda: None, lambda report, policy, trainer, more: None])
def test_a_function_that_cannot_be_called_is_refused_before_a_folder_is_made(function, tmp_path):
    with pytest.raises(UserError, match="on_iteration: "):
        canter.train("CartPole-v1", function, console="quiet", run_dir=tmp_path, name="mine", **SHORT)
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [(canter.Callback(), "is no list"), ([canter.Callback], "Callback is a class; pass an instance, Callback()")],
)
def test_callbacks_are_instances_in_a_list(callbacks, message):
    with pytest.raises(UserError, match=re.escape(message)):
        canter.train("CartPole-v1", callbacks=callbacks, console="quiet", folder=False, **SHORT)


def test_a_tensor_with_a_gradient_is_a_metric(tmp_path):
    rows = train(tmp_path / "run", lambda report: {"mine": torch.ones((), requires_grad=True)})
    assert [row["mine"] for row in rows] == [1.0, 1.0, 1.0]


def test_nan_is_logged_as_null(tmp_path):
    assert train(tmp_path, lambda report: {"x": float("nan")})[0]["x"] is None
