"""Models of the user's, written for RSL-RL 5 (`class_name` of `actor` or `critic`), as networks of Canter.

L steps, B sequences, A action components. The model has its own normalizer, last layer and
distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from canter.compat.drop_in import imported_object
from canter.compat.own_module import OwnModule, OwnModuleConfig, announce, by_layer, stacked
from canter.compat.settings.importing import Imported
from canter.compat.settings.rsl_rl_network import NETWORK_CLASSES, class_name, generation_of
from canter.core.plain import ConfigError
from canter.core.specs import EnvSpec, TensorSpec
from canter.core.struct import Obs, State

ROLES = ("actor", "critic")


def own_models(train_cfg: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Return the user's class of each network that names one, in settings of 5.x."""
    generation = generation_of(train_cfg)
    if generation is None or generation.number < 5:
        return {}
    named = {role: (train_cfg.get(role) or {}).get("class_name") for role in ROLES}
    return {role: imported_object(name, f"{role}.class_name") for role, name in named.items() if _is_own(name)}


def _is_own(given: Any) -> bool:
    if given is None or class_name(given) in NETWORK_CLASSES:
        return False
    return not isinstance(given, str) or ":" in given or "." in given


def with_stand_ins(train_cfg: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return settings with a network that Canter knows in place of each of the user's."""
    known = dict(train_cfg)
    for role, cls in own.items():
        known[role] = {"class_name": "MLPModel", "hidden_dims": [1]}
        if is_recurrent(cls):
            known[role] |= {"class_name": "RNNModel", "rnn_hidden_dim": 1}
    if "actor" in own:
        known["actor"]["distribution_cfg"] = train_cfg["actor"].get("distribution_cfg")
    return known


def is_recurrent(cls: Callable[..., Any]) -> bool:
    """Return True for a class of models with a recurrent state."""
    return bool(getattr(cls, "is_recurrent", False))


@dataclass(frozen=True, kw_only=True)
class OwnModelConfig(OwnModuleConfig):
    """A model class of the user's, and what RSL-RL calls it with."""

    cls: Callable[..., Any]
    arguments: Mapping[str, Any]
    """Settings of the network, without `class_name`."""
    obs_groups: Mapping[str, Any]
    """Observation groups of each network."""
    role: str
    """actor or critic."""
    outputs: int
    container: Callable[..., Any] | None
    """TensorDict, if the environment's observations are one."""

    def build(self, obs: dict[str, TensorSpec], role: str) -> OwnModel:
        """Build the model for these observation groups."""
        return OwnModel(self, obs)


class OwnModel(OwnModule):
    """A model of RSL-RL's form: features are mean and log of the std `[L, B, 2A]`, or values `[L, B, 1]`."""

    def __init__(self, config: OwnModelConfig, obs: dict[str, TensorSpec]) -> None:
        super().__init__()
        self.role = config.role
        self.container = config.container
        self.groups = tuple(config.obs_groups[config.role])
        self.normalizers = nn.ModuleList()
        zeros = {name: torch.zeros(2, *spec.shape, dtype=spec.dtype) for name, spec in obs.items()}
        groups = dict(config.obs_groups)
        arguments = deepcopy(dict(config.arguments))
        self.model: Any = config.cls(self._batch(zeros, 2), groups, config.role, config.outputs, **arguments)
        name = getattr(config.cls, "__name__", "")
        if not isinstance(self.model, nn.Module):
            raise ConfigError(f"{config.role}.class_name={name}: made a {type(self.model).__name__}, not a Module")
        self.is_recurrent = is_recurrent(config.cls)
        if self.is_recurrent != bool(self.model.is_recurrent):
            raise ConfigError(f"{config.role}.class_name={name}: is_recurrent must be an attribute of the class")
        self.first_state: Any = None
        if self.is_recurrent:
            with torch.no_grad():
                self.model(self._batch(zeros, 2))
            self.first_state = self._leave()
        self.features = config.outputs * (2 if config.role == "actor" else 1)

    def _batch(self, obs: Obs, count: int) -> Any:
        return obs if self.container is None else self.container(obs, batch_size=[count])

    def call(self, obs: Obs, state: State) -> tuple[Tensor, State]:
        """Return the features `[B, ...]` of `obs` `[B, ...]`, and the next state."""
        if self.is_recurrent:
            before: Any = stacked(state)
            self.model.reset(hidden_state=before if len(before) > 1 else before[0])
        batch = self._batch(obs, len(obs[self.groups[0]]))
        if self.role == "critic":
            features = self.model(batch)
        else:
            self.model(batch, stochastic_output=True)
            mean = self.model.output_mean
            features = torch.cat([mean, self.model.output_std.expand_as(mean).log()], dim=-1)
        return features, by_layer(self._leave()) if self.is_recurrent else ()

    def _leave(self) -> Any:
        """Return the model's recurrent state and reset it: Canter keeps states."""
        state = self.model.get_hidden_state()
        self.model.reset()
        return state

    def default_state(self) -> Any:
        """Return the state after a step of zeros, for its shapes."""
        return self.first_state

    def update_statistics(self, obs: Obs, valid: Tensor) -> None:
        """Update the model's normalizer with `obs` `[T, N, ...]`; all samples of RSL-RL's are valid."""
        if hasattr(self.model, "update_normalization"):
            flat = {name: obs[name].flatten(0, 1) for name in self.groups}
            self.model.update_normalization(self._batch(flat, valid.numel()))

    def buffers_of_file(self) -> dict[str, Tensor]:
        """Return the entries of a model's file other than its parameters."""
        parameters = dict(self.model.named_parameters())
        return {name: tensor for name, tensor in self.model.state_dict().items() if name not in parameters}


def use_own_models(
    imported: Imported, train_cfg: Mapping[str, Any], own: Mapping[str, Callable[..., Any]], spec: EnvSpec, env: Any
) -> Imported:
    """Return the settings with the user's models for actor and critic."""
    algorithm: Any = imported.config.algorithm
    if "actor" in own and algorithm.model.distribution == "beta":
        key = "actor.distribution_cfg.class_name"
        raise ConfigError(f"{key}: a model of yours is trained with Gaussian distributions only", key)
    observed = env.get_observations()
    container = type(observed) if type(observed).__name__ == "TensorDict" else None
    groups = dict(train_cfg.get("obs_groups") or {})
    usual = ["policy"] if "policy" in spec.obs else list(spec.obs)
    groups = {role: list(groups.get(role) or usual) for role in ROLES} | groups
    for role, cls in own.items():
        arguments = {key: value for key, value in train_cfg[role].items() if key != "class_name"}
        config = OwnModelConfig(
            cls=cls,
            arguments=arguments,
            obs_groups=groups,
            role=role,
            outputs=int(env.num_actions) if role == "actor" else 1,
            container=container,
        )
        field = "policy" if role == "actor" else "critic"
        algorithm = replace(algorithm, model=replace(algorithm.model, **{field: config}))
        what = "your model, called as in RSL-RL"
        name = getattr(cls, "__name__", str(cls))
        announce(imported, f"{role}.class_name", name, f"algorithm.model.{field}", what)
    return replace(imported, config=replace(imported.config, algorithm=algorithm))
