"""Whole rollouts of a simulator in JAX as one XLA program, with the policy's network in it.

T steps, N environments, A action components, P distribution parameters. Noise is drawn in torch, from
the stream and in the order of single steps, so that both ways take the same actions up to rounding.
Weights are handed over by DLPack before each rollout, without copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import torch
from torch import Tensor

from canter.core.data.rollout import Rollout
from canter.core.declarations import CompilesRollouts
from canter.core.registry import UserError
from canter.core.seeding import draw_for_rank
from canter.core.struct import tree_copy_, tree_map
from canter.engines.base import ANYTHING, PLAIN_NETWORKS, PPORecord, unsupported_feature
from canter.functional.densities import MIN_STD
from canter.nn.actor_critic import ActorCritic
from canter.nn.describe import describe
from canter.nn.distributions import Categorical, DiagGaussian, TanhGaussian, interval
from canter.nn.normalizer import Normalizer

ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "elu": jax.nn.elu,
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "leaky_relu": jax.nn.leaky_relu,
    "selu": jax.nn.selu,
    "celu": jax.nn.celu,
    "mish": jax.nn.mish,
    "sigmoid": jax.nn.sigmoid,
    "softplus": jax.nn.softplus,
    "identity": lambda x: x,
}
STD_FORMS: dict[str, Callable[[Any, float, float], Any]] = {
    "bounded": lambda raw, mid, half: mid + raw * jax.lax.rsqrt(1 + (raw / half) ** 2),
    "tanh": lambda raw, mid, half: mid + half * jnp.tanh(raw),
    "log": lambda raw, mid, half: raw,
    "scalar": lambda raw, mid, half: jnp.log(jnp.maximum(raw, MIN_STD)),
    "softplus": lambda raw, mid, half: jnp.log(jax.nn.softplus(raw)),
}
"""Log-std of raw parameters, see `canter.functional.densities.to_log_std`."""
SUPPORTED: Mapping[str, Any] = {
    **PLAIN_NETWORKS,
    "activation": ACTIVATIONS,
    "distribution": {"gaussian", "tanh_gaussian", "categorical"},
    "std kind": {"parameter", "constant"},
    "form": STD_FORMS,
    "parameter dtype": {"torch.float32"},
    "device": {"cpu", "cuda"},
    "frozen parameter": ANYTHING,
}
"""Features of policies by `canter.nn.describe`; others are refused."""


class XlaPolicy:
    """The policy of a model as a function of JAX, and its weights; raises UserError for one that is not supported."""

    def __init__(self, model: ActorCritic) -> None:
        layers = [layer for layer in describe(model) if layer.network != "critic" and layer.kind != "value"]
        reason = unsupported_feature((feature for layer in layers for feature in layer.features), SUPPORTED)
        if reason is not None:
            raise UserError(f"execution.mode=scan: {reason}")
        self.inputs = [layer for layer in layers if layer.kind == "input"]
        self.linear = [layer for layer in layers if layer.kind in ("hidden", "output")]
        self.head: Any = model.actor.head
        self.distribution: Any = model.policy.distribution
        self.is_discrete = isinstance(self.distribution, Categorical)

    def weights(self) -> list[Tensor]:
        """Return the live tensors that `act` takes: statistics of inputs, layers, the raw std."""
        tensors: list[Tensor] = []
        for normalizer in (layer.normalizer for layer in self.inputs):
            tensors += [normalizer.shift, normalizer.inverse_scale] if isinstance(normalizer, Normalizer) else []
        for layer in self.linear:
            tensors += [layer.module.weight, layer.module.bias]
        tensors += [] if self.is_discrete else [self.head.raw_std]
        return [tensor.detach() for tensor in tensors]

    def draw(self, horizon: int, num_envs: int, rng: torch.Generator, device: torch.device) -> Tensor:
        """Return the noise `[T, N, ...]` of a rollout, in the draws of `Distribution.sample`."""
        width = self.distribution.param_dim if self.is_discrete else self.distribution.param_dim // 2
        draw = torch.rand if self.is_discrete else torch.randn
        shape = (num_envs, width)
        return torch.stack([draw_for_rank(draw, shape, generator=rng, device=device) for _ in range(horizon)])

    def act(self, weights: list[Any], obs: Mapping[str, Any], noise: Any) -> tuple[Any, tuple[Any, Any]]:
        """Return the action for the environment, and the sample with its parameters `[N, P]`, as in PPO's record."""
        remaining = iter(weights)
        columns = []
        for layer in self.inputs:
            x = obs[layer.group]
            if isinstance(layer.normalizer, Normalizer):
                clip = layer.normalizer.clip
                x = (x - next(remaining)) * next(remaining)
                x = x if clip is None else jnp.clip(x, -clip, clip)
            columns.append(x.reshape(len(x), -1))
        x = jnp.concatenate(columns, -1)
        for layer in self.linear:
            x = ACTIVATIONS[layer.activation](x @ next(remaining).T + next(remaining))
        if self.is_discrete:
            limits = torch.finfo(torch.float32)
            uniform = jnp.clip(noise, limits.tiny, 1.0 - 0.5 * limits.eps)
            action = jnp.argmax(x - jnp.log(-jnp.log(uniform)), -1)
            return action, (action, x)
        form = self.head.log_std
        log_std = jnp.broadcast_to(STD_FORMS[form.form](next(remaining), form.mid, form.half_range), x.shape)
        action = x + jnp.exp(log_std) * noise
        return self._to_env(action), (action, jnp.concatenate([x, log_std], -1))

    def _to_env(self, action: Any) -> Any:
        """Return the action for the environment, see `Distribution.to_env`."""
        distribution = self.distribution
        if isinstance(distribution, TanhGaussian):
            action = jnp.tanh(action)
            columns = interval(distribution.low, distribution.high)
        else:
            assert isinstance(distribution, DiagGaussian)
            columns = distribution.interval()
        scale, centre, low, high = (jnp.asarray(column, jnp.float32) for column in columns)
        return jnp.clip(action * scale + centre, low, high)


class XlaRollout:
    """Fills rollouts of PPO by one XLA program."""

    def __init__(self, env: CompilesRollouts, model: ActorCritic, rng: torch.Generator) -> None:
        self.policy = XlaPolicy(model)
        self.rng = rng
        self.precision = "highest" if torch.get_float32_matmul_precision() == "highest" else "tensorfloat32"
        self.run = env.compile_rollout(self._act)

    def _act(self, weights: list[Any], obs: Mapping[str, Any], noise: Any) -> Any:
        with jax.default_matmul_precision(self.precision):
            return self.policy.act(weights, obs, noise)

    @torch.no_grad()
    def __call__(self, rollout: Rollout[PPORecord]) -> dict[str, Tensor]:
        """Fill a rollout whose first observations are set; return the simulator's metrics `[T]` by name."""
        horizon, num_envs = rollout.reward.shape
        noise = self.policy.draw(horizon, num_envs, self.rng, rollout.reward.device)
        (action, params), steps = self.run(self.policy.weights(), rollout.obs_at(0), noise)
        tree_copy_(tree_map(lambda x: x[1:], rollout.obs), steps.obs)
        tree_copy_(rollout.final_obs, steps.final_obs)
        tree_copy_(rollout.record, PPORecord(action, params))
        for name in ("reward", "terminated", "truncated", "valid"):
            getattr(rollout, name).copy_(getattr(steps, name))
        return steps.metrics
