"""A Gaussian policy and its critic on a GPU: the definition's networks, and the loss with its gradients in one launch.

The networks are the modules themselves, whose layers have kernels of their own; so this engine knows every model, on
any GPU that Triton supports.

The most frequent PPO on a GPU, a Gaussian policy and a critic of linear layers: whole networks in one launch.

S sequences of one step, A action components. Acting, judging and learning go through the same kernels, so that the
first ratio of an update is exactly 1.
"""

from __future__ import annotations

from itertools import accumulate
from typing import cast

import torch
from torch import Tensor, nn

from canter.core.seeding import draw_rows
from canter.core.struct import Metrics, Obs, State
from canter.engines.autograd import AutogradEngine, LossOutput, rl_games_kl
from canter.engines.base import Acted, Coefs, PPOBatch, PPOLoss, Valued, unknown_part
from canter.engines.streams import beside
from canter.engines.triton.chain import Layers
from canter.engines.triton.gaussian_loss import BOUND_FORMS, bound_of, count_true, gaussian_loss
from canter.engines.triton.kernels.gaussian_params import FORMS, draw
from canter.engines.triton.kernels.linear import kind_of
from canter.engines.triton.learn import COUNT, Learner, Rows
from canter.functional.statistics import masked_mean
from canter.nn.actor_critic import ActorCritic
from canter.nn.distributions import DiagGaussian
from canter.nn.heads import GaussianHead, LogStd
from canter.nn.mlp import MLP
from canter.nn.network import AnyNetwork, Network
from canter.nn.optimizer import Optimizer
from canter.nn.rnn import NoMemory

KERNELS = {
    "surrogate": lambda name: name == "clipped",
    "clip_ratio": lambda number: True,
    "value_loss": lambda name: name in ("mse", "clipped"),
    "value_clip": lambda number: True,
    "value_coef": lambda number: True,
    "advantage": lambda name: name == "given",
    "bound": lambda bound: bound is None or bound.config.form in BOUND_FORMS,
}
"""What the kernels of the loss know."""
KNOWN = KERNELS | {"moving_kl": lambda yes: True, "moves_statistics": lambda yes: True}
"""Besides, what is done as the definition does it."""
NAMES = ("loss/policy", "loss/value", "policy/entropy", "policy/kl", "policy/clip_fraction", "loss/bound")
"""What they give the means of, in their order."""


def unsupported_by_layers(loss: PPOLoss, model: ActorCritic) -> str | None:
    """Why this engine does not compute a loss; None if it does."""
    if type(model.policy.distribution) is not DiagGaussian:
        return f"it knows Gaussian policies, not {type(model.policy.distribution).__name__}"
    return unknown_part(loss, KNOWN)


def clip_of(loss: PPOLoss) -> float | None:
    """How far a value may move; None for half the squared error."""
    return loss.value_clip if loss.value_loss == "clipped" else None


def named(means: Tensor, loss: PPOLoss) -> Metrics:
    """Means `[6]` by name, without that of a bound loss where there is none."""
    names = NAMES if loss.bound is not None else NAMES[:-1]
    return dict(zip(names, means.unbind(), strict=False))


class LayersEngine(AutogradEngine):
    """Autograd through the networks, with one kernel for the loss."""

    name = "triton_layers"

    def __init__(self, loss: PPOLoss, model: ActorCritic, optimizer: Optimizer) -> None:
        super().__init__(loss, model, optimizer)
        self.bound = bound_of(loss, model.policy.distribution.param_dim // 2, next(model.parameters()).device)

    def evaluate(self, batch: PPOBatch, coefs: Coefs) -> LossOutput:
        """The loss of one minibatch."""
        output = self.forward(batch)
        params, value = output.dist_params, output.value
        assert isinstance(params, Tensor) and isinstance(value, Tensor)
        loss, means = gaussian_loss(
            params,
            value,
            action=batch.action,
            old_params=batch.dist_params,
            old_log_prob=batch.log_prob,
            advantage=batch.advantage,
            old_value=batch.value,
            return_=batch.return_,
            valid=batch.valid,
            count=count_true(batch.valid),
            clip_ratio=self.loss.clip_ratio,
            value_clip=clip_of(self.loss),
            value_coef=self.loss.value_coef,
            entropy_coef=coefs.entropy,
            bound=self.bound,
        )
        metrics = named(means, self.loss)
        if self.loss.moving_kl:
            with torch.no_grad():
                metrics["policy/kl"] = masked_mean(rl_games_kl(batch.dist_params, params), batch.valid)
        return LossOutput(loss, metrics, params)


SHARED_MEMORY = 232_448
"""Bytes that a block may need, for the widest networks; what GPUs for computing have from Hopper on."""


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one block can have on a GPU."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def unsupported_by_networks(loss: PPOLoss, model: ActorCritic) -> str | None:
    """Why this engine does not compute a loss; None if it does."""
    memory = shared_memory(next(model.parameters()).device)
    if memory < SHARED_MEMORY:
        return f"it needs {SHARED_MEMORY} bytes of shared memory a block, this GPU has {memory}"
    if torch.get_float32_matmul_precision() == "highest":
        return "it multiplies in TF32, which execution.tf32=false forbids"
    head = model.actor.head
    if not isinstance(head, GaussianHead) or not isinstance(head.raw_std, nn.Parameter):
        return "it knows Gaussian policies whose std is a parameter that learns"
    if type(head.log_std) is not LogStd or head.log_std.form not in FORMS:
        return f"it knows the forms {', '.join(FORMS)} of the std"
    for network, heads in _networks(model):
        reason = _unknown_network(network, *heads)
        if reason:
            return reason
    return unsupported_by_layers(loss, model) or unknown_part(loss, KERNELS)


def _networks(model: ActorCritic) -> list[tuple[AnyNetwork, list[nn.Module]]]:
    """Each network with its heads: one network with both of them where the trunk is shared."""
    mean, value = cast(GaussianHead, model.actor.head).mean, model.critic.head.linear
    if model.shared_trunk:
        return [(model.actor.network, [mean, value])]
    return [(model.actor.network, [mean]), (model.critic.network, [value])]


def _unknown_network(network: AnyNetwork, *heads: nn.Module) -> str | None:
    linear = all(isinstance(head, nn.Linear) and head.bias is not None for head in heads)
    if type(network) is not Network or type(network.hidden) is not MLP or not linear:
        return "it does not know networks of another kind than the standard one"
    if not isinstance(network.memory, NoMemory):
        return "it does not know memory"
    if network.in_bfloat16:
        return "it does not know bfloat16"
    if not all(isinstance(encoder, nn.Identity) for encoder in network.encoders):
        return "it does not know images or observations of several axes"
    if not network.hidden.plain or kind_of(network.hidden[-1]) is None:
        return "it knows linear layers with tanh, relu or elu"
    return None if _layers(network, *heads).fits else "its networks are too wide for one launch"


def _layers(network: AnyNetwork, *heads: nn.Module) -> Layers:
    hidden = cast(Network, network).hidden
    last = [(head.weight, head.bias) for head in cast(tuple[nn.Linear, ...], heads)]
    weights, biases, kind = hidden.weights[::2], hidden.weights[1::2], cast(int, kind_of(hidden[-1]))
    if len(last) > 1:
        return Layers(weights, biases, kind, *last)
    return Layers([*weights, last[0][0]], [*biases, last[0][1]], kind)


class NetworksEngine:
    """What PPO does with its networks, in few launches."""

    name = "triton"

    def __init__(self, loss: PPOLoss, model: ActorCritic, optimizer: Optimizer) -> None:
        self.optimizer, self.loss, self.shared = optimizer, loss, model.shared_trunk
        self.actor_network, self.critic_network = (
            cast(Network, model.actor.network),
            cast(Network, model.critic.network),
        )
        self.head, self.value_head = cast(GaussianHead, model.actor.head), model.critic.head
        self.networks = [_layers(network, *heads) for network, heads in _networks(model)]
        self.raw, std = cast(Tensor, self.head.raw_std), self.head.log_std
        self.std = std.mid, std.half_range, std.form
        self.distribution = cast(DiagGaussian, model.policy.distribution)
        self.bounds = torch.tensor(self.distribution.interval(), device=self.raw.device)
        groups = list(optimizer.groups.values())
        self.flats = [group.adam.gradient for group in groups]
        self.gradient = self.flats[0] if len(groups) == 1 else torch.cat(self.flats)
        starts = accumulate((flat.numel() for flat in self.flats), initial=0)
        self.learner = Learner(
            self.networks[0],
            None if self.shared else self.networks[1],
            self.raw,
            std=self.std,
            bound=bound_of(loss, self.distribution.dim, self.raw.device),
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
        mean = self._outputs(0, self.actor_network.encode(obs))[:, : self.distribution.dim].contiguous()
        noise = draw_rows(torch.randn, mean.shape, generator=rng, device=mean.device)
        mid, half, form = self.std
        params, action, for_env = draw(mean, self.raw, noise, self.bounds, mid=mid, half=half, form=form)
        return for_env, action, params, state

    def _outputs(self, which: int, x: Tensor, needed: Tensor | None = None) -> Tensor:
        self.networks[which].join()
        return self.networks[which](x, needed)

    @torch.no_grad()
    def values(self, obs: Obs, state: State, reset: Tensor | None, needed: Tensor | None = None) -> Valued:
        """Only blocks of rows are computed in which one is needed."""
        x = self.critic_network.encode(obs)
        values = self._outputs(-1, x.flatten(0, 1), None if needed is None else needed.flatten())[:, -1]
        return self.value_head.normalizer.inverse(values.reshape(x.shape[:2])), ()

    def log_prob(self, dist_params: Tensor, action: Tensor) -> Tensor:
        """Those of the distribution; learning computes them again from the recorded parameters."""
        return self.distribution.log_prob(dist_params, action)

    def begin(self, batch: PPOBatch) -> Rows:
        """Rows `[S, ...]`, which are then read where they are."""
        x = self.actor_network.encode(batch.obs)
        inputs = (x, x if self.shared else self.critic_network.encode(batch.obs))
        own = (batch.action, batch.dist_params, batch.advantage, batch.value, batch.return_, batch.valid)
        return Rows(*(row.squeeze(0).contiguous() for row in (*inputs, *own)))

    def gradients(self, rows: Rows, index: Tensor, coefs: Coefs) -> Metrics:
        """Forward, loss, back and the products over rows."""
        sums, parts = self.learner(rows, index, coefs.entropy)
        count = sums[COUNT]
        with beside(self.learner.stream) as join:
            means = self.learner.means(sums, count)
        self.learner.products.add_up(parts, sums, count, self.gradient)
        join(means)
        if len(self.flats) > 1:
            for flat, part in zip(self.flats, self.gradient.split([flat.numel() for flat in self.flats]), strict=True):
                flat.copy_(part)
        return named(means, self.loss)
