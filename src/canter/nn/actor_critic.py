"""Which distribution an action space gets, by name.

The model of an actor-critic algorithm: a policy that acts and a critic that judges.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from canter.core.plain import check_range
from canter.core.registry import Registry, UserError
from canter.core.specs import ACTION_MASK, ActionSpec, Continuous, Discrete, EnvSpec, MultiDiscrete
from canter.core.struct import Obs, State, tree_map
from canter.nn.arrays import read_arrays
from canter.nn.distributions import Beta, Categorical, DiagGaussian, Distribution, MultiCategorical, TanhGaussian
from canter.nn.heads import StdConfig, ValueHead, ValueNormalizerConfig, policy_head
from canter.nn.network import AnyNetwork, AnyNetworkConfig, NetworkConfig

distributions: Registry[Callable[[ActionSpec, str], Distribution]] = Registry("distribution")
"""What makes a distribution for an action space and `bounds` (that of `DiagGaussian`), or raises ValueError."""

DistributionName = Annotated[str, distributions]


def make_distribution(action_spec: ActionSpec, kind: str = "auto", bounds: str = "rescale") -> Distribution:
    """The distribution for an action space; raises ValueError when it does not fit."""
    return distributions[kind](action_spec, bounds)


FITTING: dict[type[ActionSpec], dict[str, Callable[[Any, str], Distribution]]] = {
    Continuous: {
        "gaussian": lambda spec, bounds: DiagGaussian(spec.dim, spec.low, spec.high, bounds),
        "tanh_gaussian": lambda spec, bounds: TanhGaussian(spec.low, spec.high),
        "beta": lambda spec, bounds: Beta(spec.low, spec.high),
    },
    Discrete: {"categorical": lambda spec, bounds: Categorical(spec.n)},
    MultiDiscrete: {"multi_categorical": lambda spec, bounds: MultiCategorical(spec.nvec)},
}
"""Canter's own by the kind of action; the first is what "auto" takes."""


def _built_in(kind: str, action_spec: ActionSpec, bounds: str) -> Distribution:
    fits = FITTING[type(action_spec)]
    name = next(iter(fits)) if kind == "auto" else kind
    if name not in fits:
        raise UserError(
            f"distribution kind {kind!r} does not fit {action_spec}; use 'auto' or {', '.join(map(repr, fits))}"
        )
    return fits[name](action_spec, bounds)


for _name in ("auto", *FITTING[Continuous], *FITTING[Discrete], *FITTING[MultiDiscrete]):
    distributions.register(_name)(partial(_built_in, _name))


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Networks, action distribution and normalisation."""

    policy: AnyNetworkConfig = field(default_factory=NetworkConfig)
    """The network that acts."""
    critic: AnyNetworkConfig | None = None
    """The network that values; None builds another one like the policy's."""
    shared_trunk: bool = False
    """Let the critic read the policy network's features instead of having a network of its own."""
    distribution: DistributionName = "auto"
    """Action distribution: "gaussian", "tanh_gaussian", "beta", "categorical", "multi_categorical" or a registered one;
    "auto" takes the Gaussian or the (multi-)categorical by the kind of action."""
    bounds: Literal["rescale", "clip", "none"] = "rescale"
    """How a Gaussian sample reaches the environment: -1..1 stretched to the bounds, cut off at them, or as it is."""
    std: StdConfig = field(default_factory=StdConfig)
    """Standard deviation of Gaussian policies."""
    policy_gain: float = 0.01
    """Initial scale of the policy's last layer; small, so that training starts from a broad policy."""
    value_gain: float = 1.0
    """Initial scale of the critic's last layer."""
    normalize_value: bool = True
    """Learn values in units of the returns' running mean and standard deviation."""
    value_normalizer: ValueNormalizerConfig = field(default_factory=ValueNormalizerConfig)
    """How that is done."""

    def __post_init__(self) -> None:
        """Refuse values outside their range, and a network of its own for a critic on a shared trunk."""
        check_range(self, "must not be negative", "policy_gain", "value_gain")
        if self.shared_trunk and self.critic is not None:
            raise UserError(
                "shared_trunk=True leaves no room for a critic network: set critic=None or shared_trunk=False"
            )

    def build(self, spec: EnvSpec, *, trunk_value: bool = False) -> ActorCritic:
        """The model for an environment's observations and actions, perhaps with a second value on the policy's own."""
        return ActorCritic(self, spec, trunk_value)

    def build_policy(self, spec: EnvSpec) -> Policy:
        """Only the part that acts."""
        distribution = make_distribution(spec.action, self.distribution, self.bounds)
        masked = ACTION_MASK in spec.obs and not isinstance(spec.action, Continuous)
        network = self.policy.build(spec.obs, "policy")
        head = policy_head(distribution, network.features, self.std, self.policy.init, self.policy_gain)
        return Policy(Actor(network, head, masked), distribution, self, spec)

    def build_value_head(self, network: AnyNetwork) -> ValueHead:
        """A head that reads values off the critic's network."""
        normalizer = self.value_normalizer if self.normalize_value else None
        return ValueHead(network.features, (self.critic or self.policy).init, self.value_gain, normalizer)


class Actor(nn.Module):
    """Observations to distribution parameters."""

    def __init__(self, network: AnyNetwork, head: nn.Module, masked: bool) -> None:
        super().__init__()
        self.network, self.head, self.masked = network, head, masked

    def forward(self, obs: Obs, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Parameters `[L, B, P]` of the action distribution, and the next state."""
        features, state = self.network(obs, state, reset)
        return self.read(features, obs), state

    def read(self, features: Tensor, obs: Obs) -> Tensor:
        """Parameters from features, with the action mask of the same observations."""
        return self.head(features, obs[ACTION_MASK] if self.masked else None)


class Critic(nn.Module):
    """Observations to values in normalised units."""

    def __init__(self, network: AnyNetwork, head: ValueHead) -> None:
        super().__init__()
        self.network, self.head = network, head

    def forward(self, obs: Obs, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Normalised values `[L, B]`, and the next state."""
        features, state = self.network(obs, state, reset)
        return self.head(features), state

    def unroll(self, obs: Obs, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Values `[L, B]` in the units of the reward, and the states after each row `[L, B, ...]`."""
        features, states = self.network.unroll(obs, state, reset)
        return self.head.normalizer.inverse(self.head(features)), states


class ActorCritic(nn.Module):
    """An actor and a critic, each with its own network or on one trunk."""

    def __init__(self, config: ModelConfig, spec: EnvSpec, trunk_value: bool = False) -> None:
        super().__init__()
        self.policy = config.build_policy(spec)
        self.actor, self.shared_trunk = self.policy.actor, config.shared_trunk
        own = config.critic or config.policy
        network = self.actor.network if self.shared_trunk else own.build(spec.obs, "critic")
        self.critic = Critic(network, config.build_value_head(network))
        self.trunk_value: ValueHead | None = None
        """A value on the policy's features that judges nothing, in the critic's units."""
        if trunk_value:
            self.trunk_value = ValueHead(self.actor.network.features, config.policy.init, config.value_gain, None)
        self.bonus_head: ValueHead | None = None
        """A second head on the critic's features, for the values of a second reward; see `add_bonus_head`."""

    def add_bonus_head(self, config: ModelConfig) -> None:
        """Let the critic judge a second reward as well, by a head of its own with statistics of its own."""
        self.bonus_head = config.build_value_head(self.critic.network)

    def values(self, obs: Obs, state: State, reset: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Normalised values `[L, B]` by the critic's own network: of the reward, and of a bonus where there is one."""
        features, _ = self.critic.network(obs, state, reset)
        return self.critic.head(features), None if self.bonus_head is None else self.bonus_head(features)

    def bonus_values(self, obs: Obs, state: State, reset: Tensor | None) -> Tensor:
        """Values `[L, B]` of the bonus in its own units."""
        assert self.bonus_head is not None
        features, _ = self.critic.network(obs, state, reset)
        return self.bonus_head.normalizer.inverse(self.bonus_head(features))

    @property
    def has_memory(self) -> bool:
        """Whether the policy or the critic is recurrent."""
        return any(network.initial_state(1) != () for network in (self.actor.network, self.critic.network))

    def forward(
        self, obs: Obs, policy_state: State, critic_state: State, reset: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Distribution parameters `[L, B, P]` and normalised values `[L, B]`; a shared trunk is passed once."""
        if not self.shared_trunk:
            return self.actor(obs, policy_state, reset)[0], self.critic(obs, critic_state, reset)[0]
        features, _ = self.actor.network(obs, policy_state, reset)
        return self.actor.read(features, obs), self.critic.head(features)

    def with_trunk_value(self, obs: Obs, state: State, reset: Tensor | None) -> tuple[Tensor, Tensor]:
        """Distribution parameters `[L, B, P]`, and the value `[L, B]` of the head on the policy's features."""
        assert self.trunk_value is not None
        features, _ = self.actor.network(obs, state, reset)
        return self.actor.read(features, obs), self.trunk_value(features)

    def policy_parameters(self) -> list[nn.Parameter]:
        """What the policy optimiser trains; a shared trunk belongs to the policy."""
        trunk_value = [] if self.trunk_value is None else self.trunk_value.parameters()
        return [*self.actor.parameters(), *trunk_value]

    def critic_parameters(self) -> list[nn.Parameter]:
        """What only the critic uses."""
        owned = {id(parameter) for parameter in self.policy_parameters()}
        bonus = [] if self.bonus_head is None else self.bonus_head.parameters()
        return [parameter for parameter in (*self.critic.parameters(), *bonus) if id(parameter) not in owned]

    def update_statistics(self, obs: Obs, valid: Tensor) -> None:
        """Move the observation statistics of every network by the valid rows of `obs` `[T, N, ...]`."""
        self.actor.network.update_statistics(obs, valid)
        if not self.shared_trunk:
            self.critic.network.update_statistics(obs, valid)


class Policy:
    """Inference view of an actor: what players, evaluation and export see."""

    write: ClassVar[Callable[..., None]]
    """How one is written; files are a layer above networks, which puts its function here."""

    def __init__(self, actor: Actor, distribution: Distribution, config: ModelConfig, spec: EnvSpec) -> None:
        self.actor, self.distribution, self.config, self.spec = actor, distribution, config, spec

    def initial_state(self, num_envs: int) -> State:
        """State at the start of an episode, `()` without memory."""
        return self.actor.network.initial_state(num_envs)

    def params(self, obs: Obs, state: State, reset: Tensor | None = None) -> tuple[Tensor, State]:
        """Distribution parameters `[N, P]` for one step of observations `[N, ...]`, and the next state."""
        row = None if reset is None else reset.unsqueeze(0)
        params, state = self.actor(tree_map(lambda group: group.unsqueeze(0), obs), state, row)
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
        """Actions `[N, ...]` as the environment receives them, and the next state.

        `reset` `[N]` marks environments that begin a new episode with this observation; a policy with memory forgets
        there what it knew.
        """
        params, state = self.params(obs, state, reset)
        action = self.distribution.mode(params) if deterministic else self.distribution.sample(params, generator)
        return self.distribution.to_env(action), state

    def predict(
        self, obs: Any, state: State | None = None, deterministic: bool = True, *, reset: Any = None
    ) -> tuple[np.ndarray, State]:
        """NumPy in and out: the action for one observation or a batch of N, and the next state.

            action, state = policy.predict(observation)
            action, state = policy.predict(observation, state)

        `obs` is an array, or a (nested) dict of arrays by key, each as the environment gives it or with N in front; the
        action is as its space has it. N choices of a Discrete space may also be `[N, 1]`.
        Give `state` back while the episode lasts and None when a new one begins; it is `()` without memory. In a batch
        `reset` `[N]` marks rows that begin anew.
        """
        groups, single = read_arrays(obs, self.spec, self.reads)
        count = len(next(iter(groups.values())))
        state = self.initial_state(count) if state is None else state
        begins = None if reset is None else torch.as_tensor(reset, dtype=torch.bool, device=self.spec.device)
        on_device = {name: torch.as_tensor(group, device=self.spec.device) for name, group in groups.items()}
        action, state = self.act(on_device, state, begins, deterministic=deterministic)
        array, own = action.numpy(force=True), self.spec.own_arrays.action
        array = array if own is None else own.encode(array)
        return (array[0] if single else array), state

    def save(self, path: str | Path, **about: Any) -> None:
        """Write it as one file, which `canter.load` reads; `about` as for `canter.save_policy`."""
        Policy.write(path, self, **about)

    @property
    def reads(self) -> list[str]:
        """The observation groups that it looks at."""
        return [*self.actor.network.groups, *[ACTION_MASK] * self.actor.masked]
