from dataclasses import dataclass
from itertools import chain

import pytest
import torch
from torch import nn

from canter.algorithms.phase import Phase, WeightedMean
from canter.core import distributed
from canter.core.struct import TensorStruct
from canter.engines.autograd import LossGradients, LossOutput
from canter.nn.optimizer import Optimizer, OptimizerConfig, ParameterGroup
from canter.nn.schedules import AdaptiveKL, Constant


@dataclass
class Indices(TensorStruct):
    index: torch.Tensor


@dataclass
class Samples(Indices):
    valid: torch.Tensor


class Recorder:
    """A loss that notes which rows it was shown and reports scripted KLs."""

    def __init__(self, kls=(), learning_rate=None):
        self.weight = nn.Parameter(torch.zeros(1))
        self.seen, self.kls = [], list(kls)
        config = OptimizerConfig(learning_rate=learning_rate or Constant(0.1))
        self.optimizer = Optimizer({"model": ParameterGroup([self.weight], config)}, clip_jointly=True)

    def __call__(self, batch):
        self.seen.append(batch.index[0].tolist())
        kl = torch.tensor(self.kls.pop(0) if self.kls else 0.0)
        metrics = {"loss/own": torch.tensor(float(len(self.seen)))}
        return LossOutput((self.weight - 1).square().sum(), metrics, kl)

    def phase(self, **settings):
        generator = torch.Generator().manual_seed(0)
        return Phase(LossGradients(self, self.optimizer), generator=generator, **settings)


def batch_of(count):
    return Indices(torch.arange(count).unsqueeze(0))


def test_every_row_is_used_exactly_once_an_epoch_in_a_new_order():
    recorder = Recorder()
    recorder.phase(epochs=3, num_minibatches=4).run(batch_of(24))
    assert [len(rows) for rows in recorder.seen] == [6] * 12
    epochs = [[row for rows in recorder.seen[4 * e : 4 * e + 4] for row in rows] for e in range(3)]
    for order in epochs:
        assert sorted(order) == list(range(24))
    assert len({tuple(order) for order in epochs}) == 3


def test_orders_differ_between_runs_too():
    recorder = Recorder()
    phase = recorder.phase(epochs=1, num_minibatches=1)
    phase.run(batch_of(24))
    phase.run(batch_of(24))
    assert recorder.seen[0] != recorder.seen[1]


def test_one_order_for_all_epochs_of_a_rollout():
    recorder = Recorder()
    phase = recorder.phase(epochs=2, num_minibatches=3, shuffle="rollout")
    phase.run(batch_of(24))
    phase.run(batch_of(24))
    assert recorder.seen[:3] == recorder.seen[3:6] and recorder.seen[6:9] == recorder.seen[9:]
    assert recorder.seen[0] != recorder.seen[6]
    assert sorted(chain(*recorder.seen[:3])) == list(range(24))


def test_without_shuffling_environments_come_one_after_the_other():
    recorder = Recorder()
    before = recorder.phase(epochs=1, num_minibatches=1).generator.get_state()
    phase = recorder.phase(epochs=2, num_minibatches=2, shuffle="none", num_envs=3)
    phase.run(batch_of(12))  # row t * 3 + n is step t of environment n
    assert recorder.seen == [[0, 3, 6, 9, 1, 4], [7, 10, 2, 5, 8, 11]] * 2
    assert torch.equal(phase.generator.get_state(), before)


def test_samples_beyond_whole_minibatches_are_dropped_different_ones_each_epoch():
    recorder = Recorder()
    recorder.phase(epochs=2, num_minibatches=5).run(batch_of(24))
    assert [len(rows) for rows in recorder.seen] == [4] * 10
    left_out = [set(range(24)) - set(chain(*recorder.seen[5 * e : 5 * e + 5])) for e in range(2)]
    assert [len(rows) for rows in left_out] == [4, 4] and left_out[0] != left_out[1]


def test_metrics_are_means_over_the_minibatch_updates():
    metrics = Recorder().phase(epochs=2, num_minibatches=2).run(batch_of(4)).metrics
    assert metrics["loss/own"].item() == (1 + 2 + 3 + 4) / 4
    assert metrics["optim/minibatch_updates"].item() == 4


def test_an_observation_of_weight_zero_has_no_influence_even_if_it_is_nan():
    mean = WeightedMean()
    for value, weight in ((1.0, 1.0), (5.0, 3.0), (float("nan"), 0.0)):
        mean.add({"loss": torch.tensor(value)}, torch.tensor(weight))
    assert mean.means()["loss"].item() == 4.0


def test_all_ranks_react_to_the_mean_kl(monkeypatch):
    """The other rank has 6 samples, this one 2; their KLs are 0.04 and 0, their losses 5 and 1."""
    monkeypatch.setattr(distributed, "active", lambda: True)
    monkeypatch.setattr(distributed, "world_size", lambda: 1)
    monkeypatch.setattr(distributed, "rank", lambda: 0)
    other = torch.tensor([0.0, 6 * 5.0, 6 * 0.04, 6.0])  # gradient, loss, KL and weight
    monkeypatch.setattr(distributed, "sum_", lambda flat: flat.add_(other))
    recorder = Recorder()
    samples = Samples(torch.arange(2).unsqueeze(0), torch.ones(1, 2, dtype=torch.bool))
    metrics = recorder.phase(epochs=1, num_minibatches=1).run(samples).metrics
    assert metrics["policy/kl"].item() == pytest.approx(0.03)
    assert metrics["loss/own"].item() == pytest.approx(4.0)
    stopping = recorder.phase(epochs=1, num_minibatches=1, target_kl=0.02)
    assert stopping.run(samples).metrics["optim/minibatch_updates"].item() == 0


def test_early_stop_ends_all_epochs_before_the_step_that_went_too_far():
    recorder = Recorder(kls=[0.0, 0.01, 0.02, 0.9])
    metrics = recorder.phase(epochs=5, num_minibatches=2, target_kl=0.05).run(batch_of(4)).metrics
    assert len(recorder.seen) == 4
    assert metrics["optim/minibatch_updates"].item() == 3
    reference = Recorder()
    reference.phase(epochs=3, num_minibatches=1).run(batch_of(4))
    assert torch.equal(recorder.weight, reference.weight)


def test_the_flag_alone_stops_where_the_host_does_not_look(monkeypatch):
    monkeypatch.setattr(Phase, "_leaves_loop", lambda self, flag: False)
    recorder = Recorder(kls=[0.0, 0.01, 0.02, 0.9])
    metrics = recorder.phase(epochs=5, num_minibatches=2, target_kl=0.05).run(batch_of(4)).metrics
    assert len(recorder.seen) == 10
    assert metrics["optim/minibatch_updates"].item() == 3
    assert metrics["policy/kl"].item() == pytest.approx(0.01)
    reference = Recorder()
    reference.phase(epochs=3, num_minibatches=1).run(batch_of(4))
    assert torch.equal(recorder.weight, reference.weight)


@pytest.mark.parametrize(("kl", "stops"), [(0.0501, True), (0.0499, False), (0.05, False)])
def test_the_stop_comes_just_above_the_target(kl, stops):
    recorder = Recorder(kls=[0.0, kl])
    recorder.phase(epochs=3, num_minibatches=1, target_kl=0.05).run(batch_of(4))
    assert len(recorder.seen) == (2 if stops else 3)


def test_a_kl_that_is_not_a_number_stops_too():
    recorder = Recorder(kls=[0.0, float("nan")])
    recorder.phase(epochs=5, num_minibatches=1, target_kl=0.05).run(batch_of(4))
    assert len(recorder.seen) == 2


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        # KLs 0, .03 | .03, .03 with target .01: minibatch and step lower three times, epoch on means .015 and .03 once,
        # update once on the last epoch's mean.
        ("minibatch", 1e-3 / 1.5**3),
        ("step", 1e-3 / 1.5**3),
        ("epoch", 1e-3 / 1.5),
        ("update", 1e-3 / 1.5),
    ],
)
def test_the_learning_rate_follows_the_kl_at_the_chosen_moments(every, expected):
    recorder = Recorder(kls=[0.0, 0.03, 0.03, 0.03], learning_rate=AdaptiveKL(1e-3, every=every))
    metrics = recorder.phase(epochs=2, num_minibatches=2).run(batch_of(4)).metrics
    assert metrics["optim/learning_rate/model"].item() == pytest.approx(expected)


def test_a_reaction_after_the_step_leaves_that_step_as_it_is():
    moved = {}
    for every in ("minibatch", "step"):
        recorder = Recorder(kls=[0.0, 0.03], learning_rate=AdaptiveKL(1e-2, every=every))
        metrics = recorder.phase(epochs=1, num_minibatches=2).run(batch_of(2)).metrics
        moved[every] = recorder.weight.item(), metrics["optim/learning_rate/model"].item()
    # The gradient keeps its sign and hardly its size: Adam moves by about the rate in each of the two steps.
    assert moved["step"][0] == pytest.approx(0.02, rel=0.01)
    assert moved["minibatch"][0] == pytest.approx(0.01 + 0.01 / 1.5, rel=0.01)
    assert moved["step"][1] == moved["minibatch"][1] == pytest.approx(1e-2 / 1.5)


def test_after_the_first_step_even_its_kl_counts():
    recorder = Recorder(kls=[1e-9, 0.01], learning_rate=AdaptiveKL(1e-3, every="step"))
    metrics = recorder.phase(epochs=1, num_minibatches=2).run(batch_of(4)).metrics
    assert metrics["optim/learning_rate/model"].item() == pytest.approx(1.5e-3)


def test_before_the_first_step_the_kl_has_no_effect():
    recorder = Recorder(kls=[1e-9, 0.01, 0.01, 0.01], learning_rate=AdaptiveKL(1e-3, every="minibatch"))
    metrics = recorder.phase(epochs=2, num_minibatches=2).run(batch_of(4)).metrics
    assert metrics["optim/learning_rate/model"].item() == pytest.approx(1e-3)


def test_a_batch_can_be_rebuilt_before_each_later_epoch():
    recorder = Recorder()
    made = []

    def refresh():
        made.append(len(recorder.seen))
        return Indices(100 + torch.arange(4).unsqueeze(0))

    recorder.phase(epochs=3, num_minibatches=2).run(batch_of(4), refresh=refresh)
    assert made == [2, 4]
    assert sorted(recorder.seen[0] + recorder.seen[1]) == [0, 1, 2, 3]
    assert sorted(recorder.seen[4] + recorder.seen[5]) == [100, 101, 102, 103]
