"""Metrics in other places: what arrives there, and that no such place can end a run."""

import json
import logging
import sys
from dataclasses import replace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from canter.app.report import write_report
from canter.config.presets import preset_for
from canter.envs import EnvConfig
from canter.runs.run_folder import CheckpointConfig, RunFolder
from canter.runs.writers import TensorBoardWriter, WandbWriter, Writers
from canter.training.trainer import train


def short(iterations=3):
    preset = preset_for("tensor:cartpole")
    algorithm = replace(preset.algorithm, horizon=16, num_minibatches=2, epochs=1)
    return replace(preset, algorithm=algorithm, total_steps=iterations * 16 * preset.env.num_envs)


class Kept:
    """A writer that keeps its rows, and fails on request."""

    def __init__(self, fails=()):
        self.calls, self.fails = [], fails

    def _note(self, name, value=None):
        self.calls.append((name, value))
        if name in self.fails:
            raise OSError(f"{name} is broken")

    def start(self, settings):
        self._note("start", settings)

    def write(self, row):
        self._note("write", row)

    def close(self):
        self._note("close")


def names(writer):
    return [name for name, _ in writer.calls]


def scalars(path):
    events = EventAccumulator(str(path), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_a_writer_gets_the_settings_then_a_row_per_iteration_then_the_end():
    writer, reports = Kept(), []
    train(short(), reports.append, writers=[writer])
    assert names(writer) == ["start", "write", "write", "write", "close"]
    assert writer.calls[0][1]["env"]["id"] == "tensor:cartpole"
    assert [row for name, row in writer.calls if name == "write"] == [report.row() for report in reports]


def test_a_writer_is_closed_when_the_run_fails():
    writer = Kept()

    def fail(report):
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        train(short(), fail, writers=[writer])
    assert names(writer) == ["start", "write", "close"]


@pytest.mark.parametrize(
    ("fails", "expected"),
    [
        (("start",), ["start", "close"]),
        (("write",), ["start", "write", "close"]),
        (("write", "close"), ["start", "write", "close"]),
        (("close",), ["start", "write", "write", "write", "close"]),
    ],
)
def test_a_writer_that_fails_is_warned_about_once_and_dropped(fails, expected, caplog):
    broken, sound, reports = Kept(fails), Kept(), []
    with caplog.at_level(logging.WARNING):
        train(short(), reports.append, writers=[broken, sound])
    assert names(broken) == expected
    assert names(sound) == ["start", "write", "write", "write", "close"]
    assert len(reports) == 3
    warnings = [record.message for record in caplog.records]
    assert warnings == [f"Kept failed and is not used any more ({fails[0]} is broken); training goes on"]


def test_an_interruption_is_no_failure_of_a_writer():
    class Interrupted(Kept):
        def write(self, row):
            raise KeyboardInterrupt

    writer = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        train(short(), writers=[writer])
    assert names(writer) == ["start", "close"]


def test_other_ranks_write_nothing(monkeypatch):
    monkeypatch.setattr("canter.runs.writers.distributed.rank", lambda: 1)
    writer = Kept()
    with Writers([writer]) as writers:
        writers.start(short())
        writers.write({})
    assert writer.calls == []


def test_tensorboard_has_every_number_over_env_steps(tmp_path):
    reports = []
    train(short(), reports.append, writers=[TensorBoardWriter(tmp_path)])
    seen = scalars(tmp_path)
    rows = [report.row() for report in reports]
    steps = [row["env_steps"] for row in rows]
    for name, tag in {"policy/kl": "policy/kl", "time/env": "time/env", "iteration": "run/iteration"}.items():
        assert [step for step, _ in seen[tag]] == steps
        assert [value for _, value in seen[tag]] == pytest.approx([row[name] for row in rows])
    with_value = {name for row in rows for name, value in row.items() if value is not None and name != "env_steps"}
    assert set(seen) == {name if "/" in name else f"run/{name}" for name in with_value}


def test_tensorboard_shows_what_a_resumed_run_repeats_only_once(tmp_path):
    def run(iterations, on_iteration=lambda report: None):
        folder = RunFolder(tmp_path, CheckpointConfig(save_every=2))
        train(short(iterations), on_iteration, folder=folder, writers=[TensorBoardWriter(tmp_path / "tensorboard")])

    def die(report):
        if report.iteration == 5:
            raise RuntimeError("killed after its row was written")

    with pytest.raises(RuntimeError):
        run(6, die)
    run(6)
    assert [value for _, value in scalars(tmp_path / "tensorboard")["run/iteration"]] == [1, 2, 3, 4, 5, 6]


def test_wandb_works_without_an_account_and_continues_under_the_same_id(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "nobody-is-logged-in"))
    monkeypatch.setattr(wandb, "login", lambda **options: False)
    for iterations in (1, 2):
        writer = WandbWriter(tmp_path)
        train(short(iterations), folder=RunFolder(tmp_path), writers=[writer])
        assert writer.run is not None
    wandb.teardown()
    identity = (tmp_path / "wandb" / "id").read_text()
    stored = list(tmp_path.glob(f"wandb/offline-run-*/run-{identity}.wandb"))
    assert stored
    assert all(file.stat().st_size > 0 for file in stored)


def test_wandb_mode_has_the_last_word(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    train(short(1), folder=RunFolder(tmp_path), writers=[WandbWriter(tmp_path)])
    assert not list(tmp_path.glob("wandb/*run-*"))


@pytest.mark.parametrize(
    ("writer", "module", "extra"),
    [(TensorBoardWriter, "torch.utils.tensorboard", "tensorboard"), (WandbWriter, "wandb", "wandb")],
)
def test_a_missing_extra_is_named_with_the_way_to_get_it(writer, module, extra, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf'{extra} is not installed.*pip install "canter\[{extra}\]"'):
        writer(tmp_path)


def test_what_the_environment_reports_reaches_file_writers_and_report(tmp_path):
    config = replace(short(), env=EnvConfig(id="tensor:queue", num_envs=4), total_steps=3 * 64)
    kept, run = Kept(), tmp_path / "run"
    board = TensorBoardWriter(run / "tensorboard")
    train(config, folder=RunFolder(run, settings=""), writers=[kept, board])
    in_file = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    given = [row for name, row in kept.calls if name == "write"]
    drawn = scalars(run / "tensorboard")
    for name in ("env/customers", "env/idle"):
        values = [row[name] for row in in_file]
        assert len(values) == 3 and all(value > 0 for value in values)
        assert [row[name] for row in given] == values == pytest.approx([value for _, value in drawn[name]])
    assert "env/customers" in write_report([run]).read_text()
