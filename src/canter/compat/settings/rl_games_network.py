"""rl_games' `network` sections as Canter's networks."""

from __future__ import annotations

import math
from typing import Any

from canter.compat.settings.translation import NONE, Translation
from canter.nn.network import networks

RENAMED = {"swish": "silu", "None": "identity"}
KNOWN = "elu relu tanh gelu swish silu selu sigmoid softplus None"
ACTIVATIONS = {name: RENAMED.get(name, name) for name in KNOWN.split()}
"""rl_games' names of activations, and ours."""
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


def translate_network(t: Translation, at: str, net: str) -> None:
    """Hidden layers, encoder, memory and initial weights of the network of a section; `net` are its settings here."""
    name = t.word(f"{at}.name", default="actor_critic")
    if name in ("actor_critic", "resnet_actor_critic", "amp"):
        t.judge(f"{at}.name", "mapped", f"{net}.kind=standard")
    elif name in networks:
        t.to(f"{at}.name", f"{net}.kind", name, "your network of that name, registered here")
    else:
        t.refuse(f"{at}.name", f"a network of the user's: register one here, canter.register('network', {name!r})")
    if t.raw(f"{at}.value_activation") in NONE:
        t.judge(f"{at}.value_activation", "mapped", why="")
    _hidden_layers(t, at, net)
    _normalization(t, at, net)
    if t.section(f"{at}.cnn"):
        _encoder(t, at, net, name)
    if t.section(f"{at}.rnn"):
        _memory(t, at, net)
    for name in ("rnn1", "lstm", "blocks", "value_shape", "joint_obs_actions", "cnn.regularizer"):
        t.dead("no code reads it", f"{at}.{name}")
    t.judge(f"{at}.central_value", "mapped", "algorithm.central_value", "")
    _observation_groups(t, at, net)


def _observation_groups(t: Translation, at: str, net: str) -> None:
    """Which groups the network reads, where the file names them."""
    groups: list[str] = []
    if t.section(f"{at}.inputs"):
        groups = [*t.raw(f"{at}.inputs")]
        t.judge(f"{at}.inputs", "mapped", f"{net}.obs_groups={groups}")
    for name, group in (("require_rewards", "reward"), ("require_last_actions", "last_action")):
        if t.raw(f"{at}.{name}") is True:
            groups = [*(groups or ["observation"]), group]
            why = "enters beside the encoded image; rl_games appends it to the memory's input"
            t.judge(f"{at}.{name}", "differs", f"{net}.obs_groups", why)
    if groups:
        t.put(f"{net}.obs_groups", groups)


def _hidden_layers(t: Translation, at: str, net: str) -> None:
    mlp = f"{at}.mlp"
    if not t.section(mlp):
        t.put(f"{net}.hidden", [])
        return
    t.move(f"{mlp}.units", f"{net}.hidden", t.widths)
    activation = t.word(f"{mlp}.activation", ACTIVATIONS)
    t.to(f"{mlp}.activation", f"{net}.activation", ACTIVATIONS[activation])
    if t.flag(f"{mlp}.d2rl", False):
        t.to(f"{mlp}.d2rl", f"{net}.d2rl", True)
    t.judge(f"{mlp}.d2rl", "mapped", "a plain stack of layers")
    t.dead("regularizers are read by nothing", f"{mlp}.regularizer")
    _initializer(t, at, net, mlp)


def _initializer(t: Translation, at: str, net: str, mlp: str) -> None:
    key = f"{mlp}.initializer"
    name = t.word(f"{key}.name", default="default")
    init, gain = INITIALIZERS.get(name, DEFAULT), GAIN
    if init == ZERO_BIAS:
        t.dead("has no effect beside initializer default", f"{key}.scale", f"{key}.gain")
    elif init == "variance_scaling":
        gain = t.number(f"{key}.scale", 2.0)
        t.judge(f"{key}.scale", "mapped", f"{net}.init_gain={gain:g}")
    elif init != DEFAULT:
        gain = t.number(f"{key}.gain", 1.0)
    why = f"no {name} here; {OTHER_START}" if init == DEFAULT else ""
    t.to(f"{key}.name", f"{net}.init", init, why)
    t.judge(f"{key}.gain", "mapped", f"{net}.init_gain={gain:g}")
    t.each(key, STARTS, "differs", why=OTHER_START)
    t.put(f"{net}.init_gain", gain)
    if net == "algorithm.model.policy":
        t.put("algorithm.model.policy_gain", gain)
    t.put("algorithm.model.value_gain", gain)


def _normalization(t: Translation, at: str, net: str) -> None:
    for key in (f"{at}.normalization", f"{at}.mlp.normalization"):
        kind = t.raw(key)
        if kind in NONE:
            t.judge(key, "mapped", f"{net}.layer_norm=False")
        elif kind == "layer_norm":
            t.to(key, f"{net}.layer_norm", True, "released rl_games 1.6.5 ignores it in plain layers")
            t.put(f"{net}.layer_norm_position", "after_activation")
        else:
            t.refuse(key, "there is no such normalisation here; use layer_norm")
    only_first = f"{at}.mlp.norm_only_first_layer"
    if t.has(only_first):
        t.to(only_first, f"{net}.layer_norm_layers", "first" if t.flag(only_first) else "all")


def _encoder(t: Translation, at: str, net: str, name: str) -> None:
    cnn, to = f"{at}.cnn", f"{net}.cnn"
    if t.raw(f"{cnn}.conv_depths") is not None or name == "resnet_actor_critic":
        t.put(f"{to}.kind", "impala")
        t.move(f"{cnn}.conv_depths", f"{to}.depths", t.widths)
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
    if ACTIVATIONS[activation] != t.settings.get(f"{net}.activation"):
        t.put(f"{to}.activation", ACTIVATIONS[activation])
        t.settings.setdefault(f"{net}.activation", ACTIVATIONS[activation])
    t.judge(f"{cnn}.activation", "mapped", f"{to}.activation={ACTIVATIONS[activation]}")
    own, of_layers = t.raw(f"{cnn}.initializer.name"), t.raw(f"{at}.mlp.initializer.name")
    same = own in (of_layers, None)
    why = "" if same else f"begins as the hidden layers do; {OTHER_START}"
    t.each(f"{cnn}.initializer", STARTS, "mapped" if same else "differs", f"{net}.init", why)
    layout = "channels_last" if t.flag(f"{cnn}.permute_input", True) else "channels_first"
    if t.raw(f"{cnn}.permute_input") is not None:
        t.to(f"{cnn}.permute_input", f"{to}.layout", layout)


def _convolution(t: Translation, key: str, i: int, conv: dict[str, Any]) -> list[int]:
    """(channels, kernel, stride), with the padding where there is any."""
    names = ("filters", "kernel_size", "strides", "padding")
    row = [conv.get(name, 0) for name in names]
    if not conv.keys() <= set(names) or not all(type(number) is int for number in row):
        raise t.error(key, f"filters, kernel_size, strides and padding as whole numbers in entry {i}")
    return row if row[3] else row[:3]


def _memory(t: Translation, at: str, net: str) -> None:
    rnn, to = f"{at}.rnn", f"{net}.memory"
    t.to(f"{rnn}.name", f"{to}.cell", t.word(f"{rnn}.name", ("lstm", "gru")))
    t.move(f"{rnn}.units", f"{to}.hidden", t.integer)
    t.move(f"{rnn}.layers", f"{to}.layers", t.integer, 1)
    before = t.flag(f"{rnn}.before_mlp", False)
    t.put(f"{to}.position", "before_mlp" if before else "after_mlp")
    t.judge(f"{rnn}.before_mlp", "mapped", f"{to}.position")
    t.move(f"{rnn}.layer_norm", f"{to}.layer_norm", t.flag, False)
    if t.flag(f"{rnn}.concat_input", False) and not before:
        t.to(f"{rnn}.concat_input", f"{to}.concat_input", True)
    t.dead("rl_games ignores it before the hidden layers", f"{rnn}.concat_input")
    if t.flag(f"{rnn}.concat_output", False):
        if before:
            t.to(f"{rnn}.concat_output", f"{to}.concat_input", True)
        t.refuse(f"{rnn}.concat_output", "only with before_mlp: true (it is memory.concat_input here)")
    t.judge(f"{rnn}.concat_output", "mapped")
    t.dead("belongs to config, and nothing reads it here", f"{rnn}.zero_rnn_on_done")
