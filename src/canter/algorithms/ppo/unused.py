"""Settings that have no part in a configuration, and why: said when a run starts and by `canter check`."""

from __future__ import annotations

from collections.abc import Iterator

from canter.algorithms.ppo.settings import PPOSettings
from canter.algorithms.unused import changed_below
from canter.distributions import DiagGaussian, TanhGaussian
from canter.nn.action_distribution import make_distribution
from canter.nn.heads import BOUNDED
from canter.nn.network import NetworkConfig, select_groups
from canter.specs import Continuous, EnvSpec


def unused_settings(config: PPOSettings, spec: EnvSpec) -> list[str]:
    """A line for each setting that was changed and has no effect, such as a `value_clip` without a clipped loss."""
    rules = (*_of_loss(config, spec), *_of_model(config, spec))
    return [
        f"algorithm.{path}={value} has no part here: {reason}"
        for key, reason in rules
        for path, value in changed_below(config, key)
    ]


def _of_loss(config: PPOSettings, spec: EnvSpec) -> Iterator[tuple[str, str]]:
    model = config.model
    networks = [model.policy, model.critic or model.policy]
    plain = all(isinstance(network, NetworkConfig) and network.memory is None for network in networks)
    if plain:
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
    central = config.central_value
    if central is not None and (central.value_loss or config.value_loss) != "clipped":
        yield "central_value.value_clip", "its value_loss clips nothing"
    if central is not None and not central.actor_value:
        for key in ("value_loss", "value_clip", "value_coef"):
            if getattr(central, key) is not None:
                yield key, f"central_value.{key} takes its place"
    if config.bound_loss is not None and config.bound_loss.form == "regularisation":
        yield "bound_loss.limit", "form=regularisation pulls at every mean"
    if config.advantage_normalization == "none":
        yield "advantage_std", "advantages are not standardised"
    rows = config.horizon * spec.num_envs // (1 if plain else config.sequence_length)
    passes = central or config
    if rows % config.num_minibatches == 0 and rows % passes.num_minibatches == 0:
        yield "uneven_minibatches", "the minibatches come out even"
    if spec.truncates is False:
        yield "bootstrap_truncated", "episodes of this environment are never cut off"
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
    if not model.normalize_value:
        yield "model.value_normalizer", "normalize_value is off"
    if not isinstance(distribution, DiagGaussian):
        yield "model.bounds", f"{name} is always within the bounds"
    elif unbounded:
        yield "model.bounds", "the action has none"
    if not isinstance(distribution, DiagGaussian | TanhGaussian):
        yield "model.std", f"{name} has no standard deviation to set"
    elif model.std.form not in BOUNDED:
        for key in ("minimum", "maximum"):
            yield f"model.std.{key}", f"form={model.std.form} has no bounds"
    for role, network in (("policy", model.policy), ("critic", model.critic)):
        if not isinstance(network, NetworkConfig):
            continue
        shapes = [group.shape for group in select_groups(network.obs_groups, spec.obs, role).values()]
        images = [shape for shape in shapes if len(shape) == 3]
        sequences = [shape for shape in shapes if len(shape) == 2]
        convolved = images or (sequences and network.cnn.sequences)
        if not sequences:
            yield f"model.{role}.cnn.sequences", "it reads no groups of two axes"
        if not convolved:
            for key in ("kind", "layers", "depths", "features", "activation", "layout"):
                yield f"model.{role}.cnn.{key}", "it reads no images"
        other = "layers" if network.cnn.kind == "impala" else "depths"
        if convolved:
            yield f"model.{role}.cnn.{other}", f"kind={network.cnn.kind} does not read it"
        if len(images) == len(shapes):
            yield f"model.{role}.normalize_obs", "images are not standardised"
        if len(images) == len(shapes) or not network.normalize_obs:
            yield f"model.{role}.normalizer", "nothing is standardised"
        if len(network.hidden) < 2:
            yield f"model.{role}.d2rl", "it has no second hidden layer"
        if not network.layer_norm:
            yield f"model.{role}.layer_norm_position", "it has no layer norm"
            yield f"model.{role}.layer_norm_layers", "it has no layer norm"
        elif len(network.hidden) < 2:
            yield f"model.{role}.layer_norm_layers", "it has no second hidden layer"
        if not network.hidden:
            yield f"model.{role}.layer_norm", "it has no hidden layers"
            if not convolved:
                for key in ("activation", "init_gain"):
                    yield f"model.{role}.{key}", "it has no hidden layers"
