"""PPO's loss on a CPU with all gradients, differentiated by hand.

A action components, n choices; `...` stands for the axes of the rows. Small networks are dominated by the number of
operations: the plain form has some eighty forward and backward, each with a node of autograd and new memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


@dataclass(frozen=True)
class PolicyTerms:
    """What a distribution says of stored actions, `[...]` each."""

    log_prob: Tensor
    entropy: Tensor
    kl: Tensor
    """KL(old || new)."""
    pull_back: Callable[[Tensor, Tensor], Tensor]
    """Gradient of the parameters `[..., P]` from those of the log-probability `[..., 1]` and the entropy, 0-d."""


def gaussian(params: Tensor, action: Tensor, old_params: Tensor) -> PolicyTerms:
    """Of independent normal components: parameters `[..., 2A]`, actions `[..., A]`."""
    dim = action.shape[-1]
    (mean, log_std), (old_mean, old_log_std) = params.chunk(2, -1), old_params.chunk(2, -1)
    precision = torch.exp(-log_std)
    z = (action - mean).mul_(precision)
    square = z * z
    log_prob = torch.add(log_std, square, alpha=0.5).sum(-1).add_(dim * HALF_LOG_2PI).neg_()
    log_ratio, shift = old_log_std - log_std, (old_mean - mean).mul_(precision)
    # As in the plain form: expm1 keeps the second-order difference that is left when the two are close.
    twice = torch.expm1(log_ratio + log_ratio).addcmul_(shift, shift)
    kl = torch.sub(twice, log_ratio, alpha=2.0).sum(-1).mul_(0.5)

    def pull_back(d_log_prob: Tensor, d_entropy: Tensor) -> Tensor:
        gradient = torch.empty_like(params)
        d_mean, d_log_std = gradient.chunk(2, -1)
        torch.mul(z.mul_(precision), d_log_prob, out=d_mean)
        torch.mul(square.sub_(1.0), d_log_prob, out=d_log_std).add_(d_entropy)
        return gradient

    return PolicyTerms(log_prob, log_std.sum(-1).add_(dim * (HALF_LOG_2PI + 0.5)), kl, pull_back)


def categorical(params: Tensor, action: Tensor, old_params: Tensor) -> PolicyTerms:
    """Of one choice: logits `[..., n]`, actions int64 `[...]`."""
    log_prob, old = torch.log_softmax(params, -1), torch.log_softmax(old_params, -1)
    prob, chosen = log_prob.exp(), action.unsqueeze(-1)
    entropy = (prob * log_prob).sum(-1).neg_()

    def pull_back(d_log_prob: Tensor, d_entropy: Tensor) -> Tensor:
        # d entropy / d logit = -p (log p + entropy), d log p(action) / d logit = [logit is the action's] - p
        towards = log_prob.add(entropy.unsqueeze(-1)).mul_(d_entropy).add_(d_log_prob)
        return towards.mul_(prob).neg_().scatter_add_(-1, chosen, d_log_prob)

    taken = log_prob.gather(-1, chosen).squeeze(-1)
    return PolicyTerms(taken, entropy, (old.exp() * (old - log_prob)).sum(-1), pull_back)


def _surrogate(log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, clip: float) -> tuple[Tensor, Tensor, Tensor]:
    """The clipped surrogate, its derivative by `log_prob`, and where the ratio was clipped."""
    ratio, cost = (log_prob - old_log_prob).exp_(), -advantage
    limited = ratio.clamp(1.0 - clip, 1.0 + clip)
    clipped, free, held = limited != ratio, cost * ratio, limited.mul_(cost)
    # The held branch has no gradient where it is the larger one.
    return torch.maximum(free, held), (free >= held).mul(free), clipped


def _value_error(value: Tensor, old_value: Tensor, target: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """Half the squared error, pessimistic about moves beyond `clip` if there is one, and its derivative."""
    error = value - target
    square = error * error
    if clip is None:
        return square.mul_(0.5), error
    moved = value - old_value
    held = moved.clamp(-clip, clip).add_(old_value).sub_(target).square_()
    slope = error * ((square >= held) | (moved.abs() <= clip))
    return torch.maximum(square, held).mul_(0.5), slope


def ppo_loss(
    family: Callable[[Tensor, Tensor, Tensor], PolicyTerms],
    params: Tensor,
    value: Tensor,
    *,
    action: Tensor,
    old_params: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    old_value: Tensor,
    return_: Tensor,
    valid: Tensor,
    count: Tensor,
    clip_ratio: float,
    value_clip: float | None,
    value_coef: float,
    entropy_coef: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss, 0-d, means `[5]`, and the gradients of `params` and `value`.

    Means are of surrogate, value error, entropy, KL and clipped rows, over `count` rows. Rows as in PPO's batch,
    `[..., P]`, `[..., A]` or `[...]`; `value_clip` None is half the squared error.
    """
    with torch.no_grad():
        policy = family(params, action, old_params)
        surrogate, d_log_prob, clipped = _surrogate(policy.log_prob, old_log_prob, advantage, clip_ratio)
        error, d_value = _value_error(value, old_value, return_, value_clip)
        # Filled, not multiplied: whatever a row holds that is not valid, NaN included, must not come through.
        void = ~valid
        terms = torch.stack([surrogate, error, policy.entropy, policy.kl, clipped]).masked_fill_(void, 0.0)
        # Where nothing counts everything is zero already.
        share = count.clamp(min=1e-9).reciprocal_()
        means = terms.flatten(1).sum(-1).mul_(share)
        d_params = policy.pull_back(d_log_prob.mul_(share).unsqueeze(-1), -entropy_coef * share)
        d_params.masked_fill_(void.unsqueeze(-1), 0.0)
        d_value.mul_(share * value_coef).masked_fill_(void, 0.0)
        loss = means[0] + value_coef * means[1] - entropy_coef * means[2]
    return loss, means, d_params, d_value
