"""A run with a folder: what it leaves, how it stops, how it goes on."""

import json
import os
import shutil
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch

from canter.config import TrainConfig
from canter.config.presets import preset_for
from canter.core.plain import from_plain, nest
from canter.core.storage.checkpoint import CheckpointCorrupt, NoCheckpoint
from canter.core.storage.lock import RunLocked
from canter.core.storage.validity import Mismatch, check_finite, flatten
from canter.envs import EnvConfig
from canter.nn.policy_file import read_policy_file
from canter.runs.records import is_unstarted, read_record
from canter.runs.run_folder import CheckpointConfig, RunFolder
from canter.runs.state import TrainState
from canter.training.guard import RunFailed
from canter.training.trainer import RunStopped, train

EVERY_2 = CheckpointConfig(save_every=2)


def config_for(env_id="tensor:pendulum", iterations=6, num_envs=8) -> Any:
    config = replace(preset_for(env_id) or TrainConfig(), env=EnvConfig(id=env_id, num_envs=num_envs))
    algorithm = replace(config.algorithm, horizon=16, num_minibatches=4, epochs=2)
    return replace(config, algorithm=algorithm, total_steps=iterations * 16 * num_envs)


def with_episodes(iterations):
    """About 25 episodes end in each iteration."""
    return config_for("tensor:cartpole", iterations, num_envs=32)


def stop_after(iteration):
    """A callback that sends this process SIGTERM, as a scheduler would."""

    def callback(report):
        if report.iteration == iteration:
            os.kill(os.getpid(), signal.SIGTERM)

    return callback


def lines(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clocks = ("seconds", "wall_time", "time/")
    return [{key: value for key, value in row.items() if not key.startswith(clocks)} for row in rows]


def equal(one, other):
    one, other = flatten(one), flatten(other)
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) if isinstance(one[name], torch.Tensor) else one[name] == other[name]
        for name in one
    )


@pytest.mark.parametrize("env_id", ["tensor:pendulum", "CartPole-v1"])
def test_a_stopped_run_continues_as_if_it_had_never_stopped(tmp_path, env_id):
    config = config_for(env_id)
    straight = train(config, folder=RunFolder(tmp_path / "straight", EVERY_2))
    for iteration in (1, 4):
        with pytest.raises(RunStopped, match="SIGTERM") as stopped:
            train(config, stop_after(iteration), folder=RunFolder(tmp_path / "stopped", EVERY_2))
        assert stopped.value.received == signal.SIGTERM
    resumed = train(config, folder=RunFolder(tmp_path / "stopped", EVERY_2))
    assert equal(straight.state_dict(), resumed.state_dict())
    assert lines(tmp_path / "stopped") == lines(tmp_path / "straight")


def test_a_run_killed_between_checkpoints_repeats_what_was_lost(tmp_path):
    config = config_for()
    train(config, folder=RunFolder(tmp_path / "straight", EVERY_2))

    def die(report):
        if report.iteration == 5:
            raise RuntimeError("as good as kill -9: nothing is saved on the way out")

    with pytest.raises(RuntimeError):
        train(config, die, folder=RunFolder(tmp_path / "killed", EVERY_2))
    assert [row["iteration"] for row in lines(tmp_path / "killed")] == [1, 2, 3, 4, 5]
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 6, "cut o')
    train(config, folder=RunFolder(tmp_path / "killed", EVERY_2))
    assert lines(tmp_path / "killed") == lines(tmp_path / "straight")


def test_a_finished_run_can_be_extended(tmp_path):
    train(config_for(iterations=3), folder=RunFolder(tmp_path))
    reports = []
    train(config_for(iterations=5), reports.append, folder=RunFolder(tmp_path))
    assert [report.iteration for report in reports] == [4, 5]


def test_a_second_writer_is_refused(tmp_path):
    with RunFolder(tmp_path), pytest.raises(RunLocked, match=str(os.getpid())):
        train(config_for(), folder=RunFolder(tmp_path))


def test_checkpoints_that_are_all_corrupt_never_mean_starting_from_zero(tmp_path):
    train(config_for(iterations=1), folder=RunFolder(tmp_path))
    for path in tmp_path.glob("checkpoints/step-*/tensors.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(NoCheckpoint, match="tensors"):
        train(config_for(), folder=RunFolder(tmp_path))


def test_a_full_disk_costs_the_checkpoint_not_the_run(tmp_path, monkeypatch, caplog):
    folder = RunFolder(tmp_path, EVERY_2)
    save = folder.store.save

    def full(step, tree, **options):
        if step == 4:
            raise OSError(28, "No space left on device")
        return save(step, tree, **options)

    monkeypatch.setattr(folder.store, "save", full)
    train(config_for(), folder=folder)
    assert folder.store.steps() == [0, 2, 6]
    assert "iteration 4 was not saved" in caplog.text


def test_metrics_that_cannot_be_written_do_not_end_the_run(tmp_path, caplog):
    folder = RunFolder(tmp_path)
    folder.metrics.path.mkdir()
    train(config_for(iterations=1), folder=folder)
    assert "training goes on" in caplog.text


def policy_names(folder):
    return sorted(path.stem for path in (folder / "policies").iterdir())


def test_checkpoints_spread_over_the_run_stay_for_ever_with_their_policies(tmp_path):
    config = config_for(iterations=12)
    batch = config.total_steps // 12
    for name, stops in (("straight", ()), ("stopped", (3, 4, 8))):
        folder = lambda name=name: RunFolder(  # noqa: E731
            tmp_path / name, CheckpointConfig(save_every=1, keep_last=1, num_checkpoints=3, best=False)
        )
        for stop in stops:
            with pytest.raises(RunStopped):
                train(config, stop_after(stop), folder=folder())
        train(config, folder=folder())
        assert folder().store.steps() == [4, 8, 12]
        steps = [f"step-{n * batch:09d}" for n in (4, 8, 12)]
        assert policy_names(tmp_path / name) == ["final_actor", "final_critic", *steps]
    for path in (tmp_path / "straight" / "policies").iterdir():
        assert path.read_bytes() == (tmp_path / "stopped" / "policies" / path.name).read_bytes()


def test_a_budget_that_does_not_divide_writes_the_requested_number_of_checkpoints(tmp_path):
    config = config_for(iterations=7)
    train(config, folder=RunFolder(tmp_path, CheckpointConfig(save_every=100, keep_last=1, num_checkpoints=5)))
    assert len(RunFolder(tmp_path).store.steps()) == 5
    assert len(list((tmp_path / "policies").glob("step-*"))) == 5


def test_the_policy_of_the_best_recent_return_is_kept_once_100_episodes_are_over(tmp_path):
    config = with_episodes(12)
    seen = {}

    def remember(algorithm):
        return {name: tensor.clone() for name, tensor in algorithm.policy.actor.state_dict().items()}

    class Watched(RunFolder):
        def save(self, parts, *, final=False):  # pyright: ignore[reportIncompatibleMethodOverride]
            seen[parts.run.env_steps] = remember(parts.algorithm)
            super().save(parts, final=final)

    train(config, folder=Watched(tmp_path / "straight", CheckpointConfig(save_every=3)))
    rows = [row for row in lines(tmp_path / "straight") if row["episodes"] >= 100]
    assert len(rows) > 3
    best = max(rows, key=lambda row: (row["return"], -row["env_steps"]))
    info, tensors = read_policy_file(tmp_path / "straight" / "policies" / "best.safetensors")
    assert (info.return_, info.env_steps) == (best["return"], best["env_steps"])
    assert equal(tensors, seen[info.env_steps])
    for stop in (4, 8, 10):
        with pytest.raises(RunStopped):
            train(config, stop_after(stop), folder=RunFolder(tmp_path / "stopped", CheckpointConfig(save_every=3)))
    train(config, folder=RunFolder(tmp_path / "stopped", CheckpointConfig(save_every=3)))
    files = [tmp_path / name / "policies" / "best.safetensors" for name in ("straight", "stopped")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_corrupt_best_policy_is_named_and_the_next_best_takes_its_place(tmp_path, caplog):
    path = tmp_path / "policies" / "best.safetensors"
    train(with_episodes(4), folder=RunFolder(tmp_path))
    path.write_bytes(b"x" * 100)
    train(with_episodes(12), folder=RunFolder(tmp_path))
    assert f"policy {path} cannot be used" in caplog.text
    assert (read_policy_file(path)[0].return_ or 0) > 0


def test_parameters_that_are_not_finite_are_never_saved(tmp_path):
    config, parts = config_for(), []

    class Poisoned(RunFolder):
        def save(self, given, *, final=False):  # pyright: ignore[reportIncompatibleMethodOverride]
            parts.append(given)
            if given.run.iteration == 3:
                next(given.algorithm.model.critic.parameters()).data.view(-1)[5] = float("inf")
            super().save(given, final=final)

    folder = Poisoned(tmp_path, EVERY_2)
    with pytest.raises(RunFailed, match=r"became NaN or infinite in an update"):
        train(config, folder=folder)
    for name in ("algorithm", "collector"):
        check_finite(folder.store.load_latest()[1][name], name)
    assert folder.store.steps() == [0, 2, 3]  # the state before the update that found it
    assert read_record(tmp_path)["status"] == "failed"
    assert "RunFailed: weights, moments or statistics became NaN" in read_record(tmp_path)["error"]
    reports = []
    train(config, reports.append, folder=RunFolder(tmp_path, EVERY_2))
    assert [report.iteration for report in reports] == [4, 5, 6]


def other(config, **changes):
    """The same settings with some, by dotted path, changed."""
    return from_plain(nest(changes, {}), config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env.id": "tensor:cartpole"}, "env.env_id is tensor:pendulum in what was saved and tensor:cartpole here"),
        ({"env.num_envs": 4}, "num_envs is 8 in what was saved and 4 here"),
        ({"algorithm.model.policy.hidden": [32]}, "model.policy.hidden is [64, 64] in what was saved and [32] here"),
        ({"algorithm.model.distribution": "beta"}, "model.distribution is auto in what was saved and beta here"),
        ({"algorithm.gradient_clipping": "per_network"}, "algorithm.optimizers."),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused_before_anything_changes(changes, message, tmp_path):
    config = config_for(iterations=2)
    train(config, folder=RunFolder(tmp_path, settings="old: 1\n"))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(Mismatch) as caught:
        train(other(config, **changes, total_steps=10_000), folder=RunFolder(tmp_path, settings="new: 1\n"))
    assert message in str(caught.value)
    assert "step-000000000002" in str(caught.value)
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before


def test_a_checkpoint_of_a_version_before_a_setting_was_added_is_resumed(tmp_path, monkeypatch):
    def without_variance(state):
        model = fingerprint(state)["model"]
        assert model["policy"]["normalizer"].pop("variance") == "population"
        return fingerprint(state) | {"model": model}

    fingerprint = TrainState.fingerprint
    with monkeypatch.context() as earlier:
        earlier.setattr(TrainState, "fingerprint", without_variance)
        train(config_for(iterations=2), folder=RunFolder(tmp_path, EVERY_2))
    train(config_for(iterations=4), folder=RunFolder(tmp_path, EVERY_2))
    assert RunFolder(tmp_path).store.steps()[-1] == 4


def test_a_checkpoint_that_passes_its_hash_and_cannot_be_restored_is_named(tmp_path):
    train(config_for(iterations=1), folder=RunFolder(tmp_path))
    store = RunFolder(tmp_path).store
    _, tree = store.load_latest()
    del tree["collector"]["steps_before"]
    store.save(1, tree)
    with pytest.raises(CheckpointCorrupt, match=r"its collector cannot be restored \(KeyError: 'steps_before'\)"):
        train(config_for(), folder=RunFolder(tmp_path))


def test_a_corrupt_checkpoint_is_written_again_by_the_run_that_comes_by(tmp_path, caplog):
    config = config_for()
    train(config, folder=RunFolder(tmp_path, EVERY_2))
    store = RunFolder(tmp_path, EVERY_2).store
    (store.path(6) / "state.json").write_bytes(b"{}")
    train(config, folder=RunFolder(tmp_path, EVERY_2))
    assert "step-000000000006 cannot be used" in caplog.text
    assert "continuing from" in caplog.text
    assert store.load_latest()[0] == 6
    assert [row["iteration"] for row in lines(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_on_a_disk_that_is_full_from_some_time_on_the_run_ends_and_what_was_saved_stays(tmp_path, monkeypatch, caplog):
    config, fsync = with_episodes(12), os.fsync
    saved = {}

    def fill(report):
        if report.iteration == 9:
            saved.update({path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")})

            def full(fd):
                raise OSError(28, "No space left on device")

            monkeypatch.setattr(os, "fsync", full)

    train(config, fill, folder=RunFolder(tmp_path, CheckpointConfig(save_every=1, num_checkpoints=2)))
    monkeypatch.setattr(os, "fsync", fsync)
    assert len(saved) > 4
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")} == saved
    for message in ("checkpoint of iteration 12 was not saved", "final_actor.safetensors was not saved", "run.json"):
        assert message in caplog.text
    straight, resumed = train(config), train(config, folder=RunFolder(tmp_path))
    assert equal(straight.state_dict(), resumed.state_dict())


def test_a_folder_that_could_not_be_entered_is_not_left_locked(tmp_path, monkeypatch):
    monkeypatch.setattr("canter.runs.policies.read_policy_file", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError), RunFolder(tmp_path):
        pass
    monkeypatch.undo()
    with RunFolder(tmp_path):
        pass


def test_a_folder_in_which_no_run_ever_began_may_be_used(tmp_path):
    run = tmp_path / "run"
    assert not is_unstarted(run)
    run.mkdir()
    for name in ("run.lock", ".run.lock.guard", ".run.json.partial", "run.json", ".config.yaml.partial"):
        (run / name).touch()
    assert is_unstarted(run)
    (run / "config.yaml").touch()
    assert not is_unstarted(run)


@pytest.mark.parametrize(
    "line", ['{"iteration": null}', '{"iteration": "x"}', "[1]", "[" * 9999, "\xff", '{"iteration": [1]}']
)
def test_lines_of_metrics_that_make_no_sense_are_counted_and_kept_elsewhere(line, tmp_path, caplog):
    train(config_for(iterations=2), folder=RunFolder(tmp_path))
    with (tmp_path / "metrics.jsonl").open("a", encoding="latin-1") as file:
        file.write(line + "\n")
    train(config_for(iterations=3), folder=RunFolder(tmp_path))
    assert [row["iteration"] for row in lines(tmp_path)] == [1, 2, 3]
    assert (tmp_path / "metrics.damaged.jsonl").read_text(encoding="latin-1") == line + "\n"
    assert f"1 damaged lines of {tmp_path / 'metrics.jsonl'} are kept in" in caplog.text


def test_a_run_without_checkpoints_starts_over_only_where_that_is_meant(tmp_path, caplog):
    def die(report):
        raise RuntimeError

    with pytest.raises(RuntimeError):
        train(config_for(), die, folder=RunFolder(tmp_path))
    shutil.rmtree(tmp_path / "checkpoints")
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(NoCheckpoint, match=r"has metrics but no checkpoint .* does not start over by itself"):
        train(config_for(iterations=2), folder=RunFolder(tmp_path))
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    train(config_for(iterations=2), folder=RunFolder(tmp_path, from_scratch=True))
    assert [row["iteration"] for row in lines(tmp_path)] == [1, 2]
    assert (tmp_path / "before-1" / "metrics.jsonl").read_bytes() == before
    assert "metrics.jsonl of the earlier attempt are now in" in caplog.text


def test_a_checkpoint_of_another_run_seed_or_iteration_is_refused(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    for path in (one, other):
        train(config_for(iterations=2), folder=RunFolder(path))
    with pytest.raises(Mismatch, match="seed is 0 in what was saved and 1 here"):
        train(replace(config_for(iterations=3), seed=1), folder=RunFolder(one))
    shutil.copytree(other / "checkpoints" / "step-000000000002", one / "checkpoints" / "step-000000000003")
    with pytest.raises(Mismatch, match=r"run is [0-9a-f]{32} in what was saved and [0-9a-f]{32} here"):
        train(config_for(iterations=4), folder=RunFolder(one))
    (other / "checkpoints" / "step-000000000002").rename(other / "checkpoints" / "step-000000000007")
    with pytest.raises(Mismatch, match="iteration is 2 in what was saved and 7 here"):
        train(config_for(iterations=4), folder=RunFolder(other))
    assert [row["iteration"] for row in lines(one)] == [row["iteration"] for row in lines(other)] == [1, 2]


@pytest.mark.parametrize("name", ["checkpoints", "policies", "metrics.jsonl", "anything"])
def test_a_run_does_not_write_through_links(name, tmp_path):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    train(config_for(iterations=1), folder=RunFolder(run))
    shutil.move(run / name, elsewhere) if (run / name).exists() else elsewhere.mkdir()
    (run / name).symlink_to(elsewhere)
    with pytest.raises(OSError, match=f"{name} is a link; a run writes only into its own folder"):
        train(config_for(iterations=2), folder=RunFolder(run))


def test_metrics_that_the_disk_had_no_room_for_are_written_once_it_has(tmp_path, monkeypatch):
    write, full = os.write, False

    def limited(fd, data):
        if full and len(data) > 10:
            return write(fd, data[:10])
        if full:
            raise OSError(28, "No space left on device")
        return write(fd, data)

    def fill(report):
        nonlocal full
        full = report.iteration in (1, 2)

    monkeypatch.setattr(os, "write", limited)
    folder = RunFolder(tmp_path)
    sizes = []

    def look(report):
        fill(report)
        sizes.append(folder.metrics.path.stat().st_size if folder.metrics.path.exists() else 0)  # written after it

    train(config_for(iterations=4), look, folder=folder)
    assert sizes[0] == sizes[1] == sizes[2] < sizes[3]
    assert [row["iteration"] for row in lines(tmp_path)] == [1, 2, 3, 4]


def test_numbers_that_are_not_finite_are_written_as_null(tmp_path):
    RunFolder(tmp_path).log({"iteration": 1, "loss": float("nan"), "kl": float("inf")})
    assert lines(tmp_path) == [{"iteration": 1, "loss": None, "kl": None}]


@pytest.mark.parametrize("name", ["save_every", "keep_last", "num_checkpoints"])
def test_settings_out_of_range_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name}=-1 must"):
        CheckpointConfig(**{name: -1})  # pyright: ignore[reportArgumentType]
