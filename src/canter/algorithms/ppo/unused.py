"""Settings that have no part in a configuration, and why: said when a run starts and by `canter check`."""

from __future__ import annotations

import math

from canter.algorithms.ppo.settings import PPOSettings
from canter.algorithms.unused import Rule, unused_lines
from canter.distributions import DiagGaussian, TanhGaussian
from canter.nn.action_distribution import make_distribution
from canter.nn.heads import BOUNDED
from canter.nn.network import NetworkConfig, select_groups
from canter.specs import Continuous, EnvSpec


def unused_settings(config: PPOSettings, spec: EnvSpec) -> list[str]:
    """A line for each setting that was changed and has no effect, such as a `value_clip` without a clipped loss."""
    lines = unused_lines(config, [*_of_loss(config, spec), *_of_model(config, spec)])
    for role, network in (("policy", config.model.policy), ("critic", config.model.critic)):
        if isinstance(network, NetworkConfig):
            lines += unused_lines(config, _of_network(role, network, spec), f"model.{role}.")
    return lines


def _of_loss(config: PPOSettings, spec: EnvSpec) -> list[Rule]:
    model, central, bound = config.model, config.central_value, config.bound_loss
    networks = [model.policy, model.critic or model.policy]
    plain = all(isinstance(network, NetworkConfig) and network.memory is None for network in networks)
    rows = config.horizon * spec.num_envs // (1 if plain else config.sequence_length)
    even = rows % config.num_minibatches == 0 and rows % (central or config).num_minibatches == 0
    average, alone = config.objective == "average", central is not None and not central.actor_value
    undiscounted = average and not config.reward.normalize
    unclipped = central and (central.value_loss or config.value_loss) != "clipped"
    return [
        (plain, "sequence_length", "no network has memory"),
        (not average, "average_step", "objective=discounted estimates no average"),
        (undiscounted, "gamma discount_per", "objective=average discounts nothing, and reward.normalize is off"),
        (spec.durations is False, "discount_per reward.time", "every step of this environment takes one unit of time"),
        (config.surrogate == "vanilla", "clip_ratio", "surrogate=vanilla has no ratio to clip"),
        (config.value_loss != "clipped", "value_clip", f"value_loss={config.value_loss} clips nothing"),
        (unclipped, "central_value.value_clip", "its value_loss clips nothing"),
        *(
            (alone and getattr(central, key) is not None, key, f"central_value.{key} takes its place")
            for key in ("value_loss", "value_clip", "value_coef")
        ),
        (bound and bound.form == "regularisation", "bound_loss.limit", "form=regularisation pulls at every mean"),
        (config.advantage_normalization == "none", "advantage_std", "advantages are not standardised"),
        (even, "uneven_minibatches", "the minibatches come out even"),
        (spec.truncates is False, "bootstrap_truncated", "episodes of this environment are never cut off"),
        (config.epochs == 1, "recompute_advantage", "with epochs=1 there is no later pass"),
        (central, "gradient_clipping", "with central_value each network has an optimizer, and so a norm, of its own"),
    ]


def _of_model(config: PPOSettings, spec: EnvSpec) -> list[Rule]:
    model, action = config.model, spec.action
    distribution = make_distribution(action, model.distribution, model.bounds)
    name, clips = type(distribution).__name__, isinstance(distribution, DiagGaussian)
    unbounded = isinstance(action, Continuous) and all(map(math.isinf, (*action.low, *action.high)))
    has_std, form = isinstance(distribution, DiagGaussian | TanhGaussian), model.std.form
    return [
        (not model.normalize_value, "model.value_normalizer", "normalize_value is off"),
        (not clips, "model.bounds", f"{name} is always within the bounds"),
        (clips and unbounded, "model.bounds", "the action has none"),
        (not has_std, "model.std", f"{name} has no standard deviation to set"),
        (has_std and form not in BOUNDED, "model.std.minimum model.std.maximum", f"form={form} has no bounds"),
    ]


def _of_network(role: str, network: NetworkConfig, spec: EnvSpec) -> list[Rule]:
    shapes = [group.shape for group in select_groups(network.obs_groups, spec.obs, role).values()]
    images = [shape for shape in shapes if len(shape) == 3]
    sequences = [shape for shape in shapes if len(shape) == 2]
    convolved = bool(images or (sequences and network.cnn.sequences))
    only_images, kind, depth = len(images) == len(shapes), network.cnn.kind, len(network.hidden)
    of_images = "cnn.kind cnn.layers cnn.depths cnn.features cnn.activation cnn.layout"
    other = "cnn.layers" if kind == "impala" else "cnn.depths"
    return [
        (not sequences, "cnn.sequences", "it reads no groups of two axes"),
        (not convolved, of_images, "it reads no images"),
        (convolved, other, f"kind={kind} does not read it"),
        (only_images, "normalize_obs", "images are not standardised"),
        (only_images or not network.normalize_obs, "normalizer", "nothing is standardised"),
        (depth < 2, "d2rl", "it has no second hidden layer"),
        (not network.layer_norm, "layer_norm_position layer_norm_layers", "it has no layer norm"),
        (network.layer_norm and depth < 2, "layer_norm_layers", "it has no second hidden layer"),
        (depth == 0, "layer_norm", "it has no hidden layers"),
        (depth == 0 and not convolved, "activation init_gain", "it has no hidden layers"),
    ]
