"""Capabilities of engines, as data, and the check of a loss and a model against them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from canter.engines.base import BoundLoss, PPOLoss, SACLoss
from canter.nn.actor_critic import ActorCritic
from canter.nn.describe import ABSENT, Feature, SACModel, describe


class Anything(Container[Any]):
    """Contains every value: an engine supports a property whatever it is."""

    def __contains__(self, value: object) -> bool:
        """Return True."""
        return True


ANYTHING = Anything()


class Numbers(Container[Any]):
    """Contains every Python number."""

    def __contains__(self, value: object) -> bool:
        """Return whether the value is a number, not a tensor or a schedule."""
        return isinstance(value, float | int)


NUMBERS = Numbers()


@dataclass(frozen=True)
class Capabilities:
    """Losses and models that an engine supports, by the names of their features.

    A feature that is not listed must be absent from the loss or the model. New settings and modules
    of users are therefore refused until an engine lists them.
    """

    device: str
    """Type of device that the engine is for."""
    loss: Mapping[str, Container[Any]]
    """Supported values of each field of the loss."""
    model: Mapping[str, Container[Any]]
    """Supported values of each feature of `canter.nn.describe`."""
    runs_modules: bool = False
    """Run the modules themselves: features of the model that are not listed are supported."""
    requirement: Callable[[Any], str | None] = lambda model: None
    """Return why this machine cannot run the engine for a model, if so."""
    size_limit: Callable[[Any], str | None] = lambda model: None
    """Return why a model with supported features is too large for the engine, if so."""


LOSS_TEXTS = {
    "advantage": "advantage_normalization=minibatch",
    "bound": "bound_loss.form={}",
    "trunk_value": "central_value.actor_value=true",
    "moving_kl": "kl=rl_games",
    "update_obs_stats_per_minibatch": "obs_statistics=minibatch",
    "bonus_coef": "bonus_value",
    "augment": "the hook augment of an extension",
    "terms": "the hook loss of an extension",
    "policy_terms": "the method policy_terms of a subclass",
    "learner": "{}, a subclass of the learner,",
}
"""Settings and code behind the fields of a loss, with {} for their value; other fields are settings
themselves."""


def describe_loss(loss: PPOLoss | SACLoss) -> list[Feature]:
    """Return every field of a loss as a feature; None and () are absent."""
    features: list[Feature] = []
    for field in fields(loss):
        value = getattr(loss, field.name)
        if isinstance(value, BoundLoss):
            value = value.config.form
        if value == ():
            value = None
        text = LOSS_TEXTS.get(field.name, field.name + "={}").format(value)
        features.append(Feature(field.name, value, text))
    if isinstance(loss, PPOLoss) and loss.bound is not None and loss.surrogate is None:
        features.append(Feature("bound alone", True, "bound_loss without a surrogate"))
    return features


def unsupported_reason(
    capabilities: Capabilities, loss: PPOLoss | SACLoss, model: ActorCritic | SACModel
) -> str | None:
    """Return why an engine cannot compute a loss of a model, naming the setting; None if it can."""
    reason = capabilities.requirement(model)
    if reason is not None:
        return reason
    reason = _unsupported(describe_loss(loss), capabilities.loss, optional=False)
    if reason is not None:
        return reason
    features = [feature for layer in describe(model) for feature in layer.features]
    reason = _unsupported(features, capabilities.model, optional=capabilities.runs_modules)
    return reason or capabilities.size_limit(model)


def _unsupported(features: Iterable[Feature], supported: Mapping[str, Container[Any]], optional: bool) -> str | None:
    """Return a sentence about the first feature that is not supported.

    `optional` accepts those that are not listed.
    """
    for feature in features:
        absent = feature.value == ABSENT or (feature.value is None and feature.name not in supported)
        listed = feature.value in supported.get(feature.name, ANYTHING if optional else ())
        if not (absent or listed):
            return f"{feature.text} is not supported"
    return None
