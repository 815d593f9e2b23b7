"""rl_games' files as settings of a run: environment, budget, model and algorithm.

PPO's and SAC's own keys are read in `rl_games_ppo` and `rl_games_sac`. IsaacGymEnvs' AMP agent is PPO
with the extension `amp`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from canter.compat.settings import readers as read
from canter.compat.settings.rl_games_network import CRITIC, INITIALIZER_KEYS, NETWORK, OTHER_START, POLICY, is_amp
from canter.compat.settings.rl_games_ppo import CENTRAL, CONFIG, PPO, SIGMA
from canter.compat.settings.rl_games_releases import (
    RELEASES,
    UNREAD,
    installed_version,
    release_named,
    release_of_version,
)
from canter.compat.settings.rl_games_sac import apply_sac
from canter.compat.settings.rules import OFF, OMIT, Copy, Only, Rule, always, apply, mapped, no_effect, precision
from canter.compat.settings.section import NONE, Import, Section

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
"""Keys of `params.config`: the extension's setting, the reader, and the default of IsaacGymEnvs'
files."""
CLIPS = ("motions", "motion_weights", "obs_group", "columns", "time_step", "frames")
"""Settings of the extension that IsaacGymEnvs' environment knows; a file may have them as
`config.amp`."""


def amp_extension(run: Import) -> None:
    """Add the extension, with settings of PPO that were made before."""
    s = run.section(CONFIG, "algorithm")
    if s.get("bound_loss.coef") is not None:
        s.set("bound_loss.limit", 1.0)
    network = run.section("params.network")
    network.each("disc.initializer", INITIALIZER_KEYS, "changed", "orthogonal", OTHER_START)
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
    own["replay_rows"] = max(1, min(own["replay"], round(keep * s.get("horizon") * (run.samples_per_step or 1))))
    why = "that share of each rollout is kept from the start, not only once the buffer is full"
    s.changed("amp_replay_keep_prob", why, f"{AT}.replay_rows={own['replay_rows']}")
    Only("enable_eps_greedy", OFF, "off", "some agents act without noise there: set it to False")(s)
    s.changed("disc_coef", "the discriminator has a separate Adam, which no factor changes")
    s.changed("amp_obs_demo_buffer_size amp_batch_size", "new clips are drawn for every update", f"{AT}.motions")
    own |= {name: s.raw(f"amp.{name}") for name in CLIPS if s.has(f"amp.{name}")}
    if "motions" not in own:
        key = f"{CONFIG}.amp.motions"
        why = f"IsaacGymEnvs' environment has the clips, which Runner takes; else name their files here or as {key}"
        s.changed("", why, f"{AT}.motions")
    s.set("extensions", [own])


ENDLESS = 10**15
"""Steps of a run that ends when somebody stops it."""
ALGORITHMS = ("a2c_continuous", "a2c_discrete", "amp_continuous", "amp", "sac")
DISTRIBUTIONS = {
    "continuous_a2c_logstd": "gaussian",
    "continuous_a2c": "gaussian",
    "continuous_a2c_tanh": "tanh_gaussian",
    "continuous_amp": "gaussian",
    "amp": "gaussian",
    "discrete_a2c": "categorical",
    "multi_discrete_a2c": "multi_categorical",
}
"""Distribution of actions here, by the name of rl_games' model."""
OLD_MODELS = {"discrete_a2c_lstm": "discrete_a2c", "continuous_a2c_lstm_logstd": "continuous_a2c_logstd"}


def is_rl_games(tree: Any) -> bool:
    """Return True for settings written for rl_games."""
    params = tree.get("params") if isinstance(tree, Mapping) else None
    return isinstance(params, Mapping) and "config" in params and "algo" in params


def choose_release(run: Import, source: str | None) -> None:
    """Choose the release that the file is read as, and name it in the report.

    The caller's `source`, else the installed rl_games, else what the file shows: `env_name: rlgpu` is
    of Isaac Lab, IsaacGymEnvs or OmniIsaacGymEnvs, which install 1.6.1; some keys are new in 2.0.
    """
    config = run.section(CONFIG)
    sections = (config, run.section(SIGMA))
    new = [key for key in UNREAD.split() for section in sections if section.has(key)]
    if config.raw("schedule_type") in ("per_minibatch", "standard_epoch"):
        new.append("schedule_type")
    installed = installed_version()
    if source is not None:
        run.release, why = release_named(source), "as --source says"
    elif installed is not None:
        run.release, why = release_of_version(installed), f"as rl_games {installed} is installed"
    elif config.raw("env_name") == "rlgpu":
        run.release, why = RELEASES["1.6.1"], "which Isaac Lab, IsaacGymEnvs and OmniIsaacGymEnvs install"
    elif new:
        run.release, why = RELEASES["2.0"], f"as {new[0]} is new there"
    else:
        run.release, why = RELEASES["1.6.5"], "as the file does not show another"
    run.report.dialect = f"rl_games {run.release.name} ({why}; --source names another)"
    for section in sections:
        section.no_effect(run.release.unread, f"rl_games {run.release.name} does not read it, 2.0 does")
        run.unread |= {section.key(key) for key in run.release.unread.split()}


def translate(run: Import) -> None:
    """Turn a whole file into settings and a report."""
    for key in ("params.algo", "params.config", "params.network"):
        if not run.root.has_section(key):
            raise run.root.error(key, "a mapping", "it is required")
    params = run.section("params")
    name = read.word(params, "algo.name")
    if name not in ALGORITHMS:
        params.refuse("algo.name", "an algorithm of the user's: see canter.register('algorithm', NAME)")
        run.root.refuse("params", f"belongs to {name}, which was refused")
        return
    environment(run.section(CONFIG))
    seed(params)
    apply(RUN, run.section(CONFIG))
    number_of_envs(run, default=1 if name == "sac" else None)
    if name == "sac":
        apply_sac(run)
    else:
        translate_ppo(run)
    if run.release.mixed_precision and not run.section(CONFIG).has("mixed_precision"):
        why = f"rl_games {run.release.name} multiplies in bfloat16 on GPUs that can, unless the file forbids it"
        run.root.changed("", why, "precision=float32")
    PRECISION(run.section(CONFIG, "algorithm.policy" if name == "sac" else POLICY))
    PRECISION(run.section(CENTRAL, CRITIC))
    apply(SCRIPTS, run.section(CONFIG))
    apply(AROUND, params)
    others = (str(key) for key in run.tree if key not in ("params", "pbt"))
    run.root.no_effect(" ".join(others), "rl_games reads params alone")


def translate_ppo(run: Import) -> None:
    """Turn a file of PPO, or of AMP, into settings."""
    params = run.section("params")
    params.copy("algo.name", "algorithm.kind", "ppo")
    model(params)
    apply(NETWORK, run.section("params.network", POLICY))
    central = run.root.has_section(CENTRAL)  # is the critic, apart from the policy
    separate = read.flag(params, "network.separate", False) or central
    params.copy("network.separate", "algorithm.model.shared_trunk", not separate)
    apply(PPO, run.section(CONFIG, "algorithm"))
    if is_amp(run):
        amp_extension(run)


def model(s: Section) -> None:
    """Models of rl_games are distributions here; two of them no longer exist in rl_games."""
    name = read.word(s, "model.name")
    current = OLD_MODELS.get(name, name)
    why = ""
    if current != name:
        why = f"rl_games no longer has a model of this name: read as {current}, with network.rnn"
    elif current == "continuous_a2c_tanh":
        why = "its KL and deterministic action are wrong in rl_games"
    if current in DISTRIBUTIONS:
        s.copy("model.name", "algorithm.model.distribution", DISTRIBUTIONS[current], why)
    else:
        s.refuse("model.name", f"a model of the user's; known: {', '.join(DISTRIBUTIONS)}")
    for space in ("discrete", "multi_discrete", "continuous"):
        if not s.has_section(f"network.space.{space}"):
            s.mapped(f"network.space.{space}", "the environment's action space")


def number_of_envs(run: Import, default: int | None) -> None:
    """Read the number of environments; the caller's wins, as some files leave it to a script."""
    config = run.section(CONFIG, "env")
    value = config.raw("num_actors")
    if run.num_envs is None and value is None:
        run.num_envs = default
    if run.num_envs is not None:
        config.set("num_envs", run.num_envs, "num_actors")
    elif value in (None, -1) or _is_open(value):
        config.refuse("num_actors", "rl_games' script fills it in: say --num-envs N")
        if value is None:
            raise config.error("num_actors", "the number of environments", "say --num-envs N")
    else:
        config.copy("num_actors", "num_envs", read.count(config, "num_actors"))


def _is_open(value: Any) -> bool:
    """Return True for a value that a script fills in."""
    return isinstance(value, str) and "${" in value


def seed(s: Section) -> None:
    """rl_games draws a seed where the file has none."""
    value = s.raw("seed")
    if value in (None, -1) or _is_open(value):
        s.changed("seed", "rl_games draws one, or its script does: set --seed", "seed=0")
    else:
        value = read.integer(s, "seed")
        s.copy("seed", "seed", value, "rl_games seeds nothing with 0" if value == 0 else "")


def budget(s: Section) -> None:
    """Read the run's end: iterations, steps or a score; without any of them it is endless."""
    epochs = read.integer(s, "max_epochs", -1)
    if epochs > 0:
        s.set("until.iterations", epochs, "max_epochs")
    steps = max(read.integer(s, "max_frames", -1), read.integer(s, "max_steps", -1))
    if steps > 0:
        s.set("total_steps", steps, "max_frames")
    if s.has("score_to_win"):
        why = "the mean of the last 100 episodes, read for every row of the log; rl_games reads its best mean only"
        s.copy("score_to_win", "until.mean_return", read.number(s, "score_to_win"), why)
    elif not (epochs > 0 or steps > 0):
        s.set("total_steps", ENDLESS)
        s.changed("", "nothing ends this run but you, as in rl_games", f"total_steps={ENDLESS}")


def saving(s: Section) -> None:
    """A frequency of 0 saves at the end only; Canter always saves."""
    if s.has("save_frequency") and read.integer(s, "save_frequency") > 0:
        s.copy("save_frequency", "checkpoints.save_every", read.integer(s, "save_frequency"))
    s.mapped("save_frequency", "checkpoints.save_every, which is never 0 here")


def environment(s: Section) -> None:
    """Read the environment's id, from the caller or the file, and its keywords."""
    run = s.run
    name = read.word(s, "env_name", run.env or "")
    found = run.env if run.env is not None else _env_id(s, name)
    if found:
        s.copy("env_name", "env.id", found)
    if name == "rlgpu":
        s.mapped("env_name", "the environment that the script passes to Runner; --env ID here")
    why = f"{name!r} is registered by rl_games or its script: set the environment's id here (--env ID)"
    s.changed("env_name", why)
    options = "env_config"
    has_options = s.has_section(options)
    for key in ("env_name", "name", "task_name", "device"):
        s.mapped(f"{options}.{key}", "env.id")
    if has_options and run.env is None and found not in ("", name):
        for key, value in s.raw(options).items():
            path = f"{options}.{key}"
            plain = isinstance(value, str | int | float | bool | list | dict | None)
            if plain and s.key(path) not in run.reported:
                s.set(f"env.options.{key}", value, path)
            s.mapped(path, f"env.options.{key}")
    if has_options:
        s.changed(options, "a keyword of the environment that rl_games builds: set --env.options of yours")


def _env_id(s: Section, name: str) -> str:
    """Return the environment's id here, by the names of rl_games' vectorised environments.

    Empty if unknown.
    """
    inner = s.raw("env_config.env_name", s.raw("env_config.name"))
    if name == "envpool" and inner:
        return f"envpool:{inner}"
    if name in ("gymnasium", "openai_gym", "ray", "pufferlib") and inner:
        return str(inner)
    if s.has("env_config.task_name"):
        return f"mjlab:{s.raw('env_config.task_name')}"
    return name if re.search(r"-v\d+$", name) else ""


NO_POPULATIONS = "no population trains here: set it to False for one run, or search settings with canter tune ENV"


def wrapper(s: Section) -> None:
    """`isaaclab:` does the work of Isaac Lab's wrapper itself.

    Under Runner the script has the wrapper.
    """
    own = str(s.run.settings.get("env.id", "")).startswith("isaaclab:")
    by_name = not read.flag(s, "env.concate_obs_groups", True)  # the wrapper then returns groups by name
    for key in ("clip_actions", "clip_observations") if own else ():
        Copy(f"env.{key}", f"env.options.{key}", read.number, OMIT)(s)
    if own or by_name:
        Copy("env.obs_groups.obs", f"{POLICY}.obs_groups", read.groups, OMIT)(s)
    if not s.run.root.has_section(CENTRAL):
        s.no_effect("env.obs_groups.states", "nothing reads states without a central value")
    elif own or by_name:
        Copy("env.obs_groups.states", f"{CRITIC}.obs_groups", read.groups, OMIT)(s)
    s.each("env.obs_groups", "obs states", "mapped", WRAPPER)
    s.each("env", "clip_actions clip_observations concate_obs_groups", "mapped", WRAPPER)


WRAPPER = "Isaac Lab's wrapper, which a script with Runner has; else --env isaaclab:TASK"
PLAYER_KEYS = (
    "render render_sleep games_num deterministic determenistic n_game_life print_stats use_vecenv env_config "
    "device_name num_actors balance_env_rewards evaluation update_checkpoint_freq dir_to_monitor"
)
PLAYER = " ".join(f"player.{key}" for key in PLAYER_KEYS.split())
PRECISION = precision("mixed_precision", "precision", "Isaac Lab's fork multiplies in float16")
"""For `params.config`, or the central value's, and settings of a network."""
RUN: tuple[Rule, ...] = (Copy("device", "device", read.word, OMIT), always("total_steps", None), budget, saving)
"""For `params.config` and settings by their full path."""
SCRIPTS: tuple[Rule, ...] = (
    mapped("name full_experiment_name train_dir", "the run's folder (canter train --name, Runner)"),
    mapped("print_stats use_diagnostics", "--console, --log"),
    mapped("defer_summaries_sec summaries_interval_sec_min summaries_interval_sec_max force_interval_writer", "--log"),
    mapped("device_name", "device of canter play"),
    mapped("torch_compile", "execution"),
    mapped("multi_gpu", "torchrun"),
    mapped("save_best_after games_to_track", "checkpoints.best, by the mean of the last 100 episodes"),
    mapped("algo_observer", "Runner(algo_observer)"),
    mapped("vecenv_type import_modules", "--allow-import: the caller names the imported modules"),
    Only("population_based_training", OFF, "off", NO_POPULATIONS),
    Only("pbt_idx", OFF, "off", NO_POPULATIONS),
    Only("self_play_config", (*NONE, {}), "off", "opponents live in the trainer here: see docs/agents.md"),
    mapped(PLAYER, "canter play, Runner"),
)
"""For `params.config`: keys that change nothing that is learned, and what does their work here."""
AROUND: tuple[Rule, ...] = (
    mapped("torch_threads", "execution.threads, which Canter chooses by itself"),
    no_effect("load_checkpoint load_path", "since rl_games 1.3 the file comes with run({'checkpoint': ...})"),
    no_effect("player", "belongs under config"),
    wrapper,
)
"""For `params`."""
