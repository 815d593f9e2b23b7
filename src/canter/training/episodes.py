"""Count episodes and look for NaN, on the device until the host reads them.

T steps, N environments, K rollouts since the last reading, C searched tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canter.core import distributed
from canter.core.data.rollout import Rollout
from canter.core.struct import maybe_any, tree_leaves
from canter.functional.statistics import group_sums

ACTION = "action"
"""Name of the action in an algorithm's record, if it has one."""


class NonFinite(RuntimeError):
    """NaN or infinity appeared."""

    before: int = 0
    """Number of iterations of this reading that came before the one in which it appeared."""


class NonFiniteObservation(NonFinite):
    """An environment returned NaN or infinity; the message says which, where and when."""


class NonFiniteUpdate(NonFinite):
    """An update left NaN or infinity in weights, moments or statistics."""


class NonFiniteElsewhere(NonFinite):
    """NaN or infinity appeared on another rank, and not on this one."""


BY_STEP = ("return_", "length", "ending")
"""Tensors `[T, N]` that are kept of a rollout: of each step, as if an episode ended there."""
NONFINITE_UPDATE = "weights, moments or statistics became NaN or infinite in an update"


@dataclass
class Episodes:
    """Episodes of all ranks that ended in K rollouts, on the host, in the order of their ends."""

    return_: list[float]
    """Sum of the raw rewards of each episode."""
    length: list[int]
    """Number of steps of each episode."""
    terminated: list[bool]
    """True if it terminated, False if it was truncated."""
    env_steps: int
    """Valid transitions in the rollouts."""
    resets: int
    """Episodes that started in the rollouts."""
    mean_reward: float
    """Mean raw reward of the valid transitions."""
    gain_and_time: list[list[list[float]]]
    """`[K][2][G]` sums of raw rewards and of durations, over at most 20 groups of environments."""


class EpisodeTracker:
    """Running returns and lengths of N episodes, on the device."""

    def __init__(self, horizon: int, num_envs: int, device: torch.device) -> None:
        self.running_return = torch.zeros(num_envs, dtype=torch.float64, device=device)
        self.running_length = torch.zeros(num_envs, dtype=torch.int64, device=device)
        # [t] is the running value after step t, which is an episode's total if it ended there.
        self.return_ = torch.zeros((horizon, num_envs), dtype=torch.float64, device=device)
        self.length = torch.zeros((horizon, num_envs), dtype=torch.int64, device=device)
        self.kept: list[dict[str, Tensor]] = []
        """For each rollout since the last reading: float64 tensors by name, see `keep`."""
        self.checked: dict[str, torch.Size] = {}
        """Shapes `[T, N, ...]` of the tensors that are searched for NaN and infinity, by name."""
        self.reads_at_once = device.type == "cpu"
        """The host checks every rollout before learning from it, which is free on a CPU."""
        self.unclean: int | None = None
        """Number of iterations of the last reading before the first with a metric that is not
        finite; None without one."""
        self.suspects = torch.zeros((0, 2), dtype=torch.float64, device=device)
        """`[C, 2]` position and value of the first number in each searched tensor that is not
        finite."""

    def add(self, rollout: Rollout[Any]) -> None:
        """Count the steps of a rollout; invalid ones add nothing."""
        done = rollout.done
        before = None
        if maybe_any(done):
            row = torch.arange(len(done), device=done.device).unsqueeze(-1)
            ended = torch.where(done, row, -1).cummax(0).values
            before = torch.cat([torch.full_like(ended[:1], -1), ended[:-1]])  # the last end before each step, -1: none
        for running, totals, gained in (
            (self.running_return, self.return_, torch.where(rollout.valid, rollout.reward, 0.0)),
            (self.running_length, self.length, rollout.valid),
        ):
            torch.add(running, gained.cumsum(0, dtype=running.dtype), out=totals)
            if before is not None:
                totals -= torch.where(before >= 0, totals.gather(0, before.clamp(min=0)), 0)
            running.copy_(totals[-1] if before is None else torch.where(done[-1], 0, totals[-1]))

    def search(self, rollout: Rollout[Any], steps: int) -> None:
        """Search a rollout for NaN and infinity; `steps` is the step count before it.

        Raises `NonFiniteObservation` if `reads_at_once`. Otherwise `read` raises later, and
        `finite` informs the device until then.
        """
        if self.reads_at_once and self.checked and _is_sound(rollout):  # so `suspects` can stay as they are
            return
        seen = floats_seen(rollout)
        self.checked = {name: values.shape for name, values in seen.items()}
        found = torch.stack([first_nonfinite(values) for values in seen.values()])
        if self.suspects.shape != found.shape:
            self.suspects = torch.empty_like(found)
        self.suspects.copy_(found)  # where captured graphs look for it
        if self.reads_at_once:
            try:
                refuse_nonfinite(self.suspects, self.checked, steps)
            except NonFinite:
                self.suspects.zero_()  # that rollout is discarded
                raise

    @property
    def finite(self) -> Tensor:
        """0-d bool on the device: nothing was found in the last rollout that was searched."""
        return torch.isfinite(self.suspects[:, 1]).all()

    def keep(self, rollout: Rollout[Any], flags: Tensor | None = None) -> None:
        """Keep the statistics of the rollout just added, before the next one overwrites it.

        `flags` `[2]` bool: the state learned from it is finite; the metrics are finite too.
        """
        valid = rollout.valid
        rewards = torch.where(valid, rollout.reward, 0.0)
        time = torch.where(valid, rollout.duration, 0.0)
        starts = rollout.reset[:-1] & valid
        kept = {
            "totals": torch.stack([total.sum().double() for total in (valid, starts, rewards)]),
            "gain_and_time": torch.stack([rewards, time]).sum(1, dtype=torch.float64),
            "return_": self.return_.clone(),
            "length": self.length.double(),
            # 0: no end, 1: truncated, 2: terminated.
            "ending": rollout.done.double() + rollout.terminated,
        }
        flags = torch.ones(2, device=valid.device) if flags is None else flags
        self.kept.append(kept | {"suspects": self.suspects.clone(), "flags": flags.double()})

    def read(self, steps: int) -> Episodes:
        """Return the episodes of all rollouts kept since the last reading, after `steps` steps.

        Raises `NonFiniteObservation` if one of these rollouts has NaN or infinity, and
        `NonFiniteElsewhere` if one of another rank has: all ranks raise for the same rollout, the
        first one.
        """
        kept = self.kept
        self.kept = []
        shapes = {name: tensor.shape for name, tensor in kept[0].items() if name not in BY_STEP}
        flat = torch.stack([torch.cat([rollout[name].reshape(-1) for name in shapes]) for rollout in kept])
        parts = flat.cpu().split([shape.numel() for shape in shapes.values()], dim=1)
        read = {name: part.unflatten(1, shapes[name]) for name, part in zip(shapes, parts, strict=True)}
        self.unclean = int(read["flags"][:, 1].sum()) if not read["flags"][-1, 1] else None
        error = self._first_error(read, steps)
        bad = torch.zeros(len(kept), dtype=torch.float64)
        if error is not None:
            bad[error.before] = 1.0
        sums = distributed.sum_(torch.cat([bad, read["totals"].sum(0)]))  # errors travel with the sums
        if sums[: len(kept)].any():
            number = int(sums[: len(kept)].nonzero()[0])
            if error is None or error.before != number:
                error = NonFiniteElsewhere("NaN or infinity on another rank")
            self.kept = kept[:number]
            error.before = number
            raise error
        env_steps, resets, reward = sums[len(kept) :].tolist()
        return_, length, ending = _ended(torch.stack([torch.stack([each[name] for each in kept]) for name in BY_STEP]))
        gains = distributed.all_gather(read["gain_and_time"].movedim(-1, 0)).movedim(0, -1)
        return Episodes(
            return_=return_.tolist(),
            length=length.long().tolist(),
            terminated=(ending == 2).tolist(),
            env_steps=int(env_steps),
            resets=int(resets),
            mean_reward=reward / max(env_steps, 1),
            gain_and_time=[group_sums(each).tolist() for each in gains],
        )

    def _first_error(self, read: dict[str, Tensor], steps: int) -> NonFinite | None:
        """Return the first error in the rollouts that were `read`, and its rollout's index."""
        count = len(read["suspects"])
        for number, suspects in enumerate(read["suspects"]):
            try:
                refuse_nonfinite(suspects, self.checked, steps - (count - number) * len(self.return_))
                if not read["flags"][number, 0]:
                    raise NonFiniteUpdate(NONFINITE_UPDATE)
            except NonFinite as error:
                error.before = number
                return error
        return None


def _ended(steps: Tensor) -> Tensor:
    """Select from `[3, K, T, N]`, as in `BY_STEP`, where episodes ended; return `[3, E]` of all ranks, by time."""
    ending = steps[-1]
    ended = steps[:, ending > 0].cpu()  # few of many steps: only they leave the device
    if not distributed.active():
        return ended
    rollout, step, env = torch.nonzero(ending > 0).cpu().unbind(1)
    place = (rollout * ending.shape[1] + step) * ending.shape[2] * distributed.world_size()
    place = place + env + distributed.rank() * ending.shape[2]
    rows = distributed.all_gather(torch.cat([place.double().unsqueeze(0), ended]).t().contiguous())
    return rows[rows[:, 0].argsort()].t()[1:]


def floats_seen(rollout: Rollout[Any]) -> dict[str, Tensor]:
    """Return all float tensors `[T or T+1, N, ...]` to and from the environment, by name."""
    action = getattr(rollout.record, ACTION, None)  # an algorithm's own record may have none
    seen: dict[str, Tensor] = {"reward": rollout.reward, "duration": rollout.duration}
    if action is not None:
        seen[ACTION] = action
    seen |= {f"observation {name!r}": group for name, group in rollout.obs.items()}
    for name, group in (rollout.final_obs or {}).items():
        ended = rollout.done.reshape(*rollout.done.shape, *[1] * (group.ndim - 2))
        seen[f"final observation {name!r}"] = torch.where(ended, group, torch.zeros_like(group))
    return {name: values for name, values in seen.items() if values.is_floating_point()}


def _is_sound(rollout: Rollout[Any]) -> bool:
    """Check quickly that everything in `floats_seen` is finite, unused numbers too."""
    action = getattr(rollout.record, ACTION, None)
    seen = tree_leaves((rollout.reward, rollout.duration, rollout.obs, rollout.final_obs, action))
    return all(is_finite(values) for values in seen if values.is_floating_point())


def is_finite(x: Tensor) -> bool:
    """Return True if a tensor is finite, by a host read of its sum."""
    return math.isfinite(x.sum().item()) or bool(torch.isfinite(x).all())


def first_nonfinite(values: Tensor) -> Tensor:
    """Return `[2]` float64: position and value of the first NaN or infinity, or of element 0."""
    flat = values.reshape(-1)
    place = (flat - flat).argmax()  # 0 where finite, else NaN, which counts as the largest
    return torch.stack([place.double(), flat.take(place).double()])  # `flat[place]` would wait for the device


def refuse_nonfinite(suspects: Tensor, shapes: dict[str, torch.Size], steps_before: int) -> None:
    """Raise NonFiniteObservation if one of `suspects` `[C, 2]` (`first_nonfinite`) is nonfinite.

    `shapes` are those of the C searched tensors, by name; they start at step `steps_before`.
    """
    found = []
    for (place, value), (name, shape) in zip(suspects.tolist(), shapes.items(), strict=True):
        if not math.isfinite(value):
            t, env, *component = (int(i) for i in np.unravel_index(int(place), shape))
            found.append((name, value, t, env + shape[1] * distributed.rank(), component))
    if found:
        name, value, t, env, component = min(found, key=lambda item: moment(item[0], item[2]))
        where = f" component {component}" if component else ""
        source = f"environment {env} returned"
        if name == ACTION:
            source = f"the policy sent environment {env} the"
        raise NonFiniteObservation(f"{source} {name}{where} = {value} at its step {steps_before + t}")


def moment(name: str, t: int) -> tuple[int, int]:
    """Return a sort key for values of step t: observation, then action, then results."""
    if name.startswith("observation"):
        return t, 0
    return t, 1 if name == ACTION else 2
