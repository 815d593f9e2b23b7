"""Every kernel against the plain function that defines it, on fresh random inputs; float64 is the reference.

With Triton's interpreter (`TRITON_INTERPRET=1`) they run on a CPU as well.
"""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from canter.functional.layers import batch_norm, linear_layers
from canter.functional.optimization import AdamGroup
from canter.nn.distributions import DiagGaussian
from canter.nn.heads import LogStd, StdConfig
from canter.nn.schedules import AdaptiveKL
from triton_device import DEVICE, INTERPRETED, NEEDS_DEVICE, relative_error

pytestmark = NEEDS_DEVICE


@pytest.mark.parametrize("activation", [nn.ELU(), nn.ReLU(), nn.Tanh(), nn.Identity()], ids=str)
@pytest.mark.parametrize(("rows", "widths"), [(300, (48, 256, 128, 64)), (1, (3, 7)), (1000, (17, 40, 24))])
def test_layers_and_all_their_gradients(activation, rows, widths):
    from canter.engines.triton.kernels.linear import fused_layers

    parameters = []
    for width, following in itertools.pairwise(widths):
        parameters += [torch.randn(following, width) / width**0.5, torch.randn(following) * 0.1]
    x, weights = torch.randn(2, rows, widths[0]), torch.randn(widths[-1])
    results = []
    for dtype in (torch.float32, torch.float64):
        inputs = [tensor.to(DEVICE, dtype, copy=True).requires_grad_() for tensor in (x, *parameters)]
        if dtype == torch.float32:
            y = fused_layers(inputs[0], activation, inputs[1:])
        else:
            y = linear_layers.plain(inputs[0], activation, inputs[1:])
        (y * weights.to(y)).square().sum().backward()
        results.append([y.detach(), *(tensor.grad for tensor in inputs)])
    for ours, exact in zip(*results, strict=True):
        assert ours.shape == exact.shape
        assert relative_error(ours, exact) < 2e-6


@pytest.mark.parametrize(("members", "rows", "columns"), [(2, 700, 70), (1, 1, 3), (3, 257, 64), (2, 33, 1)])
def test_batch_norm_and_all_its_gradients(members, rows, columns):
    x = 2 + torch.randn(members, rows, columns)
    weight, bias, toward = torch.randn(members, 1, columns), torch.randn(members, 1, columns), torch.randn_like(x)
    results = []
    for dtype, function in ((torch.float32, _fused_batch_norm()), (torch.float64, batch_norm.plain)):
        inputs = [tensor.to(DEVICE, dtype, copy=True).requires_grad_() for tensor in (x, weight, bias)]
        y, mean, var = function(*inputs, 1e-2)
        assert not mean.requires_grad
        (y - toward.to(y)).pow(3).sum().backward()
        results.append([y.detach(), mean, var, *(tensor.grad for tensor in inputs)])
    for ours, exact in zip(*results, strict=True):
        assert ours.shape == exact.shape
        # One row has no variance and no slope: what is left there is rounding, and is judged as such.
        assert (ours.double() - exact).norm() < 1e-5 * (exact.norm() + x.numel() ** 0.5)


def test_a_projection_keeps_a_nan_in_its_row():
    from canter.engines.triton.kernels.sac import project_on_gpu

    atoms = torch.randn(3, 11, device=DEVICE)
    atoms[1, 4] = torch.nan
    found = project_on_gpu(torch.rand(3, 11, device=DEVICE), atoms, -2.0, 2.0).isnan()
    assert found[1].any()
    assert not found[[0, 2]].any()


def _fused_batch_norm():
    from canter.engines.triton.kernels.sac import fused_batch_norm

    return fused_batch_norm


@pytest.mark.skipif(INTERPRETED, reason="the interpreter knows no bfloat16")
def test_bfloat16_rounds_factors_and_keeps_sums():
    from canter.engines.triton.kernels.linear import fused_layers

    widths, results = (48, 256, 128, 64), []
    parameters = []
    for width, following in itertools.pairwise(widths):
        parameters += [torch.randn(following, width) / width**0.5, torch.randn(following) * 0.1]
    x = torch.randn(3000, 48)
    for dtype in (torch.float32, torch.float64):
        inputs = [tensor.to(DEVICE, dtype, copy=True).requires_grad_() for tensor in (x, *parameters)]
        if dtype == torch.float32:
            with torch.autocast("cuda", torch.bfloat16):
                y = fused_layers(inputs[0], nn.ELU(), inputs[1:])
        else:
            y = linear_layers.plain(inputs[0], nn.ELU(), inputs[1:])
        y.square().sum().backward()
        results.append([y.detach(), *(tensor.grad for tensor in inputs)])
    for ours, exact in zip(*results, strict=True):
        assert ours.dtype == torch.float32
        assert relative_error(ours, exact) < 1e-2


def test_weight_gradients_are_the_same_bits_every_time():
    from canter.engines.triton.kernels.linear import weight_gradients

    deltas = [torch.randn(2000, width, device=DEVICE) for width in (96, 40)]
    inputs = [torch.randn(2000, width, device=DEVICE) for width in (17, 96)]
    first, second = (torch.cat([g.flatten() for g in weight_gradients(deltas, inputs)]) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter computes in float32")
def test_tf32_is_used_where_it_is_allowed_and_only_there():
    from canter.engines.triton.kernels.linear import fused_layers

    x, weight, bias = (
        torch.randn(512, 256, device=DEVICE),
        torch.randn(64, 256, device=DEVICE),
        torch.zeros(64).to(DEVICE),
    )
    exact = F.linear(x.double(), weight.double(), bias.double())
    strict = relative_error(fused_layers(x, nn.Identity(), [weight, bias]), exact)
    torch.set_float32_matmul_precision("high")
    loose = relative_error(fused_layers(x, nn.Identity(), [weight, bias]), exact)
    assert strict < 1e-6 < 1e-5 < loose < 2e-3


def test_observations_are_standardised_and_a_nan_stays_one():
    from canter.engines.triton.kernels.rollout import standardize

    x, shift, scale = torch.randn(3, 50, 7).to(DEVICE) * 9, torch.randn(7).to(DEVICE), torch.rand(7).to(DEVICE)
    x[0, 0, 0] = torch.nan
    expected = ((x - shift) * scale).clamp(-2, 2)
    torch.testing.assert_close(standardize(x, shift, scale, 2.0), expected, equal_nan=True)


@pytest.mark.parametrize("coupled", [False, True])
def test_adam_takes_the_steps_of_torch_and_skips_without_a_trace(coupled):
    from canter.engines.triton.kernels.optimizer import adam_step_on_gpu

    start = torch.randn(3000, device=DEVICE)
    exact = torch.nn.Parameter(start.double())
    kind = torch.optim.Adam if coupled else torch.optim.AdamW
    optimizer = kind([exact], lr=1e-2, betas=(0.9, 0.999), eps=1e-5, weight_decay=0.1)
    zeros, scalar = torch.zeros(3, 3000, device=DEVICE), torch.zeros((), device=DEVICE)
    group = AdamGroup(
        start, *zeros.unbind(), scalar.clone(), scalar + 1e-2, betas=(0.9, 0.999), eps=1e-5, weight_decay=0.1,
        max_norm=40.0, coupled=coupled,
    )  # fmt: skip
    for iteration in range(20):
        gradient, skipped = torch.randn(3000, device=DEVICE), iteration % 5 == 3
        if not skipped:
            exact.grad = gradient.double().clone()
            torch.nn.utils.clip_grad_norm_([exact], 40.0)
            optimizer.step()
        group.gradient.copy_(gradient * torch.nan if skipped else gradient)
        _, blocked = adam_step_on_gpu([group], True, torch.tensor(False, device=DEVICE))
        assert blocked.item() == skipped
    assert group.step.item() == 16
    assert relative_error(group.flat, exact.detach()) < 1e-6


@pytest.mark.parametrize(
    ("squares", "skip", "expected"),
    [
        ([9.0, 16.0], False, [5.0, 0.0, 0.0]),
        ([9.0, 16.0], True, [5.0, 0.0, 1.0]),
        ([math.inf, 16.0], False, [math.inf, 1.0, 1.0]),
        ([math.nan, 16.0], True, [math.nan, 1.0, 1.0]),
    ],
)
def test_a_step_is_taken_on_finite_gradients_unless_it_is_to_be_skipped(squares, skip, expected):
    from canter.engines.triton.kernels.optimizer import decide

    steps = [torch.tensor(3.0).to(DEVICE), torch.tensor(7.0).to(DEVICE)]
    verdict = decide([torch.tensor(s).to(DEVICE) for s in squares], steps, torch.tensor(skip).to(DEVICE))
    torch.testing.assert_close(torch.stack(verdict).cpu(), torch.tensor(expected), equal_nan=True)
    assert [step.item() for step in steps] == [4.0 - expected[2], 8.0 - expected[2]]


@pytest.mark.parametrize("kl", [0.0, 5e-6, 2e-5, 4e-3, 6e-3, 1e-2, 2.1e-2, 1.0, math.inf, math.nan])
@pytest.mark.parametrize("rate", [1e-3, 8e-3, 1.2e-6])
def test_a_learning_rate_follows_the_kl(kl, rate):
    from canter.engines.triton.kernels.optimizer import follow_kl_on_gpu_

    law, expected = AdaptiveKL(1e-3, every="minibatch"), torch.tensor(rate)
    law.observe_(expected, torch.tensor(kl), "minibatch")
    value = torch.tensor(rate).to(DEVICE)
    follow_kl_on_gpu_(value, torch.tensor(kl).to(DEVICE), target=0.01, factor=1.5, minimum=1e-6, maximum=1e-2)
    torch.testing.assert_close(value.cpu(), expected)


@pytest.mark.parametrize("form", ["bounded", "log", "scalar"])
@pytest.mark.parametrize("dim", [1, 3, 12])
def test_mean_and_log_std_are_joined(dim, form):
    from canter.engines.triton.kernels.gaussian_params import gaussian_params

    bound, weights = LogStd(StdConfig(form=form)), torch.randn(2, 300, 2 * dim)
    mean, raw = torch.randn(2, 300, dim), 3 * torch.randn(dim)
    results = []
    for dtype in (torch.float32, torch.float64):
        means, raws = (tensor.to(DEVICE, dtype, copy=True).requires_grad_() for tensor in (mean, raw))
        if dtype == torch.float32:
            params = gaussian_params(means, raws, mid=bound.mid, half=bound.half_range, form=form)
        else:
            params = torch.cat([means, bound(raws).expand_as(means)], -1)
        (params * weights.to(params)).sum().backward()
        results.append([params.detach(), means.grad, raws.grad])
    for ours, exact in zip(*results, strict=True):
        assert ours.shape == exact.shape
        assert relative_error(ours, exact) < 1e-6


@pytest.mark.parametrize(
    ("bounds", "form"), [("rescale", "bounded"), ("clip", "log"), ("none", "scalar"), ("rescale", "scalar")]
)
def test_a_gaussian_sample_and_its_density(bounds, form):
    from canter.engines.triton.kernels.gaussian_params import diag_gaussian_log_prob, draw

    bound, distribution = LogStd(StdConfig(form=form)), DiagGaussian(3, (-1.0, -math.inf, 0.0), (2.0, 5.0, 0.5), bounds)
    mean, raw, noise = torch.randn(300, 3), torch.rand(3), torch.randn(300, 3)
    mean[7, 1] = torch.nan
    exact = torch.cat([mean, bound(raw).expand_as(mean)], -1).double()
    drawn = mean.double() + torch.exp(exact[:, 3:]) * noise.double()
    interval = torch.tensor(distribution.interval()).to(DEVICE)
    tensors = (mean.to(DEVICE), raw.to(DEVICE), noise.to(DEVICE), interval)
    params, action, for_env = draw(*tensors, mid=bound.mid, half=bound.half_range, form=form)
    for ours, expected in (
        (params, exact),
        (action, drawn),
        (for_env, distribution.to_env(drawn)),
        (diag_gaussian_log_prob(params, action), distribution.log_prob(exact, drawn)),
    ):
        torch.testing.assert_close(ours.cpu().double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
