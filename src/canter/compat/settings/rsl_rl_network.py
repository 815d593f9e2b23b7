"""RSL-RL's networks of every generation.

Layers, recurrent layers, encoders, normalizers and the std of actions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from canter.compat.settings import readers as read
from canter.compat.settings.rules import OMIT, Copy, Only, Rule, always, apply, no_effect
from canter.compat.settings.section import Import, Section

POLICY = "algorithm.model.policy"
CRITIC = "algorithm.model.critic"
RENAMED = {"lrelu": "leaky_relu", "swish": "silu", "crelu": "celu"}
KNOWN = "elu relu tanh gelu lrelu swish selu crelu sigmoid softplus mish identity"
ACTIVATIONS = {name: RENAMED.get(name, name) for name in KNOWN.split()}
"""RSL-RL's names of activations, and Canter's."""
GAIN = math.sqrt(2)
"""Gain that leaves torch's own initial weights unchanged."""
NETWORK_CLASSES = ("MLPModel", "RNNModel", "CNNModel", "ActorCritic", "ActorCriticRecurrent", "ActorCriticCNN")
RECURRENT_CLASSES = ("RNNModel", "ActorCriticRecurrent")
STD_KINDS = {"GaussianDistribution": "parameter", "HeteroscedasticGaussianDistribution": "network"}
BETA = "BetaDistribution"
DISTRIBUTIONS = (*STD_KINDS, BETA)


@dataclass(frozen=True)
class Generation:
    """A generation of RSL-RL's settings, and the sections of its keys."""

    number: int
    runner: str
    """Section of the runner's keys; empty for the top level."""
    actor: str
    """Section of the actor's network."""
    critic: str
    """Section of the critic's network; the actor's own up to 3.x."""

    @property
    def split(self) -> bool:
        """Actor and critic have separate sections."""
        return self.number >= 4

    @property
    def empirical_normalization(self) -> str:
        """Key that normalised the observations of both networks in old generations."""
        return f"{self.runner}.empirical_normalization" if self.runner else "empirical_normalization"


def with_class_names(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with RSL-RL's own classes by name: RNNModel for rsl_rl.models:RNNModel."""

    def short(key: Any, value: Any) -> Any:
        if isinstance(value, Mapping):
            return with_class_names(value)
        return class_name(value) if str(key).endswith("class_name") else value

    return {key: short(key, value) for key, value in tree.items()}


def class_name(value: Any) -> Any:
    """Return the name of a class of RSL-RL, given as a path or itself; other values as they are."""
    path = f"{value.__module__}:{value.__name__}" if isinstance(value, type) else value
    if isinstance(path, str) and path.startswith("rsl_rl."):
        return re.split("[:.]", path)[-1]
    return value


def generation_of(tree: Mapping[str, Any]) -> Generation | None:
    """Return the generation of settings; None if they are not RSL-RL's."""
    algorithm = tree.get("algorithm")
    if not isinstance(algorithm, Mapping) or "kind" in algorithm:
        return None
    if not {"class_name", "num_learning_epochs", "clip_param", "num_mini_batches"} & algorithm.keys():
        return None
    if isinstance(tree.get("runner"), Mapping):
        return Generation(1, "runner", "policy", "policy")
    if any(tree.get(name) for name in ("actor", "student")):
        section = tree.get("actor")
        actor = section if isinstance(section, Mapping) else {}
        newest = "distribution_cfg" in actor and not {"stochastic", "init_noise_std"} & actor.keys()
        return Generation(5 if newest else 4, "", "actor", "critic")
    if isinstance(tree.get("policy"), Mapping):
        return Generation(3 if tree.get("obs_groups") else 2, "", "policy", "policy")
    return None


def apply_networks(run: Import, generation: Generation) -> None:
    """Apply the tables of both networks and of the distribution."""
    for network, at, prefix in ((POLICY, generation.actor, "actor_"), (CRITIC, generation.critic, "critic_")):
        own = "" if generation.split else prefix
        s = run.section(at, network)
        hidden_layers(s, f"{own}hidden_dims")
        apply(NETWORK, s)
        normalizer(s, f"{own}obs_normalization", generation)
        recurrent_layers(s, generation)
        encoder(s)
    distribution(run, generation)
    apply(GROUPS, run.root)


def hidden_layers(s: Section, key: str) -> None:
    """A width of -1 is that of the input in RSL-RL."""
    hidden = read.widths(s, key, [256, 256, 256])
    if -1 in hidden:
        raise s.error(key, "widths of at least 1", "-1 is the width of the input: write it as a number")
    s.copy(key, "hidden", hidden)


def normalizer(s: Section, key: str, generation: Generation) -> None:
    """RSL-RL divides by the std + 0.01, without a limit."""
    empirical = generation.empirical_normalization
    root = s.run.root
    if s.has(key):
        on = read.flag(s, key, False)
    else:
        on = not generation.split and root.has(empirical) and read.flag(root, empirical)
    s.set("normalize_obs", on)
    if generation.split:
        root.no_effect(empirical, "since 4.0 nothing reads it")
    root.mapped(empirical, f"{s.to}.normalize_obs={on}")
    if not on:
        return
    timing = "" if generation.number >= 5 else "; this generation updates it on every step"
    if not s.parity:
        why = f"divides by the std, clipped at 10; RSL-RL by the std + 0.01, without a limit{timing}"
        s.changed(key if s.has(key) else "", why)
        return
    s.set("normalizer.eps", 0.01, key)
    s.set("normalizer.eps_on", "std")
    s.set("normalizer.clip", None)
    s.set("normalizer.prior_count", 0.0)
    if timing:
        why = (
            "observation statistics are updated once an iteration, as since 5.5; this generation updates them each step"
        )
        s.changed("", why)


def recurrent_layers(s: Section, generation: Generation) -> None:
    """Sequences of recurrent networks are as long as the rollout."""
    size = "rnn_hidden_size" if s.has("rnn_hidden_size") else "rnn_hidden_dim"
    if not is_recurrent(s):
        s.no_effect(f"rnn_type {size} rnn_num_layers", "the network is not recurrent")
        return
    s.copy("rnn_type", "rnn.cell", "gru" if str(s.raw("rnn_type", "lstm")).lower() == "gru" else "lstm")
    s.copy(size, "rnn.hidden", read.integer(s, size, 256))
    s.copy("rnn_num_layers", "rnn.layers", read.integer(s, "rnn_num_layers", 1))
    s.set("rnn.position", "before_mlp")
    runner = s.run.section(generation.runner, "algorithm")
    runner.set("sequence_length", read.integer(runner, "num_steps_per_env"), "num_steps_per_env")


def is_recurrent(s: Section) -> bool:
    """Return True for a recurrent class, or layers of one; `ActorCritic` ignores layers."""
    named = s.raw("class_name", s.run.root.raw("runner.policy_class_name"))
    return named in RECURRENT_CLASSES or (s.has("rnn_type") and named != "ActorCritic")


def encoder(s: Section) -> None:
    """Convolutions; RSL-RL's have no linear layer behind them."""
    if s.has("cnn_cfg"):
        apply(ENCODER, s.inner("cnn_cfg", "cnn"))


def convolutions(s: Section) -> None:
    """Kernel sizes and strides are one number for all layers, or one for each."""
    channels = read.widths(s, "output_channels")
    kernels = _per_layer(s, "kernel_size", None, len(channels))
    strides = _per_layer(s, "stride", 1, len(channels))
    layers = [list(layer) for layer in zip(channels, kernels, strides, strict=True)]
    if s.raw("padding", "none") == "zeros":
        for layer in layers:
            layer.append(max(0, math.ceil((layer[1] - layer[2]) / 2)))
        if max(strides) > 1:
            why = "right for images whose sides the strides divide; RSL-RL pads others by their size"
            s.changed("padding", why, s.setting("layers"))
    s.set("layers", layers, "output_channels")


def _per_layer(s: Section, key: str, default: Any, layers: int) -> list[int]:
    """Return one positive whole number for each layer."""
    value = s.raw(key, default)
    sizes = list(value) if isinstance(value, list | tuple) else [value] * layers
    if len(sizes) != layers or not all(type(size) is int and size > 0 for size in sizes):
        raise s.error(key, f"a whole number above 0, or {layers} of them")
    return sizes


def distribution(run: Import, generation: Generation) -> None:
    """Read the distribution's section, which is separate since 5.x."""
    actor = run.section(generation.actor, "algorithm.model")
    section = actor.inner("distribution_cfg")
    if generation.number >= 5 and str(section.raw("class_name")) == BETA:
        beta(section)
    elif generation.number >= 5:
        apply(DISTRIBUTION, section)
        std(section, "init_std", "std_type")
    else:
        kinds = {True: "network", False: "parameter"}
        Copy("state_dependent_std", "std.kind", read.flag, default=False, convert=kinds)(actor)
        if generation.number <= 2 and run.settings.get(f"{POLICY}.rnn.cell"):
            actor.no_effect("noise_std_type", "recurrent policies of 2.x do not read it: their std is a bare parameter")
            std(actor, "init_noise_std", None)
        else:
            std(actor, "init_noise_std", "noise_std_type")
    apply(HEAD, run.section("", "algorithm.model"))
    keys = "stochastic noise_std_type init_noise_std state_dependent_std"
    if generation.split:
        critic = run.section(generation.critic)
        critic.no_effect(f"{keys} distribution_cfg", "its values have no distribution")
    if generation.number < 5:
        actor.no_effect(f"{keys} distribution_cfg", "the actor is stochastic")
    else:
        actor.no_effect(keys, "distribution_cfg wins")


def distribution_class(s: Section) -> None:
    """Read the distribution's class: the std is a parameter or an output of the network."""
    kind = STD_KINDS.get(str(s.raw("class_name")))
    s.set("std.kind", kind or "parameter")
    if kind is None:
        s.refuse("class_name", f"known: {', '.join(DISTRIBUTIONS)}")


def beta(s: Section) -> None:
    """A beta over a range; concentrations and log-probabilities are RSL-RL's."""
    why = "deterministic actions are the peak of the density; RSL-RL's are its mean"
    s.copy("class_name", "distribution", "beta", why)
    low, high = read.pair(s, "action_range", "two numbers, such as [-1.0, 1.0]", default=(-1.0, 1.0))
    s.copy("action_range", "action_range", [low, high])
    s.changed("", "the last layer begins otherwise (RSL-RL's second concentration at a constant), never a checkpoint")


def std_range(s: Section) -> None:
    """A range keeps Canter's own form of the std."""
    if s.has("std_range"):
        low, high = read.pair(s, "std_range", "two numbers, such as [0.1, 2.0]")
        s.set("std.minimum", max(low, 1e-6), "std_range")
        s.set("std.maximum", high, "std_range")
        s.changed("std_range", "approached, not clipped", "algorithm.model.std.minimum, .maximum")


def std(s: Section, initial: str, form: str | None) -> None:
    """Read the std with RSL-RL's parameterisation, without parity too.

    The speed at which the noise shrinks depends on it. Without a key for it, `form`, it is scalar.
    """
    s.copy(initial, "std.initial", read.number(s, initial, 1.0))
    if form is None:
        s.set("std.form", "scalar")
        return
    kind = read.one_of("scalar", "log")(s, form, "scalar")
    if s.get("std.maximum") is None:
        s.copy(form, "std.form", kind)
    else:
        theirs = "exp of a parameter" if kind == "log" else "a bare parameter"
        s.changed(form, f"std_range keeps it within; RSL-RL's is {theirs}", "algorithm.model.std.form=bounded")


KNOWN_CLASSES = ", ".join(NETWORK_CLASSES)
OTHER_CLASS = f"a class of the user's: register it, canter.register('network', NAME); known: {KNOWN_CLASSES}"
NETWORK: tuple[Rule, ...] = (
    Only("class_name", NETWORK_CLASSES, "a network of kind standard", OTHER_CLASS),
    Copy("activation", "activation", read.one_of(*ACTIVATIONS), "elu", ACTIVATIONS),
    always("init", "default"),
    always("init_gain", GAIN),
)
"""For the section of a network and settings below `algorithm.model.policy` or `.critic`."""
PLAIN_LAYERS = {"dilation": 1, "norm": "none", "max_pool": False, "global_pool": "none", "flatten": True}
PLAIN = "plain convolutions only: register an encoder of your own"
ENCODER: tuple[Rule, ...] = (
    convolutions,
    always("features", None),
    always("layout", "channels_first"),
    Copy("activation", "activation", read.one_of(*ACTIVATIONS), "elu", ACTIVATIONS),
    *(Only(key, (value,), "off", PLAIN) for key, value in PLAIN_LAYERS.items()),
    Only("padding", ("none", "zeros"), "cnn.layers", "zeros or none"),
)
"""For `cnn_cfg` of a network and settings below its `cnn`."""
DISTRIBUTION: tuple[Rule, ...] = (distribution_class, Copy("learn_std", "std.learn", read.flag, OMIT), std_range)
"""For `actor.distribution_cfg` and settings below `algorithm.model`."""
HEAD: tuple[Rule, ...] = (
    always("bounds", "none"),
    always("normalize_value", value=False),
    always("policy_gain", GAIN),
    always("value_gain", GAIN),
)
GROUPS: tuple[Rule, ...] = (
    Copy("obs_groups.actor", f"{POLICY}.obs_groups", read.groups, OMIT),
    Copy("obs_groups.policy", f"{POLICY}.obs_groups", read.groups, OMIT),
    Copy("obs_groups.critic", f"{CRITIC}.obs_groups", read.groups, OMIT),
    no_effect("obs_groups.rnd_state obs_groups.teacher obs_groups.student", "PPO does not read it"),
)
"""For the whole mapping."""
