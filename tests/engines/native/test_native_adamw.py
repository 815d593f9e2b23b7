"""AdamW in C against torch's, and against the clipping of Canter's optimiser."""

import math

import pytest
import torch

from canter.engines.native import AVAILABLE, adamw_, square_sum

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="there was no C compiler")


def vectors(n, dtype):
    torch.manual_seed(n)
    flat = torch.randn(n, dtype=dtype)
    return flat, torch.zeros(n, dtype=dtype), torch.zeros(n, dtype=dtype), torch.zeros(())


SETTINGS = {"learning_rate": 3e-3, "betas": (0.9, 0.99), "eps": 1e-5}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("n", [1, 7, 64, 4097])
def test_steps_are_those_of_torch(n, weight_decay, dtype):
    flat, mean, square, step = vectors(n, dtype)
    parameter = torch.nn.Parameter(flat.clone())
    optimizer = torch.optim.AdamW([parameter], lr=3e-3, betas=(0.9, 0.99), eps=1e-5, weight_decay=weight_decay)
    for number in range(20):
        gradient = torch.randn(n, dtype=dtype) * (10.0 if number % 2 else 0.01)
        norm = adamw_(flat, gradient, mean, square, step, weight_decay=weight_decay, max_norm=0.5, **SETTINGS)
        assert norm == pytest.approx(float(gradient.double().norm()), rel=1e-6)
        parameter.grad = gradient.clone()
        torch.nn.utils.clip_grad_norm_([parameter], 0.5)
        optimizer.step()
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-5, "atol": 1e-8}
    torch.testing.assert_close(flat, parameter.detach(), **close)  # torch adds 1e-6 to the norm it divides by
    assert step == 20


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_takes_no_step(bad):
    flat, mean, square, step = vectors(9, torch.float32)
    before, gradient = flat.clone(), torch.randn(9)
    gradient[4] = bad
    assert not math.isfinite(adamw_(flat, gradient, mean, square, step, weight_decay=0.1, max_norm=0.5, **SETTINGS))
    assert torch.equal(flat, before) and (mean == 0).all() and (square == 0).all() and step == 0


def test_several_vectors_are_clipped_jointly():
    one, other = vectors(5, torch.float64), vectors(11, torch.float64)
    both = tuple(torch.cat(pair) for pair in zip(one[:3], other[:3], strict=True))
    gradients, step = (torch.randn(5, dtype=torch.float64), torch.randn(11, dtype=torch.float64)), torch.zeros(())
    norm = math.sqrt(sum(square_sum(gradient) for gradient in gradients))
    for part, gradient in zip((one, other), gradients, strict=True):
        adamw_(part[0], gradient, *part[1:], weight_decay=0.0, max_norm=0.5, norm=norm, **SETTINGS)
    adamw_(both[0], torch.cat(gradients), both[1], both[2], step, weight_decay=0.0, max_norm=0.5, **SETTINGS)
    torch.testing.assert_close(torch.cat([one[0], other[0]]), both[0], rtol=1e-14, atol=1e-14)


def test_vectors_of_other_lengths_are_refused():
    flat, mean, square, step = vectors(9, torch.float32)
    with pytest.raises(ValueError, match="bytes"):
        adamw_(flat, torch.zeros(8), mean, square, step, weight_decay=0.0, max_norm=0.5, **SETTINGS)
