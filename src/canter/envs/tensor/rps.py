"""Rock, paper, scissors: a game of two with a known equilibrium, for self-play.

E games.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from canter.envs.agents import ALIVE, REWARD
from canter.envs.tensor.base import EnvState, Outcome, TensorEnv
from canter.specs import MultiDiscrete, TensorSpec
from canter.struct import Obs

NO_MOVE = 3
"""What is shown in place of a last move before the first."""


@final
class RockPaperScissors(TensorEnv):
    """Rock, paper, scissors for two: a game with a known equilibrium, for self-play.

    Both players choose at once: 0 rock, 1 paper, 2 scissors; the winner gets from the loser what is at stake.

    `stakes` are what a win with rock, paper and scissors is worth. With stakes `(r, p, s)` the only equilibrium plays
    them with probabilities in the proportion `s : r : p`, and then nobody can win anything. A game terminates after
    `rounds`. The joint action is `[E, 2]`; "policy" `[E, 2, 4]` is the other's last move, one-hot, or the fourth when
    there was none.
    """

    num_agents = 2

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        *,
        rounds: int = 1,
        stakes: Sequence[float] = (1.0, 1.0, 1.0),
    ) -> None:
        if rounds < 1:
            raise ValueError(f"rounds={rounds} must be at least 1")
        if len(stakes) != 3 or min(stakes) <= 0:
            raise ValueError(f"stakes={tuple(stakes)} must be three positive numbers: for rock, paper and scissors")
        obs = {"policy": TensorSpec((2, NO_MOVE + 1))}
        super().__init__("tensor:rps", num_envs, device, obs=obs, action=MultiDiscrete((3, 3)))
        self.rounds = rounds
        rock, paper, scissors = stakes
        table = ((0.0, -paper, rock), (paper, 0.0, -scissors), (-rock, scissors, 0.0))
        self._payoff = torch.tensor(table, device=self.device).flatten()
        self._one_hot = torch.eye(NO_MOVE + 1, device=self.device)

    def _sample_state(self) -> EnvState:
        nothing = torch.full((self.num_envs, 2), NO_MOVE, device=self.device)
        return {"last_moves": nothing, "round": torch.zeros_like(nothing[:, 0])}

    def _advance(self, state: EnvState, action: Tensor) -> Outcome:
        reward = self._payoff.index_select(0, 3 * action[:, 0] + action[:, 1])
        following = {"last_moves": action, "round": state["round"] + 1}
        both = {REWARD: torch.stack((reward, -reward), 1), ALIVE: torch.ones_like(action, dtype=torch.bool)}
        return Outcome(following, reward, following["round"] >= self.rounds, info=both)

    def _observe(self, state: EnvState) -> Obs:
        seen = state["last_moves"].flip(1)
        return {"policy": self._one_hot.index_select(0, seen.flatten()).unflatten(0, seen.shape)}
