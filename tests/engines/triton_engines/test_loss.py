"""The loss of a policy and its critic in one kernel against the plain functions; float64 is the reference."""

import pytest
import torch

from canter.functional.losses import BOUND_LOSSES, SURROGATES, VALUE_LOSSES
from canter.functional.statistics import masked_mean
from canter.nn.distributions import Categorical, DiagGaussian, MultiCategorical, TanhGaussian, mask_logits
from triton_device import DEVICE, NEEDS_DEVICE, relative_error

pytestmark = NEEDS_DEVICE
ROWS = 700
POLICIES = {
    "gaussian of 1": DiagGaussian(1),
    "gaussian of 3": DiagGaussian(3),
    "gaussian of 12": DiagGaussian(12),
    "tanh": TanhGaussian((-1.0, 0.0, -3.0), (1.0, 5.0, 3.0)),
    "discrete": Categorical(5),
    "many discrete": Categorical(300),
    "multi-discrete": MultiCategorical((2, 1, 5, 3)),
}


def random_params(distribution):
    """Parameters of the old and the new policy, near each other; some choices are masked in both."""
    old = torch.randn(1, ROWS, distribution.param_dim)
    if isinstance(distribution, DiagGaussian | TanhGaussian):
        old[..., distribution.param_dim // 2 :] *= 0.3
    new = old + 0.1 * torch.randn_like(old)
    if distribution != Categorical(5):
        return old, new
    allowed = torch.rand(old.shape) > 0.3
    allowed[..., 2] = True
    return mask_logits(old, allowed), mask_logits(new, allowed)


@pytest.mark.parametrize("distribution", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("value_clip", [None, 0.2])
def test_the_loss_and_its_gradients(distribution, value_clip):
    from canter.engines.triton.loss import fused_loss
    from canter.engines.triton.policies import Bound, policy_of

    old, new = random_params(distribution)
    action = distribution.sample(old)
    advantage, old_value = torch.randn(2, 1, ROWS).unbind()
    value, return_ = old_value + 0.3 * torch.randn(1, ROWS), old_value + torch.randn(1, ROWS)
    valid = torch.rand(1, ROWS) > 0.3
    dim, form = distribution.param_dim // 2, int(isinstance(distribution, DiagGaussian))
    units = torch.stack([torch.randn(dim), 0.5 + torch.rand(dim)])
    results = []
    for dtype in (torch.float32, torch.float64):
        tensors = (new, value, old, advantage, old_value, return_)
        params, values, o, adv, ov, ret = (tensor.to(DEVICE, dtype, copy=True) for tensor in tensors)
        a = action.to(DEVICE, dtype) if action.is_floating_point() else action.to(DEVICE)
        params.requires_grad_()
        values.requires_grad_()
        mask = valid.to(DEVICE)
        if dtype == torch.float32:
            loss, means = fused_loss(
                policy_of(distribution), params, values, action=a, old_params=o, advantage=adv, old_value=ov,
                return_=ret, valid=mask, clip_ratio=0.2, value_clip=value_clip,
                value_coef=0.7, entropy_coef=torch.tensor(0.13).to(DEVICE),
                bound=Bound(form, 0.2, 0.3, units.to(DEVICE)),
            )  # fmt: skip
        else:
            log_prob, old_log_prob = distribution.log_prob(params, a), distribution.log_prob(o, a)
            kind = "mse" if value_clip is None else "clipped"
            beyond = BOUND_LOSSES["soft"]((params[..., :dim] - units[0].to(params)) / units[1].to(params), 0.3)
            terms = [
                SURROGATES["clipped"](log_prob, old_log_prob, adv, 0.2),
                VALUE_LOSSES[kind](values, ov, ret, value_clip or 0.0),
                distribution.entropy(params),
                distribution.kl(o, params),
                ((torch.exp(log_prob - old_log_prob) - 1).abs() > 0.2).double(),
                beyond if form else torch.zeros_like(adv),
            ]
            means = masked_mean(torch.stack(terms), mask)
            loss = means[0] + 0.7 * means[1] - 0.13 * means[2] + 0.2 * means[5]
        (3 * loss).backward()
        results.append([loss.detach(), *means.detach(), params.grad, values.grad])
    for ours, exact in zip(*results, strict=True):
        assert relative_error(ours, exact) < 2e-5 if exact.norm() > 0 else ours == 0


@pytest.mark.parametrize("distribution", POLICIES.values(), ids=POLICIES)
def test_equal_parameters_have_a_ratio_of_exactly_one(distribution):
    from canter.engines.triton.loss import fused_loss
    from canter.engines.triton.policies import Bound, policy_of

    old, new = random_params(distribution)
    ones, valid = torch.ones(1, ROWS, device=DEVICE), torch.ones(1, ROWS, dtype=torch.bool, device=DEVICE)

    def diagnostics(params):
        """KL, and the part of all ratios that is not exactly 1."""
        _, means = fused_loss(
            policy_of(distribution), params.to(DEVICE), ones, action=distribution.sample(old).to(DEVICE),
            old_params=old.to(DEVICE), advantage=ones, old_value=ones, return_=ones, valid=valid,
            clip_ratio=0.0, value_clip=None, value_coef=0.7,
            entropy_coef=torch.tensor(0.13).to(DEVICE), bound=Bound(0, 0.0, 0.0, ones[:0]),
        )  # fmt: skip
        return means[3:5].tolist()

    assert diagnostics(old) == [0.0, 0.0]
    assert min(diagnostics(new)) > 1e-4
