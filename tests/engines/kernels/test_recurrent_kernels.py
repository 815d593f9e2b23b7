"""Recurrent layers in one launch against torch's cells step by step, in float64: outputs and all gradients."""

import copy

import pytest
import torch
from torch import nn

from canter.functional.layers import recurrent_layer
from triton_device import DEVICE, INTERPRETED, NEEDS_DEVICE, relative_error

pytestmark = NEEDS_DEVICE
pytest.importorskip("triton", reason="Triton comes with the GPU builds of torch")
CELLS = {"lstm": nn.LSTMCell, "gru": nn.GRUCell}
STEPS = 4


def sequence(kind, inputs, units, sequences):
    cell = CELLS[kind](inputs, units).to(DEVICE)
    state = tuple(torch.randn(sequences, units, device=DEVICE) for _ in range(2 if kind == "lstm" else 1))
    starts = torch.rand(STEPS, sequences, device=DEVICE) < 0.3
    starts[0, 0] = starts[2, -1] = True
    return torch.randn(STEPS, sequences, inputs, device=DEVICE), cell, state, starts


def results(function, x, cell, state, reset, dtype):
    """Outputs, and the gradients by input, first states and parameters."""
    cell = copy.deepcopy(cell).to(dtype)
    leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in (x, *state)]
    outputs = function(leaves[0], cell, tuple(leaves[1:]), reset)
    generator = torch.Generator(DEVICE).manual_seed(1)
    toward = [torch.randn(x.shape[0], *state[0].shape, generator=generator, device=DEVICE) for _ in outputs]
    loss = torch.stack([(y - z.to(dtype)).square().sum() for y, z in zip(outputs, toward, strict=True)]).sum()
    return [*outputs, *torch.autograd.grad(loss, [*leaves, *cell.parameters()])]


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize(
    ("inputs", "units", "sequences", "reset", "precision"),
    [
        (7, 20, 19, True, "highest"),  # streams
        (3, 5, 1, False, "highest"),
        (7, 20, 19, True, "high"),
        (5, 96, 17, True, "high"),
        (9, 128, 33, True, "high"),
        (5, 130, 17, True, "high"),  # streams
        pytest.param(48, 256, 100, True, "high", marks=pytest.mark.skipif(INTERPRETED, reason="slow there")),
        pytest.param(48, 128, 1024, True, "high", marks=pytest.mark.skipif(INTERPRETED, reason="slow there")),
    ],
)
def test_a_layer_and_all_its_gradients(kind, inputs, units, sequences, reset, precision):
    from canter.engines.triton.kernels.recurrent import fused_recurrent_layer

    torch.set_float32_matmul_precision(precision)
    tolerance = 2e-6 if precision == "highest" else 1e-3 if INTERPRETED else 3e-3
    *arguments, starts = sequence(kind, inputs, units, sequences)
    reset = starts if reset else None
    ours = results(fused_recurrent_layer, *arguments, reset, torch.float32)
    exact = results(recurrent_layer.plain, *arguments, reset, torch.float64)
    for one, other in zip(ours, exact, strict=True):
        assert one.shape == other.shape
        assert relative_error(one, other) < tolerance


@pytest.mark.parametrize("kind", CELLS)
def test_small_gradients_keep_their_digits(kind):
    """Gradients of a mean over many samples are below the smallest number of float16."""
    from canter.engines.triton.kernels.recurrent import fused_recurrent_layer

    torch.set_float32_matmul_precision("high")
    x, cell, state, reset = sequence(kind, 7, 20, 19)
    gradients = []
    for scale in (1.0, 2.0**-40):
        y = fused_recurrent_layer(x, cell, state, reset)[0]
        gradients.append(torch.autograd.grad(scale * y.square().sum(), list(cell.parameters())))
    for large, small in zip(*gradients, strict=True):
        assert relative_error(small * 2.0**40, large) < 1e-5


@pytest.mark.parametrize(("kind", "units"), [("lstm", 128), ("gru", 96), ("lstm", 130)])
def test_steps_one_by_one_have_the_bits_of_the_sequence(kind, units):
    from canter.engines.triton.kernels.recurrent import fused_recurrent_layer

    torch.set_float32_matmul_precision("high")
    x, cell, state, reset = sequence(kind, 7, units, 19)
    whole = fused_recurrent_layer(x, cell, state, reset)
    chosen = torch.tensor([18, 3, 4], device=DEVICE)
    with torch.no_grad():
        part = fused_recurrent_layer(x[:, chosen], cell, tuple(s[chosen] for s in state), reset[:, chosen])
        for t in range(STEPS):
            steps = fused_recurrent_layer(x[t : t + 1], cell, state, reset[t : t + 1])
            state = tuple(step[0] for step in steps)
            for at_once, some, alone in zip(whole, part, state, strict=True):
                assert torch.equal(at_once[t], alone)
                assert torch.equal(some[t], alone[chosen])


@pytest.mark.parametrize("units", [20, 130])
def test_a_nan_does_not_reach_the_next_episode(units):
    from canter.engines.triton.kernels.recurrent import fused_recurrent_layer

    torch.set_float32_matmul_precision("high")
    x, cell, state, _ = sequence("lstm", 5, units, 3)
    reset = torch.zeros(STEPS, 3, dtype=torch.bool, device=DEVICE)
    reset[2] = True
    clean = fused_recurrent_layer(x, cell, state, reset)[0]
    x[:2] = torch.nan
    poisoned = fused_recurrent_layer(x, cell, state, reset)[0]
    assert poisoned[:2].isnan().all()
    assert torch.equal(poisoned[2:], clean[2:])


def test_layers_that_the_kernel_does_not_support_run_step_by_step():
    from canter.engines.triton.kernels.recurrent import is_supported

    x, cell, *_ = sequence("lstm", 5, 20, 3)
    torch.set_float32_matmul_precision("high")
    assert is_supported(x, cell) == (not INTERPRETED)
    for other in (nn.LSTMCell(5, 300), nn.GRUCell(5, 20, bias=False), type("Own", (nn.LSTMCell,), {})(5, 20)):
        assert not is_supported(x, other.to(DEVICE))
    assert not is_supported(x.double(), cell.double())
    cell.float().register_forward_hook(lambda *_: None)
    assert not is_supported(x, cell)
    torch.set_float32_matmul_precision("highest")
    assert not is_supported(x, nn.LSTMCell(5, 20))
