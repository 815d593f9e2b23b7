"""What environments did so far, in a ring from which transitions are drawn.

T steps, N environments, S slots of the ring (one holds the observation that comes next and no transition yet), B rows
drawn, n steps of a return. Row `slot * N + env` is what environment `env` did at that slot's step.

Every observation is stored once: the successor of a row is the observation one slot later. Only the true last
observation of an episode that was cut off, which has no slot of its own, lies beside them in a smaller ring.
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

TERMINATED, TRUNCATED, FILLER = 1, 2, 4
"""Bits of a row's `ending`; 0 is a transition after which the episode goes on."""
SIDE_SHARE = 16
"""There is room for the last observation of one row in so many; where more are cut off, the oldest are given up."""


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """How much is remembered, and how."""

    capacity: int = 1_000_000
    """Transitions that are kept, over all environments; the oldest make room for new ones."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """How vector observations are stored; images stay bytes. bfloat16 takes half the memory and keeps 8 bits of
    mantissa."""
    save: bool = True
    """Whether checkpoints hold it. Without it a resumed run first collects `warmup_steps` anew, by its policy, and is
    no longer the run that was never stopped."""

    def __post_init__(self) -> None:
        """Refuse a ring without room."""
        check_range(self, "must be at least 1", "capacity")

    def slots(self, num_envs: int) -> int:
        """S: steps of all environments that fit, and one more for the observation that comes next."""
        return math.ceil(self.capacity / num_envs) + 1

    def side(self, spec: EnvSpec) -> int:
        """Last observations that fit beside the ring; a few where none is expected, for episodes broken off."""
        rows = (self.slots(spec.num_envs) - 1) * spec.num_envs
        needed = spec.final_obs == "separate" and spec.truncates is not False
        return max(2 * spec.num_envs, math.ceil(rows / SIDE_SHARE)) if needed else 2 * spec.num_envs

    def stored(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which observations of `dtype` are kept."""
        return torch.bfloat16 if self.dtype == "bfloat16" and dtype == torch.float32 else dtype

    def nbytes(self, spec: EnvSpec, action_dim: int) -> int:
        """Bytes that the ring will take on the environment's device."""
        rows, side = self.slots(spec.num_envs) * spec.num_envs, self.side(spec)
        obs = sum(math.prod(group.shape) * self.stored(group.dtype).itemsize for group in spec.obs.values())
        return (rows + side + 1) * obs + rows * (4 * action_dim + 13) + 8 * (side + self.slots(spec.num_envs))

    def build(self, spec: EnvSpec, action_dim: int) -> Replay:
        """An empty ring on the environment's device; refused where that has too little memory altogether."""
        needed, there = self.nbytes(spec, action_dim), memory_of(spec.device)
        if needed > there:
            fits = max(1, int(self.capacity * there / needed / 2))
            raise UserError(
                f"replay.capacity={self.capacity} needs {needed / 1e9:,.1f} GB, more than the {there / 1e9:,.1f} GB "
                f"of {spec.device}; use about {fits:,}, or dtype=bfloat16"
            )
        return Replay(self, spec, action_dim)


def memory_of(device: torch.device) -> int:
    """Bytes of memory that a device has, used or not."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass
class Transitions(TensorStruct):
    """B transitions of up to n steps each."""

    obs: Obs
    """`[B, ...]` s."""
    action: Tensor
    """`[B, A]` as stored."""
    reward: Tensor
    """`[B]` raw rewards of the k <= n steps, summed with gamma^j; k is less where an ending or the newest row cuts."""
    next_obs: Obs
    """`[B, ...]` the true observation after those k steps."""
    discount: Tensor
    """`[B]` gamma^k, 0 where the episode terminated."""
    valid: Tensor
    """`[B]` bool; False where the last observation of a cut episode has been given up, so that nothing is learned."""


class Replay:
    """A ring at fixed addresses; writing and drawing never ask the host."""

    def __init__(self, config: ReplayConfig, spec: EnvSpec, action_dim: int) -> None:
        self.config, self.num_envs, self.slots = config, spec.num_envs, config.slots(spec.num_envs)
        self.side, self.final_obs, device = config.side(spec), spec.final_obs, spec.device
        self.dtypes = {name: group.dtype for name, group in spec.obs.items()}
        rows = self.rows = self.slots * spec.num_envs

        def table(length: int, dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros((length, *shape), dtype=dtype, device=device)

        # Last observations follow the ring's own, so that one gather serves both, and then a row for what is nowhere
        # needed. Not zeroed: a row is written before it is read, and until then it takes no memory.
        self.obs = {
            name: torch.empty((rows + self.side + 1, *group.shape), dtype=config.stored(group.dtype), device=device)
            for name, group in spec.obs.items()
        }
        self.action, self.reward = table(rows, torch.float32, action_dim), table(rows, torch.float32)
        self.ending = table(rows, torch.uint8)
        self.final_at = table(rows, torch.int32).fill_(-1)
        """Place of a row's last observation beside the ring, -1 for none."""
        self.owner = table(self.side + 1, torch.int64).fill_(-1)
        """Which row, counted from the beginning of time, a place beside the ring was last given to."""
        self.order = table(rows + 1, torch.int32)
        """All transitions in the order in which they came, filler rows left out, as a ring of its own."""
        self.before = table(self.slots, torch.int64)
        """Transitions ever entered before each slot."""
        self.head, self.entered, self.finals = (table(1, torch.int64).squeeze(0) for _ in range(3))
        """Steps, transitions and last observations ever written."""
        self.zero = torch.zeros((), device=device)  # a number in its place is made a tensor in every call
        self.expected = table(spec.num_envs, torch.bool).fill_(True)
        """Whether the next observation begins an episode as far as the rows before it tell."""

    @torch.no_grad()
    def write(self, rollout: Rollout[Any], action: Tensor) -> None:
        """Take in all rows of a rollout; `action` `[T, N, A]` is stored as it is."""
        horizon, envs = rollout.horizon, self.num_envs
        # Rows as counted from the beginning of time, from those before the rollout to those of what comes next.
        number = torch.arange(-envs, (horizon + 1) * envs, device=action.device) + self.head * envs
        rows = number % self.rows
        here = rows[envs:-envs]
        self._keep_finals(rollout, number, rows)  # before the next observation is overwritten
        for name, stored in self.obs.items():
            stored.index_copy_(0, rows[envs:], rollout.obs[name].flatten(0, 1).to(stored.dtype))
        ending = torch.add(rollout.terminated.byte(), rollout.truncated, alpha=TRUNCATED)
        ending.add_(~rollout.valid, alpha=FILLER)
        for column, values in ((self.action, action), (self.reward, rollout.reward), (self.ending, ending)):
            column.index_copy_(0, here, values.flatten(0, 1))
        self._enter(rollout.valid, here)
        self.expected.copy_(rollout.reset[-1])
        self.head += horizon

    def _keep_finals(self, rollout: Rollout[Any], number: Tensor, rows: Tensor) -> None:
        """Store the last observations of episodes that were cut off, also of those broken off between two rollouts.

        An environment that could not save its state begins anew where a run is resumed. Then the rows before have as
        their last observation the one that stands where the next rollout begins.
        """
        envs = self.num_envs
        before, here = rows[:envs], rows[envs : 2 * envs]
        self.final_at.index_fill_(0, rows[envs:-envs], -1)  # a number to indices would wait for the device
        cut = broken = rollout.reset[0] & ~self.expected
        if rollout.final_obs is not None:
            cut = torch.cat([broken, rollout.truncated.flatten()])
        if not maybe_any(cut):
            return
        ended = self.ending[before]
        self.ending[before] = ended | torch.where(broken & (ended & TERMINATED == 0), TRUNCATED, 0).byte()
        number, rows = number[: len(cut)], rows[: len(cut)]
        place = torch.where(cut, (self.finals + cut.cumsum(0) - 1) % self.side, self.side)
        for name, stored in self.obs.items():
            last = stored[here]
            if rollout.final_obs is not None:
                last = torch.cat([last, rollout.final_obs[name].flatten(0, 1).to(stored.dtype)])
            stored.index_copy_(0, self.rows + place, last)
        self.final_at[rows] = torch.where(cut, place, self.final_at[rows].long()).int()
        self.owner.index_copy_(0, place, number)
        self.finals += cut.sum()

    def _enter(self, valid: Tensor, rows: Tensor) -> None:
        """Put the transitions among the rows `[T * N]` at the end of `order`; `valid` is `[T, N]`."""
        slots = rows[:: self.num_envs] // self.num_envs
        after = self.entered + valid.flatten().cumsum(0)
        self.before.index_copy_(0, slots, after[:: self.num_envs] - valid[:, 0].long())
        place = torch.where(valid.flatten(), (after - 1) % self.rows, self.rows)
        self.order.index_copy_(0, place, rows.int())
        self.entered.copy_(after[-1])

    @property
    def oldest(self) -> Tensor:
        """0-d: transitions ever entered that the ring has lost since."""
        place = (self.head - (self.slots - 1)).clamp(min=0) % self.slots
        return self.before.take(place)  # an index by a tensor of one number would wait for the device

    @property
    def count(self) -> Tensor:
        """0-d: transitions that may be drawn."""
        return self.entered - self.oldest

    def draw(self, size: int, generator: torch.Generator) -> Tensor:
        """`size` rows, each transition of the ring equally likely; with none there, row 0."""
        # float64: float32 has fewer numbers in 0..1 than a large ring has rows.
        share = torch.rand(size, dtype=torch.float64, generator=generator, device=self.head.device)
        oldest = self.oldest
        number = (share * (self.entered - oldest)).long()  # less than all: the largest share is 1 - 2^-53
        return self.order[(oldest + number) % self.rows].long()

    def at(self, rows: Tensor, steps: int, gamma: float) -> Transitions:
        """The transitions that begin at `rows` `[B]`, over up to `steps` steps."""
        newest = self.head * self.num_envs - 1
        reward, taken, discount = self._ahead(rows, newest, steps, gamma)
        after = (rows + taken * self.num_envs) % self.rows
        last = (after - self.num_envs) % self.rows
        ended = self.ending[last]
        terminated, truncated = ended == TERMINATED, ended == TRUNCATED
        place = self.final_at[last].long()
        beside = truncated & (place >= 0)
        number = newest - (newest - last) % self.rows
        lost = beside & (self.owner[place] != number)
        if self.final_obs == "unknown":
            after = torch.where(truncated, last, after)
        after = torch.where(beside, self.rows + place, after)
        return Transitions(
            obs=self._read(rows),
            action=self.action[rows],
            reward=reward,
            next_obs=self._read(after),
            discount=torch.where(terminated, self.zero, discount),
            valid=~lost,
        )

    def _ahead(
        self, rows: Tensor, newest: Tensor, steps: int, gamma: float
    ) -> tuple[Tensor, Tensor | int, Tensor | float]:
        """Rewards `[B]` of the steps that can be taken from `rows` on, how many these are, and gamma to that power."""
        if steps == 1:  # which nothing cuts short
            return self.reward[rows], 1, gamma
        envs, device = self.num_envs, rows.device
        ahead = torch.arange(0, steps * envs, envs, device=device)
        window = (rows[:, None] + ahead) % self.rows
        ending = self.ending[window]
        missing = (ahead > ((newest - rows) % self.rows)[:, None]) | (ending >= FILLER)
        missing[:, 1:].logical_or_(ending[:, :-1] > 0)
        used = missing.cumsum(1) == 0
        taken = used.sum(1)
        powers = torch.pow(gamma, torch.arange(steps + 1, device=device, dtype=torch.float64)).float()
        return torch.where(used, self.reward[window] * powers[:-1], self.zero).sum(1), taken, powers[taken]

    def sample(self, size: int, steps: int, gamma: float, generator: torch.Generator) -> Transitions:
        """`size` transitions drawn at random."""
        return self.at(self.draw(size, generator), steps, gamma)

    def _read(self, rows: Tensor) -> Obs:
        return {name: stored[rows].to(self.dtypes[name]) for name, stored in self.obs.items()}

    def _tables(self, head: int, entered: int, finals: int) -> dict[str, Tensor]:
        """All that was written, where it lies, after so many steps, transitions and last observations."""
        slots = min(head + 1, self.slots) if head else 0
        rows, finals = slots * self.num_envs, min(finals, self.side)
        parts = {f"obs/{name}": stored[:rows] for name, stored in self.obs.items()}
        parts |= {f"final/{name}": stored[self.rows : self.rows + finals] for name, stored in self.obs.items()}
        parts |= {name: getattr(self, name)[:rows] for name in ("action", "reward", "ending", "final_at")}
        parts |= {"owner": self.owner[:finals], "order": self.order[: min(entered, self.rows)]}
        return parts | {"before": self.before[:slots], "expected": self.expected}

    def state_dict(self) -> dict[str, Any]:
        """What was written, as it lies; nothing where it is not to be saved."""
        if not self.config.save:
            return {"head": 0, "entered": 0, "finals": 0, "tables": {}}
        counts = {name: int(getattr(self, name)) for name in ("head", "entered", "finals")}
        return counts | {"tables": {name: part.clone() for name, part in self._tables(**counts).items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved ring of the same sizes; tensors keep their addresses."""
        counts = {name: int(state[name]) for name in ("head", "entered", "finals")}
        here = self._tables(**counts) if state["tables"] else {}
        for name, part in here.items():
            saved = state["tables"][name]
            if saved.shape != part.shape or saved.dtype != part.dtype:
                raise UserError(
                    f"replay: {name} is {saved.dtype} {list(saved.shape)} in what was saved and {part.dtype} "
                    f"{list(part.shape)} here; replay.capacity and replay.dtype must be those of the run"
                )
        for name, part in here.items():
            part.copy_(state["tables"][name])
        for name, count in counts.items():
            getattr(self, name).fill_(count)
        if not here:
            self.expected.fill_(True)
