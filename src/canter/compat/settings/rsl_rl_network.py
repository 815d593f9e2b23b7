"""RSL-RL's networks of every generation: layers, memory, encoders, normalisers and the deviation of actions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from canter.compat.settings.translation import Translation

POLICY, CRITIC = "algorithm.model.policy", "algorithm.model.critic"
ACTIVATIONS = {
    "elu": "elu",
    "relu": "relu",
    "tanh": "tanh",
    "gelu": "gelu",
    "lrelu": "leaky_relu",
    "swish": "silu",
    "selu": "selu",
    "crelu": "celu",
    "sigmoid": "sigmoid",
    "softplus": "softplus",
    "mish": "mish",
    "identity": "identity",
}


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
        if self.split:
            return f"{self.actor if network == POLICY else self.critic}.{name}"
        return f"{self.actor}.{'actor' if network == POLICY else 'critic'}_{name}"

    def shared(self, network: str, name: str) -> str:
        """The key of a setting that both networks share up to 3.x."""
        return f"{self.actor if network == POLICY else self.critic}.{name}"


def translate_network(t: Translation, dialect: Dialect, network: str) -> None:
    """Layers, normaliser, memory and encoder of one network."""
    hidden = dialect.of(network, "hidden_dims")
    widths = t.widths(hidden, [256, 256, 256])
    if -1 in widths:
        raise t.error(hidden, "widths of at least 1", "-1 is the width of the input: write it as a number")
    t.put(f"{network}.hidden", widths, hidden)
    t.judge(hidden, "mapped", f"{network}.hidden={widths}")
    key = dialect.shared(network, "activation")
    activation = ACTIVATIONS[t.word(key, ACTIVATIONS, "elu")]
    t.put(f"{network}.activation", activation, key)
    t.judge(key, "mapped", f"{network}.activation={activation}")
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
            t.choose(f"{network}.normalizer.{name} is Canter's", f"{network}.normalizer.{name}", value)
        if timing:
            t.always(
                "observation statistics move once an iteration, as since 5.5; this generation moves them each step"
            )


def _class_name(t: Translation, dialect: Dialect, network: str) -> None:
    key = dialect.shared(network, "class_name")
    known = ("MLPModel", "RNNModel", "CNNModel", "ActorCritic", "ActorCriticRecurrent", "ActorCriticCNN")
    name = t.raw(key, known[0])
    if name in known:
        t.judge(key, "mapped", f"{network}.kind=standard")
    else:
        t.refuse(
            key, f"a class of the user's: register it, canter.register('network', NAME); known: {', '.join(known)}"
        )
    t.judge("runner.policy_class_name", "mapped", f"{network}.kind=standard")


def _memory(t: Translation, dialect: Dialect, network: str) -> None:
    kind = dialect.shared(network, "rnn_type")
    named = t.raw(dialect.shared(network, "class_name"), t.raw("runner.policy_class_name", ""))
    recurrent = t.has(kind) or named in ("RNNModel", "ActorCriticRecurrent")
    width = next(
        (key for key in ("rnn_hidden_size", "rnn_hidden_dim") if t.has(dialect.shared(network, key))), "rnn_hidden_dim"
    )
    keys = {"hidden": (width, 256), "layers": ("rnn_num_layers", 1)}
    if not recurrent:
        t.dead("there is no memory", kind, *(dialect.shared(network, key) for key, _ in keys.values()))
        return
    cell = "gru" if str(t.raw(kind, "lstm")).lower() == "gru" else "lstm"
    t.put(f"{network}.memory.cell", cell, kind)
    t.judge(kind, "mapped", f"{network}.memory.cell={cell}")
    for name, (key, usual) in keys.items():
        value = t.integer(dialect.shared(network, key), usual)
        t.put(f"{network}.memory.{name}", value, dialect.shared(network, key))
        t.judge(dialect.shared(network, key), "mapped", f"{network}.memory.{name}={value}")
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
    for name in ("output_channels", "kernel_size", "stride"):
        t.judge(f"{key}.{name}", "mapped", f"{network}.cnn.layers")
    activation = ACTIVATIONS[t.word(f"{key}.activation", ACTIVATIONS, "elu")]
    t.to(f"{key}.activation", f"{network}.cnn.activation", activation)
    plain = {"dilation": 1, "norm": "none", "max_pool": False, "global_pool": "none", "flatten": True}
    for name, usual in plain.items():
        if t.raw(f"{key}.{name}", usual) == usual:
            t.judge(f"{key}.{name}", "mapped", "off")
        t.refuse(f"{key}.{name}", "plain convolutions only: register an encoder of your own")
    if t.raw(f"{key}.padding", "none") in ("none", "zeros"):
        t.judge(f"{key}.padding", "mapped", f"{network}.cnn.layers")
    t.refuse(f"{key}.padding", "zeros or none")


def translate_std(t: Translation, dialect: Dialect) -> None:
    """The distribution of actions."""
    section = f"{dialect.actor}.distribution_cfg"
    if dialect.generation >= 5:
        initial, form, name = (
            f"{section}.init_std",
            f"{section}.std_type",
            t.raw(f"{section}.class_name", "GaussianDistribution"),
        )
        by_state = name == "HeteroscedasticGaussianDistribution"
        known = ("GaussianDistribution", "HeteroscedasticGaussianDistribution")
        if name in known:
            t.judge(
                f"{section}.class_name", "mapped", f"algorithm.model.std.kind={'network' if by_state else 'parameter'}"
            )
        t.refuse(f"{section}.class_name", f"known: {', '.join(known)}; for Beta set algorithm.model.distribution=beta")
        if t.has(f"{section}.learn_std"):
            t.to(f"{section}.learn_std", "algorithm.model.std.learn", t.flag(f"{section}.learn_std"))
        if t.has(f"{section}.std_range"):
            low, high = t.pair(f"{section}.std_range", "two numbers, such as [0.1, 2.0]")
            t.put("algorithm.model.std.minimum", max(low, 1e-6), f"{section}.std_range")
            t.put("algorithm.model.std.maximum", high, f"{section}.std_range")
            t.judge(
                f"{section}.std_range", "differs", "algorithm.model.std.minimum, .maximum", "approached, not cut off at"
            )
    else:
        initial, form = f"{dialect.actor}.init_noise_std", f"{dialect.actor}.noise_std_type"
        by_state = t.flag(f"{dialect.actor}.state_dependent_std", False)
        t.judge(f"{dialect.actor}.state_dependent_std", "mapped", "algorithm.model.std.kind")
    std = t.number(initial, 1.0)
    t.put("algorithm.model.std.initial", std, initial)
    t.judge(initial, "mapped", f"algorithm.model.std.initial={std:g}")
    t.put("algorithm.model.std.kind", "network" if by_state else "parameter")
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
    unused = "its values have no distribution"
    for name in ("stochastic", "noise_std_type", "init_noise_std", "state_dependent_std", "distribution_cfg"):
        if dialect.split:
            t.dead(unused, f"{dialect.critic}.{name}")
        if dialect.generation < 5:
            t.dead("the actor is stochastic", f"{dialect.actor}.{name}")
        elif name != "distribution_cfg":
            t.dead("distribution_cfg wins", f"{dialect.actor}.{name}")
    if not t.section(section):
        t.judge(section, "mapped", "algorithm.model.std")
