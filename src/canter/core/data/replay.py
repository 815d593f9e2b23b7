"""A replay buffer: a ring of past transitions from which minibatches are drawn.

T steps, N environments, S slots of the ring (one holds the next observation and no transition yet),
B drawn transitions, n steps of a return. Entry `slot * N + env` is the transition of environment
`env` in the step of that slot.

Every observation is stored once: the next observation of an entry is the observation one slot
later. Only the true last observation of a truncated episode, which has no slot, is stored in a
smaller ring behind the main one, here called the finals.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from canter.core.data.rollout import Rollout
from canter.core.plain import check_range
from canter.core.registry import UserError
from canter.core.specs import EnvSpec
from canter.core.struct import Obs, TensorStruct, maybe_any

TERMINATED = 1
TRUNCATED = 2
FILLER = 4
"""Bits of an entry's `ending`; 0 is a transition after which the episode continues."""
FINALS_SHARE = 16
"""Entries per last observation that the finals have room for; beyond that the oldest are
overwritten."""


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Size and storage of the replay buffer."""

    capacity: int = 1_000_000
    """Number of transitions that are kept, over all environments; new ones overwrite the oldest."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Storage type of vector observations; images stay bytes. bfloat16 needs half the memory and
    keeps 8 bits of mantissa."""
    save: bool = True
    """Save the buffer in checkpoints. Without it a resumed run first collects `warmup_steps` again,
    with its policy, and does not continue bit for bit."""

    def __post_init__(self) -> None:
        """Raise UserError for a buffer without capacity."""
        check_range(self, "must be at least 1", "capacity")

    def slots(self, num_envs: int) -> int:
        """Return S: the steps of all environments that fit, and one for the next observation."""
        return math.ceil(self.capacity / num_envs) + 1

    def final_slots(self, spec: EnvSpec) -> int:
        """Return the size of the finals; small if only interrupted episodes need them."""
        transitions = (self.slots(spec.num_envs) - 1) * spec.num_envs
        least = 2 * spec.num_envs
        if spec.final_obs != "separate" or spec.truncates is False:
            return least
        return max(least, math.ceil(transitions / FINALS_SHARE))

    def storage_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which observations of `dtype` are stored."""
        return torch.bfloat16 if self.dtype == "bfloat16" and dtype == torch.float32 else dtype

    def nbytes(self, spec: EnvSpec, action_dim: int) -> int:
        """Return the bytes that the buffer takes on the environment's device."""
        slots = self.slots(spec.num_envs)
        entries = slots * spec.num_envs
        finals = self.final_slots(spec)
        obs = sum(math.prod(group.shape) * self.storage_dtype(group.dtype).itemsize for group in spec.obs.values())
        return (entries + finals + 1) * obs + entries * (4 * action_dim + 13) + 8 * (finals + slots)

    def build(self, spec: EnvSpec, action_dim: int) -> Replay:
        """Return an empty buffer; raise UserError if the device has too little memory for it."""
        needed = self.nbytes(spec, action_dim)
        total = device_memory(spec.device)
        if needed > total:
            fits = max(1, int(self.capacity * total / needed / 2))
            raise UserError(
                f"replay.capacity={self.capacity} needs {needed / 1e9:,.1f} GB, more than the {total / 1e9:,.1f} GB "
                f"of {spec.device}; use about {fits:,}, or dtype=bfloat16"
            )
        return Replay(self, spec, action_dim)


def device_memory(device: torch.device) -> int:
    """Return the total memory of a device in bytes, used or not."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass
class ReplayBatch(TensorStruct):
    """B transitions of up to n steps each."""

    obs: Obs
    """`[B, ...]` first observation."""
    action: Tensor
    """`[B, A]` as stored."""
    reward: Tensor
    """`[B]` raw rewards of k <= n steps, summed with gamma^j; k < n at the end of an episode or of
    the data."""
    next_obs: Obs
    """`[B, ...]` true observation after these k steps."""
    discount: Tensor
    """`[B]` gamma^k, 0 if the episode terminated."""
    valid: Tensor
    """`[B]` bool; False if the last observation of a truncated episode has been overwritten."""


class Replay:
    """A ring at fixed addresses; writing and drawing never wait for the device."""

    def __init__(self, config: ReplayConfig, spec: EnvSpec, action_dim: int) -> None:
        device = spec.device
        self.config = config
        self.num_envs = spec.num_envs
        self.slots = config.slots(spec.num_envs)
        self.entries = self.slots * spec.num_envs
        self.final_slots = config.final_slots(spec)
        self.final_obs = spec.final_obs
        self.dtypes = {name: group.dtype for name, group in spec.obs.items()}

        def table(length: int, dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros((length, *shape), dtype=dtype, device=device)

        # Entries, then the finals, so that one gather serves both, then one place for values that
        # nobody reads. Not zeroed: everything is written before it is read, and untouched pages
        # take no memory.
        length = self.entries + self.final_slots + 1
        self.obs = {
            name: torch.empty((length, *group.shape), dtype=config.storage_dtype(group.dtype), device=device)
            for name, group in spec.obs.items()
        }
        self.action = table(self.entries, torch.float32, action_dim)
        self.reward = table(self.entries, torch.float32)
        self.ending = table(self.entries, torch.uint8)
        self.final_at = table(self.entries, torch.int32).fill_(-1)
        """Index into the finals of an entry's last observation, -1 for none."""
        self.owner = table(self.final_slots + 1, torch.int64).fill_(-1)
        """For each of the finals, the entry that it belongs to, numbered from the first one ever
        written."""
        self.order = table(self.entries + 1, torch.int32)
        """A ring of the entries that are transitions, in the order in which they were written."""
        self.before = table(self.slots, torch.int64)
        """Number of transitions ever written before each slot."""
        self.head = table(1, torch.int64).squeeze(0)
        """0-d: steps ever written."""
        self.entered = table(1, torch.int64).squeeze(0)
        """0-d: transitions ever written."""
        self.finals = table(1, torch.int64).squeeze(0)
        """0-d: last observations ever written."""
        self.zero = torch.zeros((), device=device)  # a Python number would be converted in every call
        self.expected = table(spec.num_envs, torch.bool).fill_(True)
        """`[N]` the next observation starts an episode, according to the last step."""

    @torch.no_grad()
    def write(self, rollout: Rollout[Any], action: Tensor) -> None:
        """Write all steps of a rollout; `action` `[T, N, A]` is stored as it is."""
        horizon = rollout.horizon
        envs = self.num_envs
        # Numbers of entries since the first one ever, from the step before the rollout to the one
        # after it.
        number = torch.arange(-envs, (horizon + 1) * envs, device=action.device) + self.head * envs
        index = number % self.entries
        new = index[envs:-envs]
        self._write_finals(rollout, number, index)  # before the next observation is overwritten
        for name, stored in self.obs.items():
            stored.index_copy_(0, index[envs:], rollout.obs[name].flatten(0, 1).to(stored.dtype))
        ending = torch.add(rollout.terminated.byte(), rollout.truncated, alpha=TRUNCATED)
        ending.add_(~rollout.valid, alpha=FILLER)
        self.action.index_copy_(0, new, action.flatten(0, 1))
        self.reward.index_copy_(0, new, rollout.reward.flatten(0, 1))
        self.ending.index_copy_(0, new, ending.flatten(0, 1))
        self._write_order(rollout.valid, new)
        self.expected.copy_(rollout.reset[-1])
        self.head += horizon

    def _write_finals(self, rollout: Rollout[Any], number: Tensor, index: Tensor) -> None:
        """Store the last observations of truncated and of interrupted episodes.

        An environment that cannot save its state restarts when a run resumes. The last observation
        of the interrupted episode is then the one in the slot where the next rollout begins.
        """
        envs = self.num_envs
        previous = index[:envs]
        first = index[envs : 2 * envs]
        self.final_at.index_fill_(0, index[envs:-envs], -1)  # assigning a number would wait for the device
        interrupted = rollout.reset[0] & ~self.expected
        cut = interrupted
        if rollout.final_obs is not None:
            cut = torch.cat([interrupted, rollout.truncated.flatten()])
        if not maybe_any(cut):
            return
        ending = self.ending[previous]
        added = torch.where(interrupted & (ending & TERMINATED == 0), TRUNCATED, 0).byte()
        self.ending[previous] = ending | added
        number = number[: len(cut)]
        index = index[: len(cut)]
        place = torch.where(cut, (self.finals + cut.cumsum(0) - 1) % self.final_slots, self.final_slots)
        for name, stored in self.obs.items():
            last = stored[first]
            if rollout.final_obs is not None:
                last = torch.cat([last, rollout.final_obs[name].flatten(0, 1).to(stored.dtype)])
            stored.index_copy_(0, self.entries + place, last)
        self.final_at[index] = torch.where(cut, place, self.final_at[index].long()).int()
        self.owner.index_copy_(0, place, number)
        self.finals += cut.sum()

    def _write_order(self, valid: Tensor, index: Tensor) -> None:
        """Append the valid entries of `index` `[T * N]` to `order`; `valid` is `[T, N]`."""
        slots = index[:: self.num_envs] // self.num_envs
        after = self.entered + valid.flatten().cumsum(0)
        self.before.index_copy_(0, slots, after[:: self.num_envs] - valid[:, 0].long())
        place = torch.where(valid.flatten(), (after - 1) % self.entries, self.entries)
        self.order.index_copy_(0, place, index.int())
        self.entered.copy_(after[-1])

    @property
    def oldest(self) -> Tensor:
        """0-d: transitions that have been overwritten."""
        place = (self.head - (self.slots - 1)).clamp(min=0) % self.slots
        return self.before.take(place)  # indexing by a 0-d tensor would wait for the device

    @property
    def count(self) -> Tensor:
        """0-d: transitions in the buffer."""
        return self.entered - self.oldest

    def draw(self, size: int, generator: torch.Generator) -> Tensor:
        """Return `size` entries drawn uniformly; entry 0 if there is no transition yet."""
        # float64, because float32 has fewer numbers in 0..1 than a large buffer has entries.
        share = torch.rand(size, dtype=torch.float64, generator=generator, device=self.head.device)
        oldest = self.oldest
        number = (share * (self.entered - oldest)).long()  # below the count, because share is at most 1 - 2^-53
        return self.order[(oldest + number) % self.entries].long()

    def newest(self, size: int) -> Tensor:
        """Return the entries of the last `size` transitions; there must be one, and fewer are repeated."""
        number = self.entered - 1 - torch.arange(size, device=self.head.device)
        return self.order[torch.maximum(number, self.oldest) % self.entries].long()

    def gather(self, index: Tensor, steps: int, gamma: float) -> ReplayBatch:
        """Return the transitions of up to `steps` steps that begin at entries `index` `[B]`."""
        newest = self.head * self.num_envs - 1
        reward, taken, discount = self._sum_rewards(index, newest, steps, gamma)
        after = (index + taken * self.num_envs) % self.entries
        last = (after - self.num_envs) % self.entries
        ending = self.ending[last]
        terminated = ending == TERMINATED
        truncated = ending == TRUNCATED
        place = self.final_at[last].long()
        has_final = truncated & (place >= 0)
        number = newest - (newest - last) % self.entries
        lost = has_final & (self.owner[place] != number)
        if self.final_obs == "unknown":
            after = torch.where(truncated, last, after)
        after = torch.where(has_final, self.entries + place, after)
        return ReplayBatch(
            obs=self.read_obs(index),
            action=self.action[index],
            reward=reward,
            next_obs=self.read_obs(after),
            discount=torch.where(terminated, self.zero, discount),
            valid=~lost,
        )

    def _sum_rewards(
        self, index: Tensor, newest: Tensor, steps: int, gamma: float
    ) -> tuple[Tensor, Tensor | int, Tensor | float]:
        """Return the discounted rewards `[B]`, the number k of steps, and gamma^k."""
        if steps == 1:  # never cut short
            return self.reward[index], 1, gamma
        envs = self.num_envs
        device = index.device
        ahead = torch.arange(0, steps * envs, envs, device=device)
        window = (index[:, None] + ahead) % self.entries
        ending = self.ending[window]
        missing = (ahead > ((newest - index) % self.entries)[:, None]) | (ending >= FILLER)
        missing[:, 1:].logical_or_(ending[:, :-1] > 0)
        used = missing.cumsum(1) == 0
        taken = used.sum(1)
        powers = torch.pow(gamma, torch.arange(steps + 1, device=device, dtype=torch.float64)).float()
        return torch.where(used, self.reward[window] * powers[:-1], self.zero).sum(1), taken, powers[taken]

    def sample(self, size: int, steps: int, gamma: float, generator: torch.Generator) -> ReplayBatch:
        """Return `size` transitions drawn at random."""
        return self.gather(self.draw(size, generator), steps, gamma)

    def read_obs(self, index: Tensor) -> Obs:
        """Return the observations of entries, in their own dtypes."""
        return {name: stored[index].to(self.dtypes[name]) for name, stored in self.obs.items()}

    def _counts(self) -> dict[str, Tensor]:
        return {"head": self.head, "entered": self.entered, "finals": self.finals}

    def _tables(self, head: int, entered: int, finals: int) -> dict[str, Tensor]:
        """Return views of everything written, given the counts of steps, transitions and finals."""
        slots = min(head + 1, self.slots) if head else 0
        used = slots * self.num_envs
        used_finals = min(finals, self.final_slots)
        tables = {f"obs/{name}": stored[:used] for name, stored in self.obs.items()}
        for name, stored in self.obs.items():
            tables[f"final/{name}"] = stored[self.entries : self.entries + used_finals]
        return tables | {
            "action": self.action[:used],
            "reward": self.reward[:used],
            "ending": self.ending[:used],
            "final_at": self.final_at[:used],
            "owner": self.owner[:used_finals],
            "order": self.order[: min(entered, self.entries)],
            "before": self.before[:slots],
            "expected": self.expected,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return everything that was written; an empty buffer if it is not to be saved."""
        if not self.config.save:
            return {"head": 0, "entered": 0, "finals": 0, "tables": {}}
        counts = {name: int(count) for name, count in self._counts().items()}
        return counts | {"tables": {name: table.clone() for name, table in self._tables(**counts).items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a buffer of the same size; tensors keep their addresses."""
        counts = {name: int(state[name]) for name in self._counts()}
        tables = self._tables(**counts) if state["tables"] else {}
        for name, table in tables.items():
            saved = state["tables"][name]
            if saved.shape != table.shape or saved.dtype != table.dtype:
                raise UserError(
                    f"replay: {name} is {saved.dtype} {list(saved.shape)} in what was saved and {table.dtype} "
                    f"{list(table.shape)} here; replay.capacity and replay.dtype must be those of the run"
                )
        for name, table in tables.items():
            table.copy_(state["tables"][name])
        for name, count in self._counts().items():
            count.fill_(counts[name])
        if not tables:
            self.expected.fill_(True)
