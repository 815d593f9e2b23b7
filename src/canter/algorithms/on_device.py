"""The most frequent PPO on a GPU, a Gaussian policy and a critic of linear layers: whole networks in one launch.

S sequences of one step, A action components. Acting, judging and learning go through the same kernels, so that the
first ratio of an update is exactly 1. The plain forms stay the definition.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from canter import distributed
from canter.algorithms.base import Metrics
from canter.algorithms.fused import NAMES
from canter.algorithms.phase import LossOutput
from canter.distributions import DiagGaussian
from canter.kernels import usable
from canter.kernels.streams import beside
from canter.nn.actor_critic import ActorCritic
from canter.nn.heads import GaussianHead, ValueHead
from canter.nn.network import AnyNetwork, Network, plain_network
from canter.optim import Optimizer
from canter.struct import Obs, TensorStruct

if TYPE_CHECKING:
    from canter.algorithms.ppo import PPOBatch, PPOConfig
    from canter.kernels.chain import Layers
    from canter.kernels.learn import Rows


SHARED_MEMORY = 232_448
"""Bytes that a block may need, for the widest networks; what GPUs for computing have from Hopper on."""


@dataclass
class Indices(TensorStruct):
    """Which rows to learn from: shuffled in place of the rows, which are read where they are."""

    index: Tensor
    """`[1, S]`."""


class OnDevice:
    """What an algorithm does with its networks, in few launches."""

    def __init__(
        self,
        config: PPOConfig,
        actor: tuple[Network, Layers],
        critic: tuple[Network, Layers],
        head: GaussianHead,
        value_head: ValueHead,
        distribution: DiagGaussian,
        optimizer: Optimizer,
    ) -> None:
        from canter.kernels.learn import Learner

        (self.actor_network, self.actor), (self.critic_network, self.critic) = actor, critic
        self.head, self.value_head = head, value_head
        self.bounds = torch.tensor(distribution.interval(), device=head.mean.weight.device)
        groups = list(optimizer.groups.values())
        self.flats = [group.gradient for group in groups]
        self.gradient = self.flats[0] if len(groups) == 1 else torch.cat(self.flats)
        starts = accumulate((flat.numel() for flat in self.flats), initial=0)
        self.learner = Learner(
            self.actor,
            self.critic,
            cast(Tensor, head.raw_std),
            bound=(head.bound.mid, head.bound.half_range),
            clip_ratio=config.clip_ratio,
            value_clip=config.value_clip if config.value_loss == "clipped" else None,
            value_coef=config.value_coef,
            places={
                parameter: start + int(view.storage_offset())
                for group, start in zip(groups, starts, strict=False)
                for parameter, view in group.gradients.items()
            },
            count=self.gradient.numel(),
        )
        self.rows: Rows | None = None

    def act(self, obs: Obs, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """What the environment receives, the action as drawn, and the distribution parameters `[N, ...]`."""
        from canter.kernels.gaussian_params import draw

        mean, bound = self.actor(self.actor_network.encode(obs)), self.head.bound
        noise = torch.randn(mean.shape, generator=generator, device=mean.device)
        raw = cast(Tensor, self.head.raw_std)
        params, action, for_env = draw(mean, raw, noise, self.bounds, mid=bound.mid, half=bound.half_range)
        return for_env, action, params

    def values(self, obs: Obs, needed: Tensor | None = None) -> Tensor:
        """Values `[T, N]` in the units of the reward; of rows that are not `needed` `[T, N]` they may be anything."""
        x = self.critic_network.encode(obs)
        values = self.critic(x.flatten(0, 1), None if needed is None else needed.flatten())
        return self.value_head.normalizer.inverse(values.view(x.shape[:2]))

    def read(self, batch: PPOBatch) -> Indices:
        """Take these rows to learn from."""
        from canter.kernels.learn import Rows

        inputs = [network.encode(batch.obs) for network in (self.actor_network, self.critic_network)]
        own = (batch.action, batch.dist_params, batch.advantage, batch.value, batch.return_, batch.valid)
        self.rows = Rows(*(row.squeeze(0).contiguous() for row in (*inputs, *own)))
        return Indices(torch.arange(len(self.rows.action), device=self.gradient.device).unsqueeze(0))

    def loss(self, batch: Indices, entropy_coef: Tensor) -> LossOutput:
        """The loss of rows that were read; puts the gradients of all parameters where the optimiser has them."""
        assert self.rows is not None
        sums, parts = self.learner(self.rows, batch.index.squeeze(0), entropy_coef)
        count = sums[5] if distributed.world_size() == 1 else distributed.mean_(sums[5].sum(0, keepdim=True))
        with beside(self.learner.stream) as join:
            means = self.learner.means(sums, count)
        self.learner.products.add_up(parts, sums, count, self.gradient)
        join(means)
        if len(self.flats) > 1:
            for flat, part in zip(self.flats, self.gradient.split([flat.numel() for flat in self.flats]), strict=True):
                flat.copy_(part)
        metrics: Metrics = dict(zip(NAMES, means.unbind(), strict=True))
        return LossOutput(None, metrics["policy/kl"], metrics)


def on_device(config: PPOConfig, model: ActorCritic, optimizer: Optimizer) -> OnDevice | None:
    """The kernels for this model, or None where it has parts that they do not know."""
    device = next(model.parameters()).device
    if not usable(torch.empty(0, device=device)) or model.shared_trunk or config.extensions or config.central_value:
        return None
    if torch.cuda.get_device_properties(device).shared_memory_per_block_optin < SHARED_MEMORY:
        return None
    match model.actor.head:
        case GaussianHead(raw_std=nn.Parameter()) as head:
            actor = _network(model.actor.network, head.mean)
        case _:
            return None
    critic, distribution = _network(model.critic.network, model.critic.head.linear), model.policy.distribution
    if actor is None or critic is None or not isinstance(distribution, DiagGaussian):
        return None
    return OnDevice(config, actor, critic, head, model.critic.head, distribution, optimizer)


def _network(network: AnyNetwork, last: nn.Module) -> tuple[Network, Layers] | None:
    from canter.kernels.chain import Layers

    plain = plain_network(network)
    if plain is None or not isinstance(last, nn.Linear):
        return None
    weights = plain.hidden.weights
    layers = Layers([*weights[::2], last.weight], [*weights[1::2], last.bias], plain.hidden.activation or "")
    return (plain, layers) if layers.fits else None
