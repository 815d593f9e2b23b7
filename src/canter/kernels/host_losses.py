"""PPO's loss on a CPU with all gradients, differentiated by hand.

M rows, A action components, n choices. Small networks are dominated by the number of operations: the plain form has
some eighty forward and backward, each with a node of autograd and new memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Array = np.ndarray
HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
total = np.add.reduce
"""`sum` without its detours."""


@dataclass(frozen=True)
class PolicyTerms:
    """What a distribution says of stored actions."""

    log_prob: Array
    """`[M]`."""
    entropy: Array
    """`[M]`, or 0-d where it is the same in every row."""
    kl: Array
    """`[M]` KL(old || new)."""
    pull_back: Callable[[Array, float], tuple[Array, Array | None]]
    """Gradients of the network's output and of the log-std, if there is one, from that of the log-probability `[M, 1]`
    and that of the entropy of each row."""


def gaussian(mean: Array, log_std: Array | None, action: Array, old_params: Array) -> PolicyTerms:
    """Of independent normal components: `mean` `[M, A]`, `log_std` `[A]`, `old_params` `[M, 2A]`."""
    assert log_std is not None
    dim = mean.shape[1]
    precision = np.exp(-log_std)
    z = (action - mean) * precision
    square = z * z
    log_prob = total(square, 1) * -0.5 - (float(total(log_std)) + dim * HALF_LOG_2PI)
    log_ratio = old_params[:, dim:] - log_std
    shift = (old_params[:, :dim] - mean) * precision
    # As in the plain form: expm1 keeps the second-order difference that is left when the two are close.
    kl = total(np.expm1(log_ratio + log_ratio) + shift * shift - 2.0 * log_ratio, 1) * 0.5

    def pull_back(d_log_prob: Array, d_entropy: float) -> tuple[Array, Array]:
        d_log_std = total((square - 1.0) * d_log_prob, 0) + d_entropy * len(mean)
        return z * precision * d_log_prob, d_log_std

    return PolicyTerms(log_prob, total(log_std) + dim * (HALF_LOG_2PI + 0.5), kl, pull_back)


def categorical(logits: Array, log_std: Array | None, action: Array, old_params: Array) -> PolicyTerms:
    """Of one choice: `logits` and `old_params` `[M, n]`, actions int64 `[M]`."""
    log_prob, old = _log_softmax(logits), _log_softmax(old_params)
    prob, row = np.exp(log_prob), np.arange(len(action))
    entropy = -total(prob * log_prob, 1)

    def pull_back(d_log_prob: Array, d_entropy: float) -> tuple[Array, None]:
        # d entropy / d logit = -p (log p + entropy), d log p(action) / d logit = [logit is the action's] - p
        gradient = ((log_prob + entropy[:, None]) * d_entropy + d_log_prob) * -prob
        gradient[row, action] += d_log_prob[:, 0]
        return gradient, None

    return PolicyTerms(log_prob[row, action], entropy, total(np.exp(old) * (old - log_prob), 1), pull_back)


def _log_softmax(logits: Array) -> Array:
    shifted = logits - np.maximum.reduce(logits, 1, keepdims=True)
    return shifted - np.log(total(np.exp(shifted), 1, keepdims=True))


def _surrogate(log_prob: Array, old_log_prob: Array, advantage: Array, clip: float) -> tuple[Array, Array, Array]:
    """The clipped surrogate, its derivative by `log_prob`, and where the ratio was clipped."""
    ratio, cost = np.exp(log_prob - old_log_prob), -advantage
    limited = np.minimum(np.maximum(ratio, 1.0 - clip), 1.0 + clip)
    free, held = cost * ratio, cost * limited
    # The held branch has no gradient where it is the larger one.
    return np.maximum(free, held), (free >= held) * free, limited != ratio


def policy_loss(
    terms: PolicyTerms, old_log_prob: Array, advantage: Array, share: float, *, clip_ratio: float, entropy_coef: float
) -> tuple[list[float], Array, Array | None]:
    """Sums over M rows of surrogate, entropy, KL and clipped rows; gradients of the actor's output and of the log-std.

    Those are of the surrogate less `entropy_coef` times the entropy, with each row counting for `share`.
    """
    surrogate, d_log_prob, clipped = _surrogate(terms.log_prob, old_log_prob, advantage, clip_ratio)
    entropy = total(terms.entropy) if terms.entropy.ndim else terms.entropy * len(advantage)
    d_output, d_log_std = terms.pull_back((d_log_prob * share)[:, None], -entropy_coef * share)
    return [total(surrogate), entropy, total(terms.kl), np.count_nonzero(clipped)], d_output, d_log_std


def value_loss(value: Array, old_value: Array, return_: Array, share: float, clip: float | None) -> tuple[float, Array]:
    """The sum of half the squared errors of M rows, pessimistic about moves beyond `clip`; gradient `[M]` of `value`.

    Each row counts for `share` in the gradient.
    """
    error = value - return_
    square = error * error
    if clip is not None:
        moved = value - old_value
        held = np.square(np.minimum(np.maximum(moved, -clip), clip) + old_value - return_)
        error *= (square >= held) | (np.abs(moved) <= clip)
        square = np.maximum(square, held)
    return 0.5 * total(square), error * share
