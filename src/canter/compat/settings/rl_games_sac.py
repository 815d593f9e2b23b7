"""rl_games' `sac` files: the algorithm and its networks."""

from __future__ import annotations

import math

from canter.compat.settings.rl_games_algorithm import CONFIG, normalizer_form
from canter.compat.settings.rl_games_network import ACTIVATIONS, STARTS
from canter.compat.settings.translation import NONE, Translation

NETWORK = "params.network"
GRAD_CLIP = 5.0
"""rl_games' bound on the length of the critics' gradient where the file is silent."""
WARMUP_EPOCHS = 1000
NETWORKS = ("algorithm.policy", "algorithm.critic")


def translate_sac(t: Translation, num_envs: int | None) -> None:
    """Everything that changes what is learned; `num_envs` is None where it was refused."""
    for key in ("params.algo.name", "params.model.name"):
        t.to(key, "algorithm.kind", "sac")
    _networks(t)
    _updates(t, num_envs)
    t.move(f"{CONFIG}.gamma", "algorithm.gamma", t.number, 0.99)
    t.move(f"{CONFIG}.critic_tau", "algorithm.tau", t.number, 0.005)
    t.move(f"{CONFIG}.batch_size", "algorithm.batch_size", t.integer)
    t.move(f"{CONFIG}.replay_buffer_size", "algorithm.replay.capacity", t.integer)
    t.move(f"{CONFIG}.save_replay_buffer", "algorithm.replay.save", t.flag, False)
    _temperature(t)
    _optimizers(t)
    _rewards(t)
    t.always(
        "the true last observation of a truncated episode gives its target; rl_games takes it from "
        "infos['final_observation'] where it is there, else the observation before"
    )


def _networks(t: Translation) -> None:
    """Policy and critics have layers of the same widths, each its own."""
    name, mlp = t.word(f"{NETWORK}.name"), f"{NETWORK}.mlp"
    why = "a network of the user's; known for SAC: soft_actor_critic"
    t.only(f"{NETWORK}.name", name == "soft_actor_critic", "algorithm.policy, algorithm.critic", why)
    widths, activation = t.widths(f"{mlp}.units"), ACTIVATIONS[t.word(f"{mlp}.activation", ACTIVATIONS)]
    normalized = t.flag(f"{CONFIG}.normalize_input", False)
    norm = t.raw(f"{NETWORK}.normalization")
    if norm not in (*NONE, "layer_norm"):
        t.refuse(f"{NETWORK}.normalization", "layer_norm is known")
    t.put("algorithm.policy.kind", "stack")
    for network in NETWORKS:
        t.put(f"{network}.init", "default_zero_bias")
        t.put(f"{network}.hidden", widths, f"{mlp}.units")
        t.put(f"{network}.activation", activation, f"{mlp}.activation")
        t.put(f"{network}.normalize_obs", normalized, f"{CONFIG}.normalize_input")
        t.put(f"{network}.norm", "none" if norm in NONE else "layer", f"{NETWORK}.normalization")
        if normalized:
            normalizer_form(t, f"{network}.normalizer")
    t.judge(f"{mlp}.units", "mapped", f"hidden={widths} of policy and critics")
    t.judge(f"{mlp}.activation", "mapped", f"activation={activation} of policy and critics")
    limit = 5 if t.parity else 10
    why = f"statistics move by new rows, clipped at {limit}; rl_games 1.6.5's by rows drawn to learn, at 5"
    to = f"normalize_obs={normalized} of policy and critics"
    t.judge(f"{CONFIG}.normalize_input", "differs" if normalized else "mapped", to, why if normalized else "")
    why = "" if norm in NONE else "before each activation; rl_games' comes after it"
    t.judge(f"{NETWORK}.normalization", "differs" if why else "mapped", "norm of policy and critics", why)
    initializer = t.word(f"{mlp}.initializer.name", default="default")
    why = "" if initializer == "default" else f"no {initializer} here; only the start of a run differs"
    t.each(f"{mlp}.initializer", STARTS, "differs" if why else "mapped", "init=default_zero_bias", why)
    why = "SAC's networks are plain stacks here; residual blocks are algorithm.critic.blocks"
    t.only(f"{mlp}.d2rl", not t.flag(f"{mlp}.d2rl", False), "a plain stack of layers", why)
    t.dead("no code of SAC reads it", f"{mlp}.regularizer", f"{mlp}.norm_only_first_layer")
    t.dead("policy and critics are always apart", f"{NETWORK}.separate")
    t.dead("SAC reads log_std_bounds instead", f"{NETWORK}.space")
    _std(t)


def _std(t: Translation) -> None:
    key = f"{NETWORK}.log_std_bounds"
    bounds = t.pair(key, "two numbers, such as [-5, 2]")
    t.put("algorithm.std.kind", "network")
    for name, bound in zip(("minimum", "maximum"), bounds, strict=True):
        t.put(f"algorithm.std.{name}", math.exp(bound), key)
    why = "approached more slowly than by a tanh, and begun at 1; only the way there differs"
    if t.parity:
        why = ""
        t.put("algorithm.std.form", "tanh", key)
        t.put("algorithm.std.initial", math.exp(sum(bounds) / 2), key)
    to = f"algorithm.std.minimum={math.exp(bounds[0]):.4g}, maximum={math.exp(bounds[1]):.4g}"
    t.judge(key, "differs" if why else "mapped", to, why)


def _updates(t: Translation, num_envs: int | None) -> None:
    """Steps between updates, updates for each, and what comes before the first."""
    t.move(f"{CONFIG}.num_steps_per_episode", "algorithm.horizon", t.integer, 1)
    ratio, plain = f"{CONFIG}.utd_ratio", f"{CONFIG}.num_updates_per_step"
    count = t.integer(plain, 1)
    if t.has(ratio):
        count = max(1, round(t.finite(ratio) * (num_envs or 1)))
        t.dead("utd_ratio wins", plain)
    for key in (ratio, plain):
        t.judge(key, "mapped", f"algorithm.updates_per_step={count}")
    t.put("algorithm.updates_per_step", float(count), ratio if t.has(ratio) else plain)
    t.move(f"{CONFIG}.policy_frequency", "algorithm.policy_delay", t.integer, 2)
    frames, epochs = f"{CONFIG}.num_warmup_frames", f"{CONFIG}.num_warmup_steps"
    steps = t.integer(epochs, WARMUP_EPOCHS) * t.settings["algorithm.horizon"] * (num_envs or 1)
    if t.has(frames):
        steps = t.integer(frames)
        t.dead("num_warmup_frames wins", epochs)
    t.put("algorithm.warmup_steps", steps, frames if t.has(frames) else epochs)
    for key in (frames, epochs):
        t.judge(key, "mapped", f"algorithm.warmup_steps={steps}, transitions of all environments")
    t.dead("no code reads it any more", f"{CONFIG}.num_seed_steps")


def _temperature(t: Translation) -> None:
    to = "algorithm.temperature"
    t.move(f"{CONFIG}.init_alpha", f"{to}.initial", t.number)
    t.move(f"{CONFIG}.learnable_temperature", f"{to}.learned", t.flag)
    share = f"{CONFIG}.target_entropy_coef"
    why = "give the entropy itself, minus this times the actions: --algorithm.temperature.target-entropy"
    t.only(share, t.number(share, 1.0) == 1.0, f"{to}.target_entropy=null, minus one per action", why)
    t.always(
        "critics read actions in -1..1, and entropy is that of such actions: rl_games' critics read those of the "
        "environment, whose entropy it takes after 1.6.5; its alpha acts as at least 0.01"
    )


def _optimizers(t: Translation) -> None:
    places = {"actor": "algorithm.optimizer", "critic": "algorithm.critic_optimizer"}
    for name, to in (places | {"alpha": "algorithm.temperature.optimizer"}).items():
        rate, betas = f"{CONFIG}.{name}_lr", f"{CONFIG}.{'alphas' if name == 'alpha' else name}_betas"
        t.put(f"{to}.learning_rate.kind", "constant")
        t.move(rate, f"{to}.learning_rate.value", t.number)
        t.put(f"{to}.eps", 1e-8)
        t.put(f"{to}.max_grad_norm", math.inf)
        t.move_given(betas, f"{to}.betas", t.raw)
    key = f"{CONFIG}.critic_grad_clip"
    clip = t.number(key, GRAD_CLIP)
    t.to(key, f"{places['critic']}.max_grad_norm", clip if clip > 0 else math.inf)


def _rewards(t: Translation) -> None:
    shaper = f"{CONFIG}.reward_shaper"
    for name, neutral in (("scale_value", 1), ("shift_value", 0), ("log_val", False)):
        if t.raw(f"{shaper}.{name}", neutral) != neutral:
            t.refuse(f"{shaper}.{name}", "SAC learns from rewards as they are, or scaled by algorithm.scale_rewards")
    for name in ("min_val", "max_val"):
        if t.has(f"{shaper}.{name}"):
            t.refuse(f"{shaper}.{name}", "SAC does not cut rewards off here")
    t.each(shaper, "scale_value shift_value log_val min_val max_val", "mapped", "rewards as they are")
    bootstrap = f"{CONFIG}.value_bootstrap"
    why = "an episode that is cut off is no end for SAC: leave it out"
    t.only(bootstrap, t.flag(bootstrap, True), "truncated episodes go on in their targets", why)
