"""`canter resume` goes on with what it was given, or says why not; it never starts over by itself."""

import json
import os
import shutil

import pytest

from canter.app.cli import main

FLAGS = ["--num-envs=8", "--algorithm.horizon=8", "--algorithm.epochs=1", "--algorithm.num-minibatches=1"]
STEPS = 5 * 64


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    flags = [*FLAGS, f"--total-steps={STEPS}", "--run-dir", str(runs), "--name", "run", "--console", "quiet"]
    main(["train", "tensor:cartpole", *flags, "--checkpoints.save-every=2"])
    return runs / "run"


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture
def resume(run, capsys):
    """Exit code, output and errors of `canter resume`."""

    def command(*flags):
        capsys.readouterr()
        try:
            main(["resume", str(run), "--console", "quiet", *flags])
        except SystemExit as leaving:
            return leaving.code, *capsys.readouterr()
        return 0, *capsys.readouterr()

    return command


def content(run):
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and "lock" not in path.name}


def edit(run, old, new):
    text = (run / "config.yaml").read_text()
    assert text.count(old) == 1
    (run / "config.yaml").write_text(text.replace(old, new))


def remove(path):
    shutil.rmtree(path)


def link(path):
    path.rename(path.with_name("moved"))
    path.symlink_to(path.with_name("moved"))


def empty(path):
    shutil.rmtree(path)
    path.mkdir()
    (path / "notes.txt").touch()


def file(path):
    shutil.rmtree(path)
    path.touch()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove, "has metrics and policies but no checkpoint"),
        (link, "checkpoints is a link"),
        (empty, "has metrics and policies but no checkpoint"),
        (file, "checkpoints is not a folder"),
    ],
)
def test_without_its_checkpoints_a_run_is_refused_and_left_as_it_is(damage, message, run, resume):
    damage(run / "checkpoints")
    before = content(run)
    code, _, err = resume(f"--total-steps={2 * STEPS}")
    assert code == 2
    assert message in err
    assert content(run) == before


def test_a_run_whose_checkpoints_are_no_folder_starts_from_scratch_on_request(run, resume):
    file(run / "checkpoints")
    code, out, _ = resume("--from-scratch")
    assert code == 0
    assert "Starting at step 0" in out
    iterations = [json.loads(line)["iteration"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert iterations == [1, 2, 3, 4, 5]
    assert (run / "before-1" / "policies" / "final_actor.safetensors").is_file()


def test_a_checkpoint_under_another_name_is_refused(run, resume):
    os.rename(run / "checkpoints" / "step-000000000005", run / "checkpoints" / "step-000000000009")
    code, _, err = resume()
    assert code == 2
    assert "step-000000000009 does not fit: iteration is 5 in what was saved and 9 here" in err


def test_a_checkpoint_of_another_run_is_refused(run, resume):
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"id": "0" * 32}))
    code, _, err = resume()
    assert code == 2
    assert f"does not fit: run is {record['id']} in what was saved and {'0' * 32} here" in err


def test_a_checkpoint_of_another_seed_is_refused_even_with_accepted_edits(run, resume):
    edit(run, "seed: 0", "seed: 1")
    code, _, err = resume("--accept-edits")
    assert code == 2
    assert "does not fit: seed is 0 in what was saved and 1 here" in err


def test_edited_settings_are_listed_and_need_to_be_accepted(run, resume):
    edit(run, "gamma: 0.98", "gamma: 0.5")
    edit(run, "options: {}", "options: {max_episode_steps: 50}")
    before = content(run)
    code, _, err = resume(f"--total-steps={2 * STEPS}")
    assert code == 2
    assert "config.yaml was edited since iteration 5: " in err
    assert "algorithm.gamma 0.98 -> 0.5" in err
    assert "env.options.max_episode_steps (absent) -> 50" in err
    assert "--accept-edits" in err
    assert content(run) == before
    code, out, _ = resume("--accept-edits")
    assert code == 0
    assert "From iteration 5 on: " in out
    (note,) = map(json.loads, (run / "edits.jsonl").read_text().splitlines())
    changes = {"algorithm.gamma": ["0.98", "0.5"], "env.options.max_episode_steps": ["(absent)", "50"]}
    assert (note["iteration"], note["changes"]) == (5, changes)
    assert resume()[0] == 0  # they are known from here on


def test_a_budget_may_grow_but_not_below_what_is_done(run, resume):
    code, _, err = resume(f"--total-steps={STEPS - 1}")
    assert code == 2
    assert f"total_steps={STEPS - 1} is below the {STEPS} steps that are done" in err
    code, out, _ = resume(f"--total-steps={STEPS + 64}")
    assert code == 0
    assert f"From iteration 5 on: total_steps {STEPS} -> {STEPS + 64}" in out
    assert resume()[0] == 0


def test_a_budget_whose_run_was_killed_before_its_next_checkpoint_is_still_known(run, resume):
    note = {"iteration": 5, "date": "", "changes": {"total_steps": [str(STEPS), str(9 * STEPS)]}}
    (run / "edits.jsonl").write_text("torn{\n[1]\n" + json.dumps(note) + "\n")
    assert resume()[0] == 0  # killed between the note and the settings
    (run / "edits.jsonl").write_text(json.dumps(note) + "\n")
    edit(run, f"total_steps: {STEPS}", f"total_steps: {9 * STEPS}")
    code, out, _ = resume(f"--total-steps={STEPS + 64}")
    assert code == 0
    assert f"total_steps {9 * STEPS} -> {STEPS + 64}" in out


def test_damaged_lines_of_metrics_are_counted_aloud_and_kept(run, resume, caplog):
    whole = (run / "metrics.jsonl").read_bytes()
    damaged = [b'{"iteration": 2, "return": NaN}', b'{"iteration": 1e999}', b"\xff\x00", b'{"iter']
    lines = whole.splitlines()
    lines[1:1] = damaged
    (run / "metrics.jsonl").write_bytes(b"\n".join(lines))
    assert resume()[0] == 0
    assert (run / "metrics.jsonl").read_bytes() == whole
    assert (run / "metrics.damaged.jsonl").read_bytes().splitlines() == damaged
    assert "4 damaged lines of" in caplog.text
