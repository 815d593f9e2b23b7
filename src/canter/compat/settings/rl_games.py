"""rl_games' YAML files (`params: ...`) as settings of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from canter.compat.settings.rl_games_algorithm import CENTRAL, CONFIG, CRITIC, POLICY, translate_algorithm
from canter.compat.settings.rl_games_network import STARTS, translate_network
from canter.compat.settings.rl_games_sac import translate_sac
from canter.compat.settings.translation import NONE, Translation

ENDLESS = 10**15
"""Steps of a run that ends when somebody stops it."""
ALGORITHMS = ("a2c_continuous", "a2c_discrete", "amp_continuous")
MODELS = {
    "continuous_a2c_logstd": "gaussian",
    "continuous_a2c": "gaussian",
    "continuous_a2c_tanh": "tanh_gaussian",
    "continuous_amp": "gaussian",
    "discrete_a2c": "categorical",
    "multi_discrete_a2c": "multi_categorical",
}
OLD_MODELS = {"discrete_a2c_lstm": "discrete_a2c", "continuous_a2c_lstm_logstd": "continuous_a2c_logstd"}


def is_rl_games(tree: Mapping[str, Any]) -> bool:
    """Whether a file was written for rl_games."""
    params = tree.get("params")
    return isinstance(params, Mapping) and "config" in params and "algo" in params


def translate(t: Translation, env: str | None, num_envs: int | None, agents: int) -> None:
    """All of a file; `env`, `num_envs` and `agents` are what the caller knows of the environment."""
    for key in ("params.algo", "params.config", "params.network"):
        if not t.section(key):
            raise t.error(key, "a mapping", "it is required")
    name = t.word("params.algo.name")
    if name not in (*ALGORITHMS, "sac"):
        t.refuse("params.algo.name", "an algorithm of the user's: see canter.register('algorithm', NAME)")
        t.refuse("params", f"belongs to {name}, which was refused")
        return
    if name == "sac":
        _run(t, env)
        alone = num_envs is None and t.raw(f"{CONFIG}.num_actors") is None  # where the file is silent there is one
        translate_sac(t, _rows(t, 1 if alone else num_envs, agents))
        _precision(t, "algorithm.policy")
    else:
        _ppo(t, name, env, num_envs, agents)
    _edges(t)
    t.finish()


def _ppo(t: Translation, name: str, env: str | None, num_envs: int | None, agents: int) -> None:
    t.to("params.algo.name", "algorithm.kind", "ppo")
    _model(t)
    _run(t, env)
    rows = _rows(t, num_envs, agents)
    translate_network(t, "params.network", POLICY)
    _shared_trunk(t)
    recurrent = t.section("params.network.rnn") or t.section(f"{CENTRAL}.network.rnn")
    if name == "amp_continuous":
        _amp_verdicts(t)
    translate_algorithm(t, rows, name != "a2c_discrete", recurrent)
    if name == "amp_continuous":
        _amp(t, rows)
    _actions(t)
    _precision(t, POLICY)


def _model(t: Translation) -> None:
    name = t.word("params.model.name")
    model, why = OLD_MODELS.get(name, name), ""
    if model != name:
        why = f"rl_games has no model of this name any more: read as {model}, with the memory of network.rnn"
    elif model == "continuous_a2c_tanh":
        why = "its KL and deterministic action are wrong in rl_games"
    if model in MODELS:
        t.to("params.model.name", "algorithm.model.distribution", MODELS[model], why)
    else:
        t.refuse("params.model.name", f"a model of the user's; known: {', '.join(MODELS)}")
    for space in ("discrete", "multi_discrete", "continuous"):
        if not t.section(f"params.network.space.{space}"):
            t.judge(f"params.network.space.{space}", "mapped", "the environment's action space")


AMP = {
    "disc_logit_reg": ("logit_regularization", 0.05),
    "disc_grad_penalty": ("gradient_penalty", 5.0),
    "disc_weight_decay": ("weight_regularization", 1e-4),
    "disc_reward_scale": ("reward_scale", 2.0),
    "task_reward_w": ("task_weight", 0.0),
    "disc_reward_w": ("style_weight", 1.0),
    "normalize_amp_input": ("normalize_obs", True),
    "amp_replay_buffer_size": ("replay", 1_000_000),
    "amp_minibatch_size": ("batch_size", 4096),
}
"""AMP's settings: their name in the extension, and what the parent's files have."""
CLIPS = ("motions", "motion_weights", "obs_group", "columns", "time_step", "frames")
"""Settings of the extension that the parent's environment knows; a file may have them as `config.amp`."""


def _amp_verdicts(t: Translation) -> None:
    """What IsaacGymEnvs' AMP agent does in another way than rl_games' PPO."""
    coef = 2 * t.number(f"{CONFIG}.critic_coef")
    t.judge(f"{CONFIG}.critic_coef", "mapped", f"algorithm.value_coef={coef:g} (half the square here)")
    t.each("params.network.disc.initializer", STARTS, "differs", "orthogonal", "only the start of a run differs")


def _amp(t: Translation, rows: int | None) -> None:
    """AMP's keys as the extension of that name."""
    t.put("algorithm.value_coef", 2 * t.number(f"{CONFIG}.critic_coef"))
    if "algorithm.bound_loss.coef" in t.settings:
        t.put("algorithm.bound_loss.limit", 1.0)
    own: dict[str, Any] = {"kind": "amp", "hidden": t.widths("params.network.disc.units", [1024, 512])}
    own["activation"] = t.word("params.network.disc.activation", default="relu")
    reads = {bool: t.flag, int: t.integer, float: t.number}
    own |= {name: reads[type(usual)](f"{CONFIG}.{key}", usual) for key, (name, usual) in AMP.items()}
    horizon, keep = t.settings["algorithm.horizon"], t.finite(f"{CONFIG}.amp_replay_keep_prob", 0.01)
    own["replay_rows"] = max(1, min(own["replay"], round(keep * horizon * (rows or 1))))
    own["updates"] = t.settings["algorithm.epochs"] * t.settings.get("algorithm.num_minibatches", 1)
    own["optimizer"] = {
        "learning_rate": t.number(f"{CONFIG}.learning_rate"),
        "max_grad_norm": t.settings.get("algorithm.optimizer.max_grad_norm", math.inf),
    }
    at = "algorithm.extensions[0]"
    for name in CLIPS:
        if t.has(f"{CONFIG}.amp.{name}"):
            own[name] = t.raw(f"{CONFIG}.amp.{name}")
            t.judge(f"{CONFIG}.amp.{name}", "mapped", f"{at}.{name}")
    t.put("algorithm.extensions", [own])
    for key, name in (("learning_rate", "learning_rate"), ("grad_norm", "max_grad_norm")):
        t.origin[f"{at}.optimizer.{name}"] = f"{CONFIG}.{key}"
    t.judge("params.network.disc.units", "mapped", f"{at}.hidden")
    t.judge("params.network.disc.activation", "mapped", f"{at}.activation")
    for key, (name, _) in AMP.items():
        t.judge(f"{CONFIG}.{key}", "mapped", f"{at}.{name}={own[name]}")
    why = "that share of each rollout is kept from the start, not only once the buffer is full"
    t.judge(f"{CONFIG}.amp_replay_keep_prob", "differs", f"{at}.replay_rows={own['replay_rows']}", why)
    t.judge(f"{CONFIG}.disc_coef", "differs", "", "the discriminator has an Adam of its own, which no factor changes")
    why = "clips are drawn anew for every update"
    t.each(CONFIG, "amp_obs_demo_buffer_size amp_batch_size", "differs", f"{at}.motions", why)
    if "motions" not in own:
        why = f"the parent's environment has the clips: name their files here, or in the file as {CONFIG}.amp.motions"
        t.always(why, f"{at}.motions")


def _shared_trunk(t: Translation) -> None:
    separate = t.flag("params.network.separate", False) or t.section(CENTRAL)  # the central value is the critic
    t.to("params.network.separate", "algorithm.model.shared_trunk", not separate)


def _rows(t: Translation, num_envs: int | None, agents: int) -> int | None:
    """Environments times agents; None where the file leaves it to a script and the caller says nothing."""
    key = f"{CONFIG}.num_actors"
    if num_envs is not None:
        t.put("env.num_envs", num_envs, key)
        t.judge(key, "mapped", f"env.num_envs={num_envs}, given by you")
        return num_envs * agents
    value = t.raw(key)
    if value in (None, -1) or (isinstance(value, str) and "${" in value):
        t.refuse(key, "the parent's script fills it in: say --num-envs N")
        if value is None:
            raise t.error(key, "the number of environments", "say --num-envs N")
        return None
    t.move(key, "env.num_envs", t.count)
    return t.settings["env.num_envs"] * agents


def _run(t: Translation, env: str | None) -> None:
    """Environment, seed, device and when the run ends."""
    _environment(t, env)
    seed = t.raw("params.seed")
    if seed in (None, -1) or (isinstance(seed, str) and "${" in seed):
        t.judge("params.seed", "differs", "seed=0", "the parent draws one, or its script does: give --seed")
    else:
        why = "rl_games seeds nothing with 0" if t.integer("params.seed") == 0 else ""
        t.to("params.seed", "seed", t.integer("params.seed"), why)
    t.move_given(f"{CONFIG}.device", "device", t.word)
    t.put("total_steps", None)
    epochs = t.integer(f"{CONFIG}.max_epochs", -1)
    if epochs > 0:
        t.put("until.iterations", epochs, f"{CONFIG}.max_epochs")
    t.judge(f"{CONFIG}.max_epochs", "mapped", f"until.iterations={epochs if epochs > 0 else 'null'}")
    steps = max(t.integer(f"{CONFIG}.{key}", -1) for key in ("max_frames", "max_steps"))
    if steps > 0:
        t.put("total_steps", steps, f"{CONFIG}.max_frames")
    t.each(CONFIG, "max_frames max_steps", "mapped", f"total_steps={steps if steps > 0 else 'null'}")
    score = f"{CONFIG}.score_to_win"
    if t.has(score):
        where = "looked at in every row of the log; rl_games looks at its best mean only"
        t.to(score, "until.mean_return", t.number(score), f"the mean of the last 100 episodes, {where}")
    if not (epochs > 0 or steps > 0 or t.has(score)):
        t.put("total_steps", ENDLESS)
        t.always("nothing ends this run but you, as in rl_games", f"total_steps={ENDLESS}")
    save = f"{CONFIG}.save_frequency"
    if t.has(save) and t.integer(save) > 0:
        t.move(save, "checkpoints.save_every", t.integer)
    t.judge(save, "mapped", "checkpoints.save_every, which is never 0 here")


def _environment(t: Translation, env: str | None) -> None:
    name, options = t.word(f"{CONFIG}.env_name", default=env or ""), f"{CONFIG}.env_config"
    given = dict(t.raw(options)) if t.section(options) else {}
    inner = t.raw(f"{options}.env_name", t.raw(f"{options}.name"))
    found, why = name, ""
    if env is not None:
        found = env
    elif name == "envpool" and inner:
        found = f"envpool:{inner}"
    elif name in ("gymnasium", "openai_gym", "ray", "pufferlib") and inner:
        found = str(inner)
    elif t.has(f"{options}.task_name"):
        found = f"mjlab:{t.raw(f'{options}.task_name')}"
    elif not re.search(r"-v\d+$", name):
        found, why = "", f"{name!r} is registered by rl_games or its script: give the environment's id here (--env ID)"
    if found:
        t.to(f"{CONFIG}.env_name", "env.id", found, why)
    if name == "rlgpu":
        t.judge(f"{CONFIG}.env_name", "mapped", "the environment that the script gives to Runner; --env ID here")
    t.judge(f"{CONFIG}.env_name", "differs", "", why)
    for key in ("env_name", "name", "task_name", "device"):
        t.judge(f"{options}.{key}", "mapped", "env.id")
    taken = env is None and found not in ("", name)
    for key, value in given.items() if taken else ():
        plain = isinstance(value, str | int | float | bool | list | dict | None)
        if plain and f"{options}.{key}" not in t.judged:
            t.put(f"env.options.{key}", value, f"{options}.{key}")
        t.judge(f"{options}.{key}", "mapped", f"env.options.{key}")
    why = "a keyword of the environment that rl_games builds: give --env.options of yours"
    t.judge(options, "differs" if given else "mapped", "", why if given else "")


def _actions(t: Translation) -> None:
    rescale = t.flag(f"{CONFIG}.clip_actions", True)
    t.to(f"{CONFIG}.clip_actions", "algorithm.model.bounds", "rescale" if rescale else "none")
    t.judge(f"{CONFIG}.use_action_masks", "mapped", "the environment's group action_mask")


def _precision(t: Translation, policy: str) -> None:
    for at, network in ((CONFIG, policy), (CENTRAL, CRITIC)):
        key = f"{at}.mixed_precision"
        if t.flag(key, False):
            t.to(key, f"{network}.precision", "bfloat16", "in acting too; Isaac Lab's fork multiplies in float16")
        t.judge(key, "mapped", f"{network}.precision=float32")


def _edges(t: Translation) -> None:
    """What scripts, writers and players read."""
    for keys, to in _EDGES.items():
        t.each(CONFIG, keys, "mapped", to)
    t.judge("params.torch_threads", "mapped", "execution.threads, which Canter chooses by itself")
    no_pbt = "there is no population based training here: start several runs"
    for key in (f"{CONFIG}.population_based_training", f"{CONFIG}.pbt_idx"):
        t.only(key, t.raw(key) in (*NONE, False), "off", no_pbt)
    if t.section(f"{CONFIG}.self_play_config"):
        t.refuse(f"{CONFIG}.self_play_config", "the opponent lives in the trainer here: see self_play, docs/agents.md")
    why = "since rl_games 1.3 the file comes with run({'checkpoint': ...})"
    t.dead(why, "params.load_checkpoint", "params.load_path")
    t.dead("belongs under config", "params.player")
    t.dead("belongs to SAC", f"{CONFIG}.num_warmup_steps", f"{CONFIG}.num_seed_steps")
    t.each(f"{CONFIG}.player", _PLAYER, "mapped", "canter play, Runner")
    _wrapper(t)
    if t.raw("pbt.enabled") is True:
        t.refuse("pbt", no_pbt)
    t.dead("rl_games reads params alone", *(str(key) for key in t.tree if key != "params"))


def _wrapper(t: Translation) -> None:
    """What Isaac Lab's wrapper is told by `params.env`; `isaaclab:` does it itself, under Runner the wrapper does."""
    own, at = str(t.settings.get("env.id", "")).startswith("isaaclab:"), "params.env"
    apart = not t.flag(f"{at}.concate_obs_groups", True)  # the wrapper then gives groups by name
    for name in ("clip_actions", "clip_observations") if own else ():
        t.move_given(f"{at}.{name}", f"env.options.{name}", t.number)
    for name, network in (("obs", POLICY), ("states", CRITIC)):
        if name == "states" and not t.section(CENTRAL):
            t.dead("nothing reads states without a central value", f"{at}.obs_groups.{name}")
        elif own or apart:
            t.move_given(f"{at}.obs_groups.{name}", f"{network}.obs_groups", t.groups)
    t.each(f"{at}.obs_groups", "obs states", "mapped", WRAPPER)
    t.each(at, "clip_actions clip_observations concate_obs_groups", "mapped", WRAPPER)


WRAPPER = "Isaac Lab's wrapper, which a script with Runner has; else --env isaaclab:TASK"
_PLAYER = (
    "render render_sleep games_num deterministic determenistic n_game_life print_stats use_vecenv env_config "
    "device_name num_actors balance_env_rewards evaluation update_checkpoint_freq dir_to_monitor"
)
_EDGES = {
    "name full_experiment_name train_dir": "the run's folder (canter train --name, Runner)",
    "print_stats use_diagnostics defer_summaries_sec summaries_interval_sec_min": "--console, --log",
    "summaries_interval_sec_max force_interval_writer": "--log",
    "device_name": "device of canter play",
    "torch_compile": "execution",
    "multi_gpu": "torchrun",
    "save_best_after games_to_track": "checkpoints.best, by the mean of the last 100 episodes",
    "algo_observer": "Runner(algo_observer)",
    "vecenv_type import_modules": "--allow-import: what is imported is named by the caller",
}
"""Keys that change nothing that is learned, and what does their work here."""
