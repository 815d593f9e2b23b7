"""rl_games' `network` sections as Canter's networks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from canter.compat.settings.translation import NONE, Translation
from canter.nn.network import networks

ACTIVATIONS = {
    "elu": "elu",
    "relu": "relu",
    "tanh": "tanh",
    "gelu": "gelu",
    "swish": "silu",
    "silu": "silu",
    "selu": "selu",
    "sigmoid": "sigmoid",
    "softplus": "softplus",
    "None": "identity",
}
GAIN = math.sqrt(2)
"""With torch's own initial weights: the gain that leaves them as they are."""
DEFAULT, ZERO_BIAS = "default", "default_zero_bias"
INITIALIZERS = {
    "default": ZERO_BIAS,
    "orthogonal_initializer": "orthogonal",
    "glorot_normal_initializer": "glorot_normal",
    "glorot_uniform_initializer": "glorot_uniform",
    "variance_scaling_initializer": "variance_scaling",
}
OTHER_START = "only the start of a run differs, never a checkpoint"
STARTS = "name gain scale std val value a b mode distribution nonlinearity"
"""What initialisers of rl_games and torch are told."""
DEAD = {
    "regularizer": "regularizers are read by nothing",
    "scale": "has no effect beside initializer default",
}


@dataclass(frozen=True)
class Place:
    """Where a network's section is, and where its settings go."""

    key: str
    """Path of the section in the parent's file."""
    setting: str
    """Path of the network in Canter's settings."""


def translate_network(t: Translation, place: Place) -> None:
    """Hidden layers, encoder, memory and initial weights of one network."""
    key = place.key
    name = t.word(f"{key}.name", default="actor_critic")
    if name in ("actor_critic", "resnet_actor_critic", "amp"):
        t.judge(f"{key}.name", "mapped", f"{place.setting}.kind=standard")
    elif name in networks:
        t.to(f"{key}.name", f"{place.setting}.kind", name, "your network of that name, registered here")
    else:
        t.refuse(f"{key}.name", f"a network of the user's: register one here, canter.register('network', {name!r})")
    if t.raw(f"{key}.value_activation") in NONE:
        t.judge(f"{key}.value_activation", "mapped", why="")
    _hidden_layers(t, place)
    _normalization(t, place)
    if t.section(f"{key}.cnn"):
        _encoder(t, place, name)
    if t.section(f"{key}.rnn"):
        _memory(t, place)
    t.dead("no code reads it", *(f"{key}.{name}" for name in ("rnn1", "lstm", "blocks", "value_shape")))
    t.dead("no code reads it", f"{key}.joint_obs_actions", f"{key}.cnn.regularizer")
    t.judge(f"{key}.central_value", "mapped", "algorithm.central_value", "")
    _observation_groups(t, place)


def _observation_groups(t: Translation, place: Place) -> None:
    """Which groups the network reads, where the file names them."""
    groups: list[str] = []
    if t.section(f"{place.key}.inputs"):
        groups = [*t.raw(f"{place.key}.inputs")]
        t.judge(f"{place.key}.inputs", "mapped", f"{place.setting}.obs_groups={groups}")
    for name, group in (("require_rewards", "reward"), ("require_last_actions", "last_action")):
        if t.raw(f"{place.key}.{name}") is True:
            groups = [*(groups or ["observation"]), group]
            why = "enters beside the encoded image; rl_games appends it to the memory's input"
            t.judge(f"{place.key}.{name}", "differs", f"{place.setting}.obs_groups", why)
    if groups:
        t.put(f"{place.setting}.obs_groups", groups)


def _hidden_layers(t: Translation, place: Place) -> None:
    mlp = f"{place.key}.mlp"
    if not t.section(mlp):
        t.put(f"{place.setting}.hidden", [])
        return
    t.to(f"{mlp}.units", f"{place.setting}.hidden", t.widths(f"{mlp}.units"))
    activation = t.word(f"{mlp}.activation", ACTIVATIONS)
    t.to(f"{mlp}.activation", f"{place.setting}.activation", ACTIVATIONS[activation])
    if t.flag(f"{mlp}.d2rl", False):
        t.to(f"{mlp}.d2rl", f"{place.setting}.d2rl", True)
    t.judge(f"{mlp}.d2rl", "mapped", "a plain stack of layers")
    t.dead(DEAD["regularizer"], f"{mlp}.regularizer")
    _initializer(t, place, mlp)


def _initializer(t: Translation, place: Place, mlp: str) -> None:
    key = f"{mlp}.initializer"
    name = t.word(f"{key}.name", default="default")
    init, setting = INITIALIZERS.get(name), f"{place.setting}.init"
    if name == "default":
        t.dead(DEAD["scale"], f"{key}.scale", f"{key}.gain")
    gain = GAIN if init in (ZERO_BIAS, None) else t.number(f"{key}.gain", 1.0)
    if init == "variance_scaling":
        gain = t.number(f"{key}.scale", 2.0)
        t.judge(f"{key}.scale", "mapped", f"{place.setting}.init_gain={gain:g}")
    if init is None:
        t.put(setting, DEFAULT)
        t.judge(f"{key}.name", "differs", f"{setting}={DEFAULT}", f"no {name} here; {OTHER_START}")
        gain = GAIN
    else:
        t.to(f"{key}.name", setting, init)
    t.judge(f"{key}.gain", "mapped", f"{place.setting}.init_gain={gain:g}")
    t.each(key, STARTS, "differs", why=OTHER_START)
    t.put(f"{place.setting}.init_gain", gain)
    if place.setting == "algorithm.model.policy":
        t.put("algorithm.model.policy_gain", gain)
    t.put("algorithm.model.value_gain", gain)


def _normalization(t: Translation, place: Place) -> None:
    for key in (f"{place.key}.normalization", f"{place.key}.mlp.normalization"):
        kind = t.raw(key)
        if kind in NONE:
            t.judge(key, "mapped", f"{place.setting}.layer_norm=False")
        elif kind == "layer_norm":
            t.to(key, f"{place.setting}.layer_norm", True, "released rl_games 1.6.5 ignores it in plain layers")
            t.put(f"{place.setting}.layer_norm_position", "after_activation")
        else:
            t.refuse(key, "there is no such normalisation here; use layer_norm")
    only_first = f"{place.key}.mlp.norm_only_first_layer"
    if t.has(only_first):
        which = "first" if t.flag(only_first) else "all"
        t.to(only_first, f"{place.setting}.layer_norm_layers", which)


def _encoder(t: Translation, place: Place, name: str) -> None:
    cnn, to = f"{place.key}.cnn", f"{place.setting}.cnn"
    if t.raw(f"{cnn}.conv_depths") is not None or name == "resnet_actor_critic":
        t.put(f"{to}.kind", "impala")
        t.to(f"{cnn}.conv_depths", f"{to}.depths", t.widths(f"{cnn}.conv_depths"))
    else:
        known = ("conv2d", "conv2d_flatten", "conv1d", "conv2d_spatial_softargmax", "coord_conv2d")
        kind = t.word(f"{cnn}.type", known)
        if kind not in known[:3]:
            t.refuse(f"{cnn}.type", "there are plain 1-d and 2-d convolutions here: register an encoder of your own")
        if kind == "conv1d":
            t.put(f"{to}.sequences", True)
        t.judge(f"{cnn}.type", "mapped", f"{to}.layers")
        convs = t.raw(f"{cnn}.convs", [])
        if not isinstance(convs, list) or not all(isinstance(conv, dict) for conv in convs):
            raise t.error(f"{cnn}.convs", "a list of mappings with filters, kernel_size, strides and padding")
        layers = [_convolution(t, f"{cnn}.convs", i, conv) for i, conv in enumerate(convs)]
        t.to(f"{cnn}.convs", f"{to}.layers", layers)
        t.put(f"{to}.features", None)
    activation = t.word(f"{cnn}.activation", ACTIVATIONS, default="relu")
    if ACTIVATIONS[activation] != t.settings.get(f"{place.setting}.activation"):
        t.put(f"{to}.activation", ACTIVATIONS[activation])
        t.settings.setdefault(f"{place.setting}.activation", ACTIVATIONS[activation])
    t.judge(f"{cnn}.activation", "mapped", f"{to}.activation={ACTIVATIONS[activation]}")
    own, of_layers = t.raw(f"{cnn}.initializer.name"), t.raw(f"{place.key}.mlp.initializer.name")
    same = own in (of_layers, None)
    why = "" if same else f"begins as the hidden layers do; {OTHER_START}"
    t.each(f"{cnn}.initializer", STARTS, "mapped" if same else "differs", f"{place.setting}.init", why)
    layout = "channels_last" if t.flag(f"{cnn}.permute_input", True) else "channels_first"
    if t.raw(f"{cnn}.permute_input") is not None:
        t.to(f"{cnn}.permute_input", f"{to}.layout", layout)


def _convolution(t: Translation, key: str, i: int, conv: dict[str, object]) -> list[int]:
    """(channels, kernel, stride), with the padding where there is any."""
    unknown = [name for name in conv if name not in ("filters", "kernel_size", "strides", "padding")]
    numbers = [conv.get(name, 0) for name in ("filters", "kernel_size", "strides", "padding")]
    if unknown or not all(type(number) is int for number in numbers):
        raise t.error(key, f"filters, kernel_size, strides and padding as whole numbers in entry {i}")
    row = [int(str(number)) for number in numbers]
    return row if row[3] else row[:3]


def _memory(t: Translation, place: Place) -> None:
    rnn, to = f"{place.key}.rnn", f"{place.setting}.memory"
    t.to(f"{rnn}.name", f"{to}.cell", t.word(f"{rnn}.name", ("lstm", "gru")))
    t.to(f"{rnn}.units", f"{to}.hidden", t.integer(f"{rnn}.units"))
    t.to(f"{rnn}.layers", f"{to}.layers", t.integer(f"{rnn}.layers", 1))
    before = t.flag(f"{rnn}.before_mlp", False)
    t.put(f"{to}.position", "before_mlp" if before else "after_mlp")
    t.judge(f"{rnn}.before_mlp", "mapped", f"{to}.position")
    t.to(f"{rnn}.layer_norm", f"{to}.layer_norm", t.flag(f"{rnn}.layer_norm", False))
    if t.flag(f"{rnn}.concat_input", False) and not before:
        t.to(f"{rnn}.concat_input", f"{to}.concat_input", True)
    t.dead("rl_games ignores it before the hidden layers", f"{rnn}.concat_input")
    if t.flag(f"{rnn}.concat_output", False):
        if before:
            t.to(f"{rnn}.concat_output", f"{to}.concat_input", True)
        t.refuse(f"{rnn}.concat_output", "only with before_mlp: true (it is memory.concat_input here)")
    t.judge(f"{rnn}.concat_output", "mapped")
    t.dead("belongs to config, and nothing reads it here", f"{rnn}.zero_rnn_on_done")
