"""Counts episodes, on the device until the host reads them.

T steps, N environments, K rollouts since the last reading.
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
from canter.core.struct import may_hold, tree_leaves
from canter.functional.statistics import in_groups

ACTION = "action"
"""The part of a record, where it has one, that the environment acts on."""


class NonFinite(RuntimeError):
    """NaN or infinity appeared."""

    before: int = 0
    """How many of the iterations that were read came before the one in which it did."""


class NonFiniteObservation(NonFinite):
    """An environment gave NaN or infinity; the message names the environment, the key and the step."""


class NonFiniteUpdate(NonFinite):
    """An update left NaN or infinity in weights, moments or statistics."""


class NonFiniteElsewhere(NonFinite):
    """NaN or infinity appeared on another rank, and not on this one."""


SPOILT = "weights, moments or statistics became NaN or infinite in an update"


@dataclass
class Episodes:
    """Episodes of all ranks that ended in K rollouts, on the host, in the order in which they ended."""

    return_: list[float]
    """Sum of the raw rewards of each episode."""
    length: list[int]
    terminated: list[bool]
    """Whether it ended by itself rather than being cut off."""
    env_steps: int
    """Real transitions in the rollouts; reset rows are not counted."""
    resets: int
    """Episodes that began in the rollouts."""
    mean_reward: float
    """Mean of the raw reward over the real transitions."""
    gain_and_time: list[list[list[float]]]
    """`[K][2][G]` sums of the raw rewards and of the durations, over at most 20 groups of environments."""


class EpisodeTracker:
    """Running returns and lengths of N episodes, on the device."""

    def __init__(self, horizon: int, num_envs: int, device: torch.device) -> None:
        self.running_return = torch.zeros(num_envs, dtype=torch.float64, device=device)
        self.running_length = torch.zeros(num_envs, dtype=torch.int64, device=device)
        # Row t holds the running values after step t; they are an episode's totals where it ended.
        self.return_ = torch.zeros((horizon, num_envs), dtype=torch.float64, device=device)
        self.length = torch.zeros((horizon, num_envs), dtype=torch.int64, device=device)
        self.kept: list[dict[str, Tensor]] = []
        """What was kept of each rollout since the last reading: float64 tensors by name, see `keep`."""
        self.checked: dict[str, torch.Size] = {}
        """Shapes `[T, N, ...]` of what is searched for NaN and infinity, by name."""
        self.reads_at_once = device.type == "cpu"
        """Whether what is not finite is looked for by the host before it goes on, which is free on a CPU."""
        self.unclean: int | None = None
        """How many of the iterations that were last read came before one with a metric that is not finite, if any."""
        self.suspects = torch.zeros((0, 2), dtype=torch.float64, device=device)
        """`[C, 2]` the most suspect number of each of these in the last rollout, see `first_nonfinite`."""

    def add(self, rollout: Rollout[Any]) -> None:
        """Count the steps of a rollout; a row that is not valid adds nothing."""
        done, before = rollout.done, None
        if may_hold(done):
            row = torch.arange(len(done), device=done.device).unsqueeze(-1)
            ended = torch.where(done, row, -1).cummax(0).values
            before = torch.cat([torch.full_like(ended[:1], -1), ended[:-1]])  # the last end before each row, -1: none
        for running, totals, gained in (
            (self.running_return, self.return_, torch.where(rollout.valid, rollout.reward, 0.0)),
            (self.running_length, self.length, rollout.valid),
        ):
            torch.add(running, gained.cumsum(0, dtype=running.dtype), out=totals)
            if before is not None:
                totals -= torch.where(before >= 0, totals.gather(0, before.clamp(min=0)), 0)
            running.copy_(totals[-1] if before is None else torch.where(done[-1], 0, totals[-1]))

    def search(self, rollout: Rollout[Any], steps: int) -> None:
        """Look for NaN and infinity in a rollout, before anything is learned from it; `steps` were taken before.

        Raises `NonFiniteObservation` if `reads_at_once`. Otherwise `read` raises, and `finite` tells the device
        meanwhile.
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
                self.suspects.zero_()  # nobody learns from that rollout
                raise

    @property
    def finite(self) -> Tensor:
        """0-d bool on the device: nothing was found in the last rollout that was searched."""
        return torch.isfinite(self.suspects[:, 1]).all()

    def keep(self, rollout: Rollout[Any], flags: Tensor | None = None) -> None:
        """Keep what is to be read of the rollout just searched and added, before the next one overwrites it.

        `flags` `[2]` bool say whether the state that was learned from it is finite, and whether everything is.
        """
        valid = rollout.valid
        rewards, time = torch.where(valid, rollout.reward, 0.0), torch.where(valid, rollout.duration, 0.0)
        begun = rollout.reset[:-1] & valid
        kept = {
            "totals": torch.stack([total.sum().double() for total in (valid, begun, rewards)]),
            "gain_and_time": torch.stack([rewards, time]).sum(1, dtype=torch.float64),
            "return_": self.return_.clone(),
            "length": self.length.double(),
            # 0 where no episode ended, 1 where one was cut off, 2 where it ended by itself.
            "ending": rollout.done.double() + rollout.terminated,
        }
        flags = torch.ones(2, device=valid.device) if flags is None else flags
        self.kept.append(kept | {"suspects": self.suspects.clone(), "flags": flags.double()})

    def read(self, steps: int) -> Episodes:
        """The episodes of all rollouts kept since the last reading; `steps` of each environment were taken till now.

        Raises `NonFiniteObservation` if one of these rollouts holds NaN or infinity, and `NonFiniteElsewhere` if one of
        another rank does: all ranks raise for the same rollout, the first one.
        """
        kept, self.kept = self.kept, []
        forms = {name: tensor.shape for name, tensor in kept[0].items()}
        flat = torch.stack([torch.cat([part.reshape(-1) for part in rollout.values()]) for rollout in kept])
        parts = flat.cpu().split([form.numel() for form in forms.values()], dim=1)  # waits for the device, once
        read = {name: part.unflatten(1, forms[name]) for name, part in zip(forms, parts, strict=True)}
        self.unclean = int(read["flags"][:, 1].sum()) if not read["flags"][-1, 1] else None
        error, bad = self._first_error(read, steps), torch.zeros(len(kept), dtype=torch.float64)
        if error is not None:
            bad[error.before] = 1.0
        sums = distributed.sum_(torch.cat([bad, read["totals"].sum(0)]))  # ranks find an error by what they add anyway
        if sums[: len(kept)].any():
            number = int(sums[: len(kept)].nonzero()[0])
            if error is None or error.before != number:
                error = NonFiniteElsewhere("NaN or infinity on another rank")
            self.kept, error.before = kept[:number], number
            raise error
        env_steps, resets, reward = sums[len(kept) :].tolist()
        return_, length, ending = _ended(*(read[name] for name in ("return_", "length", "ending")))
        gains = distributed.gather_rows(read["gain_and_time"].movedim(-1, 0)).movedim(0, -1)
        return Episodes(
            return_=return_.tolist(),
            length=length.long().tolist(),
            terminated=(ending == 2).tolist(),
            env_steps=int(env_steps),
            resets=int(resets),
            mean_reward=reward / max(env_steps, 1),
            gain_and_time=[in_groups(each).tolist() for each in gains],
        )

    def _first_error(self, read: dict[str, Tensor], steps: int) -> NonFinite | None:
        """What was not finite first in the rollouts that were `read`, with how many came before that one."""
        count = len(read["suspects"])
        for number, suspects in enumerate(read["suspects"]):
            try:
                refuse_nonfinite(suspects, self.checked, steps - (count - number) * len(self.return_))
                if not read["flags"][number, 0]:
                    raise NonFiniteUpdate(SPOILT)
            except NonFinite as error:
                error.before = number
                return error
        return None


def _ended(return_: Tensor, length: Tensor, ending: Tensor) -> Tensor:
    """`[3, E]` of `[K, T, N]` each where `ending` is not 0, on all ranks, in the order of time and environments."""
    ended = torch.stack([return_, length, ending])[:, ending > 0]
    if not distributed.active():
        return ended
    rollout, step, env = torch.nonzero(ending > 0, as_tuple=True)
    place = (rollout * ending.shape[1] + step) * ending.shape[2] * distributed.world_size()
    place = place + env + distributed.rank() * ending.shape[2]
    rows = distributed.gather_rows(torch.cat([place.double().unsqueeze(0), ended]).t().contiguous())
    return rows[rows[:, 0].argsort()].t()[1:]


def floats_seen(rollout: Rollout[Any]) -> dict[str, Tensor]:
    """All numbers `[T or T+1, N, ...]` that the environment was given or gave, and that could be NaN, by name."""
    action = getattr(rollout.record, ACTION, None)
    seen: dict[str, Tensor] = {"reward": rollout.reward, "duration": rollout.duration}
    seen |= {} if action is None else {ACTION: action}
    seen |= {f"observation {name!r}": group for name, group in rollout.obs.items()}
    for name, group in (rollout.final_obs or {}).items():
        ended = rollout.done.reshape(*rollout.done.shape, *[1] * (group.ndim - 2))
        seen[f"final observation {name!r}"] = torch.where(ended, group, torch.zeros_like(group))
    return {name: values for name, values in seen.items() if values.is_floating_point()}


def _is_sound(rollout: Rollout[Any]) -> bool:
    """Whether all is finite that `floats_seen` would give, and last observations that nobody has seen too."""
    action = getattr(rollout.record, ACTION, None)
    seen = tree_leaves((rollout.reward, rollout.duration, rollout.obs, rollout.final_obs, action))
    return all(is_finite(values) for values in seen if values.is_floating_point())


def is_finite(x: Tensor) -> bool:
    """Whether all of it is finite, on the host; numbers whose sum is finite are, and that is found soonest."""
    return math.isfinite(x.sum().item()) or bool(torch.isfinite(x).all())


def first_nonfinite(values: Tensor) -> Tensor:
    """`[2]` float64: place in the flat tensor and value of the first NaN or infinity; without any, of the first."""
    flat = values.reshape(-1)
    place = (flat - flat).argmax()  # 0 where finite, else NaN, which counts as the largest
    return torch.stack([place.double(), flat.take(place).double()])  # `flat[place]` would wait for the device


def refuse_nonfinite(suspects: Tensor, shapes: dict[str, torch.Size], steps_before: int) -> None:
    """Raise if one of the values of `suspects` `[C, 2]` (see `first_nonfinite`) is NaN or infinite.

    `shapes` are those of the C tensors that were searched, by name; their first row is step `steps_before`.
    """
    found = []
    for (place, value), (name, shape) in zip(suspects.tolist(), shapes.items(), strict=True):
        if not math.isfinite(value):
            t, env, *component = (int(i) for i in np.unravel_index(int(place), shape))
            found.append((name, value, t, env + shape[1] * distributed.rank(), component))
    if found:
        name, value, t, env, component = min(found, key=lambda item: moment(item[0], item[2]))
        where = f" component {component}" if component else ""
        who = f"the policy gave environment {env} the" if name == ACTION else f"environment {env} gave"
        raise NonFiniteObservation(f"{who} {name}{where} = {value} at its step {steps_before + t}")


def moment(name: str, t: int) -> tuple[int, int]:
    """When the number of that name in row t came: the observation, then the action on it, then what that led to."""
    return t, 0 if name.startswith("observation") else 1 if name == ACTION else 2
