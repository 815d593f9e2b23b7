"""Settings that cannot work with an environment, refused before any work is lost."""

from __future__ import annotations

import math
import warnings

from torch import nn

from canter import distributed
from canter.nn.stack import has_batch_norm
from canter.specs import EnvSpec


def check_batch(
    horizon: int,
    num_envs: int,
    num_minibatches: int,
    sequence_length: int = 1,
    key: str = "",
    *,
    even: bool = True,
    may_drop: bool = True,
) -> None:
    """Refuse sequences and minibatches that do not divide the rollout, and offer the nearest numbers that do.

    Without `even` the minibatches need only be there; `may_drop` says that there is a setting for that.
    """
    if horizon % sequence_length:
        fits = [n for n in range(1, horizon + 1) if horizon % n == 0]
        near = min(fits, key=lambda n: abs(n - sequence_length))
        longer = math.ceil(horizon / sequence_length) * sequence_length
        raise ValueError(
            f"sequence_length={sequence_length} does not divide horizon={horizon}; "
            f"use sequence_length={near}, or horizon={longer}"
        )
    batch = horizon // sequence_length * num_envs
    if batch % num_minibatches == 0 or (not even and num_minibatches < batch):
        return
    fewer = next(n for n in range(num_minibatches, 0, -1) if batch % n == 0)
    more = next((n for n in range(num_minibatches, batch) if batch % n == 0), batch)
    step = num_minibatches // math.gcd(num_minibatches, num_envs) * sequence_length
    over = f" / sequence_length = {horizon} * {num_envs} / {sequence_length}" if sequence_length > 1 else ""
    drop = ", or uneven_minibatches=drop, which leaves some rows out" if may_drop and even else ""
    raise ValueError(
        f"{key}num_minibatches={num_minibatches} does not divide horizon * num_envs"
        f"{over or f' = {horizon} * {num_envs}'} = {batch}; "
        f"use {key}num_minibatches={fewer} or {more}, or horizon={math.ceil(horizon / step) * step}"
        + (drop if num_minibatches < batch else "")
    )


def check_blocks(blocks: int | None, num_envs: int) -> int:
    """Environments of a block that is shuffled apart; refuses blocks that ranks or their environments do not fill."""
    ranks = distributed.world_size()
    own = (blocks or ranks) // ranks
    if blocks is not None and (blocks % ranks or num_envs % own):
        fits = [n * ranks for n in range(1, num_envs + 1) if num_envs % n == 0]
        near = min(fits, key=lambda n: abs(n - blocks))
        raise ValueError(
            f"shuffle_blocks={blocks} does not divide {num_envs * ranks} environments on {ranks} ranks into blocks "
            f"within ranks; use shuffle_blocks={near}"
        )
    return num_envs // own


def check_norms(model: nn.Module) -> None:
    """Refuse batch norm: its statistics would stay as they begin, as only joint batches move them."""
    if has_batch_norm(model):
        raise ValueError("a norm of kind batch needs the joint batches of sac; use layer or rms with ppo")


def check_discount(gamma: float, spec: EnvSpec) -> None:
    """Refuse gamma = 1 where values would have no fixed point, warn where they might not."""
    if gamma < 1 or spec.truncates is False:
        return
    reason = (
        "with gamma=1 a value is the whole future reward; where episodes are cut off and bootstrapped from that value, "
        "it has no fixed point and drifts without end"
    )
    if spec.truncates:
        raise ValueError(
            f"gamma=1 on {spec.env_id or 'this environment'}, whose episodes are truncated: {reason}. "
            "Use gamma < 1, or declare finite_horizon=True if the deadline is part of the task and the observation "
            "tells the time"
        )
    warnings.warn(f"gamma=1: {reason}. This is fine only if every episode terminates by itself", stacklevel=3)
