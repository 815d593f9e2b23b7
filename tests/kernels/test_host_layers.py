"""Layers on a CPU: the form in C against NumPy's, and rows shared among threads."""

import shutil
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch

from canter.kernels import host_layers, host_threads
from canter.kernels.host_layers import IN_PLACE, KINDS, SLOPES, activate_, descend_, last_output, run_layers
from canter.kernels.host_threads import parts, share

SHAPES = [(1, 1), (5, 3), (7, 12), (64, 64), (300, 257)]
compiled = pytest.mark.skipif(not host_layers.COMPILED, reason="Canter was installed without a C compiler")


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(before)


@pytest.fixture
def in_numpy(monkeypatch):
    monkeypatch.setattr(host_layers, "_host", None)


def numbers(*shape, scale=4.0):
    return (np.random.default_rng(0).standard_normal(shape) * scale).astype(np.float32)


def test_the_form_in_c_is_there_wherever_there_is_a_compiler():
    """Without it the tests below would be skipped in silence."""
    headers = Path(sysconfig.get_path("include"), "Python.h")
    assert host_layers.COMPILED or shutil.which("cc") is None or not headers.exists()


@compiled
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activation", KINDS)
def test_activations_in_c_are_those_of_numpy_in_float64(activation, shape):
    y, bias = numbers(*shape), numbers(shape[1], scale=0.5)
    exact = y.astype(np.float64) + bias
    IN_PLACE[activation](exact)
    activate_(y, bias, activation)
    # The sum with the bias is rounded to float32, 2^-24 of up to 20; the rest is the exponential's.
    np.testing.assert_allclose(y, exact, rtol=1e-6, atol=1e-6)


@compiled
@pytest.mark.parametrize("activation", ["elu", "tanh"])
def test_small_large_and_odd_numbers(activation):
    edge = [0.0, -0.0, 1e-38, -1e-38, -1e-7, -1e-3, -0.3, -0.35, -16.9, -17.1, -100.0, 100.0, np.inf, -np.inf]
    x = np.array([*edge, *np.linspace(-18, 18, 100_001)], np.float32)[None]
    exact = (
        np.tanh(x.astype(np.float64)) if activation == "tanh" else np.where(x > 0, x, np.expm1(x.astype(np.float64)))
    )
    activate_(x, np.zeros_like(x[0]), activation)
    np.testing.assert_allclose(x, exact, rtol=3e-7)


@compiled
@pytest.mark.parametrize("activation", KINDS)
def test_what_is_no_number_stays_none(activation):
    x = np.full((3, 9), np.nan, np.float32)
    activate_(x, np.zeros(9, np.float32), activation)
    assert np.isnan(x).all()


@compiled
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activation", KINDS)
def test_gradients_in_c_are_those_of_numpy_in_float64(activation, shape):
    y, d, sums = numbers(*shape), numbers(*shape)[::-1].copy(), np.full(shape[1], np.nan, np.float32)
    activate_(y, np.zeros(shape[1], np.float32), activation)
    exact, value = d.astype(np.float64), y.astype(np.float64)
    SLOPES[activation](exact, value)
    descend_(d, y, sums, activation)
    np.testing.assert_allclose(d, exact, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(sums, exact.sum(0), rtol=1e-4, atol=1e-3)


@compiled
def test_arrays_that_do_not_fit_each_other_are_refused():
    y, bias = numbers(4, 3), numbers(5)
    with pytest.raises(ValueError, match="48 bytes are no rows of 20 bytes"):
        activate_(y, bias, "elu")
    with pytest.raises(ValueError, match="a gradient of 48 bytes for outputs of 24"):
        descend_(y, y[:2].copy(), numbers(3), "elu")
    with pytest.raises(ValueError, match="7 is no activation"):
        host_layers._host.activate(y, numbers(3), 7)
    with pytest.raises(TypeError, match="argument 1"):  # another layout must not be read as if it were this one
        activate_(numbers(3, 4).T, numbers(3), "elu")


@pytest.mark.parametrize("activation", KINDS)
def test_without_a_compiler_numpy_does_the_same(activation, in_numpy):
    y, bias, sums = numbers(50, 8), numbers(8), np.empty(8, np.float32)
    ours = y.copy()
    activate_(ours, bias, activation)
    module = {"identity": torch.nn.Identity(), "elu": torch.nn.ELU(), "relu": torch.nn.ReLU(), "tanh": torch.nn.Tanh()}
    before = torch.from_numpy(y + bias).requires_grad_()
    after = module[activation](before)
    np.testing.assert_allclose(ours, after.detach().numpy(), rtol=1e-5, atol=1e-6)
    d = numbers(50, 8)[::-1].copy()
    exact = torch.autograd.grad(after, before, torch.from_numpy(d.copy()))[0]
    descend_(d, ours, sums, activation)
    np.testing.assert_allclose(d, exact.numpy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(sums, exact.sum(0).numpy(), rtol=1e-4, atol=1e-4)


class TestThreads:
    def test_parts_are_all_rows_once_and_only_of_much_work(self, threads):
        assert parts(1000, 10) == [slice(0, 1000)]
        cut = parts(1000, host_threads.MUCH)
        assert [row for part in cut for row in range(1000)[part]] == list(range(1000)) and len(cut) == threads

    def test_more_threads_than_rows(self, threads):
        assert [part.stop - part.start for part in parts(2, host_threads.MUCH)] == [0, 1, 1]

    def test_results_come_in_the_order_of_the_parts(self, threads):
        assert share(lambda number, rows: (number, rows.start), [slice(0, 5), slice(5, 9)]) == [(0, 0), (1, 5)]

    def test_an_error_in_any_part_comes_through(self):
        def work(number, _):
            if number == 1:
                raise FloatingPointError("in the second")

        with pytest.raises(FloatingPointError, match="in the second"):
            share(work, [slice(0, 1), slice(1, 2)])

    def test_shared_rows_give_what_one_thread_gives(self, threads, monkeypatch):
        monkeypatch.setattr(host_threads, "MUCH", 1)
        x, weights = numbers(100, 6), [numbers(16, 6), numbers(16), numbers(4, 16), numbers(4)]
        alone = run_layers(x, ["elu", "identity"], weights)[-1]
        np.testing.assert_allclose(last_output(x, ["elu", "identity"], weights), alone, rtol=1e-5, atol=1e-4)
