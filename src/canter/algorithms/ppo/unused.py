"""Settings that have no part in a configuration, and why: said when a run starts and by `canter check`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import reduce
from typing import Any

from canter.algorithms.ppo.settings import PPOSettings
from canter.distributions import DiagGaussian, TanhGaussian
from canter.nn.action_distribution import make_distribution
from canter.nn.network import NetworkConfig, select_groups
from canter.specs import Continuous, EnvSpec


def unused_settings(config: PPOSettings, spec: EnvSpec) -> list[str]:
    """A line for each setting that was changed and has no effect, such as a `value_clip` without a clipped loss."""
    rules = (*_of_loss(config, spec), *_of_model(config, spec))
    return [
        f"algorithm.{path}={value} has no part here: {reason}"
        for key, reason in rules
        for path, value in _changed(config, key)
    ]


def _of_loss(config: PPOSettings, spec: EnvSpec) -> Iterator[tuple[str, str]]:
    model = config.model
    networks = [model.policy, model.critic or model.policy]
    if all(isinstance(network, NetworkConfig) and network.memory is None for network in networks):
        yield "sequence_length", "no network has memory"
    if config.objective == "discounted":
        yield "average_step", "objective=discounted estimates no average"
    elif not config.reward.normalize:
        for key in ("gamma", "discount_per"):
            yield key, "objective=average discounts nothing, and reward.normalize is off"
    if spec.durations is False:
        for key in ("discount_per", "reward.time"):
            yield key, "every step of this environment takes one unit of time"
    if config.surrogate == "vanilla":
        yield "clip_ratio", "surrogate=vanilla has no ratio to clip"
    if config.value_loss != "clipped":
        yield "value_clip", f"value_loss={config.value_loss} clips nothing"
    if config.bound_loss is not None and config.bound_loss.form == "regularisation":
        yield "bound_loss.limit", "form=regularisation pulls at every mean"
    if config.epochs == 1:
        yield "recompute_advantage", "with epochs=1 there is no later pass"
    if config.central_value is not None:
        yield "gradient_clipping", "with central_value each network has an optimizer, and so a norm, of its own"


def _of_model(config: PPOSettings, spec: EnvSpec) -> Iterator[tuple[str, str]]:
    model = config.model
    distribution = make_distribution(spec.action, model.distribution, model.bounds)
    name = type(distribution).__name__
    unbounded = isinstance(spec.action, Continuous) and all(
        abs(bound) == float("inf") for bound in (*spec.action.low, *spec.action.high)
    )
    if not isinstance(distribution, DiagGaussian):
        yield "model.bounds", f"{name} is always within the bounds"
    elif unbounded:
        yield "model.bounds", "the action has none"
    if not isinstance(distribution, DiagGaussian | TanhGaussian):
        yield "model.std", f"{name} has no standard deviation to set"
    for role, network in (("policy", model.policy), ("critic", model.critic)):
        if not isinstance(network, NetworkConfig):
            continue
        shapes = [group.shape for group in select_groups(network.obs_groups, spec.obs, role).values()]
        images = [shape for shape in shapes if len(shape) == 3]
        if not images:
            yield f"model.{role}.cnn", "it reads no images"
        if len(images) == len(shapes):
            yield f"model.{role}.normalize_obs", "images are not standardised"
        if not network.hidden:
            yield f"model.{role}.layer_norm", "it has no hidden layers"
            if not images:
                for key in ("activation", "init_gain"):
                    yield f"model.{role}.{key}", "it has no hidden layers"


def _changed(config: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Path and value of every setting at or below a key that is not at its default."""
    *parents, last = key.split(".")
    owner = reduce(getattr, parents, config)
    value = getattr(owner, last)
    if is_dataclass(value):
        for field in fields(value):
            yield from _changed(config, f"{key}.{field.name}")
    elif value != getattr(type(owner)(), last):
        yield key, value
