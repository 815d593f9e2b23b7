"""Model of an actor-critic algorithm: networks, action distribution, policy and critic."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from canter.core.plain import check_range
from canter.core.registry import Registry, UserError
from canter.core.specs import ACTION_MASK, ActionSpec, Continuous, Discrete, EnvSpec, MultiDiscrete
from canter.core.struct import Obs, State, tree_map
from canter.nn.arrays import obs_to_arrays
from canter.nn.distributions import Beta, Categorical, DiagGaussian, Distribution, MultiCategorical, TanhGaussian
from canter.nn.heads import (
    OwnPolicyHead,
    OwnValueHead,
    StdConfig,
    ValueHead,
    ValueNormalizerConfig,
    WithHeads,
    policy_head,
)
from canter.nn.network import AnyNetwork, AnyNetworkConfig, NetworkConfig
from canter.nn.policy_file import save_critic, save_policy

distributions: Registry[Callable[[ActionSpec, str], Distribution]] = Registry("distribution")
"""Builders of a distribution, `(action space, bounds of DiagGaussian)`; raise ValueError if
unfit."""

DistributionName = Annotated[str, distributions]


def make_distribution(action_spec: ActionSpec, kind: str = "auto", bounds: str = "rescale") -> Distribution:
    """Return the distribution for an action space; raise ValueError if it does not fit."""
    return distributions[kind](action_spec, bounds)


DISTRIBUTIONS_FOR: dict[type[ActionSpec], dict[str, Callable[[Any, str], Distribution]]] = {
    Continuous: {
        "gaussian": lambda spec, bounds: DiagGaussian(spec.dim, spec.low, spec.high, bounds),
        "tanh_gaussian": lambda spec, bounds: TanhGaussian(spec.low, spec.high),
        "beta": lambda spec, bounds: Beta(spec.low, spec.high),
    },
    Discrete: {"categorical": lambda spec, bounds: Categorical(spec.n)},
    MultiDiscrete: {"multi_categorical": lambda spec, bounds: MultiCategorical(spec.nvec)},
}
"""Built-in distributions by the kind of action; "auto" takes the first."""


def _built_in(kind: str, action_spec: ActionSpec, bounds: str) -> Distribution:
    builders = DISTRIBUTIONS_FOR[type(action_spec)]
    name = next(iter(builders)) if kind == "auto" else kind
    if name not in builders:
        names = ", ".join(map(repr, builders))
        raise UserError(f"model.distribution: {kind!r} does not fit {action_spec}; use 'auto' or {names}")
    return builders[name](action_spec, bounds)


for _name in ("auto", *DISTRIBUTIONS_FOR[Continuous], *DISTRIBUTIONS_FOR[Discrete], *DISTRIBUTIONS_FOR[MultiDiscrete]):
    distributions.register(_name)(partial(_built_in, _name))


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Networks, action distribution and normalisation."""

    policy: AnyNetworkConfig = field(default_factory=NetworkConfig)
    """Network of the actor."""
    critic: AnyNetworkConfig | None = None
    """Network of the critic; None uses the settings of `policy`."""
    shared_trunk: bool = False
    """Share the policy network with the critic, instead of a separate critic network."""
    distribution: DistributionName = "auto"
    """Action distribution: "gaussian", "tanh_gaussian", "beta", "categorical", "multi_categorical"
    or a registered one; "auto" takes the Gaussian or the (multi-)categorical by the kind of
    action."""
    bounds: Literal["rescale", "clip", "none"] = "rescale"
    """Mapping of Gaussian samples to the action bounds: scaled from -1..1, clipped, or
    unchanged."""
    action_range: tuple[float, float] | None = None
    """Bounds of every action component for the distribution, such as a beta where the environment
    has none; None takes the environment's."""
    std: StdConfig = field(default_factory=StdConfig)
    """Standard deviation of Gaussian policies."""
    policy_gain: float = 0.01
    """Initial gain of the policy's last layer; small, so that training starts from a broad
    policy."""
    value_gain: float = 1.0
    """Initial gain of the critic's last layer."""
    normalize_value: bool = True
    """Learn values in units of the returns' running mean and standard deviation."""
    value_normalizer: ValueNormalizerConfig = field(default_factory=ValueNormalizerConfig)
    """Settings of that normaliser."""

    def __post_init__(self) -> None:
        """Raise UserError for a negative gain, and for `critic` together with `shared_trunk`."""
        check_range(self, "must not be negative", "policy_gain", "value_gain")
        if self.shared_trunk and self.critic is not None:
            raise UserError(
                "shared_trunk=True excludes a separate critic network: set critic=None or shared_trunk=False"
            )
        if self.action_range is not None and not self.action_range[0] < self.action_range[1]:
            raise UserError(f"action_range={self.action_range}: expected two numbers, the lower first")

    def distribution_for(self, action: ActionSpec) -> Distribution:
        """Return the distribution of these actions, within `action_range` if they are continuous."""
        if self.action_range is not None and isinstance(action, Continuous):
            low, high = self.action_range
            action = Continuous((low,) * action.dim, (high,) * action.dim)
        return make_distribution(action, self.distribution, self.bounds)

    def build(self, spec: EnvSpec, *, trunk_value: bool = False, bonus_value: bool = False) -> ActorCritic:
        """Build the model; `trunk_value` adds a value head on the policy network, `bonus_value` one on the critic's."""
        return ActorCritic(self, spec, trunk_value, bonus_value)

    def build_policy(self, spec: EnvSpec) -> Policy:
        """Build the policy alone."""
        distribution = self.distribution_for(spec.action)
        masked = ACTION_MASK in spec.obs and not isinstance(spec.action, Continuous)
        network = self.policy.build(spec.obs, "policy")
        if isinstance(network, WithHeads):
            head: nn.Module = OwnPolicyHead(distribution.param_dim)
        else:
            head = policy_head(distribution, network.features, self.std, self.policy.init, self.policy_gain)
        return Policy(Actor(network, head, masked), distribution, self, spec)

    def build_value_head(self, network: AnyNetwork) -> ValueHead:
        """Build a value head on the critic's network."""
        normalizer = self.value_normalizer if self.normalize_value else None
        if isinstance(network, WithHeads):
            return OwnValueHead(normalizer)
        return ValueHead(network.features, (self.critic or self.policy).init, self.value_gain, normalizer)


class Actor(nn.Module):
    """Maps observations to distribution parameters."""

    def __init__(self, network: AnyNetwork, head: nn.Module, masked: bool) -> None:
        super().__init__()
        self.network = network
        self.head = head
        self.masked = masked

    def forward(self, obs: Obs, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return parameters `[L, B, P]` of the action distribution, and the next state."""
        features, state = self.network(obs, state, reset)
        return self.read(features, obs), state

    def read(self, features: Tensor, obs: Obs) -> Tensor:
        """Return parameters from features, with the action mask of the same observations."""
        return self.head(features, obs[ACTION_MASK] if self.masked else None)


class Critic(nn.Module):
    """Maps observations to values in normalised units."""

    def __init__(self, network: AnyNetwork, head: ValueHead) -> None:
        super().__init__()
        self.network = network
        self.head = head

    def forward(self, obs: Obs, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return normalised values `[L, B]`, and the next state."""
        features, state = self.network(obs, state, reset)
        return self.head(features), state

    def unroll(self, obs: Obs, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return values `[L, B]` in reward units, and the states after each step `[L, B, ...]`."""
        features, states = self.network.unroll(obs, state, reset)
        return self.head.normalizer.inverse(self.head(features)), states


class ActorCritic(nn.Module):
    """An actor and a critic, with separate networks or on a shared trunk."""

    def __init__(
        self, config: ModelConfig, spec: EnvSpec, trunk_value: bool = False, bonus_value: bool = False
    ) -> None:
        super().__init__()
        self.policy = config.build_policy(spec)
        self.actor = self.policy.actor
        self.shared_trunk = config.shared_trunk
        critic = config.critic or config.policy
        network = self.actor.network if self.shared_trunk else critic.build(spec.obs, "critic")
        self.critic = Critic(network, config.build_value_head(network))
        self.trunk_value: ValueHead | None = None
        """Auxiliary value head on the policy's features, in the critic's units; not used for
        advantages."""
        if trunk_value:
            self.trunk_value = ValueHead(self.actor.network.features, config.policy.init, config.value_gain, None)
        self.bonus_head = config.build_value_head(network) if bonus_value else None
        """Second head on the critic's features, with separate statistics, for the values of a bonus reward."""

    def values(self, obs: Obs, state: State, reset: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return normalised values `[L, B]` of the reward, and of the bonus if there is one."""
        features, _ = self.critic.network(obs, state, reset)
        bonus = None if self.bonus_head is None else self.bonus_head(features)
        return self.critic.head(features), bonus

    def bonus_values(self, obs: Obs, state: State, reset: Tensor | None) -> Tensor:
        """Return values `[L, B]` of the bonus in the units of the bonus reward."""
        assert self.bonus_head is not None
        features, _ = self.critic.network(obs, state, reset)
        return self.bonus_head.normalizer.inverse(self.bonus_head(features))

    @property
    def is_recurrent(self) -> bool:
        """True if the policy or the critic is recurrent."""
        return any(network.initial_state(1) != () for network in (self.actor.network, self.critic.network))

    def forward(
        self, obs: Obs, policy_state: State, critic_state: State, reset: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return distribution parameters `[L, B, P]` and normalised values `[L, B]`.

        A shared trunk is evaluated once.
        """
        if not self.shared_trunk:
            return self.actor(obs, policy_state, reset)[0], self.critic(obs, critic_state, reset)[0]
        features, _ = self.actor.network(obs, policy_state, reset)
        return self.actor.read(features, obs), self.critic.head(features)

    def with_trunk_value(self, obs: Obs, state: State, reset: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return distribution parameters `[L, B, P]` and values `[L, B]` of `trunk_value`."""
        assert self.trunk_value is not None
        features, _ = self.actor.network(obs, state, reset)
        return self.actor.read(features, obs), self.trunk_value(features)

    def policy_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the policy optimiser; a shared trunk belongs to the policy."""
        trunk_value = [] if self.trunk_value is None else self.trunk_value.parameters()
        return [*self.actor.parameters(), *trunk_value]

    def critic_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that only the critic uses."""
        owned = {id(parameter) for parameter in self.policy_parameters()}
        bonus = [] if self.bonus_head is None else self.bonus_head.parameters()
        return [parameter for parameter in (*self.critic.parameters(), *bonus) if id(parameter) not in owned]

    def update_statistics(self, obs: Obs, valid: Tensor) -> None:
        """Update the observation statistics with the valid samples of `obs` `[T, N, ...]`."""
        self.actor.network.update_statistics(obs, valid)
        if not self.shared_trunk:
            self.critic.network.update_statistics(obs, valid)


@dataclass(eq=False, repr=False)
class Policy:
    """Inference view of an actor, for players, evaluation and export."""

    actor: Actor
    distribution: Distribution
    config: ModelConfig
    spec: EnvSpec

    def __repr__(self) -> str:
        groups = ", ".join(f"{name} {list(self.spec.obs[name].shape)}" for name in self.actor.network.groups)
        return f"Policy({self.spec.env_id}: {groups} -> {type(self.distribution).__name__})"

    def initial_state(self, num_envs: int) -> State:
        """Return the recurrent state at the start of an episode; `()` for feed-forward policies."""
        return self.actor.network.initial_state(num_envs)

    def params(self, obs: Obs, state: State, reset: Tensor | None = None) -> tuple[Tensor, State]:
        """Return distribution parameters `[N, P]` of `obs` `[N, ...]`, and the next state."""
        sequence = tree_map(lambda group: group.unsqueeze(0), obs)
        params, state = self.actor(sequence, state, None if reset is None else reset.unsqueeze(0))
        return params.squeeze(0), state

    @torch.no_grad()
    def act(
        self,
        obs: Obs,
        state: State = (),
        reset: Tensor | None = None,
        *,
        deterministic: bool = True,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, State]:
        """Return actions `[N, ...]` as the environment receives them, and the next state.

        `reset` `[N]` marks environments that start a new episode with this observation; the
        recurrent state of these environments is reset first.
        """
        params, state = self.params(obs, state, reset)
        action = self.distribution.mode(params) if deterministic else self.distribution.sample(params, generator)
        return self.distribution.to_env(action), state

    def predict(
        self, obs: Any, state: State | None = None, deterministic: bool = True, *, reset: Any = None
    ) -> tuple[np.ndarray, State]:
        """Return the action for one observation or a batch of N as an array, and the next state.

            action, state = policy.predict(observation)
            action, state = policy.predict(observation, state)

        `obs` is an array, or a (nested) dict of arrays by key, each as the environment returns it
        or with a leading axis N; the action has the form of the action space. N elements of a
        Discrete space may also be `[N, 1]`. Pass `state` to the next call, or None when a new
        episode starts; it is `()` for feed-forward policies. In a batch, `reset` `[N]` marks
        environments that start a new episode.
        """
        groups, single = obs_to_arrays(obs, self.spec, self.reads)
        count = len(next(iter(groups.values())))
        state = self.initial_state(count) if state is None else state
        starts = None if reset is None else torch.as_tensor(reset, dtype=torch.bool, device=self.spec.device)
        on_device = {name: torch.as_tensor(group, device=self.spec.device) for name, group in groups.items()}
        action, state = self.act(on_device, state, starts, deterministic=deterministic)
        array = action.numpy(force=True)
        encoder = self.spec.own_arrays.action
        if encoder is not None:
            array = encoder.encode(array)
        return (array[0] if single else array), state

    def frozen_copy(self) -> Policy:
        """Return a policy with copies of the weights and statistics, which are not trained."""
        twin = copy.copy(self)
        twin.actor = copy.deepcopy(self.actor).requires_grad_(False)
        return twin

    def save(self, path: str | Path, **about: Any) -> None:
        """Write the policy to a file for `canter.load`; `about` are keywords of `save_policy`."""
        save_policy(path, self, **about)

    @property
    def reads(self) -> list[str]:
        """Observation groups that the policy reads, with the action mask."""
        return [*self.actor.network.groups, *[ACTION_MASK] * self.actor.masked]


@dataclass(eq=False)
class ValueFunction:
    """Inference view of a critic."""

    critic: Critic
    config: ModelConfig
    spec: EnvSpec

    def initial_state(self, num_envs: int) -> State:
        """Return the recurrent state at the start of an episode; `()` for feed-forward critics."""
        return self.critic.network.initial_state(num_envs)

    @torch.no_grad()
    def value(self, obs: Obs, state: State = (), reset: Tensor | None = None) -> tuple[Tensor, State]:
        """Return values `[N]` of `obs` `[N, ...]` in reward units, and the next state."""
        sequence = tree_map(lambda group: group.unsqueeze(0), obs)
        value, state = self.critic(sequence, state, None if reset is None else reset.unsqueeze(0))
        return self.critic.head.normalizer.inverse(value).squeeze(0), state

    def save(self, path: str | Path, **about: Any) -> None:
        """Write the critic to a file for `canter.load_critic`; `about` as for `save_policy`."""
        save_critic(path, self, **about)
