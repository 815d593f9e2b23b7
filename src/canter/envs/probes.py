"""Probe environments: tiny tasks with known answers, each sensitive to one kind of mistake.

A probe has S nodes and no more state than the node a row is at. Train on one for some seconds, then
compare with its `checks`: the first wrong answer names the mistake. Importing this module registers
the probes in `tensor_envs`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import final

import torch
from torch import Tensor

from canter.core.registry import UserError
from canter.core.specs import ACTION_MASK, ActionSpec, Continuous, Discrete, MultiDiscrete, TensorSpec
from canter.core.struct import Obs
from canter.envs.tensor import tensor_envs
from canter.envs.tensor.base import EnvState, Outcome, TensorEnv

ENDS = -1
"""Entry of `ProbeTask.follows` for a node whose step terminates the episode."""

Row = tuple[float, ...]
NO_CHOICE = Discrete(1)
ONE_REAL = Continuous(low=(-1.0,), high=(1.0,))


@dataclass(frozen=True, kw_only=True)
class ProbeTask:
    """A task as tables over its S nodes, with the correct answers."""

    about: str
    """Description of the task, the correct answer, and the wrong answers that mistakes lead to."""
    action: ActionSpec = NO_CHOICE
    obs: tuple[Row, ...] = ((0.0,),)
    """Observation at each node, `[S, O]`."""
    reward: tuple[Row, ...] = ()
    """Reward `[S, number of joint actions]`, the last head varying fastest."""
    target: tuple[Row, ...] = ()
    """Best action `[S, A]` instead of `reward` if actions are continuous: the reward is
    `-sum((action - target)^2)`."""
    follows: tuple[int, ...] = ()
    """Node after each node, or `ENDS`; no entries: every step ends the episode."""
    truncation: Row = ()
    """Probability that the step from each node is truncated on arrival; no entries: never."""
    mask: tuple[tuple[bool, ...], ...] = ()
    """Action mask `[S, n]`, True for an allowed action; no entries: no mask."""
    max_episode_steps: int | None = None
    value: Callable[[float], Sequence[float]] | None = None
    """Function from the discount to the correct value of each node under the best policy; None if
    exploration noise shifts it. Discount 1 in a task that never ends stands for the average reward
    and its centred values."""
    best: tuple[tuple[int, ...] | None, ...] = ()
    """Best action of each node, one number per head, None if all are equally good; continuous
    actions have `target` instead."""

    @property
    def starts(self) -> int:
        """Number of start nodes, all equally likely: the first ones, which follow none, or all."""
        return len(self.obs) - len({*self.follows} - {ENDS}) or len(self.obs)


@dataclass(frozen=True)
class ProbeCheck:
    """Correct value and action at K situations; compare the policy's modes with `action`."""

    obs: Obs
    """Groups of `[K, ...]`."""
    history: tuple[Obs, ...]
    """Earlier observations of the K episodes, oldest first; only a recurrent policy needs them."""
    value: Tensor | None
    """`[K]` float32."""
    action: Tensor | None
    """`[K]` int64, `[K, heads]` int64 or `[K, A]` float32, as the environment takes them."""


@final
class Probe(TensorEnv):
    """A `ProbeTask`, batched. `tensor_envs` has them by name; `checks` returns the answers."""

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        *,
        task: ProbeTask,
        env_id: str = "tensor:probe",
        max_episode_steps: int | None = None,
    ) -> None:
        tables = {"policy": task.obs} | ({ACTION_MASK: task.mask} if task.mask else {})
        self._groups = {name: torch.tensor(table, device=device) for name, table in tables.items()}
        groups = {name: TensorSpec(tuple(table.shape[1:]), table.dtype) for name, table in self._groups.items()}
        limit = max_episode_steps or task.max_episode_steps
        truncates = limit is not None or any(task.truncation)
        super().__init__(env_id, num_envs, device, groups, task.action, max_episode_steps=limit, truncates=truncates)
        self.task = task
        nodes = len(task.obs)
        self._follows = torch.tensor(task.follows or (ENDS,) * nodes, device=self.device)
        self._truncation = torch.tensor(task.truncation or (0.0,) * nodes, device=self.device)
        self._reward = self._build_reward()

    def _build_reward(self) -> Callable[[Tensor, Tensor], Tensor]:
        table = torch.tensor(self.task.target or self.task.reward, device=self.device)
        match self.task.action:
            case Continuous():
                return lambda node, action: -(action - table[node]).square().sum(-1)
            case Discrete() | MultiDiscrete() as choices:
                table = table.view(-1, *choices.nvec)
                return lambda node, action: table[(node, *action.view(len(node), -1).unbind(-1))]

    def _sample_state(self) -> EnvState:
        return {"node": self._integers(self.task.starts)}

    def _advance(self, state: EnvState, action: Tensor) -> Outcome:
        node = state["node"]
        follower = self._follows[node]
        terminated = follower == ENDS
        # An ended row stays where it is: its final observation is a valid one, and a wrong
        # bootstrap from it shows.
        after = torch.where(terminated, node, follower)
        truncated = self._uniform(0.0, 1.0) < self._truncation[node]
        return Outcome({"node": after}, self._reward(node, action), terminated, truncated)

    def _observe(self, state: EnvState) -> Obs:
        return {name: table[state["node"]] for name, table in self._groups.items()}

    def checks(self, gamma: float) -> list[ProbeCheck]:
        """Return the correct results with discount `gamma`: a check per step of the episode."""
        task = self.task
        follows = self._follows.tolist()
        values = None if task.value is None else torch.tensor(task.value(gamma), device=self.device)
        checks: list[ProbeCheck] = []
        history: tuple[Obs, ...] = ()
        nodes = list(range(task.starts))
        visited = {ENDS}
        while nodes:
            rows = torch.tensor(nodes, device=self.device)
            obs = {name: table[rows] for name, table in self._groups.items()}
            value = None if values is None else values[rows]
            checks.append(ProbeCheck(obs, history, value, self._answers(nodes)))
            history = (*history, obs)
            # All paths of a task are equally long, so the rows of every entry of the history belong
            # together.
            visited.update(nodes)
            nodes = [follows[node] for node in nodes if follows[node] not in visited]
        return checks

    def _answers(self, nodes: list[int]) -> Tensor | None:
        answers = self.task.target or self.task.best
        chosen = [answers[node] for node in nodes] if answers else [None]
        if None in chosen:
            return None
        action = torch.tensor(chosen, device=self.device)
        return action[:, 0] if isinstance(self.task.action, Discrete) else action


@final
class DeepSea(TensorEnv):
    """Dive from the top left of a `size` x `size` grid, a row each step, to the bottom right.

    A table drawn once says which action goes right in each cell; going right costs 0.01 / size.
    Random actions find the corner once in 2^size episodes, and until then an algorithm learns not
    to go right. So the task tests exploration over more than a step; the best return is 0.99.
    "policy" holds the cell as a one-hot vector.
    """

    def __init__(self, num_envs: int, device: torch.device | str = "cpu", *, size: int = 10) -> None:
        if size < 2:
            raise UserError(f"size={size} must be at least 2")
        groups = {"policy": TensorSpec((size * size,))}
        super().__init__("tensor:deep-sea", num_envs, device, groups, Discrete(2), truncates=False)
        self.size = size
        table = torch.rand((size, size), generator=torch.Generator().manual_seed(size)) < 0.5
        self.goes_right = table.long().to(self.device)
        """Action that goes right in each cell, `[size, size]`."""

    def _sample_state(self) -> EnvState:
        zero = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        return {"row": zero, "column": zero.clone()}

    def _advance(self, state: EnvState, action: Tensor) -> Outcome:
        row = state["row"]
        column = state["column"]
        right = action == self.goes_right[row, column]
        corner = right & (row == self.size - 1) & (column == self.size - 1)
        after = {
            "row": (row + 1).clamp(max=self.size - 1),
            "column": torch.where(right, column + 1, column - 1).clamp(0, self.size - 1),
        }
        return Outcome(after, corner.float() - 0.01 / self.size * right.float(), row == self.size - 1)

    def _observe(self, state: EnvState) -> Obs:
        cell = state["row"] * self.size + state["column"]
        return {"policy": (cell.unsqueeze(-1) == torch.arange(self.size**2, device=self.device)).float()}


HORIZON = 5
RECALL_DELAY = 3
"""Blank steps between the cue and the question."""
HEADS = (2, 3)
PAIRS = tuple(product(*map(range, HEADS)))
"""All joint actions of the two heads."""
EITHER = ((-1.0,), (1.0,))

PROBES = {
    "value-constant": ProbeTask(
        about="One step, observation 0, reward 1. V = 1, or the value loss or its optimiser is broken.",
        reward=((1.0,),),
        value=lambda gamma: (1.0,),
    ),
    "value-obs": ProbeTask(
        about="One step, observation -1 or 1, reward the same. V = observation, or the value does not see it.",
        obs=EITHER,
        reward=((-1.0,), (1.0,)),
        value=lambda gamma: (-1.0, 1.0),
    ),
    "discount": ProbeTask(
        about="Observation 0, then 1, then the end with reward 1. V = (gamma, 1), or discounting or GAE is broken.",
        obs=((0.0,), (1.0,)),
        reward=((0.0,), (1.0,)),
        follows=(1, ENDS),
        value=lambda gamma: (gamma, 1.0),
    ),
    "action": ProbeTask(
        about="One step, action 1 pays 1, action 0 costs 1. Choose 1, or the policy loss or its sign is broken.",
        action=Discrete(2),
        reward=((-1.0, 1.0),),
        value=lambda gamma: (1.0,),
        best=((1,),),
    ),
    "action-continuous": ProbeTask(
        about="One step, reward -(action - 0.5)^2. The mean goes to 0.5.",
        action=ONE_REAL,
        target=((0.5,),),
    ),
    "obs-action": ProbeTask(
        about="One step, 1 for the action that matches observation -1 or 1, else -1. Or observation and action of "
        "different environments were mixed up.",
        action=Discrete(2),
        obs=EITHER,
        reward=((1.0, -1.0), (-1.0, 1.0)),
        value=lambda gamma: (1.0, 1.0),
        best=((0,), (1,)),
    ),
    "obs-action-continuous": ProbeTask(
        about="One step, reward -(action - observation / 2)^2 with observation -1 or 1. The mean goes to -0.5 or 0.5.",
        action=ONE_REAL,
        obs=EITHER,
        target=((-0.5,), (0.5,)),
    ),
    "truncation": ProbeTask(
        about="S goes to A; A pays 1 and goes to B, where half of the episodes are truncated; B pays 10 and "
        "terminates. With gamma 0.99, V(A) = 10.90. It is 5.95 when truncation counts as an end, 11.78 when V(A) "
        "stands in for V(B), 11.67 when the next episode's first value leaks in.",
        obs=((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
        reward=((0.0,), (1.0,), (10.0,)),
        follows=(1, 2, ENDS),
        truncation=(0.0, 0.5, 0.0),
        value=lambda gamma: (gamma * (1.0 + gamma * 10.0), 1.0 + gamma * 10.0, 10.0),
    ),
    "both-flags": ProbeTask(
        about="Every step pays 1 and terminates exactly when the time limit strikes. V = 1; it grows towards "
        "1 / (1 - gamma) when the time limit wins and the end is bootstrapped.",
        reward=((1.0,),),
        max_episode_steps=1,
        value=lambda gamma: (1.0,),
    ),
    "finite-horizon": ProbeTask(
        about="Five steps that pay 1 each, the elapsed share of time is shown and the deadline terminates. V falls "
        "to 1 at the last step; it stays high when the deadline is taken for a truncation.",
        obs=tuple((t / HORIZON,) for t in range(HORIZON)),
        reward=((1.0,),) * HORIZON,
        follows=(*range(1, HORIZON), ENDS),
        value=lambda gamma: [sum(gamma**k for k in range(left)) for left in range(HORIZON, 0, -1)],
    ),
    "cycle": ProbeTask(
        about="Two states take turns for ever and pay 0 and 2. By average reward the rate is 1 and V = (-0.5, 0.5); "
        "values that drift together were not centred, and a rate of 0 or 2 comes from counting one state only.",
        obs=((0.0,), (1.0,)),
        reward=((0.0,), (2.0,)),
        follows=(1, 0),
        value=lambda gamma: (-0.5, 0.5) if gamma == 1 else (2.0 * gamma / (1.0 - gamma**2), 2.0 / (1.0 - gamma**2)),
    ),
    "masked": ProbeTask(
        about="Observation -1 or 1 forbids action 0 or 1, which would pay 10; the other of the two pays 1, action 2 "
        "nothing. V = 1 with the mask obeyed, and 10 or a forbidden choice when it is not.",
        action=Discrete(3),
        obs=EITHER,
        reward=((10.0, 1.0, 0.0), (1.0, 10.0, 0.0)),
        mask=((False, True, True), (True, False, True)),
        value=lambda gamma: (1.0, 1.0),
        best=((1,), (0,)),
    ),
    "multi-discrete": ProbeTask(
        about="Two heads with 2 and 3 choices; the observation shows a choice for each as one-hots, a match pays 0.5. "
        "V = 1 and both heads match, or heads are mixed up or share their log-probability wrongly.",
        action=MultiDiscrete(HEADS),
        obs=tuple(
            tuple(float(choice == wanted) for wanted, n in zip(pair, HEADS, strict=True) for choice in range(n))
            for pair in PAIRS
        ),
        reward=tuple(tuple(0.5 * (a == first) + 0.5 * (b == second) for a, b in PAIRS) for first, second in PAIRS),
        value=lambda gamma: (1.0,) * 6,
        best=PAIRS,
    ),
    "value-scale": ProbeTask(
        about="Observation -1 or 1, the matching action pays 500 or 1500, the other nothing. Right only when large "
        "returns neither swamp the policy's gradient nor need hundreds of thousands of steps to be reached.",
        action=Discrete(2),
        obs=EITHER,
        reward=((500.0, 0.0), (0.0, 1500.0)),
        value=lambda gamma: (500.0, 1500.0),
        best=((0,), (1,)),
    ),
    "recall": ProbeTask(
        about="The first observation is (cue, 0) with cue -1 or 1, then come three blanks (0, 0), then the question "
        "(0, 1): the action that matches the cue pays 1, the other -1. Needs memory; V = gamma^(steps to the reward).",
        action=Discrete(2),
        obs=((-1.0, 0.0), (1.0, 0.0), *((0.0, 0.0),) * (2 * RECALL_DELAY), (0.0, 1.0), (0.0, 1.0)),
        reward=(*((0.0, 0.0),) * (2 * RECALL_DELAY + 2), (1.0, -1.0), (-1.0, 1.0)),
        follows=(*range(2, 2 * RECALL_DELAY + 4), ENDS, ENDS),
        value=lambda gamma: [gamma**left for left in range(RECALL_DELAY + 1, -1, -1) for _cue in range(2)],
        best=(*(None,) * (2 * RECALL_DELAY + 2), (0,), (1,)),
    ),
}
"""The probes by name; `tensor_envs` has them as `probe-<name>`."""

for _name, _task in PROBES.items():
    _probe = partial(Probe, task=_task, env_id=f"tensor:probe-{_name}")
    _probe.__doc__ = f"Probe: {_task.about.partition('. ')[0]}."  # `canter envs` lists it
    tensor_envs.register(f"probe-{_name}")(_probe)
tensor_envs.register("deep-sea")(DeepSea)
