"""What N environments did in T steps.

T steps, N environments, L sequence length, S = T / L * N sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from canter.core.specs import ContractBroken, EnvSpec, FinalObs, Step, episode_starts
from canter.core.struct import (
    Obs,
    State,
    TensorStruct,
    copy_all_,
    fused_writer,
    tree_copy_,
    tree_leaves,
    tree_map,
    zeros,
)

Record = TypeVar("Record", bound=TensorStruct)
NUMBERS = ("reward", "terminated", "truncated", "valid", "duration")
"""What every step gives besides observations, in the order in which it is written."""


@dataclass
class Transitions(TensorStruct):
    """Rows with what each of them led to, `[T, N, ...]` or cut into sequences."""

    obs: Obs
    next_obs: Obs
    """What followed in the same episode: its true last observation, never the first of the next one."""
    valid: Tensor
    """bool; False where a row is no transition of the task, or where the simulator lost the last observation."""


@dataclass
class Rollout(TensorStruct, Generic[Record]):
    """Buffers at fixed addresses, written step by step and reused every iteration."""

    obs: Obs
    """`[T+1, N, ...]`; row T follows the last step."""
    reward: Tensor
    """`[T, N]`."""
    terminated: Tensor
    """`[T, N]` bool, after step t."""
    truncated: Tensor
    """`[T, N]` bool, after step t; never together with `terminated`."""
    valid: Tensor
    """`[T, N]` bool; False rows are no transitions of the task."""
    duration: Tensor
    """`[T, N]` the time that each step took, from `Step.info`; 1 in environments that never tell."""
    final_obs: Obs | None
    """`[T, N, ...]` true last observations in rows that ended; None when `obs` itself holds them in row t+1 (`reset` is
    then False there), or when nothing does (`reset` is True, as row t+1 belongs to the next episode)."""
    reset: Tensor
    """`[T+1, N]` bool: an episode begins with row t's observation, or none is running; memory is cleared there."""
    state: State
    """`[T / L, N, ...]` the policy's memory before rows 0, L, 2L, ...; `()` without memory."""
    record: Record
    """`[T, N, ...]` what the algorithm asked to remember of each step."""
    bonus: Tensor | None = None
    """`[T, N]` a second reward, which a second value head judges; None where no extension gives one."""

    @staticmethod
    def allocate(
        horizon: int, obs: Obs, record: Record, spec: EnvSpec, state: State = (), sequence_length: int = 1
    ) -> Rollout[Record]:
        """Empty buffers for `horizon` steps, shaped after one step's observations, record and state `[N, ...]`."""
        flags = torch.zeros((horizon, spec.num_envs), dtype=torch.bool, device=spec.device)
        rows, starts = (horizon, spec.num_envs), (horizon // sequence_length, spec.num_envs)
        return Rollout(
            obs=tree_map(lambda x: zeros((horizon + 1, spec.num_envs), x), obs),
            reward=torch.zeros(rows, device=spec.device),
            terminated=flags,
            truncated=flags.clone(),
            valid=flags.clone(),
            duration=torch.ones(rows, device=spec.device),
            final_obs=tree_map(lambda x: zeros(rows, x), obs) if spec.final_obs == "separate" else None,
            reset=torch.ones((horizon + 1, spec.num_envs), dtype=torch.bool, device=spec.device),
            state=tree_map(lambda x: zeros(starts, x), state),
            record=tree_map(lambda x: zeros(rows, x), record),
        )

    @property
    def horizon(self) -> int:
        """T."""
        return self.reward.shape[0]

    @property
    def done(self) -> Tensor:
        """`[T, N]` bool: an episode ended at step t, either way."""
        return self.terminated | self.truncated

    def begin(self) -> Obs:
        """Carry what followed the previous rollout over to row 0; gives that row of observations."""
        tree_copy_(self.obs_at(0), self.obs_at(self.horizon))
        self.reset[0].copy_(self.reset[self.horizon])
        return self.obs_at(0)

    def keep_state(self, t: int, state: State, sequence_length: int) -> None:
        """Remember the policy's memory before row t if a sequence starts there."""
        if len(self.state) > 0 and t % sequence_length == 0:
            tree_copy_(tree_map(lambda x: x[t // sequence_length], self.state), state)

    def obs_at(self, t: int) -> Obs:
        """Observations `[N, ...]` of row t, as a view."""
        return tree_map(lambda x: x[t], self.obs)

    def transitions(self, groups: Iterable[str] | None = None) -> Transitions:
        """Observations of these groups, by default of all, each with the one that it led to."""
        obs = {name: self.obs[name] for name in (self.obs if groups is None else groups)}
        before, after = tree_map(lambda x: x[:-1], obs), tree_map(lambda x: x[1:], obs)
        if self.final_obs is None:  # in the next row, unless an episode begins there: then nobody stored it
            return Transitions(before, after, self.valid & ~(self.done & self.reset[1:]))
        ended = self.done

        def follow(last: Tensor, next_: Tensor) -> Tensor:
            return torch.where(ended.reshape(*ended.shape, *[1] * (next_.ndim - 2)), last, next_)

        return Transitions(before, tree_map(follow, {name: self.final_obs[name] for name in obs}, after), self.valid)

    def rows(self) -> list[Row[Record]]:
        """Where each of the T steps goes."""
        after, final = [group[1:] for group in self.obs.values()], self.final_obs or {}
        numbers = [getattr(self, name) for name in NUMBERS]
        buffers = [*tree_leaves(self.record), *after, *numbers, *final.values()]
        quickly, places = fused_writer(buffers), zip(*(buffer.unbind() for buffer in buffers), strict=True)
        return [Row(self.obs_at(t + 1), list(final), partial(quickly, t), row) for t, row in enumerate(places)]

    def mark_resets(self, mode: FinalObs, t: int | slice = slice(None)) -> Tensor:
        """Write `reset` of the rows after t `[N]`, or by default of all `[T, N]`; `mode` is the spec's `final_obs`."""
        ends = self.terminated[t], self.truncated[t]
        return episode_starts(self.valid[t], *ends, mode, out=self.reset[1:][t])


@dataclass
class Row(Generic[Record]):
    """Step t's place in a rollout: views made once, as making one costs as much as writing to it."""

    obs: Obs
    """Where the next observations go."""
    final: list[str]
    """Names of the groups whose last observations are stored."""
    quickly: Callable[[list[Tensor | None]], bool]
    """Writes all values if it can, see `fused_writer`."""
    places: tuple[Tensor, ...]
    """Where everything goes: the record, observations, `NUMBERS`, last observations."""

    def write(self, record: Record, step: Step) -> Obs:
        """Store the record and the step; gives the next observations."""
        obs, final = step.obs, step.final_obs
        # By name: an environment may give its groups in another order than at first.
        values: list[Tensor | None] = [*tree_leaves(record), *[obs[name] for name in self.obs]]
        values += [step.reward, step.terminated, step.truncated, step.valid, step.info.get("duration")]
        if final is not None:
            values += [final[name] for name in self.final]
        if not self.quickly(values):
            self._write(values)
        return self.obs

    def _write(self, values: list[Tensor | None]) -> None:
        names = [f"observation {name!r}" for name in self.obs] + [*NUMBERS]
        names += [f"final_obs {name!r}" for name in self.final]
        names = ["the record"] * (len(self.places) - len(names)) + names
        items = zip(names, self.places, values, strict=False)
        given = [(name, place, value) for name, place, value in items if value is not None]
        for name, place, value in given:
            if value.shape != place.shape:  # a copy would spread what is too small
                raise ContractBroken(
                    f"step() gave {name} of shape {tuple(value.shape)}, it must be {tuple(place.shape)}"
                )
        # One call for all: on a GPU one launch for each dtype, on a CPU a fraction of the time around the copies.
        copy_all_([place for _, place, _ in given], [value for *_, value in given])


def as_sequences(tree: Any, length: int) -> Any:
    """Cut every tensor `[T, N, ...]` of a tree into sequences `[L, S, ...]`; number `c * N + n` is chunk c of env n."""

    def cut(x: Tensor) -> Tensor:
        horizon, num_envs = x.shape[:2]
        chunks = x.unflatten(0, (horizon // length, length))
        return chunks.transpose(0, 1).reshape(length, horizon // length * num_envs, *x.shape[2:])

    return tree_map(cut, tree)
