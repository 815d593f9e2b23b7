"""Gaussians whose log-std does not depend on the observation: parameters, samples and densities.

M samples, A action components. Parameters are a mean and a log-std, concatenated.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from canter.core.dispatch import double_backward, kernel, on_gpu
from canter.functional import densities

TILE = 64
FORMS: tuple[densities.StdForm, ...] = ("bounded", "log", "scalar")
"""Parameterisations of the std by their numbers in kernels."""


@triton.jit
def _log_std(raw, mid, half, FORM: tl.constexpr):
    """Return the log-std of learned numbers, and its slope."""
    if FORM == 0:
        x = raw / half
        root = tl.sqrt_rn(1.0 + x * x)
        return mid + half * x / root, 1.0 / (root * root * root)
    elif FORM == 1:
        return raw, tl.full(raw.shape, 1.0, tl.float32)
    else:
        std = tl.where(raw < 1e-6, 1e-6, raw)
        return tl.log(std), tl.where(raw < 1e-6, 0.0, 1.0 / std)


@triton.jit
def _join(mean_ptr, raw_ptr, out_ptr, M, A, mid, half, FORM: tl.constexpr, TILE: tl.constexpr, TILE_A: tl.constexpr):
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    parts = tl.arange(0, TILE_A)
    inside = (rows < M)[:, None] & (parts < A)[None, :]
    log_std, _ = _log_std(tl.load(raw_ptr + parts, mask=parts < A, other=0.0), mid, half, FORM)
    where = rows[:, None] * (2 * A) + parts[None, :]
    mean = tl.load(mean_ptr + rows[:, None] * A + parts[None, :], mask=inside, other=0.0)
    tl.store(out_ptr + where, mean, mask=inside)
    tl.store(out_ptr + where + A, tl.broadcast_to(log_std[None, :], (TILE, TILE_A)), mask=inside)


@triton.jit
def _part(d_ptr, d_mean_ptr, sums_ptr, M, A, TILE: tl.constexpr, TILE_A: tl.constexpr):
    """Store the mean's half of the gradient, and the column sums of the other half over a block."""
    block = tl.program_id(0)
    parts = tl.arange(0, TILE_A)
    rows = block * TILE + tl.arange(0, TILE)
    inside = (rows < M)[:, None] & (parts < A)[None, :]
    where = rows[:, None] * (2 * A) + parts[None, :]
    d_mean = tl.load(d_ptr + where, mask=inside, other=0.0)
    tl.store(d_mean_ptr + rows[:, None] * A + parts[None, :], d_mean, mask=inside)
    sums = tl.sum(tl.load(d_ptr + where + A, mask=inside, other=0.0), 0)
    tl.store(sums_ptr + block * A + parts, sums, mask=parts < A)


@triton.jit
def _finish(
    sums_ptr, raw_ptr, out_ptr, blocks, A, mid, half, FORM: tl.constexpr, TILE: tl.constexpr, TILE_A: tl.constexpr
):  # fmt: skip
    """Compute the gradient of the raw numbers from the sums of all blocks, in a fixed order."""
    parts = tl.arange(0, TILE_A)
    total = tl.zeros((TILE_A,), tl.float32)
    for start in range(0, blocks, TILE):
        rows = start + tl.arange(0, TILE)
        inside = (rows < blocks)[:, None] & (parts < A)[None, :]
        total += tl.sum(tl.load(sums_ptr + rows[:, None] * A + parts[None, :], mask=inside, other=0.0), 0)
    _, slope = _log_std(tl.load(raw_ptr + parts, mask=parts < A, other=0.0), mid, half, FORM)
    tl.store(out_ptr + parts, total * slope, mask=parts < A)


class _GaussianParams(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, raw: Tensor, mid: float, half: float, form: densities.StdForm = "bounded"
    ) -> Tensor:
        m, a = mean.shape
        tile_a = max(2, triton.next_power_of_2(mean.shape[1]))
        out = mean.new_empty(m, 2 * a)
        _join[(triton.cdiv(m, TILE),)](
            mean, raw, out, m, a, mid, half, FORM=FORMS.index(form), TILE=TILE, TILE_A=tile_a
        )  # fmt: skip
        ctx.std = mid, half, form
        ctx.save_for_backward(mean, raw)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        mean, raw = ctx.saved_tensors
        if torch.is_grad_enabled():
            plain = densities.gaussian_params.plain
            return *double_backward(plain, (mean, raw), gradients[0], ctx.std), None, None, None
        gradient = gradients[0].contiguous()
        m = gradient.shape[0]
        a = raw.shape[0]
        blocks = triton.cdiv(m, TILE)
        tile_a = max(2, triton.next_power_of_2(a))
        d_mean = gradient.new_empty(m, a)
        sums = gradient.new_empty(blocks, a)
        d_raw = torch.empty_like(raw)
        _part[(blocks,)](gradient, d_mean, sums, m, a, TILE=TILE, TILE_A=tile_a)
        mid, half, form = ctx.std
        _finish[(1,)](sums, raw, d_raw, blocks, a, mid, half, FORM=FORMS.index(form), TILE=128, TILE_A=tile_a)
        return d_mean, d_raw, None, None, None


def _same_in_all_samples(
    mean: Tensor, raw: Tensor, mid: float, half: float, form: densities.StdForm = "bounded"
) -> bool:
    return on_gpu(mean) and raw.ndim == 1 and form in FORMS


@kernel(of=densities.gaussian_params, accepts=_same_in_all_samples)
def gaussian_params(mean: Tensor, raw: Tensor, mid: float, half: float, form: densities.StdForm = "bounded") -> Tensor:
    """Concatenate mean and log-std in one launch, for `raw` `[A]`."""
    flat = mean.reshape(-1, mean.shape[-1]).contiguous()
    return _GaussianParams.apply(flat, raw, mid, half, form).unflatten(0, mean.shape[:-1])


@triton.jit
def _draw(
    mean_ptr, raw_ptr, noise_ptr, bounds_ptr, params_ptr, action_ptr, env_ptr, M, A, mid, half, FORM: tl.constexpr,
    SQUASHED: tl.constexpr, TILE: tl.constexpr, TILE_A: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    parts = tl.arange(0, TILE_A)
    inside = (rows < M)[:, None] & (parts < A)[None, :]
    where = rows[:, None] * A + parts[None, :]
    log_std, _ = _log_std(tl.load(raw_ptr + parts, mask=parts < A, other=0.0), mid, half, FORM)
    log_std = log_std[None, :] + tl.zeros((TILE, TILE_A), tl.float32)
    mean = tl.load(mean_ptr + where, mask=inside, other=0.0)
    action = mean + tl.exp(log_std) * tl.load(noise_ptr + where, mask=inside, other=0.0)
    tl.store(params_ptr + where + rows[:, None] * A, mean, mask=inside)
    tl.store(params_ptr + where + (rows[:, None] + 1) * A, log_std, mask=inside)
    tl.store(action_ptr + where, action, mask=inside)
    scale = tl.load(bounds_ptr + parts, mask=parts < A)
    centre = tl.load(bounds_ptr + A + parts, mask=parts < A)
    low = tl.load(bounds_ptr + 2 * A + parts, mask=parts < A)
    high = tl.load(bounds_ptr + 3 * A + parts, mask=parts < A)
    if SQUASHED:
        action = 2.0 * tl.sigmoid(2.0 * action) - 1.0
    y = action * scale[None, :] + centre[None, :]
    # NaN stays NaN, as in torch's clamp.
    within = tl.where(y != y, y, tl.minimum(tl.maximum(y, low[None, :]), high[None, :]))
    tl.store(env_ptr + where, within, mask=inside)


def draw(
    mean: Tensor,
    raw: Tensor,
    noise: Tensor,
    bounds: Tensor,
    *,
    mid: float,
    half: float,
    form: densities.StdForm = "bounded",
    squashed: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return parameters `[M, 2A]`, sample `[M, A]` and action for the environment `[M, A]`.

    `bounds` `[4, A]` are scale, centre, minimum and maximum, as in `DiagGaussian.to_env`, which
    apply to the tanh of the sample if it is `squashed`.
    """
    m, a = mean.shape
    tile_a = max(2, triton.next_power_of_2(mean.shape[1]))
    params = mean.new_empty(m, 2 * a)
    action = torch.empty_like(mean)
    for_env = torch.empty_like(mean)
    grid = (triton.cdiv(m, TILE),)
    _draw[grid](
        mean, raw, noise, bounds, params, action, for_env, m, a, mid, half,
        FORM=FORMS.index(form), SQUASHED=squashed, TILE=TILE, TILE_A=tile_a,
    )  # fmt: skip
    return params, action, for_env


@triton.jit
def _log_prob(action, mean, log_std, inside):
    # 0.9189... is half the logarithm of two pi; a kernel sees no constants of its module.
    z = (action - mean) * tl.exp(-log_std)
    return tl.sum(tl.where(inside, -0.5 * z * z - log_std - 0.9189385332046727, 0.0), 1)


@triton.jit
def _log_probs(params_ptr, action_ptr, out_ptr, M, A, TILE: tl.constexpr, TILE_A: tl.constexpr):
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    parts = tl.arange(0, TILE_A)
    inside = (rows < M)[:, None] & (parts < A)[None, :]
    where = rows[:, None].to(tl.int64) * A + parts[None, :]
    mean = tl.load(params_ptr + where + rows[:, None] * A, mask=inside, other=0.0)
    log_std = tl.load(params_ptr + where + (rows[:, None] + 1) * A, mask=inside, other=0.0)
    action = tl.load(action_ptr + where, mask=inside, other=0.0)
    tl.store(out_ptr + rows, _log_prob(action, mean, log_std, inside), mask=rows < M)


def _without_gradient(params: Tensor, x: Tensor) -> bool:
    return on_gpu(params) and not (torch.is_grad_enabled() and (params.requires_grad or x.requires_grad))


@kernel(of=densities.diag_gaussian_log_prob, accepts=_without_gradient)
def diag_gaussian_log_prob(params: Tensor, action: Tensor) -> Tensor:
    """Compute log-probabilities in one launch, without gradient."""
    a = action.shape[-1]
    out = action.new_empty(action.shape[:-1])
    tile_a = max(2, triton.next_power_of_2(a))
    m = out.numel()
    grid = (triton.cdiv(m, TILE),)
    _log_probs[grid](params.contiguous(), action.contiguous(), out, m, a, TILE=TILE, TILE_A=tile_a)
    return out
