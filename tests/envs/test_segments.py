"""Segments of a simulator's step that are recorded once and then replayed: when, and what ends it.

On a CPU a stand-in records: see rerun.py. test_mjlab.py runs mjlab's own step in segments.
"""

import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from rerun import rerun

from canter.envs.robots import mjlab
from canter.envs.robots.captured import EnvIndices, HiddenCounter
from canter.envs.robots.host_state import Effects, Roots, Snapshot
from canter.envs.robots.recording import NotCapturable
from canter.envs.robots.replacements import yaw_rotation
from canter.envs.robots.segments import MAX_EAGER_RUNS, MAX_GRAPHS, NUM_CHECKED, UNUSED_AFTER, WARM_UP, Segments

N = 6


class Simulator:
    """Six rows of a counter, with what managers have: buffers, tensors that take others' places, caches, flags."""

    def __init__(self):
        self.value, self.mean, self.flag = torch.zeros(N), torch.zeros(()), False
        self.ranges, self.calls = [[0.0, 1.0], [2.0, 3.0]], 0
        self.log = {}
        self.segments = Segments(
            Roots({"simulator": self}, skipped_ids=set(), skipped_keys=frozenset({"segments", "log", "calls"})),
            torch.device("cpu"),
            lambda: self.log,
            nullcontext,
            lambda function: self.record(function),
        )
        self.record = rerun(self.segments.roots, torch.device("cpu"))

    def step(self):
        self.calls += 1
        self.value[[0, 2]] = 1.0
        self.value[:] += torch.tensor(self.ranges)[0, 1] * torch.rand(N)
        self.mean = self.value.mean()  # a new tensor in the place of the old
        self.log["mean"] = self.mean.item()
        return self.value * 2


def runs(simulator, segment, count, name="step", **given):
    return [simulator.segments.run(name, segment, **given) for _ in range(count)]


def eager(count, seed=0):
    torch.manual_seed(seed)
    simulator = Simulator()
    return [simulator.step().clone() for _ in range(count)], simulator


def test_a_replay_equals_the_eager_part_bit_for_bit():
    wanted, plain = eager(12)
    torch.manual_seed(0)
    simulator = Simulator()
    for expected in wanted:
        assert torch.equal(simulator.segments.run("step", simulator.step), expected)
    assert simulator.segments.captured() == ["step"]
    assert torch.equal(simulator.value, plain.value) and torch.equal(simulator.mean, plain.mean)
    assert simulator.log["mean"] == pytest.approx(plain.log["mean"])


def test_tensors_stay_where_the_graph_looks_for_them():
    simulator = Simulator()
    runs(simulator, simulator.step, WARM_UP + 2)
    place = simulator.mean.data_ptr()
    runs(simulator, simulator.step, 3)
    assert simulator.mean.data_ptr() == place


def test_a_number_that_others_change_has_a_graph_for_each_state():
    simulator = Simulator()
    runs(simulator, simulator.step, WARM_UP + 2)
    simulator.segments.check_guards()
    for step in range(40):
        simulator.flag = step % 2 == 0  # as a curriculum would, outside of all parts
        simulator.segments.check_guards()
        before = simulator.value.clone()
        simulator.segments.run("flagged", lambda: simulator.value.add_(1.0 if simulator.flag else 10.0))
        assert torch.equal(simulator.value, before + (1.0 if simulator.flag else 10.0)), step
    assert simulator.segments._num_graphs["flagged"] == 2


def test_a_flag_in_whose_place_something_else_is_put_has_a_graph_for_that():
    simulator = Simulator()

    def step():
        simulator.flag = not simulator.flag
        return simulator.value + 1.0

    runs(simulator, step, 2)
    simulator.flag = {}  # G1's sensors keep a dataclass there, which cannot be a key either
    assert torch.equal(simulator.segments.run("step", step), torch.ones(N))
    assert torch.equal(runs(simulator, step, 12)[-1], torch.ones(N))


def test_a_part_on_request_gets_the_indices_and_a_graph_for_each_number():
    simulator = Simulator()

    def segment():
        rows = (simulator.value > 2.5).nonzero().squeeze(-1)
        simulator.value[rows] = -1.0
        simulator.value += 1.0

    wanted, place = torch.zeros(N), torch.zeros(N, dtype=torch.int64)
    for step in range(60):
        simulator.value[: step % 3] += 1.0
        wanted[: step % 3] += 1.0
        rows = (simulator.value > 2.5).nonzero().squeeze(-1)
        place[: len(rows)] = rows
        simulator.segments.run("step", segment, (place[: len(rows)],), finds_env_ids=True)
        wanted[wanted > 2.5] = -1.0
        wanted += 1.0
        assert torch.equal(simulator.value, wanted), step
    assert len({key[1] for key in simulator.segments.graphs}) > 1


def test_other_random_decisions_are_not_captured():
    simulator = Simulator()

    def segment():
        simulator.value += random.random()

    runs(simulator, segment, WARM_UP + 3)
    assert "differs from the eager one in simulator.value" in simulator.segments.dropped["step"]


def test_a_number_that_is_another_one_in_every_step_is_not_captured():
    simulator = Simulator()
    simulator.count = 0

    def segment():
        simulator.count += 1

    runs(simulator, segment, MAX_EAGER_RUNS)
    assert "a number that changes in every step, one of count" in simulator.segments.dropped["step"]
    assert simulator.count == MAX_EAGER_RUNS


def test_why_a_part_is_given_up_says_where_and_the_result_is_right():
    simulator = Simulator()

    def segment():
        simulator.value += 1.0
        if simulator.segments.restored and torch.overrides._is_torch_function_mode_enabled():
            raise NotCapturable("it cannot")  # only while it is being recorded

    runs(simulator, segment, WARM_UP + 2)
    assert simulator.segments.dropped["step"].startswith("it cannot (test_segments.py:")
    assert simulator.value[0] == WARM_UP + 2


def test_after_some_that_were_checked_other_numbers_of_rows_are_only_recorded():
    simulator, ran, place = Simulator(), [], torch.arange(N)

    def segment():
        ran.append(len(simulator.segments.env_ids[0]))
        simulator.value[simulator.segments.env_ids[0]] += 1.0

    for count in range(1, N + 1):
        runs(simulator, segment, WARM_UP + 1, env_ids=(place[:count],))
    assert simulator.segments._num_graphs["step"] == N <= MAX_GRAPHS and N > NUM_CHECKED
    assert ran.count(N) < ran.count(2)
    assert simulator.value.tolist() == [(WARM_UP + 1) * (N - i) for i in range(N)]


class ContactSensor:
    """What was measured, newest first, and a cache of it that shares its memory, as mjlab's contact sensors have it."""

    def __init__(self):
        self.history, self._cached_data, self._cache_valid = torch.zeros(N), None, False

    def update(self):
        self._cache_valid = False
        self.history = self.history.roll(1)
        self.history[0] = self.history.sum() + 1.0

    def read(self):
        if not self._cache_valid:
            self._cached_data, self._cache_valid = {"history": self.history}, True
        return self._cached_data["history"] * 2


def test_what_lies_in_a_cache_that_is_not_valid_ends_no_capture():
    simulator, plain = Simulator(), ContactSensor()
    simulator.sensor = ContactSensor()
    for _ in range(12):
        for _ in range(2):
            plain.update()
            simulator.segments.run("update", simulator.sensor.update)
        assert torch.equal(simulator.segments.run("read", simulator.sensor.read), plain.read())
    assert simulator.segments.captured() == ["read", "update"] and not simulator.segments.dropped


def test_one_more_number_of_rows_gets_a_graph_at_once_and_a_number_that_never_returns_none():
    simulator, place = Simulator(), torch.arange(N)
    segments = simulator.segments

    def segment():
        simulator.value[segments.env_ids[0]] += simulator.ranges[0][0]

    for scale in (1.0, 2.0):  # as by a curriculum: a number that moves
        simulator.ranges[0][0] = scale
        segments.check_guards()
        runs(simulator, segment, WARM_UP + 2, env_ids=(place[:1],))
    runs(simulator, segment, WARM_UP + 2, env_ids=(place[:2],))
    assert segments._num_graphs["step"] == NUM_CHECKED
    runs(simulator, segment, 1, env_ids=(place[:3],))
    assert segments._num_graphs["step"] == NUM_CHECKED + 1
    for step in range(20):
        simulator.ranges[0][0] = 3.0 + step
        segments.check_guards()
        runs(simulator, segment, 1, env_ids=(place[:3],))
    assert segments._num_graphs["step"] == NUM_CHECKED + 1
    later = 2.0 + sum(3.0 + step for step in range(20))
    assert simulator.value.tolist() == [(WARM_UP + 2) * 5.0 + later, (WARM_UP + 2) * 2.0 + later, later, 0, 0, 0]


def test_numbers_of_rows_that_no_longer_come_make_room_for_others(monkeypatch):
    monkeypatch.setattr(f"{Segments.__module__}.MAX_GRAPHS", 4)
    simulator, place = Simulator(), torch.arange(N)
    segments = simulator.segments
    segments.check_guards()

    def segment():
        simulator.value[segments.env_ids[0]] += 1.0

    def numbers():
        return sorted(key[1] for key in segments.graphs)

    for count in range(1, N + 1):
        runs(simulator, segment, WARM_UP + 1, env_ids=(place[:count],))
    assert numbers() == [1, 2, 3, 4] and segments._num_graphs["step"] == 4  # 5 and 6 run eagerly
    for _ in range(UNUSED_AFTER - 1):
        segments.check_guards()
        runs(simulator, segment, 1, env_ids=(place[:2],))
    runs(simulator, segment, 1, env_ids=(place[:5],))
    assert numbers() == [1, 2, 3, 4]  # not long enough ago yet
    segments.check_guards()
    runs(simulator, segment, 1, env_ids=(place[:5],))
    assert numbers() == [2, 3, 4, 5] and segments._num_graphs["step"] == 4
    wanted = [(WARM_UP + 1) * (N - i) for i in range(N)]
    wanted = [n + (UNUSED_AFTER - 1) * (i < 2) + 2 * (i < 5) for i, n in enumerate(wanted)]
    assert simulator.value.tolist() == wanted


def test_rows_lie_where_they_lay_until_there_are_more_masks():
    rows = EnvIndices(N, torch.device("cpu"))
    assert rows.resize(2) and not rows.resize(2)
    odd = torch.arange(N) % 2 == 1
    rows.request(odd, torch.zeros(N, dtype=torch.bool))
    first = rows.receive()
    assert [own.tolist() for own in first] == [[1, 3, 5], []]
    rows.request(~odd, odd)
    second = rows.receive()
    assert [own.tolist() for own in second] == [[0, 2, 4], [1, 3, 5]]
    assert second[0].data_ptr() == first[0].data_ptr() and first[0].tolist() == [0, 2, 4]
    assert rows.resize(3)


@pytest.mark.parametrize("new", [None, torch.ones(2), np.ones(2)], ids=["gone", "a tensor", "an array"])
def test_a_setting_that_is_no_longer_one_makes_new_graphs_too(new):
    simulator = Simulator()
    simulator.only = {"limit": 1.0}
    simulator.segments.check_guards()
    runs(simulator, simulator.step, WARM_UP + 2)
    simulator.segments.check_guards()
    assert simulator.segments.captured() == ["step"]
    del simulator.only["limit"]
    simulator.only |= {} if new is None else {"limit": new}
    simulator.segments.check_guards()
    assert simulator.segments.captured() == []
    simulator.segments.check_guards()


def test_settings_that_change_make_new_graphs():
    simulator = Simulator()
    simulator.segments.check_guards()
    runs(simulator, simulator.step, WARM_UP + 2)
    simulator.ranges[0][1] = 5.0
    simulator.segments.check_guards()
    before = simulator.value.clone()
    runs(simulator, simulator.step, 2)
    assert (simulator.value - before).max() > 2.0


def test_rotations_about_the_vertical_also_of_what_points_up():
    """Against the angle itself: of the x axis, or 90 degrees behind the y axis where the x axis points up or down."""
    torch.manual_seed(0)
    matrices = torch.linalg.qr(torch.randn(500, 3, 3, dtype=torch.float64))[0]
    matrices[0] = torch.tensor([[0.0, 0.0, 1.0], [0.0, 1.0, 0.0], [-1.0, 0.0, 0.0]])
    length = matrices[:, :2, 0].norm(dim=1)
    assert (length < 0.1).sum() > 1
    ahead = torch.atan2(matrices[:, 1, 0], matrices[:, 0, 0])
    beside = torch.atan2(matrices[:, 1, 1], matrices[:, 0, 1]) - torch.pi / 2
    angle, zero = torch.where(length < 0.1, beside, ahead), torch.zeros(500)
    cos, sin = angle.cos(), angle.sin()
    rows = [cos, -sin, zero, sin, cos, zero, zero, zero, zero + 1]
    torch.testing.assert_close(yaw_rotation(matrices), torch.stack(rows, 1).view(500, 3, 3))


def test_another_version_of_mjlab_is_not_taken_apart(monkeypatch, caplog):
    monkeypatch.setattr(mjlab, "version", lambda name: "2.0.1")
    assert not mjlab._can_capture("cuda:0")
    assert "need version 1.6, this is 2.0.1" in caplog.text
    monkeypatch.setattr(mjlab, "version", lambda name: "1.6.3")
    assert mjlab._can_capture("cuda:0") and not mjlab._can_capture("cpu")


class Sensor:
    def __init__(self):
        self.force, self.count = torch.zeros(2), 0


def _tensor_replaced(held):
    held["sensor"].force = held["sensor"].force + 1.0


def _object_replaced(held):
    held["sensor"] = Sensor()


def _key_in_place_of_another(held):
    del held["table"]["a"]
    held["table"]["b"] = 7


def _list_grows(held):
    held["list"].append(5)
    held["list"][0] = 9


def _mapping_for_nothing(held):
    held["nothing"] = {"inner": [1.5]}


@pytest.mark.parametrize(
    "change", [_tensor_replaced, _object_replaced, _key_in_place_of_another, _list_grows, _mapping_for_nothing]
)
def test_what_a_part_does_in_python_is_found_undone_and_done_again(change):
    held = {"sensor": Sensor(), "table": {"a": 1}, "list": [1, 2], "nothing": None}
    roots = Roots(held)
    for _ in range(2):  # what was found the first time is looked at again
        snapshot = Snapshot(roots, torch.device("cpu"))
    sensor, home = held["sensor"], held["sensor"].force
    change(held)
    new = held["sensor"]
    effects = Effects.since(snapshot.view, roots)
    assert [*effects.assignments, *effects.copied_back]
    snapshot.restore()
    assert held["sensor"] is sensor and sensor.force is home and torch.equal(home, torch.zeros(2))
    assert held["table"]["a"] == 1 and held["list"][:2] == [1, 2] and held["nothing"] is None
    effects.apply()
    wanted = {
        _tensor_replaced: lambda: list(effects.copied_back) == [("sensor", "force")] and sensor.force is home,
        _object_replaced: lambda: held["sensor"] is new is not sensor,
        _key_in_place_of_another: lambda: held["table"]["b"] == 7,
        _list_grows: lambda: held["list"] == [9, 2, 5],
        _mapping_for_nothing: lambda: held["nothing"] == {"inner": [1.5]},
    }
    assert wanted[change]()


@pytest.mark.parametrize(
    "use",
    [
        bool,
        int,
        float,
        str,
        [1, 2].__getitem__,
        lambda count: count + 1,
        lambda count: 7 % count,
        lambda count: count == 0,
        lambda count: min(count, 3),
        lambda count: torch.zeros(()) + count,
        lambda count: torch.tensor(count),
    ],
)
def test_a_hidden_counter_cannot_be_used(use):
    with pytest.raises((NotCapturable, RuntimeError, TypeError)):
        use(HiddenCounter("common_step_counter"))
    with pytest.raises(NotCapturable, match="it uses common_step_counter"):
        HiddenCounter("common_step_counter") % 24
