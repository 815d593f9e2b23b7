"""RSL-RL's `Distillation`: a student in `policy` up to 3.x, and in `student` since."""

from __future__ import annotations

import math

from canter.compat.settings import readers as read
from canter.compat.settings.rsl_rl_network import Generation
from canter.compat.settings.rules import OMIT, Copy, Only, Rule, always, apply, mapped
from canter.compat.settings.section import NONE, Import, Section


def apply_distillation(run: Import, generation: Generation) -> None:
    """Apply everything that changes what a student learns."""
    root = run.root
    s = run.section("algorithm", "algorithm")
    s.copy("class_name", "kind", "distillation")
    s.changed("", "RSL-RL's script loads the teacher: name its file", "algorithm.teacher")
    sequences(s, run.section(generation.runner))
    apply(DISTILLATION, s)
    old = root.has_section("policy") and not root.has_section("student")
    student(run.section("policy" if old else "student", "algorithm"), "student_" if old else "")
    apply(TEACHER, root)


def sequences(s: Section, runner: Section) -> None:
    """RSL-RL takes a step of the optimizer after each `gradient_length` steps of the rollout."""
    length = read.count(s, "gradient_length", 15)
    horizon = read.count(runner, "num_steps_per_env")
    s.set("num_minibatches", max(1, horizon // length))
    why = "shuffled sequences of that length, in as many minibatches as RSL-RL takes steps; no sequence is left over"
    s.copy("gradient_length", "sequence_length", length, why)


def student(s: Section, prefix: str) -> None:
    """Apply the student's network; the prefix stands before names that the teacher has too."""
    hidden = f"{prefix}hidden_dims"
    normalize = f"{prefix}obs_normalization"
    s.copy(hidden, "policy.hidden", read.widths(s, hidden, [256, 256, 256]))
    s.copy(normalize, "policy.normalize_obs", read.flag(s, normalize, False))
    std = "init_noise_std" if s.has("init_noise_std") else "distribution_cfg.init_std"
    s.copy(std, "std.initial", read.number(s, std, 0.1))
    apply(STUDENT, s)


def recurrent_layers(s: Section) -> None:
    """Read the recurrent layers, whose width has had two names."""
    if s.has("rnn_type"):
        width = read.integer(s, "rnn_hidden_dim", read.integer(s, "rnn_hidden_size", 256))
        cell = read.one_of("lstm", "gru")(s, "rnn_type")
        s.set("policy.rnn", {"cell": cell, "hidden": width, "layers": read.integer(s, "rnn_num_layers", 1)})


def teacher_groups(s: Section) -> None:
    """The teacher's file knows its observation groups."""
    s.changed("obs_groups.teacher", "the teacher reads its own; name others there", "algorithm.teacher_obs")


DISTILLATION: tuple[Rule, ...] = (
    Copy("num_learning_epochs", "epochs", read.integer, 1),
    Copy("loss_type", "loss", read.one_of("mse", "huber"), "mse"),
    always("optimizer.max_grad_norm", math.inf),
    Copy("max_grad_norm", "optimizer.max_grad_norm", read.number, OMIT),
    always("optimizer.eps", 1e-8),
    Copy("learning_rate", "optimizer.learning_rate", read.number, 1e-3),
    Only("optimizer", ("adam",), "algorithm.optimizer", "there is Adam here"),
    mapped("device", "device"),
)
"""For `algorithm` and settings below `algorithm`."""
STUDENT: tuple[Rule, ...] = (
    Copy("activation", "policy.activation", read.word, "elu"),
    recurrent_layers,
    Copy("state_dependent_std", "std.kind", read.flag, default=False, convert={True: "network", False: "parameter"}),
    mapped("class_name noise_std_type stochastic state_dependent_std", "algorithm.policy, algorithm.std"),
    mapped("distribution_cfg.class_name distribution_cfg.std_type", "algorithm.std"),
)
"""For the section of the student and settings below `algorithm`."""
TEACHER_FILE = "the teacher's file says it"


TEACHER: tuple[Rule, ...] = (
    mapped("teacher", TEACHER_FILE),
    Only("empirical_normalization", NONE, "off", "write student_obs_normalization and teacher_obs_normalization"),
    mapped("policy.teacher_hidden_dims policy.teacher_obs_normalization policy.teacher_recurrent", TEACHER_FILE),
    Copy("obs_groups.policy", "algorithm.policy.obs_groups", read.groups, OMIT),
    Copy("obs_groups.student", "algorithm.policy.obs_groups", read.groups, OMIT),
    teacher_groups,
)
"""For the whole mapping."""
