"""RSL-RL's settings of every generation, as mappings, become settings of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from canter.compat.settings.rsl_rl_network import CRITIC, POLICY, Dialect, translate_network, translate_std
from canter.compat.settings.translation import NONE, Translation

RATE = "algorithm.optimizer.learning_rate"
OLD_DEFAULTS = {"gamma": 0.998, "num_learning_epochs": 1, "num_mini_batches": 1, "entropy_coef": 0.0}
NEW_DEFAULTS = {"gamma": 0.99, "num_learning_epochs": 5, "num_mini_batches": 4, "entropy_coef": 0.01}
RND, SYMMETRY = "algorithm.rnd_cfg", "algorithm.symmetry_cfg"


def dialect_of(tree: Mapping[str, Any]) -> Dialect | None:
    """The generation of a mapping; None if it is not RSL-RL's."""
    algorithm = tree.get("algorithm")
    if not isinstance(algorithm, Mapping) or "kind" in algorithm:
        return None
    if not {"class_name", "num_learning_epochs", "clip_param", "num_mini_batches"} & algorithm.keys():
        return None
    if isinstance(tree.get("runner"), Mapping):
        return Dialect(1, "runner.", "policy", "policy")
    if any(tree.get(name) for name in ("actor", "student")):
        given = tree.get("actor")
        actor = given if isinstance(given, Mapping) else {}
        new = "distribution_cfg" in actor and not {"stochastic", "init_noise_std"} & actor.keys()
        return Dialect(5 if new else 4, "", "actor", "critic")
    if isinstance(tree.get("policy"), Mapping):
        return Dialect(3 if tree.get("obs_groups") else 2, "", "policy", "policy")
    return None


def translate(t: Translation, dialect: Dialect, num_envs: int | None) -> None:
    """All of a mapping; RSL-RL's say nothing about the environment."""
    if num_envs is None:
        t.always("RSL-RL's settings do not say how many environments there are: give --num-envs", "env.num_envs=8")
    else:
        t.put("env.num_envs", num_envs)
    algorithm = t.raw("algorithm.class_name", t.raw("runner.algorithm_class_name", "PPO"))
    if algorithm not in ("PPO", "Distillation"):
        why = "only PPO and Distillation can be imported. A class of yours: canter.register('algorithm', NAME)"
        t.refuse("algorithm.class_name" if t.has("algorithm.class_name") else "runner.algorithm_class_name", why)
        for key in t.tree:
            t.refuse(str(key), f"belongs to {algorithm}, which was refused")
        return
    _ppo(t, dialect) if algorithm == "PPO" else _distillation(t, dialect)
    _runner(t, dialect)
    t.finish()


def _ppo(t: Translation, dialect: Dialect) -> None:
    for key in (dialect.actor, dialect.critic):
        t.section(key)  # an error where it is no mapping
    for key in ("algorithm.class_name", "runner.algorithm_class_name"):
        t.to(key, "algorithm.kind", "ppo")
    if dialect.split:
        t.dead("actor and critic win over it", "policy")
    _algorithm(t, dialect)
    for network in (POLICY, CRITIC):
        translate_network(t, dialect, network)
    translate_std(t, dialect)
    for name, network in (("actor", POLICY), ("policy", POLICY), ("critic", CRITIC)):
        if t.raw(f"obs_groups.{name}") is not None:
            t.move(f"obs_groups.{name}", f"{network}.obs_groups", t.groups)
    t.dead("no part of PPO reads it", "obs_groups.rnd_state", "obs_groups.teacher", "obs_groups.student")
    if not t.section("obs_groups"):
        t.judge("obs_groups", "mapped", "obs_groups=null")


def _algorithm(t: Translation, dialect: Dialect) -> None:
    usual = OLD_DEFAULTS if dialect.generation < 3 else NEW_DEFAULTS
    t.move("algorithm.num_learning_epochs", "algorithm.epochs", t.count, usual["num_learning_epochs"])
    t.move("algorithm.num_mini_batches", "algorithm.num_minibatches", t.count, usual["num_mini_batches"])
    count = t.settings["algorithm.num_minibatches"]
    recurrent = _recurrent(t)
    rows = (1 if recurrent else t.count(f"{dialect.runner}num_steps_per_env")) * t.settings.get("env.num_envs", count)
    if rows % count and t.parity:
        t.put("algorithm.uneven_minibatches", "drop")
    elif rows % count:
        what = "environments, with memory," if recurrent else "num_steps_per_env * environments"
        remedy = "RSL-RL drops the rest: --parity does too; or give another --num-envs"
        raise t.error("algorithm.num_mini_batches", f"a number that divides {what} = {rows}", remedy)
    t.move("algorithm.gamma", "algorithm.gamma", t.number, usual["gamma"])
    t.move("algorithm.lam", "algorithm.gae_lambda", t.number, 0.95)
    t.move("algorithm.clip_param", "algorithm.clip_ratio", t.number, 0.2)
    t.move("algorithm.entropy_coef", "algorithm.entropy_coef", t.number, usual["entropy_coef"])
    t.put("algorithm.value_clip", t.settings["algorithm.clip_ratio"])
    coef = t.number("algorithm.value_loss_coef", 1.0)
    t.put("algorithm.value_coef", 2 * coef, "algorithm.value_loss_coef")
    t.judge("algorithm.value_loss_coef", "mapped", f"algorithm.value_coef={2 * coef:g} (half the square here)")
    clipped = t.flag("algorithm.use_clipped_value_loss", True)
    t.to("algorithm.use_clipped_value_loss", "algorithm.value_loss", "clipped" if clipped else "mse")
    _optimizer(t, dialect)
    per_minibatch = t.flag("algorithm.normalize_advantage_per_mini_batch", False)
    t.put("algorithm.advantage_normalization", "minibatch" if per_minibatch else "rollout")
    t.judge("algorithm.normalize_advantage_per_mini_batch", "mapped", "algorithm.advantage_normalization")
    t.choose("advantages are divided by the root of the mean square, not by n - 1", "algorithm.advantage_std", "sample")
    ours = "samples are shuffled anew for each epoch; RSL-RL keeps one order, or none with memory"
    t.choose(ours, "algorithm.shuffle", "none" if recurrent else "rollout")
    if t.flag("algorithm.use_mixed_precision", False):
        why = "in acting too; RSL-RL only in the update"
        t.to("algorithm.use_mixed_precision", f"{POLICY}.precision", "bfloat16", why)
        t.put(f"{CRITIC}.precision", "bfloat16")
    _extras(t)


def _recurrent(t: Translation) -> bool:
    """Whether a network has memory: then minibatches are of whole environments."""
    named = str(t.raw("runner.policy_class_name", t.raw("policy.class_name", "")))
    return named.endswith("Recurrent") or any(t.has(f"{name}.rnn_type") for name in ("policy", "actor", "critic"))


def _extras(t: Translation) -> None:
    """Parts of RSL-RL's PPO that are off in nearly all files."""
    for key, part in ((RND, _curiosity), (SYMMETRY, _symmetry)):
        if t.section(key):
            part(t)
        else:
            t.judge(key, "mapped", "off")
    shared, why = "algorithm.share_cnn_encoders", "model.shared_trunk shares the whole network, not the encoder alone"
    t.only(shared, t.raw(shared) is not True, "off", why)
    t.judge("algorithm.use_mixed_precision", "mapped", f"{POLICY}.precision=float32")
    t.each("algorithm", "grad_reduce_bucket_mb multi_gpu_cfg device", "mapped", "torchrun")


def _extend(t: Translation, own: dict[str, Any], key: str) -> None:
    others = t.settings.get("algorithm.extensions", [])
    t.origin[f"algorithm.extensions[{len(others)}]"] = key
    t.put("algorithm.extensions", [*others, own])


_MIRRORED = "use_data_augmentation use_mirror_loss"


def _symmetry(t: Translation) -> None:
    """`symmetry_cfg` as the extension `symmetry`; what is mirrored how, a file does not say."""
    augment = t.flag(f"{SYMMETRY}.use_data_augmentation", False)
    coef = t.number(f"{SYMMETRY}.mirror_loss_coeff", 0.0) if t.flag(f"{SYMMETRY}.use_mirror_loss", False) else 0.0
    if not augment and not coef:
        why = "the parent learns nothing from it and only logs how symmetric the policy is"
        t.each(SYMMETRY, f"{_MIRRORED} mirror_loss_coeff data_augmentation_func", "differs", why=why)
        return
    own: dict[str, Any] = {"kind": "symmetry", "augment": augment, "mirror_loss": coef}
    t.judge(f"{SYMMETRY}.mirror_loss_coeff", "mapped", f"mirror_loss={coef:g} of the extension symmetry")
    remedy = "declare EnvSpec.symmetries in the environment, or mirrors here"
    why = f"a file's function is not run: {remedy}; OnPolicyRunner takes the function itself"
    t.judge(f"{SYMMETRY}.data_augmentation_func", "differs", "algorithm.extensions[].mirrors", why)
    if t.parity:
        own["old_log_prob"] = "repeated"
    elif augment:
        why = "the ratio of an image is measured from what the acting policy gives the image; RSL-RL: the original"
        t.judge(f"{SYMMETRY}.use_data_augmentation", "differs", "old_log_prob=evaluated", why)
    _extend(t, own, SYMMETRY)
    t.each(SYMMETRY, _MIRRORED, "mapped", f"augment={augment} of the extension symmetry")


def _curiosity(t: Translation) -> None:
    """`rnd_cfg` as the extension `rnd`, with RSL-RL's defaults."""
    own: dict[str, Any] = {"kind": "rnd", "error": "norm", "activation": t.word(f"{RND}.activation", default="elu")}
    own |= {name: t.settings[f"algorithm.{name}"] for name in ("epochs", "num_minibatches")}
    own["outputs"] = t.integer(f"{RND}.num_outputs", 1)
    own["normalize_obs"] = t.flag(f"{RND}.state_normalization", False)
    own["normalize_bonus"] = t.flag(f"{RND}.reward_normalization", False)
    own["optimizer"] = {"learning_rate": t.number(f"{RND}.learning_rate", 1e-3), "eps": 1e-8, "max_grad_norm": math.inf}
    for key, name in (("predictor_hidden_dims", "hidden"), ("target_hidden_dims", "target_hidden")):
        own[name] = t.widths(f"{RND}.{key}", [-1])
        if -1 in own[name]:
            t.refuse(f"{RND}.{key}", "-1 is the number of observations: write it out")
            if not t.has(f"{RND}.{key}"):
                raise t.error(f"{RND}.{key}", "widths, as the parent's default depends on the observation")
    weight, mode = t.number(f"{RND}.weight", 0.0), t.raw(f"{RND}.weight_schedule.mode", "constant")
    own["weight"] = weight
    if mode == "step":
        steps = t.count("num_steps_per_env", 1) * t.count("max_iterations", 1500)
        at = t.number(f"{RND}.weight_schedule.final_step") / steps
        end = t.number(f"{RND}.weight_schedule.final_value")
        own["weight"] = {"kind": "step", "start": weight, "end": end, "at": at}
    elif mode != "constant":
        t.refuse(f"{RND}.weight_schedule", "only constant and step fit: linear runs over the whole run here")
    if t.raw("obs_groups.rnd_state") is not None:
        own["obs_groups"] = t.groups("obs_groups.rnd_state")
        t.judge("obs_groups.rnd_state", "mapped", f"obs_groups={own['obs_groups']} of the extension rnd")
    _extend(t, own, RND)
    why = "without the factor of the environment's time step, and of the observation that a step truly led to"
    t.judge(f"{RND}.weight", "differs", f"weight={weight:g} of the extension rnd", why)
    t.each(RND, _CURIOSITY, "mapped", "the extension rnd")
    t.each(f"{RND}.weight_schedule", "mode final_step final_value", "mapped", "weight of the extension rnd")


_CURIOSITY = (
    "activation num_outputs state_normalization reward_normalization learning_rate predictor_hidden_dims "
    "target_hidden_dims"
)


def _distillation(t: Translation, dialect: Dialect) -> None:
    """A student of RSL-RL's, from `policy` up to 3.x and from `student` since."""
    at = "algorithm"
    t.to(f"{at}.class_name", "algorithm.kind", "distillation")
    t.always("the parent's script loads the teacher: name its file", "algorithm.teacher")
    t.move(f"{at}.num_learning_epochs", "algorithm.epochs", t.integer, 1)
    length, horizon = t.count(f"{at}.gradient_length", 15), t.count(f"{dialect.runner}num_steps_per_env")
    t.put("algorithm.num_minibatches", max(1, horizon // length))
    why = "sequences of that length, shuffled, as many minibatches as the parent takes steps; nothing is left over"
    t.to(f"{at}.gradient_length", "algorithm.sequence_length", length, why)
    t.to(f"{at}.loss_type", "algorithm.loss", t.word(f"{at}.loss_type", ("mse", "huber"), "mse"))
    norm = t.number(f"{at}.max_grad_norm") if t.has(f"{at}.max_grad_norm") else math.inf
    t.to(f"{at}.max_grad_norm", "algorithm.optimizer.max_grad_norm", norm)
    t.put("algorithm.optimizer.eps", 1e-8)
    t.move(f"{at}.learning_rate", RATE, t.number, 1e-3)
    t.only(f"{at}.optimizer", t.raw(f"{at}.optimizer") == "adam", "algorithm.optimizer", "there is Adam here")
    t.judge(f"{at}.device", "mapped", "device")
    old = t.section("policy") and not t.section("student")
    _student(t, *(("policy", "student_") if old else ("student", "")))
    t.judge("teacher", "mapped", "the teacher's file says it")
    for key in ("hidden_dims", "obs_normalization", "recurrent"):
        t.judge(f"policy.teacher_{key}", "mapped", "the teacher's file says it")
    for key in ("obs_groups.policy", "obs_groups.student"):
        t.move_given(key, "algorithm.policy.obs_groups", t.groups)
    t.judge("obs_groups.teacher", "differs", "algorithm.teacher_obs", "the teacher reads its own; name others there")


def _student(t: Translation, own: str, prefix: str) -> None:
    """The student's network and deviation, in this section and with this before names that a teacher has too."""
    t.move(f"{own}.{prefix}hidden_dims", "algorithm.policy.hidden", t.widths, [256, 256, 256])
    t.to(f"{own}.activation", "algorithm.policy.activation", t.word(f"{own}.activation", default="elu"))
    t.move(f"{own}.{prefix}obs_normalization", "algorithm.policy.normalize_obs", t.flag, False)
    if t.has(f"{own}.rnn_type"):
        hidden = t.integer(f"{own}.rnn_hidden_dim", t.integer(f"{own}.rnn_hidden_size", 256))
        memory = {"cell": t.word(f"{own}.rnn_type", ("lstm", "gru")), "hidden": hidden}
        t.put("algorithm.policy.memory", memory | {"layers": t.integer(f"{own}.rnn_num_layers", 1)})
        t.each(own, "rnn_type rnn_hidden_dim rnn_hidden_size rnn_num_layers", "mapped", "algorithm.policy.memory")
    std = f"{own}.init_noise_std" if t.has(f"{own}.init_noise_std") else f"{own}.distribution_cfg.init_std"
    t.move(std, "algorithm.std.initial", t.number, 0.1)
    if t.flag(f"{own}.state_dependent_std", False):
        t.to(f"{own}.state_dependent_std", "algorithm.std.kind", "network")
    for key in ("class_name", "noise_std_type", "stochastic", "state_dependent_std"):
        t.judge(f"{own}.{key}", "mapped", "algorithm.policy, algorithm.std")
    t.each(f"{own}.distribution_cfg", "class_name std_type", "mapped", "algorithm.std")


def _optimizer(t: Translation, dialect: Dialect) -> None:
    rate = t.number("algorithm.learning_rate", 1e-3)
    t.judge("algorithm.learning_rate", "mapped", f"{RATE}={rate:g}")
    t.put("algorithm.optimizer.eps", 1e-8)
    norm = t.number("algorithm.max_grad_norm", 1.0)
    t.put("algorithm.optimizer.max_grad_norm", norm, "algorithm.max_grad_norm")
    clipping = "per_network" if dialect.split else "joint"
    t.put("algorithm.gradient_clipping", clipping)
    t.judge("algorithm.max_grad_norm", "mapped", f"optimizer.max_grad_norm={norm:g}, gradient_clipping={clipping}")
    name = t.raw("algorithm.optimizer")
    if name == "adamw":
        t.put("algorithm.optimizer.weight_decay", 0.01)
    t.only("algorithm.optimizer", name in ("adam", "adamw"), "algorithm.optimizer", "there is Adam and AdamW here")
    adaptive = t.raw("algorithm.schedule", "fixed" if dialect.generation < 3 else "adaptive") == "adaptive"
    if not adaptive or t.raw("algorithm.desired_kl", 0.01) in NONE:
        t.put(RATE, rate, "algorithm.learning_rate")
        t.judge("algorithm.schedule", "mapped", f"{RATE} stays")
        t.dead("only an adaptive rate reads it", "algorithm.desired_kl")
        return
    for name, value in {"every": "minibatch", "factor": 1.5, "minimum": 1e-5, "maximum": 1e-2}.items():
        t.put(f"{RATE}.{name}", value)
    t.put(f"{RATE}.start", rate, "algorithm.learning_rate")
    t.move("algorithm.desired_kl", f"{RATE}.target_kl", t.number, 0.01)
    why = "the exact KL, as since 5.0; before, 1e-5 inside of it raised the rate in each first minibatch"
    t.to("algorithm.schedule", f"{RATE}.kind", "adaptive_kl", why if dialect.generation < 5 else "")


def _runner(t: Translation, dialect: Dialect) -> None:
    at = dialect.runner
    t.move(f"{at}num_steps_per_env", "algorithm.horizon", t.integer)
    t.put("total_steps", None)
    t.move(f"{at}max_iterations", "until.iterations", t.integer, 1500)
    if t.has(f"{at}save_interval"):
        every = t.integer(f"{at}save_interval")
        t.put("checkpoints.save_every", every, f"{at}save_interval")
        t.judge(f"{at}save_interval", "mapped", f"checkpoints.save_every={every}, without one at iteration 0")
    for prefix in dict.fromkeys((at, "")):
        _edges(t, prefix)


def _edges(t: Translation, at: str) -> None:
    """Keys that scripts and writers read."""
    seed, device = t.raw(f"{at}seed"), t.raw(f"{at}device")
    if isinstance(seed, int) and seed >= 0:
        t.to(f"{at}seed", "seed", seed)
    t.judge(f"{at}seed", "differs", "seed=0", "the parent's script draws one: give --seed")
    if isinstance(device, str):
        t.to(f"{at}device", "device", device)
    for keys, to in _EDGES.items():
        for key in keys.split():
            t.judge(f"{at}{key}", "mapped", to)
    clip = f"{at}clip_actions"
    if t.has(clip) and str(t.settings.get("env.id", "")).startswith(("mjlab:", "isaaclab:")):
        t.move(clip, "env.options.clip_actions", t.number)
    elif t.has(clip):
        t.judge(clip, "differs", "the environment's adapter", "actions are cut off before the environment sees them")
    t.judge(clip, "mapped", "algorithm.model.bounds=none")
    t.dead("nothing reads it", f"{at}store_code_state", f"{at}runner_class_name", "init_member_classes")


_EDGES = {
    "experiment_name run_name": "the run's folder (canter train --name)",
    "resume load_run load_checkpoint checkpoint resume_path": "canter resume, runner.load",
    "logger wandb_project neptune_project wandb_tags upload_model": "--log",
    "check_for_nan": "always on",
    "torch_compile_mode": "execution.mode",
    "class_name": "canter.compat.rsl_rl.OnPolicyRunner",
    "multi_gpu": "torchrun",
}
"""Keys that change nothing that is learned, and what does their work here."""
