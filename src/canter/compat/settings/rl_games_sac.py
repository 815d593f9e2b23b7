"""rl_games' `sac` files: the algorithm and its networks.

The tables are for `params.config` and settings below `algorithm`, unless their comment names
another section.
"""

from __future__ import annotations

import math

from canter.compat.settings import readers as read
from canter.compat.settings.rl_games_network import ACTIVATIONS, INITIALIZER_KEYS
from canter.compat.settings.rl_games_ppo import CONFIG, set_normalizer
from canter.compat.settings.rules import OMIT, Copy, Only, Rule, always, apply, no_effect
from canter.compat.settings.section import NONE, Import, Section

NETWORKS = ("policy", "critic")
OF_BOTH = "of policy and critics"


def apply_sac(run: Import) -> None:
    """Apply everything that changes what is learned by SAC."""
    for key in ("algo.name", "model.name"):
        run.section("params", "algorithm").copy(key, "kind", "sac")
    apply(NETWORK, run.section("params.network", "algorithm"))
    apply(SAC, run.section(CONFIG, "algorithm"))
    run.root.changed(
        "",
        "critics read actions in -1..1, and entropy is that of such actions: rl_games' critics read those of the "
        "environment, whose entropy it takes after 1.6.5; its alpha acts as at least 0.01",
    )
    run.root.changed(
        "",
        "the target of a truncated episode uses its true final observation; rl_games takes it from "
        "infos['final_observation'] where it is there, else the observation before",
    )


def layers(s: Section) -> None:
    """Policy and critics have hidden layers of the same widths."""
    hidden = read.widths(s, "mlp.units")
    activation = ACTIVATIONS[read.one_of(*ACTIVATIONS)(s, "mlp.activation")]
    for network in NETWORKS:
        s.set(f"{network}.init", "default_zero_bias")
        s.set(f"{network}.hidden", hidden, "mlp.units")
        s.set(f"{network}.activation", activation, "mlp.activation")
    name = read.word(s, "mlp.initializer.name", "default")
    if name == "default":
        s.each("mlp.initializer", INITIALIZER_KEYS, "mapped", "init=default_zero_bias")
    else:
        why = f"no {name} here; only the initial weights differ"
        s.each("mlp.initializer", INITIALIZER_KEYS, "changed", "init=default_zero_bias", why)


def normalization(s: Section) -> None:
    """rl_games normalises layers after the activation."""
    kind = s.raw("normalization")
    if kind not in (*NONE, "layer_norm"):
        s.refuse("normalization", "layer_norm is known")
    for network in NETWORKS:
        s.set(f"{network}.norm", "none" if kind in NONE else "layer", "normalization")
    if kind not in NONE:
        s.changed("normalization", "before each activation; rl_games' comes after it", f"norm {OF_BOTH}")


def std(s: Section) -> None:
    """rl_games moves the std between its bounds by a tanh."""
    bounds = read.pair(s, "log_std_bounds", "two numbers, such as [-5, 2]")
    s.set("std.kind", "network")
    for name, bound in zip(("minimum", "maximum"), bounds, strict=True):
        s.set(f"std.{name}", math.exp(bound), "log_std_bounds")
    to = f"algorithm.std.minimum={math.exp(bounds[0]):.4g}, maximum={math.exp(bounds[1]):.4g}"
    if s.parity:
        s.set("std.form", "tanh", "log_std_bounds")
        s.set("std.initial", math.exp(sum(bounds) / 2), "log_std_bounds")
    else:
        why = "approached more slowly than by a tanh, and started at 1; only the way there differs"
        s.changed("log_std_bounds", why, to)


def observation_normalizer(s: Section) -> None:
    """rl_games 1.6.5 updates the statistics with the samples of each minibatch."""
    on = read.flag(s, "normalize_input", False)
    for network in NETWORKS:
        s.set(f"{network}.normalize_obs", on, "normalize_input")
        if on:
            set_normalizer(s, f"{network}.normalizer")
    to = f"normalize_obs={on} {OF_BOTH}"
    if on:
        clip = 5 if s.parity else 10
        why = f"updated with new samples, clipped at {clip}; rl_games 1.6.5: with drawn samples, clipped at 5"
        s.changed("normalize_input", why, to)


def updates(s: Section) -> None:
    """`utd_ratio` counts per transition, `num_updates_per_step` per step of all environments."""
    key = "num_updates_per_step"
    number_of_updates = read.integer(s, key, 1)
    if s.has("utd_ratio"):
        s.no_effect(key, "utd_ratio wins")
        key = "utd_ratio"
        number_of_updates = max(1, round(read.finite(s, key) * (s.run.samples_per_step or 1)))
    s.set("updates_per_step", float(number_of_updates), key)


def warmup(s: Section) -> None:
    """`num_warmup_steps` counts iterations, `num_warmup_frames` transitions."""
    key = "num_warmup_steps"
    steps = read.integer(s, key, 1000) * s.get("horizon") * (s.run.samples_per_step or 1)
    if s.has("num_warmup_frames"):
        s.no_effect(key, "num_warmup_frames wins")
        key = "num_warmup_frames"
        steps = read.integer(s, key)
    s.set("warmup_steps", steps, key)


def norm_limit(clip: float) -> float:
    """Return the limit of a gradient's norm; 0 and less stand for none."""
    return clip if clip > 0 else math.inf


def optimizer(name: str, betas: str, to: str) -> tuple[Rule, ...]:
    """Return the table of one of the three optimizers."""
    return (
        always(f"{to}.learning_rate.kind", "constant"),
        Copy(f"{name}_lr", f"{to}.learning_rate.value", read.number),
        always(f"{to}.eps", 1e-8),
        always(f"{to}.max_grad_norm", math.inf),
        Copy(betas, f"{to}.betas", Section.raw, OMIT),
    )


OTHER_NETWORK = "a network of the user's; known for SAC: soft_actor_critic"
OTHER_ENTROPY = "set the entropy itself, minus this times the actions: --algorithm.temperature.target-entropy"
NEUTRAL = {"scale_value": (1,), "shift_value": (0,), "log_val": (False,), "min_val": NONE, "max_val": NONE}
NO_SHAPING = "SAC learns from rewards as they are, without clips, or scaled by algorithm.scale_rewards"
NO_BOOTSTRAP = "a truncated episode has not ended for SAC: leave it out"
NO_DENSE = "SAC's networks are plain stacks here; residual blocks are algorithm.critic.blocks"
NETWORK: tuple[Rule, ...] = (
    Only("name", ("soft_actor_critic",), "algorithm.kind=sac", OTHER_NETWORK),
    always("policy.kind", "stack"),
    layers,
    normalization,
    Only("mlp.d2rl", (False,), "a plain stack of layers", NO_DENSE),
    no_effect("mlp.regularizer mlp.norm_only_first_layer", "no code of SAC reads it"),
    no_effect("separate", "policy and critics are always apart"),
    no_effect("space", "SAC reads log_std_bounds instead"),
    std,
)
"""For `params.network` and settings below `algorithm`."""
SAC: tuple[Rule, ...] = (
    observation_normalizer,
    Copy("num_steps_per_episode", "horizon", read.integer, 1),
    updates,
    Copy("policy_frequency", "policy_delay", read.integer, 2),
    warmup,
    no_effect("num_seed_steps", "no code reads it any more"),
    Copy("gamma", "gamma", read.number, 0.99),
    Copy("critic_tau", "tau", read.number, 0.005),
    Copy("batch_size", "batch_size", read.integer),
    Copy("replay_buffer_size", "replay.capacity", read.integer),
    Copy("save_replay_buffer", "replay.save", read.flag, default=False),
    Copy("init_alpha", "temperature.initial", read.number),
    Copy("learnable_temperature", "temperature.learned", read.flag),
    Only("target_entropy_coef", (1.0,), "temperature.target_entropy=null, minus one per action", OTHER_ENTROPY),
    *optimizer("actor", "actor_betas", "optimizer"),
    *optimizer("critic", "critic_betas", "critic_optimizer"),
    *optimizer("alpha", "alphas_betas", "temperature.optimizer"),
    Copy("critic_grad_clip", "critic_optimizer.max_grad_norm", read.number, 5.0, norm_limit),
    *(Only(f"reward_shaper.{key}", same, "rewards as they are", NO_SHAPING) for key, same in NEUTRAL.items()),
    Only("value_bootstrap", (True,), "the value of the observation behind a truncated episode", NO_BOOTSTRAP),
)
