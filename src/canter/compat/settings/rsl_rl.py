"""RSL-RL's settings of every generation, as mappings, become settings of a run."""

from __future__ import annotations

import math
from typing import Any

from canter.compat.settings import readers as read
from canter.compat.settings.rsl_rl_distillation import apply_distillation
from canter.compat.settings.rsl_rl_network import Generation, apply_networks, is_recurrent, with_class_names
from canter.compat.settings.rules import OMIT, Copy, Only, Rule, always, apply, mapped, no_effect, parity, precision
from canter.compat.settings.section import NONE, Import, Section

OLD_DEFAULTS = {"gamma": 0.998, "num_learning_epochs": 1, "num_mini_batches": 1, "entropy_coef": 0.0}
"""Up to 2.x."""
NEW_DEFAULTS = {"gamma": 0.99, "num_learning_epochs": 5, "num_mini_batches": 4, "entropy_coef": 0.01}
SAMPLES_OF_MEAN = {True: "minibatch", False: "rollout"}
ROBOTS = ("mjlab:", "isaaclab:")


def translate(run: Import, generation: Generation) -> None:
    """Turn a whole mapping into settings and a report.

    RSL-RL's say nothing about the environment.
    """
    run.tree = with_class_names(run.tree)
    root = run.root
    if run.env is not None:
        root.set("env.id", run.env)
    if run.num_envs is None:
        why = "RSL-RL's settings do not contain the number of environments: set --num-envs"
        root.changed("", why, "env.num_envs=8")
    else:
        root.set("env.num_envs", run.num_envs)
    algorithm = root.raw("algorithm.class_name", root.raw("runner.algorithm_class_name", "PPO"))
    if algorithm == "PPO":
        apply_ppo(run, generation)
    elif algorithm == "Distillation":
        apply_distillation(run, generation)
    else:
        why = "only PPO and Distillation can be imported: write PPO and leave out the keys of the other class"
        root.refuse("algorithm.class_name" if root.has("algorithm.class_name") else "runner.algorithm_class_name", why)
        root.refuse(" ".join(map(str, run.tree)), f"belongs to {algorithm}, which was refused")
        return
    apply(RUNNER, run.section(generation.runner))
    for at in dict.fromkeys((generation.runner, "")):
        apply(SCRIPTS, run.section(at))
    root.no_effect("init_member_classes", "nothing reads it")


def apply_ppo(run: Import, generation: Generation) -> None:
    """Apply everything that changes what is learned by PPO."""
    root = run.root
    for at in (generation.actor, generation.critic):
        root.has_section(at)  # raises for a value that is no mapping
    for key in ("algorithm.class_name", "runner.algorithm_class_name"):
        root.copy(key, "algorithm.kind", "ppo")
    if generation.split:
        root.no_effect("policy", "actor and critic win over it")
    s = run.section("algorithm", "algorithm")
    # Minibatches of recurrent networks are of whole environments.
    recurrent = any(is_recurrent(run.section(at)) for at in (generation.actor, generation.critic))
    apply(ppo_rules(generation), s)
    uneven_minibatches(s, run.section(generation.runner), recurrent)
    schedule(s, generation)
    order = "none" if recurrent else "rollout"
    otherwise = "samples are reshuffled for each epoch; RSL-RL keeps one order, or none with recurrent networks"
    s.own_form("", {"shuffle": order}, otherwise)
    apply(EXTRAS, s)
    apply_networks(run, generation)


def ppo_rules(generation: Generation) -> tuple[Rule, ...]:
    """Return the table for `algorithm` and settings below `algorithm`.

    Its defaults are those of the generation.
    """
    default = OLD_DEFAULTS if generation.number < 3 else NEW_DEFAULTS
    return (
        Copy("num_learning_epochs", "epochs", read.count, default["num_learning_epochs"]),
        Copy("num_mini_batches", "num_minibatches", read.count, default["num_mini_batches"]),
        Copy("gamma", "gamma", read.number, default["gamma"]),
        Copy("lam", "gae_lambda", read.number, 0.95),
        Copy("clip_param", "clip_ratio value_clip", read.number, 0.2),
        Copy("entropy_coef", "entropy_coef", read.number, default["entropy_coef"]),
        # Half the square here.
        Copy("value_loss_coef", "value_coef", read.number, 1.0, lambda coef: 2 * coef),
        Copy("use_clipped_value_loss", "value_loss", read.flag, True, {True: "clipped", False: "mse"}),
        always("optimizer.eps", 1e-8),
        Only("optimizer", ("adam", "adamw"), "algorithm.optimizer", "there is Adam and AdamW here"),
        weight_decay,
        Copy("max_grad_norm", "optimizer.max_grad_norm", read.number, 1.0),
        always("gradient_clipping", "per_network" if generation.split else "joint"),  # as the sections are
        Copy("normalize_advantage_per_mini_batch", "advantage_normalization", read.flag, False, SAMPLES_OF_MEAN),
        parity("advantage_std", "sample", "advantages are divided by the root of the mean square, not by n - 1"),
    )


def uneven_minibatches(s: Section, runner: Section, recurrent: bool) -> None:
    """RSL-RL drops samples, or environments of recurrent networks, that are left over."""
    minibatches = s.get("num_minibatches")
    length = 1 if recurrent else read.count(runner, "num_steps_per_env")
    samples = length * s.run.settings.get("env.num_envs", minibatches)
    if samples % minibatches == 0:
        return
    if s.parity:
        s.set("uneven_minibatches", "drop")
        return
    counted = "environments, with recurrent networks," if recurrent else "num_steps_per_env * environments"
    remedy = "RSL-RL drops the rest: --parity does too; or choose another --num-envs"
    raise s.error("num_mini_batches", f"a number that divides {counted} = {samples}", remedy)


def weight_decay(s: Section) -> None:
    """AdamW uses torch's default."""
    if s.raw("optimizer") == "adamw":
        s.set("optimizer.weight_decay", 0.01)


def schedule(s: Section, generation: Generation) -> None:
    """Read the learning rate's schedule, which is adaptive by default."""
    rate = read.number(s, "learning_rate", 1e-3)
    adaptive = s.raw("schedule", "fixed" if generation.number < 3 else "adaptive") == "adaptive"
    if not adaptive or s.raw("desired_kl", 0.01) in NONE:
        s.set("optimizer.learning_rate", rate, "learning_rate")
        s.no_effect("desired_kl", "only an adaptive rate reads it")
        return
    s.set("optimizer.learning_rate.start", rate, "learning_rate")
    apply(ADAPTIVE_RATE, s.inner("", "optimizer.learning_rate"))
    why = "the exact KL, as since 5.0; before, 1e-5 inside of it raised the rate in each first minibatch"
    s.copy("schedule", "optimizer.learning_rate.kind", "adaptive_kl", why if generation.number < 5 else "")


def add_extension(s: Section, own: dict[str, Any], key: str) -> None:
    """Append an extension that a section of the source describes."""
    others = s.get("extensions", [])
    s.run.origin[f"algorithm.extensions[{len(others)}]"] = s.key(key)
    s.set("extensions", [*others, own])


def symmetry(algorithm: Section) -> None:
    """`symmetry_cfg` is the extension `symmetry`; a file does not say how the robot is mirrored."""
    if not algorithm.has_section("symmetry_cfg"):
        return
    s = algorithm.inner("symmetry_cfg")
    augment = read.flag(s, "use_data_augmentation", False)
    coef = read.number(s, "mirror_loss_coeff", 0.0) if read.flag(s, "use_mirror_loss", False) else 0.0
    switches = "use_data_augmentation use_mirror_loss"
    if not augment and not coef:
        why = "RSL-RL learns nothing from it and only logs how symmetric the policy is"
        s.changed(f"{switches} mirror_loss_coeff data_augmentation_func", why)
        return
    own: dict[str, Any] = {"kind": "symmetry", "augment": augment, "mirror_loss": coef}
    remedy = "declare EnvSpec.symmetries in the environment, or mirrors here"
    why = f"a file's function is not run: {remedy}; OnPolicyRunner takes the function itself"
    s.changed("data_augmentation_func", why, "algorithm.extensions[].mirrors")
    if s.parity:
        own["old_log_prob"] = "repeated"
    elif augment:
        why = "the ratio of a mirrored sample is measured from its own log-probability; RSL-RL: from the original's"
        s.changed("use_data_augmentation", why, "old_log_prob=evaluated")
    add_extension(algorithm, own, "symmetry_cfg")
    s.mapped("mirror_loss_coeff", f"mirror_loss={coef:g} of the extension symmetry")


def curiosity(algorithm: Section) -> None:
    """`rnd_cfg` is the extension `rnd`, with RSL-RL's defaults."""
    if not algorithm.has_section("rnd_cfg"):
        return
    s = algorithm.inner("rnd_cfg")
    root = s.run.root
    own: dict[str, Any] = {
        "kind": "rnd",
        "error": "norm",
        "activation": read.word(s, "activation", "elu"),
        "epochs": algorithm.get("epochs"),
        "num_minibatches": algorithm.get("num_minibatches"),
        "outputs": read.integer(s, "num_outputs", 1),
        "normalize_obs": read.flag(s, "state_normalization", False),
        "normalize_bonus": read.flag(s, "reward_normalization", False),
        "optimizer": {"learning_rate": read.number(s, "learning_rate", 1e-3), "eps": 1e-8, "max_grad_norm": math.inf},
        "hidden": curiosity_widths(s, "predictor_hidden_dims"),
        "target_hidden": curiosity_widths(s, "target_hidden_dims"),
        "weight": curiosity_weight(s),
    }
    if s.parity:
        own["variant"] = "rsl_rl"
    else:
        s.changed("", "scores and learns the observation that a step truly led to, not the first of a new episode")
    if root.raw("obs_groups.rnd_state") is not None:
        own["obs_groups"] = read.groups(root, "obs_groups.rnd_state")
    add_extension(algorithm, own, "rnd_cfg")
    why = "OnPolicyRunner multiplies it by env.step_dt, as RSL-RL does; elsewhere write the product"
    s.changed("weight", why, f"weight={read.number(s, 'weight', 0.0):g} of the extension rnd")
    status = "mapped" if own["weight"] == read.number(s, "weight", 0.0) else "changed"
    why = "" if status == "mapped" else "changes between rollouts; RSL-RL's changes at each of their steps"
    keys = "mode initial_step final_step final_value"
    s.each("weight_schedule", keys, status, "weight of the extension rnd", why)


def curiosity_widths(s: Section, key: str) -> list[int]:
    """Read hidden widths, of which the source library's default depends on the observation."""
    hidden = read.widths(s, key, [-1])
    if -1 in hidden:
        s.refuse(key, "-1 is the number of observations: write it out")
        if not s.has(key):
            raise s.error(key, "widths, as RSL-RL's default depends on the observation")
    return hidden


def curiosity_weight(s: Section) -> Any:
    """Read the weight of the bonus, which may change in one step or along a line."""
    weight = read.number(s, "weight", 0.0)
    mode = read.one_of("constant", "step", "linear")(s, "weight_schedule.mode", "constant")
    if mode == "constant":
        return weight
    root = s.run.root
    steps = read.count(root, "num_steps_per_env", 1) * read.count(root, "max_iterations", 1500)
    change = {"kind": mode, "start": weight, "end": read.number(s, "weight_schedule.final_value")}
    last = read.number(s, "weight_schedule.final_step") / steps
    if mode == "step":
        return {**change, "at": last}
    return {**change, "begin_at": read.number(s, "weight_schedule.initial_step") / steps, "end_at": last}


def seed(s: Section) -> None:
    """Read the seed; RSL-RL's scripts draw one if there is none."""
    value = s.raw("seed")
    if isinstance(value, int) and value >= 0:
        s.copy("seed", "seed", value)
    s.changed("seed", "RSL-RL's script draws one: set --seed", "seed=0")


def action_limit(s: Section) -> None:
    """Move the action limit to the environment: `mjlab:` and `isaaclab:` take it."""
    if s.has("clip_actions") and str(s.run.settings.get("env.id", "")).startswith(ROBOTS):
        s.copy("clip_actions", "env.options.clip_actions", read.number(s, "clip_actions"))
    elif s.has("clip_actions"):
        s.changed("clip_actions", "actions are clipped before the environment sees them", "the environment's adapter")
    s.mapped("clip_actions", "algorithm.model.bounds=none")


ADAPTIVE_RATE: tuple[Rule, ...] = (
    always("every", "minibatch"),
    always("factor", 1.5),
    always("minimum", 1e-5),
    always("maximum", 1e-2),
    Copy("desired_kl", "target_kl", read.number, 0.01),
)
EXTRAS: tuple[Rule, ...] = (
    precision("use_mixed_precision", "model.policy.precision model.critic.precision", "RSL-RL only in the update"),
    curiosity,
    symmetry,
    Only(
        "share_cnn_encoders", (None, False), "off", "model.shared_trunk shares the whole network, not the encoder alone"
    ),
    mapped("grad_reduce_bucket_mb multi_gpu_cfg device", "torchrun"),
)
"""For `algorithm`: parts of RSL-RL's PPO that are off in nearly all files."""
RUNNER: tuple[Rule, ...] = (
    Copy("num_steps_per_env", "algorithm.horizon", read.integer),
    always("total_steps", None),
    Copy("max_iterations", "until.iterations", read.integer, 1500),
    Copy("save_interval", "checkpoints.save_every", read.integer, OMIT),
)
"""For the section of the runner."""
SCRIPTS: tuple[Rule, ...] = (
    seed,
    Copy("device", "device", read.word, OMIT),
    mapped("experiment_name run_name", "the run's folder (canter train --name)"),
    mapped("resume load_run load_checkpoint checkpoint resume_path", "canter resume, runner.load"),
    mapped("logger wandb_project neptune_project wandb_tags upload_model", "--log; OnPolicyRunner writes to it too"),
    mapped("check_for_nan", "always on"),
    mapped("torch_compile_mode", "execution.mode"),
    mapped("class_name", "canter.compat.rsl_rl.OnPolicyRunner"),
    mapped("multi_gpu", "torchrun"),
    action_limit,
    no_effect("store_code_state runner_class_name", "nothing reads it"),
)
"""For the section of the runner and the top level: keys of scripts and writers, and what does their
work here."""
