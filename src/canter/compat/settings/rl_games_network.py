"""rl_games' `network` sections as Canter's networks.

The tables are for a section whose keys are those of `params.network`, or of the central value's
network, and whose settings are those of one network here, `algorithm.model.policy` or
`algorithm.model.critic`.
"""

from __future__ import annotations

import math
from typing import Any

from canter.compat.settings import readers as read
from canter.compat.settings.rules import OMIT, Copy, Only, Rule, apply, mapped, no_effect
from canter.compat.settings.section import NONE, Import, Section
from canter.nn.network import networks

POLICY = "algorithm.model.policy"
CRITIC = "algorithm.model.critic"
RENAMED = {"swish": "silu", "None": "identity"}
KNOWN = "elu relu tanh gelu swish silu selu sigmoid softplus None"
ACTIVATIONS = {name: RENAMED.get(name, name) for name in KNOWN.split()}
"""rl_games' names of activations, and Canter's."""
GAIN = math.sqrt(2)
"""Gain that leaves torch's own initial weights unchanged."""
DEFAULT = "default"
ZERO_BIAS = "default_zero_bias"
STD_FORMS = {"exp": "log", "softplus": "softplus", "linear": "linear", "scalar": "linear"}
LINEAR_FLOOR = 1e-3  # of rl_games' linear std
INITIALIZERS = {
    "default": ZERO_BIAS,
    "orthogonal_initializer": "orthogonal",
    "glorot_normal_initializer": "glorot_normal",
    "glorot_uniform_initializer": "glorot_uniform",
    "variance_scaling_initializer": "variance_scaling",
}
OTHER_START = "only the initial weights differ, never a checkpoint"
INITIALIZER_KEYS = "name gain scale std val value a b mode distribution nonlinearity"
"""Arguments of rl_games' and torch's initializers."""


def is_amp(run: Import) -> bool:
    """Return True for IsaacGymEnvs' AMP agent, which scripts register under two names."""
    return run.root.raw("params.algo.name") in ("amp_continuous", "amp")


def is_continuous(run: Import) -> bool:
    """Return True for an algorithm with continuous actions."""
    return run.root.raw("params.algo.name") != "a2c_discrete"


def network_kind(s: Section) -> None:
    """Networks of rl_games are of the standard kind; others must be registered here."""
    name = read.word(s, "name", "actor_critic")
    if name in networks:
        s.copy("name", "kind", name, "your network of that name, registered here")
    elif name not in ("actor_critic", "resnet_actor_critic", "amp"):
        s.refuse("name", f"a network of the user's: register one here, canter.register('network', {name!r})")


def hidden_layers(s: Section) -> None:
    """A network without `mlp` has no hidden layers."""
    if s.has_section("mlp"):
        apply(HIDDEN_LAYERS, s)
    else:
        s.set("hidden", [])


def initializer(s: Section) -> None:
    """Read the initializer and its gain, whose key depends on the kind."""
    at = "mlp.initializer"
    name = read.word(s, f"{at}.name", "default")
    init = INITIALIZERS.get(name, DEFAULT)
    gain = GAIN
    if init == ZERO_BIAS:
        s.no_effect(f"{at}.scale {at}.gain", "has no effect with initializer default")
    elif init == "variance_scaling":
        gain = read.number(s, f"{at}.scale", 2.0)
        s.mapped(f"{at}.scale", f"{s.setting('init_gain')}={gain:g}")
    elif init != DEFAULT:
        gain = read.number(s, f"{at}.gain", 1.0)
    s.copy(f"{at}.name", "init", init, f"no {name} here; {OTHER_START}" if init == DEFAULT else "")
    s.copy(f"{at}.gain", "init_gain", gain)
    s.each(at, INITIALIZER_KEYS, "changed", why=OTHER_START)
    if s.to == POLICY:
        s.run.settings["algorithm.model.policy_gain"] = gain
    s.run.settings["algorithm.model.value_gain"] = gain


def layer_norm(s: Section) -> None:
    """rl_games normalises after the activation."""
    for key in ("normalization", "mlp.normalization"):
        kind = s.raw(key)
        if kind == "layer_norm":
            s.copy(key, "layer_norm", True, "released rl_games 1.6.5 ignores it in plain layers")
            s.set("layer_norm_position", "after_activation")
        elif kind not in NONE:
            s.refuse(key, "there is no such normalisation here; use layer_norm")


def encoder(s: Section) -> None:
    """Convolutions, or IMPALA's residual blocks."""
    if not s.has_section("cnn"):
        return
    if s.raw("cnn.conv_depths") is not None or s.raw("name", "actor_critic") == "resnet_actor_critic":
        s.set("cnn.kind", "impala")
        s.copy("cnn.conv_depths", "cnn.depths", read.widths(s, "cnn.conv_depths"))
    else:
        plain_convolutions(s)
    encoder_activation(s)
    own = s.raw("cnn.initializer.name")
    same = own in (s.raw("mlp.initializer.name"), None)
    why = "" if same else f"begins as the hidden layers do; {OTHER_START}"
    s.each("cnn.initializer", INITIALIZER_KEYS, "mapped" if same else "changed", s.setting("init"), why)
    channels_last = read.flag(s, "cnn.permute_input", True)
    if s.raw("cnn.permute_input") is not None:
        s.copy("cnn.permute_input", "cnn.layout", "channels_last" if channels_last else "channels_first")


def plain_convolutions(s: Section) -> None:
    """Each entry of `convs` is one layer."""
    supported = ("conv2d", "conv2d_flatten", "conv1d")
    kind = read.one_of(*supported, "conv2d_spatial_softargmax", "coord_conv2d")(s, "cnn.type")
    if kind not in supported:
        s.refuse("cnn.type", "there are plain 1-d and 2-d convolutions here: register an encoder of your own")
    if kind == "conv1d":
        s.set("cnn.sequences", True)
    convs = s.raw("cnn.convs", [])
    if not isinstance(convs, list) or not all(isinstance(conv, dict) for conv in convs):
        raise s.error("cnn.convs", "a list of mappings with filters, kernel_size, strides and padding")
    s.copy("cnn.convs", "cnn.layers", [_convolution(s, i, conv) for i, conv in enumerate(convs)])
    s.set("cnn.features", None)


def _convolution(s: Section, i: int, conv: dict[str, Any]) -> list[int]:
    """Return channels, kernel and stride, with the padding if there is any."""
    names = ("filters", "kernel_size", "strides", "padding")
    layer = [conv.get(name, 0) for name in names]
    if not conv.keys() <= set(names) or not all(type(size) is int for size in layer):
        raise s.error("cnn.convs", f"filters, kernel_size, strides and padding as whole numbers in entry {i}")
    return layer if layer[3] else layer[:3]


def encoder_activation(s: Section) -> None:
    """Set the encoder's activation if it differs from that of the hidden layers."""
    activation = ACTIVATIONS[read.one_of(*ACTIVATIONS)(s, "cnn.activation", "relu")]
    if activation != s.get("activation"):
        s.set("cnn.activation", activation)
        s.run.settings.setdefault(s.setting("activation"), activation)


def recurrent_layers(s: Section) -> None:
    """An LSTM or GRU before or after the hidden layers."""
    if s.has_section("rnn"):
        apply(RECURRENT_LAYERS, s.inner("rnn", "rnn"))


def concatenation(s: Section) -> None:
    """`concat_output` before the hidden layers is what Canter calls `concat_input`."""
    before = s.get("position") == "before_mlp"
    if read.flag(s, "concat_input", False) and not before:
        s.copy("concat_input", "concat_input", True)
    s.no_effect("concat_input", "rl_games ignores it before the hidden layers")
    if read.flag(s, "concat_output", False):
        if before:
            s.copy("concat_output", "concat_input", True)
        s.refuse("concat_output", "only with before_mlp: true (it is rnn.concat_input here)")


def observation_groups(s: Section) -> None:
    """Observation groups that the network reads, where the file names them."""
    names: list[str] = []
    if s.has_section("inputs"):
        names = [*s.raw("inputs")]
        s.mapped("inputs", f"{s.setting('obs_groups')}={names}")
    for key, group in (("require_rewards", "reward"), ("require_last_actions", "last_action")):
        value = s.raw(key)
        if value is True:
            names = [*(names or ["observation"]), group]
            why = "enters together with the encoded image; rl_games appends it to the recurrent layer's input"
            s.changed(key, why, s.setting("obs_groups"))
        elif value not in (*NONE, False):
            s.refuse(key, "true or false")
    if names:
        s.set("obs_groups", names)


HIDDEN_LAYERS: tuple[Rule, ...] = (
    Copy("mlp.units", "hidden", read.widths),
    Copy("mlp.activation", "activation", read.one_of(*ACTIVATIONS), convert=ACTIVATIONS),
    Copy("mlp.d2rl", "d2rl", read.flag, default=False),
    no_effect("mlp.regularizer", "regularizers are read by nothing"),
    initializer,
)
RECURRENT_LAYERS: tuple[Rule, ...] = (
    Copy("name", "cell", read.one_of("lstm", "gru")),
    Copy("units", "hidden", read.integer),
    Copy("layers", "layers", read.integer, 1),
    Copy("before_mlp", "position", read.flag, default=False, convert={True: "before_mlp", False: "after_mlp"}),
    Copy("layer_norm", "layer_norm", read.flag, default=False),
    concatenation,
    no_effect("zero_rnn_on_done", "belongs to config, and nothing reads it here"),
)
NETWORK: tuple[Rule, ...] = (
    network_kind,
    Only("value_activation", NONE, "", "values have no activation here: set it to None"),
    hidden_layers,
    layer_norm,
    Copy("mlp.norm_only_first_layer", "layer_norm_layers", read.flag, OMIT, {True: "first", False: "all"}),
    encoder,
    recurrent_layers,
    no_effect("rnn1 lstm blocks value_shape joint_obs_actions cnn.regularizer"),
    mapped("central_value", "algorithm.central_value"),
    observation_groups,
)


def std(s: Section) -> None:
    """Derive the initial std from its parameterisation and floor."""
    form, floor = std_form(s)
    key = "sigma_init.val" if s.raw("sigma_init.val") is not None else "sigma_init.value"
    raw = read.number(s, key, 0.0) if s.raw(key) is not None else 0.0
    initial = floor + _std_of(form, raw, floor, s, key)
    s.copy(key, "std.initial", initial)
    to = f"{s.setting('std.initial')}={initial:.4g}"
    if s.raw("sigma_init.name", "const_initializer") in ("const_initializer", "default"):
        s.each("sigma_init", INITIALIZER_KEYS, "mapped", to)
    else:
        s.each("sigma_init", INITIALIZER_KEYS, "changed", to, f"begins at a constant; {OTHER_START}")
    kind = "parameter" if read.flag(s, "fixed_sigma", True) else "network"
    s.set("std.kind", kind)
    if not std_bounds(s, form):
        otherwise = "keeps between 0.01 and 10, with a gradient everywhere; rl_games' is exp(parameter), without bounds"
        s.own_form("fixed_sigma", {"std.form": form}, otherwise)
        if floor and s.parity:
            s.copy("min_sigma", "std.floor", floor)
    if s.get("std.form") is None:
        s.changed("sigma_parametrization", "with --parity only", f"algorithm.model.std.form={form}")
    if floor and s.has("min_sigma"):
        s.copy("min_sigma", "std.minimum", floor, "a bound that is approached, not added")
    s.mapped("min_sigma max_sigma logstd_bounds", "off")


def _std_of(form: str, raw: float, floor: float, s: Section, key: str) -> float:
    """Return the std above its floor, of the number that rl_games learns."""
    try:
        if form == "log":
            return math.exp(raw)
        return math.log1p(math.exp(raw - floor if form == "linear" else raw))
    except OverflowError:
        raise s.error(key, "a number whose exponential is finite") from None


def std_form(s: Section) -> tuple[str, float]:
    """Return the parameterisation of the std here, and the floor that is added to it."""
    name = s.raw("sigma_parametrization", "exp")
    form = STD_FORMS.get(name) if isinstance(name, str) else None
    if form is None:
        s.refuse("sigma_parametrization", "exp, softplus, linear and scalar are known")
    floor = read.number(s, "min_sigma", 0.0) if s.has("min_sigma") else 0.0
    return form or "log", max(floor, LINEAR_FLOOR) if form == "linear" else floor


def std_bounds(s: Section, form: str) -> bool:
    """Set the bounds of the std, which only Canter's own form has; return True if there are any."""
    if form != "log":
        s.no_effect("logstd_bounds", "only sigma_parametrization: exp reads it")
    elif s.has("logstd_bounds"):
        bounds = read.pair(s, "logstd_bounds", "two numbers, such as [-5, 2]")
        for name, bound in zip(("minimum", "maximum"), bounds, strict=True):
            s.set(f"std.{name}", math.exp(bound), "logstd_bounds")
        why = "approached, with a gradient everywhere; rl_games cuts off"
        s.changed("logstd_bounds", why, "algorithm.model.std.minimum, .maximum")
    if s.has("max_sigma") and read.number(s, "max_sigma") > 0:
        s.copy("max_sigma", "std.maximum", read.number(s, "max_sigma"), "approached along another curve")
    return s.get("std.maximum") is not None


def initial_mean(s: Section) -> None:
    """An initializer of the mean becomes a gain of the last layer."""
    if s.raw("mu_init.name") not in (None, "default"):
        gain = read.number(s, "mu_init.gain", read.number(s, "mu_init.scale", read.number(s, "mu_init.std", 1.0)))
        s.set("policy_gain", gain)
        s.each("mu_init", INITIALIZER_KEYS, "changed", f"algorithm.model.policy_gain={gain:g}", OTHER_START)
    s.each("mu_init", INITIALIZER_KEYS, "mapped", "algorithm.model.policy_gain")


NO_ACTIVATION = "the mean and the std have no activation here: set it to None"
DISTRIBUTION: tuple[Rule, ...] = (
    Only("mu_activation", NONE, "", NO_ACTIVATION),
    Only("sigma_activation", NONE, "", NO_ACTIVATION),
    std,
    Copy("learn_sigma", "std.learn", read.flag, OMIT),
    initial_mean,
    no_effect("scale"),
)
"""For `params.network.space.continuous` and settings below `algorithm.model`."""
