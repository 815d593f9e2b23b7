"""The engines of PPO on a GPU, for Gaussian policies, squashed or not, and discrete actions.

`LayersEngine` runs the modules, whose layers have kernels, and computes the loss with its gradients
in one launch; it supports every model on any GPU that Triton supports. `NetworksEngine` computes
whole networks of linear layers in one launch, on GPUs with enough shared memory. Acting, values and
learning use the same kernels there, so that the first ratio of an update is exactly 1.

S sequences of one step, A means or logits.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn

from canter.core.seeding import draw_for_rank
from canter.core.struct import Metrics, Obs, State
from canter.engines.autograd import AutogradEngine, LossOutput, rl_games_kl
from canter.engines.base import ANYTHING, NUMBERS, Acted, Capabilities, Coefs, PPOBatch, PPOLoss, UpdateResult, Valued
from canter.engines.triton.chain import Layers
from canter.engines.triton.kernels.gaussian_params import FORMS, draw
from canter.engines.triton.kernels.linear import kind_of
from canter.engines.triton.learn import COUNT, Learner, Samples
from canter.engines.triton.loss import fused_loss
from canter.engines.triton.policies import BOUND_FORMS, MAX_CHOICES, bound_of, policy_of
from canter.functional.densities import StdForm
from canter.functional.statistics import masked_mean
from canter.nn.actor_critic import ActorCritic
from canter.nn.distributions import DiagGaussian, Floats, TanhGaussian, interval
from canter.nn.heads import GaussianHead, LinearHead
from canter.nn.network import AnyNetwork, Network
from canter.nn.optimizer import Optimizer

LOSS = {
    "surrogate": {"clipped"},
    "clip_ratio": NUMBERS,
    "value_loss": {"mse", "clipped"},
    "value_clip": NUMBERS,
    "value_coef": NUMBERS,
    "advantage": {"given"},
    "bound": {None, *BOUND_FORMS},
}
"""Fields of a `PPOLoss` that the kernels of the loss support."""
DISTRIBUTIONS = {"gaussian", "tanh_gaussian", "categorical", "multi_categorical"}


def choices_fit(model: ActorCritic) -> str | None:
    """Return why a supported distribution is too large for the kernels, if so."""
    if len(policy_of(model.policy.distribution).nvec) > MAX_CHOICES:
        return f"more than {MAX_CHOICES} discrete actions at a time are not supported"
    return None


LAYERS_CAPABILITIES = Capabilities(
    device="cuda",
    # The last two are computed as in the definition.
    loss=LOSS | {"moving_kl": {None, True}, "update_obs_stats_per_minibatch": ANYTHING},
    model={"distribution": DISTRIBUTIONS},
    runs_modules=True,
    size_limit=choices_fit,
)
ROLLOUT_PARAMS = "rollout_params"
"""Name among a minibatch's additional tensors, for a KL whose own reference parameters move."""
NAMES = ("loss/policy", "loss/value", "policy/entropy", "policy/kl", "policy/clip_fraction", "loss/bound")
"""Means that the kernels return, in their order."""


def clip_of(loss: PPOLoss) -> float | None:
    """Return the clip range of a value; None for half the squared error."""
    return loss.value_clip if loss.value_loss == "clipped" else None


def named(means: Tensor, loss: PPOLoss) -> Metrics:
    """Return the means `[6]` by name, without that of a bound loss if there is none."""
    names = NAMES if loss.bound is not None else NAMES[:-1]
    return dict(zip(names, means.unbind(), strict=False))


class LayersEngine(AutogradEngine):
    """Autograd through the networks, with one kernel for the loss and its gradients."""

    name = "triton_layers"
    capabilities = LAYERS_CAPABILITIES

    def __init__(self, loss: PPOLoss, model: ActorCritic, optimizer: Optimizer) -> None:
        super().__init__(loss, model, optimizer)
        self.kernel_policy = policy_of(self.distribution)
        self.bound = bound_of(loss, self.kernel_policy.columns, next(model.parameters()).device)

    def begin(self, batch: PPOBatch) -> PPOBatch:
        """Return the samples; with a moving KL, also the parameters that ratios refer to."""
        samples = super().begin(batch)
        if not self.loss.moving_kl:
            return samples
        return replace(samples, carried=samples.carried | {ROLLOUT_PARAMS: batch.dist_params})

    def evaluate(self, batch: PPOBatch, coefs: Coefs) -> LossOutput:
        """Return the loss of one minibatch."""
        output = self.forward(batch)
        params = output.dist_params
        value = output.value
        assert isinstance(params, Tensor) and isinstance(value, Tensor)
        loss, means = fused_loss(
            self.kernel_policy,
            params,
            value,
            action=batch.action,
            old_params=batch.carried.get(ROLLOUT_PARAMS, batch.dist_params),
            advantage=batch.advantage,
            old_value=batch.value,
            return_=batch.return_,
            valid=batch.valid,
            clip_ratio=self.loss.clip_ratio,
            value_clip=clip_of(self.loss),
            value_coef=self.loss.value_coef,
            entropy_coef=coefs.entropy,
            bound=self.bound,
        )
        metrics = named(means, self.loss)
        kl = metrics.pop("policy/kl")
        if self.loss.moving_kl:
            with torch.no_grad():
                kl = masked_mean(rl_games_kl(self.distribution, batch, params), batch.valid)
        return LossOutput(loss, metrics, kl, params)


SHARED_MEMORY = 232_448
"""Bytes that a block needs for the widest networks; data-centre GPUs have them from Hopper on."""


def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that one block can have on a GPU."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def networks_requirement(model: ActorCritic) -> str | None:
    """Return why this GPU cannot run whole networks in one launch, if so."""
    memory = shared_memory(next(model.parameters()).device)
    if memory < SHARED_MEMORY:
        return f"it needs {SHARED_MEMORY} bytes of shared memory a block, this GPU has {memory}"
    if torch.get_float32_matmul_precision() == "highest":
        return "it multiplies in TF32, which execution.tf32=false forbids"
    return None


def networks_fit(model: ActorCritic) -> str | None:
    """Return why supported networks are too wide for one launch, if so."""
    if not all(_layers(network, *heads).fits for network, heads in _networks(model)):
        return "model.policy.hidden or model.critic.hidden is too wide, or the actions are too many, for one launch"
    return choices_fit(model)


NETWORKS_CAPABILITIES = Capabilities(
    device="cuda",
    loss=LOSS,
    model={
        "network": {"standard"},
        "precision": {"float32"},
        "observation groups": ANYTHING,
        "hidden layers": {"MLP"},
        "encoder": {"identity"},
        "normalizer": ANYTHING,
        "observation dtype": ANYTHING,
        "layer": {"linear"},
        "activation": {"tanh", "relu", "elu"},
        "actor": {"standard"},
        "policy head": {"standard"},
        "distribution": DISTRIBUTIONS,
        "form": FORMS,
        "std kind": {"parameter"},
        "critic": {"standard"},
        "value head": {"standard"},
        "parameter dtype": ANYTHING,
        "device": ANYTHING,  # checked by `choose`; the interpreter runs on a CPU
        "frozen parameter": ANYTHING,
        "hook": ANYTHING,
    },
    requirement=networks_requirement,
    size_limit=networks_fit,
)


def _networks(model: ActorCritic) -> list[tuple[AnyNetwork, list[nn.Module]]]:
    """Return each network with its heads; a shared trunk is one network with both heads."""
    head = cast(GaussianHead | LinearHead, model.actor.head)
    last = head.mean if isinstance(head, GaussianHead) else head.linear
    value = model.critic.head.linear
    if model.shared_trunk:
        return [(model.actor.network, [last, value])]
    return [(model.actor.network, [last]), (model.critic.network, [value])]


def _layers(network: AnyNetwork, *heads: nn.Module) -> Layers:
    hidden = cast(Network, network).hidden
    last = [(head.weight, head.bias) for head in cast(tuple[nn.Linear, ...], heads)]
    weights = hidden.weights[::2]
    biases = hidden.weights[1::2]
    kind = cast(int, kind_of(hidden[-1]))
    if len(last) > 1:
        return Layers(weights, biases, kind, *last)
    return Layers([*weights, last[0][0]], [*biases, last[0][1]], kind)


def _bounds(distribution: DiagGaussian | TanhGaussian) -> tuple[Floats, ...]:
    """Return scale, centre, minimum and maximum of the environment's actions."""
    if isinstance(distribution, TanhGaussian):
        return interval(distribution.low, distribution.high)
    return distribution.interval()


def gradient_sizes(batch: PPOBatch, shared: bool) -> Tensor:
    """Return the sizes `[2]` of the gradients of policy and value; equal ones for a `shared` trunk.

    The least is 0.01 for a policy, as parts of its loss do not depend on advantages.
    """
    advantage, error = (
        torch.where(batch.valid, part, 0.0).abs().amax() for part in (batch.advantage, batch.return_ - batch.value)
    )
    sizes = torch.stack([advantage.clamp(1e-2), error.clamp(1e-12)])
    if shared:
        sizes = sizes.amax().expand(2)
    return torch.where(sizes < float("inf"), sizes, 1.0)  # the loss reports NaN and infinity


class NetworksEngine:
    """Acts, values and learns with whole networks in few launches."""

    name = "triton"
    capabilities = NETWORKS_CAPABILITIES

    def __init__(self, loss: PPOLoss, model: ActorCritic, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.loss = loss
        self.shared = model.shared_trunk
        self.actor_network = cast(Network, model.actor.network)
        self.critic_network = cast(Network, model.critic.network)
        self.value_head = model.critic.head
        self.networks = [_layers(network, *heads) for network, heads in _networks(model)]
        self.distribution: Any = model.policy.distribution
        self.policy = policy_of(self.distribution)
        self.raw = torch.empty(0, device=next(model.parameters()).device)
        self.std: tuple[float, float, StdForm] = (0.0, 0.0, "log")
        head = model.actor.head
        if isinstance(head, GaussianHead):
            self.raw = cast(Tensor, head.raw_std)
            self.std = head.log_std.mid, head.log_std.half_range, head.log_std.form
            self.bounds = torch.tensor(_bounds(self.distribution), device=self.raw.device)
        groups = list(optimizer.groups.values())
        self.flats = [group.adam.gradient for group in groups]
        self.gradient = self.flats[0] if len(groups) == 1 else torch.cat(self.flats)
        starts = accumulate((flat.numel() for flat in self.flats), initial=0)
        self.learner = Learner(
            self.networks[0],
            None if self.shared else self.networks[1],
            self.raw,
            policy=self.policy,
            std=self.std,
            bound=bound_of(loss, self.policy.columns, self.raw.device),
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
        """Sample actions; noise, bounds and parameters take one launch after the network's."""
        mean = self.networks[0](self.actor_network.encode(obs))[:, : self.policy.columns].contiguous()
        if self.policy.nvec:
            action = self.distribution.sample(mean, rng)
            return action, action, mean, state
        noise = draw_for_rank(torch.randn, mean.shape, generator=rng, device=mean.device)
        mid, half, form = self.std
        squashed = self.policy.squashed
        params, action, for_env = draw(
            mean, self.raw, noise, self.bounds, mid=mid, half=half, form=form, squashed=squashed
        )
        return for_env, action, params, state

    @torch.no_grad()
    def values(self, obs: Obs, state: State, reset: Tensor | None, needed: Tensor | None = None) -> Valued:
        """Return values `[L, B]`; a block of samples without a needed one is not computed."""
        x = self.critic_network.encode(obs)
        values = self.networks[-1](x.flatten(0, 1), None if needed is None else needed.flatten())[:, -1]
        return self.value_head.normalizer.inverse(values.reshape(x.shape[:2])), ()

    def log_prob(self, dist_params: Tensor, action: Tensor) -> Tensor:
        """Return the log-probabilities of the distribution.

        Learning recomputes them from the recorded parameters.
        """
        return self.distribution.log_prob(dist_params, action)

    def begin(self, batch: PPOBatch) -> Samples:
        """Take the samples `[S, ...]`, which are read in place."""
        x = self.actor_network.encode(batch.obs)
        inputs = (x, x if self.shared else self.critic_network.encode(batch.obs))
        own = (batch.action, batch.dist_params, batch.advantage, batch.value, batch.return_, batch.valid)
        rows = (row.squeeze(0).contiguous() for row in (*inputs, *own))
        return Samples(*rows, gradient_sizes(batch, self.shared))

    def gradients(self, samples: Samples, index: Tensor, coefs: Coefs) -> UpdateResult:
        """Write the gradients of the loss of samples `index`; return metrics and KL."""
        sums, parts = self.learner(samples, index, coefs.entropy)
        means = self.learner.products.add_up(parts, sums, sums[COUNT], self.gradient)
        if len(self.flats) > 1:
            for flat, part in zip(self.flats, self.gradient.split([flat.numel() for flat in self.flats]), strict=True):
                flat.copy_(part)
        metrics = named(means, self.loss)
        kl = metrics.pop("policy/kl")
        return UpdateResult(metrics, kl)
