"""Rollouts: T steps of N environments, in buffers that are reused every iteration.

L sequence length, S = T / L * N sequences.
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
STEP_FIELDS = ("reward", "terminated", "truncated", "valid", "duration")
"""Fields of every step except observations, in the order in which they are written."""


@dataclass
class Transitions(TensorStruct):
    """Observations and their successors, `[T, N, ...]` or cut into sequences."""

    obs: Obs
    next_obs: Obs
    """Next observation of the same episode: its true last one, never the first of the next one."""
    valid: Tensor
    """bool; False if a step is not a transition, or the simulator lost the last observation."""


@dataclass
class Rollout(TensorStruct, Generic[Record]):
    """Buffers at fixed addresses, written step by step and reused every iteration."""

    obs: Obs
    """`[T+1, N, ...]`; index T follows the last step."""
    reward: Tensor
    """`[T, N]`."""
    terminated: Tensor
    """`[T, N]` bool, after step t."""
    truncated: Tensor
    """`[T, N]` bool, after step t; never together with `terminated`."""
    valid: Tensor
    """`[T, N]` bool; False for steps that are not transitions of the task."""
    duration: Tensor
    """`[T, N]` duration of each step, from `Step.info`; 1 if the environment reports none."""
    final_obs: Obs | None
    """`[T, N, ...]` true last observations of steps that end an episode. None if `obs[t+1]` has
    them (`reset[t+1]` is then False), or nothing has (it is True: `obs[t+1]` is of the next
    episode)."""
    reset: Tensor
    """`[T+1, N]` bool: `obs[t]` starts an episode or belongs to none; the recurrent state is
    cleared."""
    state: State
    """`[T / L, N, ...]` recurrent state before steps 0, L, 2L, ...; `()` for feed-forward
    policies."""
    record: Record
    """`[T, N, ...]` values that the algorithm stores of each step."""
    bonus: Tensor | None = None
    """`[T, N]` reward of an extension, which has its own value head; None without one."""

    @staticmethod
    def allocate(
        horizon: int, obs: Obs, record: Record, spec: EnvSpec, state: State = (), sequence_length: int = 1
    ) -> Rollout[Record]:
        """Return empty buffers for `horizon` steps.

        Shapes are those of one step's observations, record and state, `[N, ...]`.
        """
        shape = (horizon, spec.num_envs)
        sequences = (horizon // sequence_length, spec.num_envs)
        flags = torch.zeros(shape, dtype=torch.bool, device=spec.device)
        return Rollout(
            obs=tree_map(lambda x: zeros((horizon + 1, spec.num_envs), x), obs),
            reward=torch.zeros(shape, device=spec.device),
            terminated=flags,
            truncated=flags.clone(),
            valid=flags.clone(),
            duration=torch.ones(shape, device=spec.device),
            final_obs=tree_map(lambda x: zeros(shape, x), obs) if spec.final_obs == "separate" else None,
            reset=torch.ones((horizon + 1, spec.num_envs), dtype=torch.bool, device=spec.device),
            state=tree_map(lambda x: zeros(sequences, x), state),
            record=tree_map(lambda x: zeros(shape, x), record),
        )

    @property
    def horizon(self) -> int:
        """T."""
        return self.reward.shape[0]

    @property
    def done(self) -> Tensor:
        """`[T, N]` bool: an episode was terminated or truncated at step t."""
        return self.terminated | self.truncated

    def begin(self) -> Obs:
        """Copy the observations after the previous rollout to index 0, and return them."""
        tree_copy_(self.obs_at(0), self.obs_at(self.horizon))
        self.reset[0].copy_(self.reset[self.horizon])
        return self.obs_at(0)

    def store_state(self, t: int, state: State, sequence_length: int) -> None:
        """Store the recurrent state before step t if a sequence starts there."""
        if len(self.state) > 0 and t % sequence_length == 0:
            tree_copy_(tree_map(lambda x: x[t // sequence_length], self.state), state)

    def obs_at(self, t: int) -> Obs:
        """Return a view of the observations `[N, ...]` before step t."""
        return tree_map(lambda x: x[t], self.obs)

    def transitions(self, groups: Iterable[str] | None = None) -> Transitions:
        """Return the observations of these groups, by default all, with their successors."""
        obs = {name: self.obs[name] for name in (self.obs if groups is None else groups)}
        before = tree_map(lambda x: x[:-1], obs)
        after = tree_map(lambda x: x[1:], obs)
        if self.final_obs is None:  # in the next step, unless an episode starts there: then it is lost
            return Transitions(before, after, self.valid & ~(self.done & self.reset[1:]))
        ended = self.done

        def follow(last: Tensor, next_: Tensor) -> Tensor:
            return torch.where(ended.reshape(*ended.shape, *[1] * (next_.ndim - 2)), last, next_)

        return Transitions(before, tree_map(follow, {name: self.final_obs[name] for name in obs}, after), self.valid)

    def step_writers(self) -> list[StepWriter[Record]]:
        """Return a writer for each of the T steps."""
        next_obs = [group[1:] for group in self.obs.values()]
        final_obs = self.final_obs or {}
        fields = [self.reward, self.terminated, self.truncated, self.valid, self.duration]
        buffers = [*tree_leaves(self.record), *next_obs, *fields, *final_obs.values()]
        write = fused_writer(buffers)
        steps = zip(*(buffer.unbind() for buffer in buffers), strict=True)
        return [
            StepWriter(self.obs_at(t + 1), list(final_obs), partial(write, t), targets)
            for t, targets in enumerate(steps)
        ]

    def mark_resets(self, mode: FinalObs, t: int | slice = slice(None)) -> Tensor:
        """Write `reset` after step t, by default after all; `mode` is the spec's `final_obs`."""
        reset = self.reset[1:][t]
        return episode_starts(self.valid[t], self.terminated[t], self.truncated[t], mode, out=reset)


@dataclass
class StepWriter(Generic[Record]):
    """Writes step t of a rollout, through views that are made once because making them is slow."""

    obs: Obs
    """Views of the next observations."""
    final_names: list[str]
    """Names of the groups whose last observations are stored."""
    fused_write: Callable[[list[Tensor | None]], bool]
    """Writes all values at once if it can, see `fused_writer`."""
    targets: tuple[Tensor, ...]
    """Views of everything: the record, observations, `STEP_FIELDS`, last observations."""

    def write(self, record: Record, step: Step) -> Obs:
        """Store the record and the step; return the next observations."""
        # By name: an environment may return its groups in another order than at first.
        values: list[Tensor | None] = [*tree_leaves(record), *[step.obs[name] for name in self.obs]]
        values += [step.reward, step.terminated, step.truncated, step.valid, step.info.get("duration")]
        if step.final_obs is not None:
            values += [step.final_obs[name] for name in self.final_names]
        if not self.fused_write(values):
            self._copy(values)
        return self.obs

    def _copy(self, values: list[Tensor | None]) -> None:
        names = [f"observation {name!r}" for name in self.obs] + [*STEP_FIELDS]
        names += [f"final_obs {name!r}" for name in self.final_names]
        names = ["the record"] * (len(self.targets) - len(names)) + names
        items = zip(names, self.targets, values, strict=False)
        present = [(name, target, value) for name, target, value in items if value is not None]
        for name, target, value in present:
            if value.shape != target.shape:  # a copy would broadcast a smaller value
                raise ContractBroken(
                    f"step() gave {name} of shape {tuple(value.shape)}, it must be {tuple(target.shape)}"
                )
        # One call for all: one launch per dtype on a GPU, and less overhead on a CPU.
        copy_all_([target for _, target, _ in present], [value for *_, value in present])


def as_sequences(tree: Any, length: int) -> Any:
    """Cut every tensor `[T, N, ...]` of a tree into sequences `[L, S, ...]`.

    Sequence `c * N + n` is chunk c of environment n.
    """

    def cut(x: Tensor) -> Tensor:
        horizon, num_envs = x.shape[:2]
        chunks = x.unflatten(0, (horizon // length, length))
        return chunks.transpose(0, 1).reshape(length, horizon // length * num_envs, *x.shape[2:])

    return tree_map(cut, tree)
