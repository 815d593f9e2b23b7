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

from canter.data.rollout import Rollout
from canter.functional.batch_means import in_groups


class NonFiniteObservation(RuntimeError):
    """An environment gave NaN or infinity; the message names the environment, the key and the step."""


@dataclass
class Episodes:
    """Episodes that ended in K rollouts, on the host, in the order in which they ended."""

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

    def add(self, rollout: Rollout[Any]) -> None:
        """Count the steps of a rollout; a row that is not valid adds nothing."""
        done = rollout.done
        row = torch.arange(len(done), device=done.device).unsqueeze(-1)
        ended = torch.where(done, row, -1).cummax(0).values
        before = torch.cat([torch.full_like(ended[:1], -1), ended[:-1]])  # the last end before each row, -1 for none
        for running, totals, gained in (
            (self.running_return, self.return_, torch.where(rollout.valid, rollout.reward, 0.0)),
            (self.running_length, self.length, rollout.valid),
        ):
            total = running + gained.cumsum(0, dtype=running.dtype)
            earlier = torch.where(before >= 0, total.gather(0, before.clamp(min=0)), 0)
            torch.sub(total, earlier, out=totals)
            running.copy_(torch.where(done[-1], 0, totals[-1]))

    def keep(self, rollout: Rollout[Any]) -> None:
        """Keep what is to be read of the rollout just added, before the next one overwrites it."""
        valid = rollout.valid
        rewards, time = torch.where(valid, rollout.reward, 0.0), torch.where(valid, rollout.duration, 0.0)
        begun, seen = rollout.reset[:-1] & valid, floats_seen(rollout)
        self.checked = {name: values.shape for name, values in seen.items()}
        kept = {
            "totals": torch.stack([total.sum().double() for total in (valid, begun, rewards)]),
            "gain_and_time": torch.stack([rewards, time]).sum(1, dtype=torch.float64),
            "return_": self.return_.clone(),
            "length": self.length.double(),
            # 0 where no episode ended, 1 where one was cut off, 2 where it ended by itself.
            "ending": rollout.done.double() + rollout.terminated,
        }
        self.kept.append(kept | {"suspects": torch.stack([first_nonfinite(values) for values in seen.values()])})

    def read(self, steps: int) -> Episodes:
        """The episodes of all rollouts kept since the last reading; `steps` of each environment were taken till now.

        Raises `NonFiniteObservation` if one of these rollouts holds NaN or infinity.
        """
        kept, self.kept = self.kept, []
        forms = {name: tensor.shape for name, tensor in kept[0].items()}
        flat = torch.stack([torch.cat([part.reshape(-1) for part in rollout.values()]) for rollout in kept])
        parts = flat.cpu().split([form.numel() for form in forms.values()], dim=1)  # waits for the device, once
        read = {name: part.unflatten(1, forms[name]) for name, part in zip(forms, parts, strict=True)}
        horizon = len(self.return_)
        for number, suspects in enumerate(read["suspects"]):
            refuse_nonfinite(suspects, self.checked, steps - (len(kept) - number) * horizon)
        env_steps, resets, reward = (sum(column) for column in read["totals"].T.tolist())
        ended = read["ending"] > 0
        return Episodes(
            return_=read["return_"][ended].tolist(),
            length=read["length"][ended].long().tolist(),
            terminated=(read["ending"][ended] == 2).tolist(),
            env_steps=int(env_steps),
            resets=int(resets),
            mean_reward=reward / max(env_steps, 1),
            gain_and_time=[in_groups(sums).tolist() for sums in read["gain_and_time"]],
        )


def floats_seen(rollout: Rollout[Any]) -> dict[str, Tensor]:
    """All numbers `[T or T+1, N, ...]` that the environment gave and that could be NaN or infinite, by name."""
    seen: dict[str, Tensor] = {"reward": rollout.reward, "duration": rollout.duration}
    seen |= {f"observation {name!r}": group for name, group in rollout.obs.items()}
    for name, group in (rollout.final_obs or {}).items():
        ended = rollout.done.reshape(*rollout.done.shape, *[1] * (group.ndim - 2))
        seen[f"final observation {name!r}"] = torch.where(ended, group, torch.zeros_like(group))
    return {name: values for name, values in seen.items() if values.is_floating_point()}


def first_nonfinite(values: Tensor) -> Tensor:
    """`[2]` float64: place in the flat tensor and value of the first NaN or infinity; without any, of the first."""
    flat = values.reshape(-1)
    place = (flat - flat).argmax()  # 0 where finite, else NaN, which counts as the largest
    return torch.stack([place.double(), flat.take(place).double()])  # `flat[place]` would wait for the device


def refuse_nonfinite(suspects: Tensor, shapes: dict[str, torch.Size], steps_before: int) -> None:
    """Raise if one of the values of `suspects` `[C, 2]` (see `first_nonfinite`) is NaN or infinite.

    `shapes` are those of the C tensors that were searched, by name; their first row is step `steps_before`.
    """
    for (place, value), (name, shape) in zip(suspects.tolist(), shapes.items(), strict=True):
        if not math.isfinite(value):
            t, env, *component = (int(i) for i in np.unravel_index(int(place), shape))
            where = f" component {component}" if component else ""
            raise NonFiniteObservation(
                f"environment {env} gave {name}{where} = {value} at its step {steps_before + t}; "
                "training stopped, and nothing that holds NaN or infinity is saved"
            )
