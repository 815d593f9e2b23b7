"""Many runs: what they are, that none is lost, and going on."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from canter.app.cli import main
from canter.app.cli.plans import values_of
from canter.app.experiments import plans, session
from canter.app.experiments.plans import Commands, Sweep, SweepRun, combinations, run_plan


def test_values_are_ranges_lists_or_whole_texts():
    assert values_of("0..4", "seed") == ["0", "1", "2", "3", "4"]
    assert values_of("0.98,0.99", "algorithm.gamma") == ["0.98", "0.99"]
    assert values_of("64,64", "algorithm.model.policy.hidden") == ["64,64"]
    assert values_of("1,2", "env.options.size") == ["1", "2"]
    with pytest.raises(ValueError, match=r"--seed 4\.\.0: expected a range such as 0\.\.4"):
        values_of("4..0", "seed")


def test_every_combination_has_a_name_by_what_varies():
    found = combinations({"seed": ["0", "1"], "algorithm.gamma": ["0.9", "0.99"], "total-steps": ["64"]})
    assert list(found) == ["seed0-gamma0.9", "seed0-gamma0.99", "seed1-gamma0.9", "seed1-gamma0.99"]
    assert found["seed1-gamma0.9"] == ["--seed=1", "--algorithm.gamma=0.9", "--total-steps=64"]
    alike = combinations({"a.hidden": ["8,8", "8_8"]})
    assert list(alike) == ["hidden8_8", "hidden8_8-2"]


def test_a_combination_that_makes_no_sense_is_refused_before_any_run_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["sweep", "tensor:cartpole", "--algorithm.gamma", "0.9,1.5"])
    assert "gamma=1.5" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_name_that_is_no_folder_and_no_environment_starts_no_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["sweep", "mien", "--seed", "0,1"])
    assert "'mien' is neither the folder of a sweep nor an environment: unknown" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("flags", [["--seed", "0..3"], ["--preset", "none"], ["--name", "other"]])
def test_flags_that_a_stored_sweep_would_ignore_are_refused(flags, tmp_path, capsys):
    Commands(tmp_path, ["train", "tensor:cartpole"], {"run": []}).write()
    with pytest.raises(SystemExit):
        main(["sweep", str(tmp_path), *flags])
    assert f"{flags[0]} cannot change when {tmp_path} continues; only --jobs can" in capsys.readouterr().err
    main(["sweep", str(tmp_path), "--print-commands"])
    assert "train tensor:cartpole" in capsys.readouterr().out


def test_commands_can_be_printed_for_another_scheduler(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["sweep", "tensor:cartpole", "--seed", "0..2", "--name", "mine", "--print-commands"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[2].endswith("train tensor:cartpole --seed=2 --run-dir runs/mine --name seed2 --console lines")
    assert not (tmp_path / "runs").exists()


@pytest.mark.long  # the example and the engineer's journey sweep too
def test_a_sweep_continues_a_killed_run_and_writes_one_report(tmp_path):
    """Two runs in separate processes; one is killed in the middle of its work, the other is not disturbed."""
    command = [sys.executable, "-m", "canter", "sweep"]
    flags = ["--algorithm.horizon", "8", "--algorithm.num-minibatches", "2", "--checkpoints.save-every", "1"]
    first = subprocess.Popen(
        [
            *command,
            "tensor:cartpole",
            *flags,
            "--seed",
            "0,1",
            "--total-steps",
            "3840",
            "--name",
            "mine",
            "--jobs",
            "2",
        ],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    victim = tmp_path / "runs" / "mine" / "seed1"
    while not any((victim / "checkpoints").glob("step-*")):
        assert first.poll() is None
        time.sleep(0.01)
    os.kill(json.loads((victim / "run.json").read_text())["pid"], signal.SIGKILL)
    _, told = first.communicate(timeout=300)
    assert first.returncode == 1
    assert "1 of 2 runs failed; see runs/mine/seed1.log" in told
    again = subprocess.run([*command, "mine"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert "seed0: " not in again.stdout  # it was finished
    for name in ("seed0", "seed1"):
        record = json.loads((victim.parent / name / "run.json").read_text())
        assert record["status"] == "finished"
        assert (record["resumed"] is not None) == (name == "seed1")
        rows = (victim.parent / name / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(row)["env_steps"] for row in rows] == list(range(64, 3841, 64))
    assert (victim.parent / "report.html").is_file()


def test_a_run_that_was_killed_during_its_evaluation_is_evaluated_when_the_sweep_continues(tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def die(*_):
        raise Killed

    sizes = ["--algorithm.horizon", "8", "--algorithm.num-minibatches", "2", "--total-steps", "640"]
    Commands(tmp_path, ["train", "tensor:cartpole", *sizes], {"run": []}).write()
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(session, "final_score", die)
        main(Commands.read(tmp_path).arguments("run"))
    record, metrics = tmp_path / "run" / "run.json", (tmp_path / "run" / "metrics.jsonl").read_text()
    assert json.loads(record.read_text())["status"] == "finished"
    sweep = Sweep(Commands.read(tmp_path))
    assert not sweep.is_done(SweepRun("run"))
    main(["sweep", str(tmp_path)])
    assert json.loads(record.read_text())["score"]["mean"] > 0
    assert sweep.is_done(SweepRun("run"))
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == metrics


class Waiting(Sweep):
    """Fails on the first run that is started."""

    def arguments(self, run):
        raise AssertionError(f"{run.name} was started")


def test_a_run_that_another_machine_may_own_is_named_once_and_waited_for(tmp_path):
    (tmp_path / "run").mkdir()
    owner = {"pid": 7, "host": "elsewhere", "since": "2026-01-02T03:04:05+00:00", "birth": "", "token": "a"}
    lock = tmp_path / "run" / "run.lock"
    lock.write_text(json.dumps(owner))
    said = []

    def on_change(plan, line):
        said.append(line)
        if len(said) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_plan(Waiting(Commands(tmp_path, [], {"run": []})), 1, on_change)
    assert said[1:] == [None, None]
    assert said[0].startswith(f"{tmp_path / 'run'} is in use by process 7 on elsewhere since 2026")
    assert said[0].endswith(f"if it no longer runs, remove {lock}")


def test_the_settings_of_a_run_are_read_once_for_all_its_states(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    sweep = Sweep(Commands(tmp_path, [], {"run": []}))
    assert sweep.state("run").startswith("waiting")
    (tmp_path / "run" / "config.yaml").write_text("algorithm: {objective: average}")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"env_steps": 64, "return": 2.0, "lta/mean": 5.0}\n')
    first = sweep.state("run")
    assert "64 steps, return 5.00" in first
    monkeypatch.setattr(plans, "read_settings", lambda path: pytest.fail("read again"))
    assert sweep.state("run") == first


def test_a_sweep_does_the_runs_that_no_process_has_finished(tmp_path):
    commands = Commands(tmp_path, ["train"], {"a": ["--seed=0"], "b": ["--seed=1"], "c": ["--seed=2"]})
    first = Sweep(commands)
    second = Sweep(commands)
    assert [run.name for run in second.next_runs()] == ["a", "b", "c"]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "run.json").write_text(json.dumps({"status": "finished", "score": {"mean": 3.0}}))
    (tmp_path / "a" / "metrics.jsonl").write_text(json.dumps({"env_steps": 64, "return": 2.0}) + "\n")
    run = SweepRun("a")
    failing = SweepRun("b")
    assert first.record(run, failed=False) == "a: finished, 64 steps, return 2.00, score 3.00"
    assert [left.name for left in second.next_runs()] == ["b", "c"] and second.is_done(run)
    assert first.record(failing, failed=True).startswith("b: failed, no steps")
    assert [left.name for left in first.next_runs()] == ["c"] and first.failed == ["b"]  # not again in this session
    assert first.progress() == {"progress": "2 of 3 to go"} and [*first.table()] == ["a", "b", "c"]
