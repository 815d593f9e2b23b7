"""The guard around a loop of two lines: nothing in here trains."""

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canter.core import distributed
from canter.core.specs import EnvFailed
from canter.envs.tensor import tensor_envs
from canter.runs.ranks import NullRunFolder
from canter.training.episodes import NonFiniteObservation, NonFiniteUpdate
from canter.training.guard import Guard, RunFailed, StopSignals, first_error_of_ranks

SPEC = tensor_envs["pendulum"](2, torch.device("cpu")).spec


class Loop:
    """A loop whose iterations add 1 to `weights`, with fakes for everything that the guard sees of a run."""

    def __init__(self):
        self.weights = 0
        self.iteration = 0
        self.rows = []
        self.saved = []
        self.boxes = []
        self.progress: Any = SimpleNamespace(
            fraction=0.0,
            iteration=0,
            forget_after=self.forget_after,
            state_dict=lambda: {"iteration": self.progress.iteration},
        )
        part = SimpleNamespace(state_dict=lambda: {"weights": self.weights})
        self.state: Any = SimpleNamespace(components=lambda: {"algorithm": part})
        tracker = SimpleNamespace(unclean=None)
        collector = SimpleNamespace(tracker=tracker, steps_before=0, algorithm=SimpleNamespace(horizon=1))
        self.rollback: Any = SimpleNamespace(
            collector=collector,
            fraction=0.0,
            iteration=0,
            history=[],
            random=[],
            reset=lambda: self.rollback.history.append(self.weights),
            stage=lambda fraction: self.rollback.random.append(fraction),
            commit=lambda: self.rollback.history.append(self.weights),
            rollout_after=lambda good: None,
            restore=self.restore,
            mark_read=lambda: None,
            state_before_nonfinite_metric=lambda good: {"algorithm": {"weights": self.rollback.history[good]}},
        )
        self.folder: Any = NullRunFolder()
        self.folder.rescue = self.rescue
        self.folder.black_box = self.boxes.append
        self.guard = Guard(self.state, self.progress, self.rollback, self.folder, SPEC, self.write_last_row)

    def run(self, iterations, fail=lambda iteration: None, log=lambda iteration: None):
        with self.guard.running():
            while self.progress.iteration < iterations and self.guard.stop_signal is None:
                with self.guard.iteration():
                    with self.guard.collecting():
                        fail(self.progress.iteration)
                    with self.guard.updating():
                        self.weights += 1
                        fail(self.progress.iteration + 0.5)
                self.progress.iteration += 1
                log(self.progress.iteration)

    def forget_after(self, good):
        self.progress.iteration = good

    def restore(self, good):
        self.weights = self.rollback.history[good]
        return {"algorithm": {"weights": self.weights}}

    def rescue(self, state, tree, error):
        self.saved.append(tree["algorithm"]["weights"])
        return f"saved {tree['algorithm']['weights']}"

    def write_last_row(self):
        self.rows.append(self.progress.iteration)


def raise_at(moment, error):
    def check(iteration):
        if iteration == moment:
            raise error

    return check


def test_iterations_that_succeed_are_committed_one_by_one():
    loop = Loop()
    loop.run(3)
    assert loop.rollback.history == [0, 1, 2, 3]
    assert loop.saved == [] and not loop.guard.uncommitted


@pytest.mark.parametrize("moment", [2, 2.5])
def test_an_error_inside_an_iteration_undoes_that_iteration_and_saves_the_one_before(moment):
    loop = Loop()
    with pytest.raises(KeyError) as raised:
        loop.run(5, raise_at(moment, KeyError("mine")))
    assert loop.saved == [2] and loop.weights == 2 and loop.rows == [2]
    assert raised.value.__notes__ == ["saved 2"]
    assert loop.boxes == []


def test_an_error_between_two_iterations_loses_nothing():
    loop = Loop()
    with pytest.raises(OSError):
        loop.run(5, log=raise_at(3, OSError("console")))
    assert loop.saved == [3] and loop.rows == []


@pytest.mark.parametrize("error", [NonFiniteUpdate("weights"), NonFiniteObservation("environment 1")])
def test_nan_ends_the_run_with_a_black_box(error):
    loop = Loop()
    with pytest.raises(RunFailed, match="saved 1") as raised:
        loop.run(5, raise_at(1.5, error))
    assert raised.value.what == str(error) and raised.value.kept == "saved 1" and raised.value.rank == 0
    (box,) = loop.boxes
    assert box["about"]["what"] == str(error) and box["algorithm"] == {"weights": 1}


def test_nan_that_is_read_late_undoes_the_iterations_since():
    loop = Loop()
    error = NonFiniteUpdate("read after three iterations")
    error.before = 1
    with pytest.raises(RunFailed):
        loop.run(5, log=raise_at(3, error))
    assert loop.saved == [1] and loop.weights == 1 and loop.rows == [1]


def test_nan_in_the_last_row_goes_back_further():
    loop = Loop()
    earlier = NonFiniteUpdate("earlier")
    earlier.before = 1
    errors = [earlier]

    def write_last_row():
        if errors:
            raise errors.pop()

    loop.guard.write_last_row = write_last_row
    with pytest.raises(RuntimeError, match="late"):
        loop.run(5, raise_at(3, RuntimeError("late")))
    assert loop.saved == [1]
    assert [box["about"]["what"] for box in loop.boxes] == ["earlier"]


def test_a_console_that_fails_during_a_rescue_costs_the_row_only(caplog):
    loop = Loop()

    def write_last_row():
        raise OSError("no terminal")

    loop.guard.write_last_row = write_last_row
    with pytest.raises(KeyError):
        loop.run(5, raise_at(2, KeyError("mine")))
    assert loop.saved == [2] and "the last row of the log was lost: OSError: no terminal" in caplog.text


def test_a_metric_that_is_not_finite_is_explained_once(caplog):
    loop = Loop()
    loop.run(2)
    loop.rollback.collector.tracker.unclean = 1
    report: Any = SimpleNamespace(iteration=2, metrics={"policy/kl": float("nan"), "value/loss": 1.0})
    loop.guard.check_metrics(report)
    loop.guard.check_metrics(report)
    (box,) = loop.boxes
    assert box["algorithm"] == {"weights": 1}
    assert caplog.text.count("not finite after iteration 2: policy/kl") == 1


@pytest.mark.parametrize(
    ("number", "before"), [(signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)]
)
def test_a_signal_lets_the_iteration_finish(number, before):
    loop = Loop()
    signal.signal(number, before)  # a shell may have started the tests with SIGINT ignored
    loop.run(9, lambda iteration: os.kill(os.getpid(), number) if iteration == 2 else None)
    assert loop.guard.stop_signal == number and loop.progress.iteration == 3 == loop.weights
    assert signal.getsignal(number) == before


def test_the_second_signal_is_not_held_back():
    with StopSignals() as signals, pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == signal.SIGINT
        os.kill(os.getpid(), signal.SIGINT)


def test_an_error_is_named_with_its_type_and_place_for_the_other_ranks():
    try:
        raise ZeroDivisionError("division")
    except ZeroDivisionError as error:
        failed = first_error_of_ranks(error)
    assert str(failed).startswith("ZeroDivisionError: division (") and "test_guard.py" in str(failed)
    assert failed.rank == 0 and "Traceback" in failed.trace and failed.where == "on rank 0"


@pytest.mark.parametrize(
    ("errors", "rank"),
    [
        ((None, EnvFailed("first"), EnvFailed("second")), 1),
        ((NonFiniteUpdate("weights"), None, EnvFailed("the cause")), 2),  # other ranks learned from its data
    ],
)
def test_the_first_rank_is_named_and_an_environment_before_what_was_learned_from_it(errors, rank, monkeypatch):
    sent = []

    def gather(data):
        sent.append(data)
        return [data]

    monkeypatch.setattr(distributed, "gather_bytes", gather)
    for error in filter(None, errors):
        first_error_of_ranks(error)
    arrived = iter(sent)
    messages = [b"{}" if error is None else next(arrived) for error in errors]
    monkeypatch.setattr(distributed, "gather_bytes", lambda data: messages)
    failed = first_error_of_ranks(errors[0])
    assert (failed.rank, str(failed)) == (rank, str(errors[rank]))
