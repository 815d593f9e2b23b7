"""A pool of frozen policies with ratings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from canter.nn.actor_critic import Policy
from canter.struct import tree_map

FIRST_RATING = 1000.0
"""Rating of the first policy; only differences mean something."""
RATING_SCALE = 400.0
"""A lead of this much means a score of 10 to 1."""
RATING_STEP = 16.0
"""How far a series of games moves a rating at most."""


class OpponentPool:
    """An even sample of the policies that ever joined, at most `size` of them, and how strong they are.

    Ratings are Elo's: the expected score against a rating higher by d is 1 / (1 + 10^(d / 400)). Here a whole series of
    games counts like one in Elo's, by its mean score. A policy joins with the rating that the learner has then.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.generator = torch.Generator().manual_seed(seed)
        self.weights: list[dict[str, Tensor]] = []
        self.ratings: list[float] = []
        self.joined = 0
        """How many ever did."""
        self.elo = FIRST_RATING
        """The learner's rating."""

    def __len__(self) -> int:
        return len(self.weights)

    def add(self, policy: Policy) -> None:
        """Let a policy in as it is now; when the pool is full a random one leaves, or this one does not come in.

        Numbers of members change, so draw again.
        """
        self.joined += 1
        if len(self) == self.size:
            # Algorithm R (Vitter, 1985): each of all that ever joined is here with the same probability.
            place = self._below(self.joined)
            if place >= self.size:
                return
            del self.weights[place], self.ratings[place]
        self.weights.append(tree_map(torch.clone, policy.actor.state_dict()))
        self.ratings.append(self.elo)

    def draw(self, count: int) -> list[int]:
        """Numbers of `count` members, each member equally likely.

        They are spread evenly over the pool, which is in the order of joining: neighbours are alike, so these few stand
        for all far better than independent draws would.
        """
        start = float(torch.rand((), generator=self.generator))
        return [int((start + place) * len(self) / count) for place in range(count)]

    def load(self, member: int, into: Policy) -> None:
        """Give a policy the weights of a member."""
        into.actor.load_state_dict(self.weights[member])

    def rate(self, member: int, score: float) -> None:
        """Take account of the learner's mean score, 0..1, in a series of games against a member."""
        expected = 1.0 / (1.0 + 10.0 ** ((self.ratings[member] - self.elo) / RATING_SCALE))
        change = RATING_STEP * (score - expected)
        self.elo += change
        self.ratings[member] -= change

    def new_seed(self) -> int:
        """A seed for another random stream."""
        return self._below(1 << 62)

    def state_dict(self) -> dict[str, Any]:
        """Everything; the weights never change, so they are not copied."""
        return {
            "weights": list(self.weights),
            "ratings": list(self.ratings),
            "joined": self.joined,
            "elo": self.elo,
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        self.weights, self.ratings = list(state["weights"]), list(state["ratings"])
        self.joined, self.elo = state["joined"], state["elo"]
        self.generator.set_state(state["generator"].cpu())

    def _below(self, limit: int) -> int:
        return int(torch.randint(limit, (), generator=self.generator))
