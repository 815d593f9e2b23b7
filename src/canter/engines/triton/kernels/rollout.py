"""Kernels for rollouts: minibatches, random permutations, standardising and advantages."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from canter.core.dispatch import kernel, on_gpu
from canter.core.seeding import MemberStreams
from canter.core.struct import tree_leaves, tree_map
from canter.functional import optimization, returns, statistics
from canter.functional.optimization import Tree

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types that elements are copied as, by their size in bytes."""
TILE = 2048
"""Elements that one block copies."""


@triton.constexpr_function
def _across(features: int) -> int:
    """Return the number of columns of a tile for this many features."""
    return min(128, triton.next_power_of_2(features))


@triton.jit
def _gather_one(
    x_ptr, out_ptr, index_ptr, block, S, B, L: tl.constexpr, F: tl.constexpr,
    TILE_S: tl.constexpr, TILE_F: tl.constexpr,
):  # fmt: skip
    """Copy block `block` of `x[:, index]` for `x` `[L, S, F]`, if it exists.

    Return the number of blocks.
    """
    down = tl.cdiv(B, TILE_S)
    across = tl.cdiv(F, TILE_F)
    if (block >= 0) & (block < L * across * down):
        rows = block % down * TILE_S + tl.arange(0, TILE_S)
        columns = block // down % across * TILE_F + tl.arange(0, TILE_F)
        plane = (block // (down * across)).to(tl.int64) * F
        inside = (rows < B)[:, None] & (columns < F)[None, :]
        taken = tl.load(index_ptr + rows, mask=rows < B, other=0)
        values = tl.load(x_ptr + plane * S + taken[:, None] * F + columns[None, :], mask=inside)
        tl.store(out_ptr + plane * B + rows[:, None] * F + columns[None, :], values, mask=inside)
    return L * across * down


@triton.jit
def _gather(sources, targets, index_ptr, S, B, LENGTHS: tl.constexpr, FEATURES: tl.constexpr, TILE: tl.constexpr):
    """Gather `index` `[B]` of the second axis of all `sources` `[LENGTHS[i], S, FEATURES[i]]`."""
    block = tl.program_id(0)
    # Blocks are numbered over all tensors, so that none is started in vain for the smaller ones.
    for i in tl.static_range(len(sources)):
        block -= _gather_one(
            sources[i], targets[i], index_ptr, block, S, B, LENGTHS[i], FEATURES[i],
            TILE // _across(FEATURES[i]), _across(FEATURES[i]),
        )  # fmt: skip


def _all_on_gpu(tree: Any, index: Tensor) -> bool:
    leaves = tree_leaves(tree)
    return (
        bool(leaves)
        and not torch.compiler.is_compiling()
        and all(leaf.is_cuda and leaf.dtype.itemsize in BITS for leaf in leaves)
        and len({leaf.shape[1] for leaf in leaves}) == 1
        and not (torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves))
    )


@kernel(of=optimization.take_sequences, accepts=_all_on_gpu)
def take_sequences(tree: Tree, index: Tensor) -> Tree:
    """Gather all tensors in one launch, without gradient."""
    sources = [leaf.contiguous() for leaf in tree_leaves(tree)]
    taken = [leaf.new_empty(leaf.shape[0], len(index), *leaf.shape[2:]) for leaf in sources]
    pairs = [pair for pair in zip(sources, taken, strict=True) if pair[1].numel()]
    if pairs:
        bits = [[x.view(BITS[x.dtype.itemsize]) for x in pair] for pair in pairs]
        lengths = tuple(x.shape[0] for x, _ in pairs)
        features = tuple(x.shape[2:].numel() for x, _ in pairs)
        tiles = ((TILE // _across(f), _across(f)) for f in features)
        blocks = sum(
            length * triton.cdiv(len(index), tile_s) * triton.cdiv(f, tile_f)
            for length, f, (tile_s, tile_f) in zip(lengths, features, tiles, strict=True)
        )
        _gather[(blocks,)](
            tuple(x for x, _ in bits), tuple(y for _, y in bits), index.contiguous(), pairs[0][0].shape[1], len(index),
            LENGTHS=lengths, FEATURES=features, TILE=TILE,
        )  # fmt: skip
    rebuilt = iter(taken)
    return tree_map(lambda _: next(rebuilt), tree)


@triton.jit
def _standardize(x_ptr, shift_ptr, scale_ptr, out_ptr, count, F, clip, TILE: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = i < count
    column = i % F
    shift = tl.load(shift_ptr + column, mask=inside, other=0.0)
    scale = tl.load(scale_ptr + column, mask=inside, other=0.0)
    y = (tl.load(x_ptr + i, mask=inside, other=0.0) - shift) * scale
    # NaN stays NaN, as in torch's clamp.
    tl.store(out_ptr + i, tl.where(y != y, y, tl.minimum(tl.maximum(y, -clip), clip)), mask=inside)


def _clips(x: Tensor, shift: Tensor, inverse_scale: Tensor, clip: float | None) -> bool:
    return on_gpu(x) and clip is not None and not x.requires_grad


@kernel(of=statistics.standardize, accepts=_clips)
def standardize(x: Tensor, shift: Tensor, inverse_scale: Tensor, clip: float) -> Tensor:
    """Standardise in one launch, without gradient."""
    x = x.contiguous()
    out = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), 1024),)
    _standardize[grid](x, shift, inverse_scale, out, x.numel(), shift.numel(), clip, TILE=1024)
    return out


@triton.jit
def _gae(
    reward_ptr, value_ptr, next_value_ptr, terminated_ptr, done_ptr, gamma_ptr, advantage_ptr, return_ptr,
    T, N, gamma, gae_lambda, PER_ROW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = columns < N
    advantage = tl.zeros((TILE,), tl.float32)
    for back in range(T):
        where = (T - 1 - back) * N + columns
        value = tl.load(value_ptr + where, mask=inside, other=0.0)
        discount = tl.load(gamma_ptr + where, mask=inside, other=0.0) if PER_ROW else gamma
        # Filled, not multiplied: 0 * NaN would let an undefined successor into the sum.
        ended = tl.load(terminated_ptr + where, mask=inside, other=0) != 0
        successor = tl.where(ended, 0.0, tl.load(next_value_ptr + where, mask=inside, other=0.0))
        delta = tl.load(reward_ptr + where, mask=inside, other=0.0) + discount * successor - value
        cut = tl.load(done_ptr + where, mask=inside, other=0) != 0
        advantage = delta + tl.where(cut, 0.0, discount * gae_lambda) * advantage
        tl.store(advantage_ptr + where, advantage, mask=inside)
        tl.store(return_ptr + where, advantage + value, mask=inside)


@kernel(of=returns.gae, accepts=on_gpu)
def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    done: Tensor,
    gamma: float | Tensor,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Compute advantages in one launch, with a thread for each environment."""
    steps, num_envs = reward.shape
    advantage = torch.empty_like(value)
    return_ = torch.empty_like(value)
    rows = [row.contiguous() for row in (reward, value, next_value)]
    flags = [flag.contiguous().view(torch.uint8) for flag in (terminated, done)]
    per_row = isinstance(gamma, Tensor)
    discounts, number = (gamma.expand_as(value).contiguous(), 0.0) if per_row else (value, gamma)
    _gae[(triton.cdiv(num_envs, 32),)](
        *rows, *flags, discounts, advantage, return_, steps, num_envs, number, gae_lambda,
        PER_ROW=per_row, TILE=32, num_warps=1,
    )  # fmt: skip
    return advantage, return_


@triton.jit
def _mix(x, key):
    x = (x + key) * 0x9E3779B1
    x = (x ^ (x >> 15)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _scatter_bits(x, keys_ptr, HIGH: tl.constexpr, LOW: tl.constexpr):
    """Permute the numbers of HIGH + LOW bits, each half by a hash of the other half and a key."""
    high = x >> LOW
    low = x & ((1 << LOW) - 1)
    for turn in tl.static_range(4):
        high = high ^ (_mix(low, tl.load(keys_ptr + 2 * turn).to(tl.uint32)) & ((1 << HIGH) - 1))
        low = low ^ (_mix(high, tl.load(keys_ptr + 2 * turn + 1).to(tl.uint32)) & ((1 << LOW) - 1))
    return (high << LOW) | low


@triton.jit
def _random_order(keys_ptr, out_ptr, N, HIGH: tl.constexpr, LOW: tl.constexpr, TILE: tl.constexpr):
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    keys_ptr += tl.program_id(1) * 8
    out_ptr += tl.program_id(1) * N
    # Numbers not below N are permuted again until they are: every number below N still appears
    # exactly once.
    x = tl.where(i < N, _scatter_bits(i.to(tl.uint32), keys_ptr, HIGH, LOW), 0)
    while tl.max((x.to(tl.int32) >= N).to(tl.int32), 0) > 0:
        x = tl.where(x.to(tl.int32) >= N, _scatter_bits(x, keys_ptr, HIGH, LOW), x)
    tl.store(out_ptr + i, x.to(tl.int64), mask=i < N)


def _draws_on_gpu(count: int, generator: torch.Generator | MemberStreams) -> bool:
    return generator.device.type == "cuda"


@kernel(of=optimization.permutation, accepts=_draws_on_gpu)
def permutation(count: int, generator: torch.Generator | MemberStreams) -> Tensor:
    """Permute without sorting, which takes a GPU as long as a third of a minibatch."""
    draw = partial(torch.randint, 1 << 32)
    if isinstance(generator, MemberStreams):
        members, shape = len(generator.generators), (len(generator.generators), count)
        keys = generator.draw(draw, (members * 8,), device=generator.device)
    else:
        members, shape = 1, (count,)
        keys = draw((8,), generator=generator, device=generator.device)
    out = torch.empty(shape, dtype=torch.int64, device=generator.device)
    bits = max(2, (count - 1).bit_length())
    high = bits // 2
    _random_order[(triton.cdiv(count, 128), members)](keys, out, count, HIGH=high, LOW=bits - high, TILE=128)
    return out
