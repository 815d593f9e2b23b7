"""The ring against a list of episodes: what is drawn, and what a transition of n steps is."""

import math
import random
from dataclasses import dataclass

import pytest
import torch

from canter.core.data.replay import ReplayConfig, device_memory
from canter.core.data.rollout import Rollout
from canter.core.specs import Continuous, EnvSpec, TensorSpec
from canter.core.storage.tree import decode, encode
from canter.core.struct import maybe_any
from covering import pairwise

A = 2


@pytest.fixture(autouse=True, params=["as on a CPU", "as on a GPU"])
def looks(request, monkeypatch):
    """Return True if operations without effect are left out."""
    if request.param == "as on a GPU":
        monkeypatch.setattr(maybe_any, "kernels", [])


@dataclass
class Row:
    """One row as the naive definition sees it."""

    obs: float
    action: float
    reward: float
    terminated: bool
    truncated: bool
    valid: bool
    successor: float = math.nan
    """The true observation after the step; of an episode that was cut off, the one that would be valued."""
    final: int | None = None
    """Number of its last observation among all that were stored beside the ring."""


class World:
    """Random episodes of N environments, as rollouts and as plain lists."""

    def __init__(self, seed, final_obs, envs, horizon, capacity, ends, dtype="float32"):
        self.random, self.mode, self.envs, self.horizon, self.ends = random.Random(seed), final_obs, envs, horizon, ends
        obs = {"policy": TensorSpec((3,)), "image": TensorSpec((2, 2, 1), torch.uint8)}
        self.spec = EnvSpec(obs, Continuous((-1.0,) * A, (1.0,) * A), envs, final_obs=final_obs, truncates=True)
        self.replay = ReplayConfig(capacity=capacity, dtype=dtype).build(self.spec, A)
        self.rollout = Rollout.allocate(horizon, self.groups([0.0] * envs), (), self.spec)
        self.past = [[] for _ in range(envs)]
        self.waiting = [0] * envs
        self.finals = self.counter = 0
        self.now = []
        self.begin()

    def begin(self):
        """New episodes everywhere, as the collector shows them to the next rollout."""
        self.now = [self.new() for _ in range(self.envs)]
        for name, values in self.groups(self.now).items():
            self.rollout.obs[name][self.horizon] = values
        self.rollout.reset[self.horizon] = True

    def new(self):
        """An observation that was never there before, small enough for bfloat16 and a byte."""
        self.counter = (self.counter + 1) % 251
        return float(self.counter)

    def groups(self, values):
        values = torch.tensor(values)
        image = values.view(-1, 1, 1, 1).expand(-1, 2, 2, 1).to(torch.uint8)
        return {"policy": values.view(-1, 1) + torch.tensor([0.0, 0.0, 0.0]), "image": image}

    def step(self, t, actions):
        rollout, after = self.rollout, []
        for env in range(self.envs):
            row = Row(self.now[env], actions[t, env, 0].item(), self.random.uniform(-1, 1), False, False, True)
            if self.waiting[env]:  # a filler row: no transition, and perhaps the reset
                self.waiting[env] -= 1
                row.valid = False
                after.append(self.new())
            else:
                kind = self.random.random()
                row.terminated, row.truncated = kind < self.ends, self.ends <= kind < 2 * self.ends
                after.append(self.settle(t, env, row))
            self.past[env].append(row)
            for name, value in (("reward", row.reward), ("terminated", row.terminated), ("truncated", row.truncated)):
                getattr(rollout, name)[t, env] = value
            rollout.valid[t, env] = row.valid
        self.now = after
        for name, values in self.groups(after).items():
            rollout.obs[name][t + 1] = values

    def settle(self, t, env, row):
        """The observation to act on next; notes the true successor."""
        true = row.successor = self.new()
        if not (row.terminated or row.truncated):
            return true
        if self.mode == "in_place":
            self.waiting[env] = self.random.choice([1, 1, 3])
            return true
        if self.random.random() < 0.2:
            self.waiting[env] = 2  # an agent whose world goes on without it
        if self.mode == "separate":
            for name, values in self.groups([true]).items():
                self.rollout.final_obs[name][t, env] = values[0]
            if row.truncated:
                row.final = -1  # numbered in the order of the rollout's rows, see `play`
        elif row.truncated:
            row.successor = row.obs
        return self.new()

    def play(self, broken=False):
        """One rollout into both memories; `broken` restarts all episodes before it, as an inexact resume does."""
        rollout = self.rollout
        if broken:
            self.restart()
        rollout.begin()
        actions = torch.rand(self.horizon, self.envs, A) * 2 - 1
        for t in range(self.horizon):
            self.step(t, actions)
        for t in range(-self.horizon, 0):
            for env in range(self.envs):
                if self.past[env][t].final == -1:
                    self.past[env][t].final, self.finals = self.finals, self.finals + 1
        rollout.mark_resets(self.mode)
        self.replay.write(rollout, actions)

    def restart(self):
        for env in range(self.envs):
            last = self.past[env][-1] if self.past[env] else None
            runs_on = last is not None and last.valid and not (last.terminated or last.truncated)
            if last is not None and (runs_on or (self.mode == "in_place" and last.valid)):
                last.truncated = not last.terminated
                last.final, self.finals = self.finals, self.finals + 1
            self.waiting[env] = 0
        self.begin()

    def alive(self):
        """Flat row of the ring -> environment and index in the list, of all rows that the ring still has."""
        replay, total = self.replay, len(self.past[0])
        steps = range(max(0, total - replay.slots + 1), total)
        return {t % replay.slots * self.envs + env: (env, t) for t in steps for env in range(self.envs)}

    def naive(self, env, t, steps, gamma):
        """Reward, successor, discount and whether it can be learned from, by the definition."""
        rows, reward = self.past[env], 0.0
        for k in range(1, steps + 1):
            row = rows[t + k - 1]
            reward += gamma ** (k - 1) * row.reward
            if row.terminated:
                return reward, None, 0.0, True
            if row.truncated:
                lost = row.final is not None and self.finals - row.final > self.replay.final_slots
                return reward, None if lost else row.successor, gamma**k, not lost
            if k == steps or t + k == len(rows):
                break
        return reward, row.successor, gamma**k, True


MODES = ("separate", "in_place", "unknown")
SIZES = ((1, 1, 5), (1, 4, 40), (3, 2, 6), (3, 5, 60), (4, 7, 200))
"""Environments, horizon and capacity."""
CASES = pairwise(MODES, SIZES, (0.05, 0.3))


PER_CASE = 340
"""Transitions compared in each of the 30 cases: more than 10,000 in all."""


@pytest.mark.parametrize(("mode", "sizes", "ends"), CASES)
def test_transitions_of_n_steps_are_those_of_the_definition(mode, sizes, ends):
    envs, horizon, capacity = sizes
    assert len(CASES) * PER_CASE > 10_000
    compared, lost, world = 0, 0, World(7, mode, envs, horizon, capacity, ends)
    while compared < PER_CASE or len(world.past[0]) < 2 * world.replay.slots:
        world.play(broken=world.random.random() < 0.2)
        alive = {row: place for row, place in world.alive().items() if world.past[place[0]][place[1]].valid}
        if not alive or world.random.random() < 0.5:
            continue
        steps, gamma = world.random.choice([1, 2, 3, 5]), 0.9
        found = world.replay.gather(torch.tensor(list(alive)), steps, gamma)
        naive = [world.naive(env, t, steps, gamma) for env, t in alive.values()]
        rows = [world.past[env][t] for env, t in alive.values()]
        assert found.valid.tolist() == [valid for _, _, _, valid in naive]
        assert found.reward.tolist() == pytest.approx([reward for reward, _, _, _ in naive], abs=1e-6)
        assert found.discount.tolist() == pytest.approx([discount for _, _, discount, _ in naive], abs=1e-6)
        assert found.action[:, 0].tolist() == [row.action for row in rows]
        shown = [(found.obs, range(len(rows)), [row.obs for row in rows])]
        known = [i for i, (_, successor, _, _) in enumerate(naive) if successor is not None]
        shown.append((found.next_obs, known, [naive[i][1] for i in known]))
        for obs, which, values in shown:
            assert all(torch.equal(obs[name][list(which)], group) for name, group in world.groups(values).items())
        compared, lost = compared + len(rows), lost + int((~found.valid).sum())
    # Where a third of the rows are cut off, there is no room for all of their last observations.
    assert lost > 0 or (mode, ends) != ("separate", 0.3) or capacity < 40


@pytest.mark.parametrize("mode", ["separate", "in_place"])
def test_every_transition_is_drawn_equally_often_and_filler_steps_never(mode):
    world = World(3, mode, 3, 4, 60, 0.2)
    for _ in range(11):
        world.play()
        alive = world.alive()
        wanted = {row for row, (env, t) in alive.items() if world.past[env][t].valid}
        assert world.replay.count.item() == len(wanted) <= len(alive)
        rows = world.replay.draw(40 * len(wanted), torch.Generator().manual_seed(0))
        assert set(rows.tolist()) == wanted
    assert len(wanted) < len(alive)  # there were filler rows
    drawn = world.replay.draw(200_000, torch.Generator().manual_seed(1))
    drawn = drawn.bincount(minlength=world.replay.entries).double()
    expected = 200_000 / len(wanted)
    chi_square = ((drawn[sorted(wanted)] - expected) ** 2 / expected).sum().item()
    assert chi_square < len(wanted) + 5 * math.sqrt(2 * len(wanted))  # five standard deviations


def test_an_empty_ring_draws_its_first_row():
    replay = ReplayConfig(capacity=8).build(World(0, "separate", 2, 1, 4, 0.1).spec, A)
    assert replay.draw(5, torch.Generator()).tolist() == [0] * 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rollouts", [0, 1, 3, 30])
def test_a_saved_ring_continues_bit_for_bit(dtype, rollouts):
    world = World(5, "separate", 3, 4, 60, 0.2, dtype)
    for _ in range(rollouts):
        world.play()
    other = ReplayConfig(capacity=60, dtype=dtype).build(world.spec, A)
    other.load_state_dict(decode(*encode(world.replay.state_dict())))
    for _ in range(3):
        drawn = [ring.sample(64, 3, 0.9, torch.Generator().manual_seed(1)) for ring in (world.replay, other)]
        if rollouts:
            for mine, theirs in zip(*(vars(batch).values() for batch in drawn), strict=True):
                pairs = zip(mine.values(), theirs.values(), strict=True) if isinstance(mine, dict) else [(mine, theirs)]
                assert all(torch.equal(left, right) for left, right in pairs)
        world.play()
        other.write(world.rollout, world.replay.action.view(-1, 3, A)[world_slots(world)])
        rollouts += 1
    mine, theirs = (encode({"ring": ring.state_dict()}) for ring in (world.replay, other))
    assert mine == theirs


def world_slots(world):
    total = len(world.past[0])
    return [t % world.replay.slots for t in range(total - world.horizon, total)]


def test_bfloat16_and_bytes_take_the_stated_memory():
    world = World(0, "separate", 4, 2, 64, 0.1, "bfloat16")
    replay = world.replay
    assert replay.obs["policy"].dtype == torch.bfloat16 and replay.obs["image"].dtype == torch.uint8
    tables = [*replay.obs.values()]
    names = ("action", "reward", "ending", "final_at", "owner", "order", "before")
    taken = sum(table.nbytes for table in (*tables, *(getattr(replay, name) for name in names)))
    assert replay.config.nbytes(world.spec, A) == pytest.approx(taken, abs=16)


def test_a_ring_that_is_left_out_comes_back_empty():
    world = World(0, "separate", 2, 4, 32, 0.1)
    world.play()
    saved = ReplayConfig(capacity=32, save=False).build(world.spec, A)
    saved.write(world.rollout, torch.zeros(4, 2, A))
    assert saved.state_dict()["tables"] == {}
    world.replay.load_state_dict(saved.state_dict())
    assert world.replay.count.item() == 0


def test_a_ring_of_other_sizes_is_refused():
    world = World(0, "separate", 2, 4, 32, 0.1)
    for _ in range(6):
        world.play()
    with pytest.raises(ValueError, match=r"replay: obs/policy is .* replay.capacity and replay.dtype"):
        ReplayConfig(capacity=64).build(world.spec, A).load_state_dict(world.replay.state_dict())


def test_more_than_the_available_memory_is_refused_before_it_is_allocated():
    spec = World(0, "separate", 2, 4, 32, 0.1).spec
    capacity = 2 * device_memory(torch.device("cpu")) // 30
    with pytest.raises(
        ValueError, match=rf"replay.capacity={capacity} needs .* GB, more than the .* of cpu; use about"
    ):
        ReplayConfig(capacity=capacity).build(spec, A)
    with pytest.raises(ValueError, match="capacity=0 must be at least 1"):
        ReplayConfig(capacity=0)
