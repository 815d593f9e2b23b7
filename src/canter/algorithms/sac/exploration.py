"""The noise that a policy explores with.

N environments, A action components.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn

from canter.seeding import draw_rows


class FreshNoise(nn.Module):
    """New noise in every step."""

    def forward(self, like: Tensor, generator: Generator) -> Tensor:
        """Standard normal, of the shape of `like` `[N, A]`."""
        return draw_rows(torch.randn, like.shape, generator=generator, device=like.device, dtype=like.dtype)


class KeptNoise(nn.Module):
    """Each environment keeps its noise for a random number of steps, k of them with a chance of k^-2 up to `most`.

    Noise that lasts moves a robot; noise that changes in every step shakes it.
    """

    def __init__(self, most: int, num_envs: int, dim: int) -> None:
        super().__init__()
        weights = torch.arange(1, most + 1, dtype=torch.float64) ** -2
        self.chance = nn.Buffer((weights.cumsum(0) / weights.sum()).float(), persistent=False)
        self.noise = nn.Buffer(torch.zeros(num_envs, dim))
        self.left = nn.Buffer(torch.zeros(num_envs, dtype=torch.int64))

    def forward(self, like: Tensor, generator: Generator) -> Tensor:
        """The noise of this step; overwritten by the next."""
        fresh = draw_rows(torch.randn, like.shape, generator=generator, device=like.device, dtype=like.dtype)
        share = draw_rows(torch.rand, (len(like),), generator=generator, device=like.device)
        steps = (torch.searchsorted(self.chance, share) + 1).clamp(max=len(self.chance))
        renew = self.left <= 0
        self.left.copy_(torch.where(renew, steps, self.left) - 1)
        self.noise.copy_(torch.where(renew.unsqueeze(-1), fresh, self.noise))
        return self.noise
