import pytest
import torch

from canter.algorithms.ppo.rewards import MovingAverage

SOME = torch.tensor(5.0)


def test_it_starts_at_the_first_value_and_weighs_newer_ones_more():
    average = MovingAverage(0.1)
    average.update(torch.tensor(10.0), SOME)
    assert average.value.item() == 10.0
    average.update(torch.tensor(20.0), SOME)
    # Weights 0.09 and 0.1, made to add up to one.
    assert average.value.item() == pytest.approx((0.09 * 10 + 0.1 * 20) / 0.19)


def test_it_follows_and_forgets():
    average = MovingAverage(0.1)
    for x in [5.0] * 50 + [-3.0] * 200:
        average.update(torch.tensor(x), SOME)
    assert average.value.item() == pytest.approx(-3.0, abs=1e-8)


@pytest.mark.parametrize("x", [float("nan"), float("inf"), 1.0])
def test_nonfinite_or_empty_input_changes_nothing(x):
    average = MovingAverage(0.5, (2,))
    average.update(torch.tensor([1.0, 2.0]), SOME)
    before = {name: tensor.clone() for name, tensor in average.state_dict().items()}
    average.update(torch.tensor([3.0, x]), SOME if x != 1.0 else torch.tensor(0.0))
    assert all(torch.equal(tensor, before[name]) for name, tensor in average.state_dict().items())


def test_its_tensors_keep_their_addresses():
    average = MovingAverage(0.5)
    addresses = [tensor.data_ptr() for tensor in average.buffers()]
    average.update(torch.tensor(1.0), SOME)
    assert [tensor.data_ptr() for tensor in average.buffers()] == addresses
