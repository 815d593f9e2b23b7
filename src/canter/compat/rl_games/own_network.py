"""Networks of the user's, written for rl_games (a `NetworkBuilder`), as networks of Canter.

L steps, B sequences, P distribution parameters. The module has its own last layers; it is trained by
the engine autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from canter.compat.own_module import OwnModule, OwnModuleConfig, announce, by_layer, stacked
from canter.compat.settings.importing import Imported, import_config
from canter.core.plain import ConfigError
from canter.core.specs import Continuous, Discrete, EnvSpec, TensorSpec
from canter.core.struct import Obs, State
from canter.nn.network import select_groups
from canter.nn.normalizer import AnyNormalizer, IdentityNormalizer, NormalizerConfig


def stand_in(params: Mapping[str, Any], recurrent: bool) -> dict[str, Any]:
    """Return `params.network` for the import of the other settings: a network that Canter knows."""
    network: dict[str, Any] = {"name": "actor_critic", "space": {"discrete": None}}
    if params["algo"]["name"] != "a2c_discrete":
        network["space"] = {"continuous": {"fixed_sigma": True, "sigma_init": {"name": "default"}}}
    if recurrent:  # so that seq_length is read
        network["rnn"] = {"name": "lstm", "units": 1}
    return network


@dataclass(frozen=True, kw_only=True)
class OwnNetworkConfig(OwnModuleConfig):
    """A builder of the user's, and what rl_games calls it with."""

    builder: Callable[..., Any]
    """Makes the `NetworkBuilder`."""
    params: Mapping[str, Any]
    """`params.network` of the settings, for its `load`."""
    model: str
    """`params.model.name`: with `continuous_a2c_logstd` the module returns the log of the std."""
    spec: EnvSpec
    obs_groups: tuple[str, ...] | None = None
    normalize_obs: bool = True
    normalizer: NormalizerConfig = field(default_factory=NormalizerConfig)
    normalize_value: bool = False
    reset_on_end: bool = True
    """Reset the recurrent state at the start of an episode."""

    def build(self, obs: dict[str, TensorSpec], role: str) -> OwnNetwork:
        """Build the module for these observation groups."""
        return OwnNetwork(self, select_groups(self.obs_groups, obs, role))


class OwnNetwork(OwnModule):
    """A module of rl_games' form: `forward(obs_dict)` returns mu, sigma, value and states, or logits, value, states.

    Features are distribution parameters and the value, `[L, B, P + 1]`.
    """

    def __init__(self, config: OwnNetworkConfig, groups: dict[str, TensorSpec]) -> None:
        super().__init__()
        self.groups = tuple(groups)
        self.returns_log_std = config.model != "continuous_a2c"
        self.continuous = isinstance(config.spec.action, Continuous)
        self.reset_on_end = config.reset_on_end
        shapes = {name: tuple(spec.shape) for name, spec in groups.items()}
        self.bare = self.groups == ("policy",)
        self.normalizers = nn.ModuleList(
            config.normalizer.build(shape) if config.normalize_obs and len(shape) < 3 else IdentityNormalizer()
            for shape in shapes.values()
        )
        self.module: Any = make_module(config, shapes["policy"] if self.bare else shapes)
        self.is_recurrent = hasattr(self.module, "is_rnn") and bool(self.module.is_rnn())
        actions = _actions_num(config.spec)
        logits = sum(actions) if isinstance(actions, list) else actions
        self.features = 2 * logits + 1 if self.continuous else logits + 1

    def prepare(self, obs: Obs) -> Obs:
        """Return normalized observations; those of bytes are divided by 255."""
        return {
            name: normalize(obs[name] / 255 if obs[name].dtype == torch.uint8 else obs[name].float())
            for name, normalize in zip(self.groups, self.normalizers, strict=True)
        }

    def call(self, obs: Obs, state: State) -> tuple[Tensor, State]:
        """Return the features `[B, P + 1]` of `obs` `[B, ...]`, and the next state."""
        given: dict[str, Any] = {
            "obs": obs["policy"] if self.bare else obs,
            "rnn_states": stacked(state) if self.is_recurrent else None,
            "is_train": torch.is_grad_enabled(),
            "prev_actions": None,
            "seq_length": 1,
            "dones": None,
            "bptt_len": 0,
        }
        *output, value, after = self.module(given)
        value = value.reshape(len(value), 1)
        if self.continuous:
            mean, sigma = output
            log_std = sigma if self.returns_log_std else sigma.log()
            params = [mean, log_std.expand_as(mean)]
        else:
            (logits,) = output
            params = list(logits) if isinstance(logits, list | tuple) else [logits]
        return torch.cat([*params, value], dim=-1), by_layer(after) if self.is_recurrent else ()

    def default_state(self) -> Any:
        """Return the module's default state, of any number of environments."""
        return self.module.get_default_rnn_state()

    def update_statistics(self, obs: Obs, valid: Tensor) -> None:
        """Update the observation statistics with the valid samples of `obs` `[T, N, ...]`."""
        for name, normalizer in zip(self.groups, self.normalizers, strict=True):
            cast(AnyNormalizer, normalizer).update(obs[name], valid)


def make_module(config: OwnNetworkConfig, input_shape: Any) -> Any:
    """Return the builder's module, built with rl_games' arguments."""
    name = config.params.get("name")
    builder = config.builder()
    if not (hasattr(builder, "load") and hasattr(builder, "build")):
        raise ConfigError(
            f"network {name!r}: {type(builder).__name__} is no NetworkBuilder with load and build; "
            f"a network of Canter is registered with canter.register('network', {name!r}), docs/extending.md"
        )
    builder.load(dict(config.params))
    module = builder.build(
        "a2c",
        actions_num=_actions_num(config.spec),
        input_shape=input_shape,
        num_seqs=config.spec.num_envs,
        value_size=1,
        normalize_value=config.normalize_value,
        normalize_input=config.normalize_obs,
    )
    if not isinstance(module, nn.Module):
        raise ConfigError(f"network {name!r}: build returned a {type(module).__name__}, expected a torch.nn.Module")
    parameters = dict(module.named_parameters())
    buffers = [key for key in module.state_dict() if key not in parameters]
    if buffers:
        raise ConfigError(
            f"network {name!r}: its buffers {', '.join(buffers[:3])} would be in no file; "
            "register them with persistent=False, or make them parameters"
        )
    return module


def _actions_num(spec: EnvSpec) -> Any:
    """Return rl_games' number of actions; a list for several discrete ones."""
    if isinstance(spec.action, Continuous):
        return spec.action.dim
    return spec.action.n if isinstance(spec.action, Discrete) else list(spec.action.nvec)


def import_own_network(
    params: Mapping[str, Any], builder: Callable[..., Any], spec: EnvSpec | None, options: Mapping[str, Any]
) -> Imported:
    """Return the imported settings with the user's network for policy and value.

    Without a `spec` for it the policy is the network of another kind that stands in for it.
    """
    name = str(params["network"]["name"])
    config = params["config"]
    advice = f"write it as a network of Canter, canter.register('network', {name!r}), docs/extending.md"
    if params["algo"]["name"] == "sac":
        raise ConfigError(f"network {name!r} with sac: {advice}")
    if config.get("central_value_config"):
        raise ConfigError(f"network {name!r} with central_value_config: {advice}")
    if spec is None:
        return import_config({"params": {**params, "network": stand_in(params, False)}}, **options)
    own = OwnNetworkConfig(
        builder=builder,
        params=params["network"],
        model=str(params["model"]["name"]),
        spec=spec,
        reset_on_end=bool(config.get("zero_rnn_on_done", True)),
    )
    with torch.random.fork_rng(devices=[]):
        recurrent = own.build(spec.obs, "policy").is_recurrent
    imported = import_config({"params": {**params, "network": stand_in(params, recurrent)}}, **options)
    algorithm: Any = imported.config.algorithm
    model = algorithm.model
    own = replace(
        own,
        obs_groups=model.policy.obs_groups,
        normalize_obs=model.policy.normalize_obs,
        normalizer=model.policy.normalizer,
        normalize_value=model.normalize_value,
    )
    value = replace(model.value_normalizer, rescale=False)
    model = replace(model, policy=own, critic=None, shared_trunk=True, value_normalizer=value)
    what = "your NetworkBuilder, called as in rl_games"
    announce(imported, "params.network.name", name, "algorithm.model.policy", what)
    return replace(imported, config=replace(imported.config, algorithm=replace(algorithm, model=model)))
