"""IsaacGymEnvs' AMP agent, in rl_games' files: the extension `amp` of PPO."""

from __future__ import annotations

import math
from typing import Any

from canter.compat.settings import readers as read
from canter.compat.settings.rl_games_network import INITIALIZER_KEYS
from canter.compat.settings.rl_games_ppo import CONFIG, samples_per_step
from canter.compat.settings.section import Import

AT = "algorithm.extensions[0]"
KEYS: dict[str, tuple[str, read.Reader, Any]] = {
    "disc_logit_reg": ("logit_regularization", read.number, 0.05),
    "disc_grad_penalty": ("gradient_penalty", read.number, 5.0),
    "disc_weight_decay": ("weight_regularization", read.number, 1e-4),
    "disc_reward_scale": ("reward_scale", read.number, 2.0),
    "task_reward_w": ("task_weight", read.number, 0.0),
    "disc_reward_w": ("style_weight", read.number, 1.0),
    "normalize_amp_input": ("normalize_obs", read.flag, True),
    "amp_replay_buffer_size": ("replay", read.integer, 1_000_000),
    "amp_minibatch_size": ("batch_size", read.integer, 4096),
}
"""Keys of `params.config`: the extension's setting, the reader, and the default of IsaacGymEnvs' files."""
CLIPS = ("motions", "motion_weights", "obs_group", "columns", "time_step", "frames")
"""Settings of the extension that IsaacGymEnvs' environment knows; a file may have them as `config.amp`."""


def report_amp(run: Import) -> None:
    """Report the keys of PPO that the AMP agent reads in another way."""
    coef = 2 * read.number(run.section(CONFIG), "critic_coef")
    run.section(CONFIG).mapped("critic_coef", f"algorithm.value_coef={coef:g} (half the square here)")
    network = run.section("params.network")
    network.each("disc.initializer", INITIALIZER_KEYS, "changed", "orthogonal", "only the initial weights differ")


def amp_extension(run: Import) -> None:
    """Add the extension, with settings of PPO that were made before."""
    s = run.section(CONFIG, "algorithm")
    s.set("value_coef", 2 * read.number(s, "critic_coef"))
    if s.get("bound_loss.coef") is not None:
        s.set("bound_loss.limit", 1.0)
    network = run.section("params.network")
    own: dict[str, Any] = {
        "kind": "amp",
        "hidden": read.widths(network, "disc.units", [1024, 512]),
        "activation": read.word(network, "disc.activation", "relu"),
    }
    for key, (name, reader, default) in KEYS.items():
        own[name] = reader(s, key, default)
    own["updates"] = s.get("epochs") * s.get("num_minibatches", 1)
    own["optimizer"] = {
        "learning_rate": read.number(s, "learning_rate"),
        "max_grad_norm": s.get("optimizer.max_grad_norm", math.inf),
    }
    run.origin[f"{AT}.optimizer.learning_rate"] = f"{CONFIG}.learning_rate"
    run.origin[f"{AT}.optimizer.max_grad_norm"] = f"{CONFIG}.grad_norm"
    keep = read.finite(s, "amp_replay_keep_prob", 0.01)
    own["replay_rows"] = max(1, min(own["replay"], round(keep * s.get("horizon") * (samples_per_step(run) or 1))))
    why = "that share of each rollout is kept from the start, not only once the buffer is full"
    s.changed("amp_replay_keep_prob", why, f"{AT}.replay_rows={own['replay_rows']}")
    s.changed("disc_coef", "the discriminator has an Adam of its own, which no factor changes")
    s.changed("amp_obs_demo_buffer_size amp_batch_size", "new clips are drawn for every update", f"{AT}.motions")
    for name in CLIPS:
        if s.has(f"amp.{name}"):
            own[name] = s.raw(f"amp.{name}")
    if "motions" not in own:
        key = f"{CONFIG}.amp.motions"
        why = f"IsaacGymEnvs' environment has the clips: name their files here, or in the file as {key}"
        s.difference(why, f"{AT}.motions")
    s.set("extensions", [own])
