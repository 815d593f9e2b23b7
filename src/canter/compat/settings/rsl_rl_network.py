"""RSL-RL's networks of every generation: layers, memory, encoders, normalisers and the deviation of actions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from canter.compat.settings.translation import Translation

POLICY, CRITIC = "algorithm.model.policy", "algorithm.model.critic"
RENAMED = {"lrelu": "leaky_relu", "swish": "silu", "crelu": "celu"}
KNOWN = "elu relu tanh gelu lrelu swish selu crelu sigmoid softplus mish identity"
ACTIVATIONS = {name: RENAMED.get(name, name) for name in KNOWN.split()}
"""RSL-RL's names of activations, and ours."""


@dataclass(frozen=True)
class Dialect:
    """A generation of RSL-RL, and where its keys are."""

    generation: int
    runner: str
    """What stands before keys of the runner."""
    actor: str
    """The section of the network that acts."""
    critic: str
    """The section of the network that values; the same one up to 3.x."""

    @property
    def split(self) -> bool:
        """Whether actor and critic have sections of their own."""
        return self.generation >= 4

    def of(self, network: str, name: str) -> str:
        """The key of one network's setting."""
        own = "" if self.split else "actor_" if network == POLICY else "critic_"
        return self.shared(network, own + name)

    def shared(self, network: str, name: str) -> str:
        """The key of a setting that both networks share up to 3.x."""
        return f"{self.actor if network == POLICY else self.critic}.{name}"


def translate_network(t: Translation, dialect: Dialect, network: str) -> None:
    """Layers, normaliser, memory and encoder of one network."""
    hidden = dialect.of(network, "hidden_dims")
    widths = t.widths(hidden, [256, 256, 256])
    if -1 in widths:
        raise t.error(hidden, "widths of at least 1", "-1 is the width of the input: write it as a number")
    t.to(hidden, f"{network}.hidden", widths)
    key = dialect.shared(network, "activation")
    t.to(key, f"{network}.activation", ACTIVATIONS[t.word(key, ACTIVATIONS, "elu")])
    t.put(f"{network}.init", "default")
    t.put(f"{network}.init_gain", math.sqrt(2))
    _normalizer(t, dialect, network)
    _class_name(t, dialect, network)
    _memory(t, dialect, network)
    cnn = dialect.shared(network, "cnn_cfg")
    if t.has(cnn):
        _encoder(t, network, cnn)
    else:
        t.judge(cnn, "mapped", "no encoder")


def _normalizer(t: Translation, dialect: Dialect, network: str) -> None:
    key, empirical = dialect.of(network, "obs_normalization"), f"{dialect.runner}empirical_normalization"
    on = t.flag(key, False) if t.has(key) else dialect.generation < 4 and t.has(empirical) and t.flag(empirical)
    t.put(f"{network}.normalize_obs", on)
    if dialect.generation >= 4:
        t.dead("since 4.0 nothing reads it", empirical)
    t.judge(empirical, "mapped", f"{network}.normalize_obs={on}")
    if not on:
        t.judge(key, "mapped", f"{network}.normalize_obs=False")
        return
    timing = "" if dialect.generation >= 5 else "; this generation moves it on every step"
    ours = f"divides by the deviation, clipped at 10; RSL-RL by the deviation + 0.01, without a limit{timing}"
    t.choose(ours, f"{network}.normalizer.eps", 0.01, key if t.has(key) else "")
    if t.parity:
        for name, value in (("eps_on", "deviation"), ("clip", None), ("prior_count", 0.0)):
            t.put(f"{network}.normalizer.{name}", value)
        if timing:
            why = "observation statistics move once an iteration, as since 5.5; this generation moves them each step"
            t.always(why)


def _class_name(t: Translation, dialect: Dialect, network: str) -> None:
    key = dialect.shared(network, "class_name")
    known = ("MLPModel", "RNNModel", "CNNModel", "ActorCritic", "ActorCriticRecurrent", "ActorCriticCNN")
    why = f"a class of the user's: register it, canter.register('network', NAME); known: {', '.join(known)}"
    t.only(key, t.raw(key) in known, f"{network}.kind=standard", why)
    t.judge("runner.policy_class_name", "mapped", f"{network}.kind=standard")


def _memory(t: Translation, dialect: Dialect, network: str) -> None:
    kind = dialect.shared(network, "rnn_type")
    named = t.raw(dialect.shared(network, "class_name"), t.raw("runner.policy_class_name", ""))
    recurrent = t.has(kind) or named in ("RNNModel", "ActorCriticRecurrent")
    size, dim = (dialect.shared(network, key) for key in ("rnn_hidden_size", "rnn_hidden_dim"))
    width, layers = size if t.has(size) else dim, dialect.shared(network, "rnn_num_layers")
    if not recurrent:
        t.dead("there is no memory", kind, width, layers)
        return
    t.to(kind, f"{network}.memory.cell", "gru" if str(t.raw(kind, "lstm")).lower() == "gru" else "lstm")
    t.move(width, f"{network}.memory.hidden", t.integer, 256)
    t.move(layers, f"{network}.memory.layers", t.integer, 1)
    t.put(f"{network}.memory.position", "before_mlp")
    horizon = f"{dialect.runner}num_steps_per_env"
    t.put("algorithm.sequence_length", t.integer(horizon), horizon)


def _encoder(t: Translation, network: str, key: str) -> None:
    """Convolutions; RSL-RL's have no linear layer behind them."""

    def each(name: str, default: Any) -> list[int]:
        value = t.raw(f"{key}.{name}", default)
        sizes = list(value) if isinstance(value, list | tuple) else [value] * len(channels)
        if len(sizes) != len(channels) or not all(type(size) is int and size > 0 for size in sizes):
            raise t.error(f"{key}.{name}", f"a whole number above 0, or {len(channels)} of them")
        return sizes

    channels = t.widths(f"{key}.output_channels")
    kernels, strides = each("kernel_size", None), each("stride", 1)
    padded = t.raw(f"{key}.padding", "none") == "zeros"
    rows = [
        [width, kernel, stride, *([(kernel - 1) // 2] if padded else [])]
        for width, kernel, stride in zip(channels, kernels, strides, strict=True)
    ]
    t.put(f"{network}.cnn.layers", rows, f"{key}.output_channels")
    t.put(f"{network}.cnn.features", None)
    t.put(f"{network}.cnn.layout", "channels_first")
    t.each(key, "output_channels kernel_size stride", "mapped", f"{network}.cnn.layers")
    activation = ACTIVATIONS[t.word(f"{key}.activation", ACTIVATIONS, "elu")]
    t.to(f"{key}.activation", f"{network}.cnn.activation", activation)
    plain = {"dilation": 1, "norm": "none", "max_pool": False, "global_pool": "none", "flatten": True}
    for name, usual in plain.items():
        own = f"{key}.{name}"
        t.only(own, t.raw(own) == usual, "off", "plain convolutions only: register an encoder of your own")
    padding = f"{key}.padding"
    t.only(padding, t.raw(padding) in ("none", "zeros"), f"{network}.cnn.layers", "zeros or none")


def translate_std(t: Translation, dialect: Dialect) -> None:
    """The distribution of actions."""
    section = f"{dialect.actor}.distribution_cfg"
    if dialect.generation >= 5:
        initial, form = f"{section}.init_std", f"{section}.std_type"
        _distribution(t, section)
    else:
        initial, form = f"{dialect.actor}.init_noise_std", f"{dialect.actor}.noise_std_type"
        by_state = t.flag(f"{dialect.actor}.state_dependent_std", False)
        t.put("algorithm.model.std.kind", "network" if by_state else "parameter")
        t.judge(f"{dialect.actor}.state_dependent_std", "mapped", "algorithm.model.std.kind")
    t.move(initial, "algorithm.model.std.initial", t.number, 1.0)
    kind = t.word(form, ("scalar", "log"), "scalar")
    if "algorithm.model.std.maximum" not in t.settings:
        # Also without parity: how fast the noise goes down, and with it the return in training, depends on it.
        t.put("algorithm.model.std.form", kind, form if t.has(form) else "")
        t.judge(form, "mapped", f"algorithm.model.std.form={kind}")
    theirs = "exp of a parameter" if kind == "log" else "a bare parameter"
    t.judge(form, "differs", "algorithm.model.std.form=bounded", f"std_range keeps it within; RSL-RL's is {theirs}")
    t.put("algorithm.model.bounds", "none")
    t.put("algorithm.model.normalize_value", False)
    t.put("algorithm.model.policy_gain", math.sqrt(2))
    t.put("algorithm.model.value_gain", math.sqrt(2))
    for name in ("stochastic", "noise_std_type", "init_noise_std", "state_dependent_std", "distribution_cfg"):
        if dialect.split:
            t.dead("its values have no distribution", f"{dialect.critic}.{name}")
        if dialect.generation < 5:
            t.dead("the actor is stochastic", f"{dialect.actor}.{name}")
        elif name != "distribution_cfg":
            t.dead("distribution_cfg wins", f"{dialect.actor}.{name}")
    if not t.section(section):
        t.judge(section, "mapped", "algorithm.model.std")


def _distribution(t: Translation, section: str) -> None:
    """What 5.x has in a section of its own."""
    kinds = {"GaussianDistribution": "parameter", "HeteroscedasticGaussianDistribution": "network"}
    name, bounds = f"{section}.class_name", f"{section}.std_range"
    kind = kinds.get(str(t.raw(name)))
    t.put("algorithm.model.std.kind", kind or "parameter")
    why = f"known: {', '.join(kinds)}; for Beta set algorithm.model.distribution=beta"
    t.only(name, kind is not None, f"algorithm.model.std.kind={kind}", why)
    t.move_given(f"{section}.learn_std", "algorithm.model.std.learn", t.flag)
    if t.has(bounds):
        low, high = t.pair(bounds, "two numbers, such as [0.1, 2.0]")
        t.put("algorithm.model.std.minimum", max(low, 1e-6), bounds)
        t.put("algorithm.model.std.maximum", high, bounds)
        t.judge(bounds, "differs", "algorithm.model.std.minimum, .maximum", "approached, not cut off at")
