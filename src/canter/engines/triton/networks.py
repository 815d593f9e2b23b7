"""The most frequent PPO on a GPU, a Gaussian policy and a critic of linear layers: whole networks in one launch.

S sequences of one step, A action components. Acting, judging and learning go through the same kernels, so that the
first ratio of an update is exactly 1.
"""

from __future__ import annotations

from itertools import accumulate
from typing import cast

import torch
from torch import Tensor, nn

from canter import distributed
from canter.distributions import DiagGaussian
from canter.engines.base import Acted, Coefs, PPOLoss, Valued
from canter.engines.batch import PPOBatch
from canter.engines.triton import layers
from canter.engines.triton.chain import Layers
from canter.engines.triton.layers import NAMES, clip_of
from canter.engines.triton.learn import Learner, Rows
from canter.kernels.gaussian_params import draw
from canter.kernels.linear import kind_of
from canter.kernels.streams import beside
from canter.nn.actor_critic import ActorCritic
from canter.nn.heads import GaussianHead
from canter.nn.mlp import MLP
from canter.nn.network import AnyNetwork, Network
from canter.nn.rnn import NoMemory
from canter.optim import Optimizer
from canter.struct import Metrics, Obs, State

SHARED_MEMORY = 232_448
"""Bytes that a block may need, for the widest networks; what GPUs for computing have from Hopper on."""


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one block can have on a GPU."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def declines(loss: PPOLoss, model: ActorCritic) -> str | None:
    """Why this engine does not compute a loss; None if it does."""
    memory = shared_memory(next(model.parameters()).device)
    if memory < SHARED_MEMORY:
        return f"it needs {SHARED_MEMORY} bytes of shared memory a block, this GPU has {memory}"
    if torch.get_float32_matmul_precision() == "highest":
        return "it multiplies in TF32, which execution.tf32=false forbids"
    if model.shared_trunk:
        return "it does not know a shared trunk"
    head = model.actor.head
    if not isinstance(head, GaussianHead) or not isinstance(head.raw_std, nn.Parameter):
        return "it knows Gaussian policies whose std is a parameter"
    for network, last in ((model.actor.network, head.mean), (model.critic.network, model.critic.head.linear)):
        reason = _unknown_network(network, last)
        if reason:
            return reason
    return layers.declines(loss, model)


def _unknown_network(network: AnyNetwork, last: nn.Module) -> str | None:
    if type(network) is not Network or type(network.hidden) is not MLP or not isinstance(last, nn.Linear):
        return "it does not know networks of another kind than the standard one"
    if not isinstance(network.memory, NoMemory):
        return "it does not know memory"
    if network.in_bfloat16:
        return "it does not know bfloat16"
    if not all(isinstance(encoder, nn.Identity) for encoder in network.encoders):
        return "it does not know images or observations of several axes"
    if not network.hidden.plain or kind_of(network.hidden[-1]) is None:
        return "it knows linear layers with tanh, relu or elu"
    return None if _layers(network, last).fits else "its networks are too wide for one launch"


def _layers(network: Network, last: nn.Linear) -> Layers:
    weights, kind = network.hidden.weights, cast(int, kind_of(network.hidden[-1]))
    return Layers([*weights[::2], last.weight], [*weights[1::2], last.bias], kind)


class NetworksEngine:
    """What PPO does with its networks, in few launches."""

    name = "triton"

    def __init__(self, loss: PPOLoss, model: ActorCritic, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.actor_network, self.critic_network = (
            cast(Network, model.actor.network),
            cast(Network, model.critic.network),
        )
        self.head, self.value_head = cast(GaussianHead, model.actor.head), model.critic.head
        self.actor = _layers(self.actor_network, cast(nn.Linear, self.head.mean))
        self.critic = _layers(self.critic_network, cast(nn.Linear, self.value_head.linear))
        self.raw = cast(Tensor, self.head.raw_std)
        self.distribution = cast(DiagGaussian, model.policy.distribution)
        self.bounds = torch.tensor(self.distribution.interval(), device=self.raw.device)
        groups = list(optimizer.groups.values())
        self.flats = [group.adam.gradient for group in groups]
        self.gradient = self.flats[0] if len(groups) == 1 else torch.cat(self.flats)
        starts = accumulate((flat.numel() for flat in self.flats), initial=0)
        self.learner = Learner(
            self.actor,
            self.critic,
            self.raw,
            bound=(self.head.bound.mid, self.head.bound.half_range),
            clip_ratio=loss.clip_ratio,
            value_clip=clip_of(loss),
            value_coef=loss.value_coef,
            places={
                parameter: start + int(view.storage_offset())
                for group, start in zip(groups, starts, strict=False)
                for parameter, view in group.gradients.items()
            },
            count=self.gradient.numel(),
        )

    @torch.no_grad()
    def act(self, obs: Obs, state: State, reset: Tensor, rng: torch.Generator) -> Acted:
        """Noise, sample, bounds and parameters in one launch behind the network's."""
        mean, bound = self.actor(self.actor_network.encode(obs)), self.head.bound
        noise = torch.randn(mean.shape, generator=rng, device=mean.device)
        params, action, for_env = draw(mean, self.raw, noise, self.bounds, mid=bound.mid, half=bound.half_range)
        return for_env, action, params, state

    @torch.no_grad()
    def values(self, obs: Obs, state: State, reset: Tensor | None, needed: Tensor | None = None) -> Valued:
        """Only blocks of rows are computed in which one is needed."""
        x = self.critic_network.encode(obs)
        values = self.critic(x.flatten(0, 1), None if needed is None else needed.flatten())
        return self.value_head.normalizer.inverse(values.view(x.shape[:2])), ()

    def log_prob(self, dist_params: Tensor, action: Tensor) -> Tensor:
        """Those of the distribution; learning computes them again from the recorded parameters."""
        return self.distribution.log_prob(dist_params, action)

    def begin(self, batch: PPOBatch) -> Rows:
        """Rows `[S, ...]`, which are then read where they are."""
        inputs = [network.encode(batch.obs) for network in (self.actor_network, self.critic_network)]
        own = (batch.action, batch.dist_params, batch.advantage, batch.value, batch.return_, batch.valid)
        return Rows(*(row.squeeze(0).contiguous() for row in (*inputs, *own)))

    def gradients(self, rows: Rows, index: Tensor, coefs: Coefs) -> Metrics:
        """Forward, loss, back and the products over rows."""
        sums, parts = self.learner(rows, index, coefs.entropy)
        count = sums[5] if distributed.world_size() == 1 else distributed.mean_(sums[5].sum(0, keepdim=True))
        with beside(self.learner.stream) as join:
            means = self.learner.means(sums, count)
        self.learner.products.add_up(parts, sums, count, self.gradient)
        join(means)
        if len(self.flats) > 1:
            for flat, part in zip(self.flats, self.gradient.split([flat.numel() for flat in self.flats]), strict=True):
                flat.copy_(part)
        return dict(zip(NAMES, means.unbind(), strict=True))
