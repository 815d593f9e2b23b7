"""The loss of a Gaussian policy and its critic in one kernel against the plain functions; float64 is the reference."""

import pytest
import torch

from canter.functional.losses import BOUND_LOSSES, SURROGATES, VALUE_LOSSES
from canter.functional.statistics import masked_mean
from canter.nn.distributions import DiagGaussian
from triton_device import DEVICE, NEEDS_DEVICE, relative_error

pytestmark = NEEDS_DEVICE


@pytest.mark.parametrize("dim", [1, 3, 12])
@pytest.mark.parametrize("value_clip", [None, 0.2])
def test_the_loss_and_its_gradients(dim, value_clip):
    from canter.engines.triton.gaussian_loss import Bound, count_true, gaussian_loss

    rows, distribution = 1500, DiagGaussian(dim)
    old = torch.cat([torch.randn(1, rows, dim), 0.3 * torch.randn(1, rows, dim)], -1)
    new, action = old + 0.1 * torch.randn_like(old), distribution.sample(old)
    advantage, old_value = torch.randn(2, 1, rows).unbind()
    value, return_ = old_value + 0.3 * torch.randn(1, rows), old_value + torch.randn(1, rows)
    valid = torch.rand(1, rows) > 0.3
    bound = (1, 0.2, 0.3), torch.stack([torch.randn(dim), 0.5 + torch.rand(dim)])
    results = []
    for dtype in (torch.float32, torch.float64):
        tensors = (new, value, old, action, advantage, old_value, return_)
        params, values, o, a, adv, ov, ret = (tensor.to(DEVICE, dtype, copy=True) for tensor in tensors)
        params.requires_grad_()
        values.requires_grad_()
        old_log_prob, mask = distribution.log_prob(o, a), valid.to(DEVICE)
        if dtype == torch.float32:
            loss, means = gaussian_loss(
                params, values, action=a, old_params=o, old_log_prob=old_log_prob, advantage=adv, old_value=ov,
                return_=ret, valid=mask, count=count_true(mask), clip_ratio=0.2, value_clip=value_clip,
                value_coef=0.7, entropy_coef=torch.tensor(0.013).to(DEVICE),
                bound=Bound(*bound[0], bound[1].to(DEVICE)),
            )  # fmt: skip
        else:
            log_prob = distribution.log_prob(params, a)
            kind = "mse" if value_clip is None else "clipped"
            terms = [
                SURROGATES["clipped"](log_prob, old_log_prob, adv, 0.2),
                VALUE_LOSSES[kind](values, ov, ret, value_clip or 0.0),
                distribution.entropy(params),
                distribution.kl(o, params),
                ((torch.exp(log_prob - old_log_prob) - 1).abs() > 0.2).double(),
                BOUND_LOSSES["soft"]((params[..., :dim] - bound[1][0].to(params)) / bound[1][1].to(params), 0.3),
            ]
            means = masked_mean(torch.stack(terms), mask)
            loss = means[0] + 0.7 * means[1] - 0.013 * means[2] + 0.2 * means[5]
        (3 * loss).backward()
        results.append([loss.detach(), means.detach(), params.grad, values.grad])
    for ours, exact in zip(*results, strict=True):
        assert relative_error(ours, exact) < 1e-5
