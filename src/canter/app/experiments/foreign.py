"""Names of settings in other libraries, and how their values convert."""

from __future__ import annotations

SAME = "the same number"
PYTHON_ONLY = "in Python only"
"""End of the remark about a name that is no flag."""
_STEPS = "the same number: steps of each environment in a rollout"
_ROLLOUT = "minibatches of a rollout: horizon x num_envs / batch size"
_ADAPTIVE = "the same number, with .kind adaptive_kl"
_ITERATIONS = "the same number, with --total-steps null"
_HIDDEN = "a list such as 256,256"
_POLICY = "widths of the layers such as 256,256; CnnPolicy is what images get, LstmPolicy is algorithm.model.policy.rnn"
_MODULE = f"canter.network(MyModule); {PYTHON_ONLY}"
_EVERY = "transitions over all environments: their number times the environments"
_VALUE_CLIP = "the same number, with algorithm.value-loss clipped"

_NAMES: dict[tuple[str, str], tuple[str, ...]] = {
    ("algorithm.optimizer.learning-rate", SAME): ("lr", "learning-rate"),
    ("algorithm.horizon", _STEPS): ("n-steps", "num-steps", "num-steps-per-env", "horizon-length", "rollout-length"),
    ("algorithm.horizon", SAME): ("train-freq",),
    ("algorithm.num-minibatches", _ROLLOUT): ("batch-size", "minibatch-size"),
    ("algorithm.num-minibatches", SAME): ("num-mini-batches",),
    ("algorithm.epochs", SAME): ("n-epochs", "update-epochs", "mini-epochs", "num-learning-epochs"),
    ("algorithm.entropy-coef", SAME): ("ent-coef",),
    (
        "algorithm.value-coef",
        "the same number from CleanRL, twice that from Stable-Baselines3, whose loss has no half; 1 is usual where "
        "values are normalised, as they are unless algorithm.model.normalize-value is false",
    ): ("vf-coef",),
    ("algorithm.value-coef", "the same number: both halve the square"): ("critic-coef",),
    ("algorithm.value-coef", "twice the number: half the square is the loss here"): ("value-loss-coef",),
    ("algorithm.clip-ratio", SAME): ("clip-range", "clip-coef", "clip-param", "e-clip"),
    ("algorithm.gae-lambda", SAME): ("lam",),
    (
        "algorithm.gae-lambda",
        "the same number, where advantages are meant; for slow copies of critics it is algorithm.tau",
    ): ("tau",),
    ("algorithm.optimizer.learning-rate.target-kl", _ADAPTIVE): ("desired-kl", "kl-threshold"),
    ("algorithm.optimizer.max-grad-norm", SAME): ("grad-norm",),
    ("total-steps", "the same number: transitions over all environments"): ("total-timesteps",),
    ("total-steps", "the same number, if it counts transitions over all environments"): ("timesteps",),
    ("until.iterations", _ITERATIONS): ("max-iterations", "max-epochs"),
    ("num-envs", SAME): ("num-actors", "n-envs"),
    ("algorithm.model.policy.hidden", _HIDDEN): ("net-arch",),
    ("algorithm.model.policy.hidden", _POLICY): ("policy", "policy-kwargs"),
    ("algorithm.model.policy.activation", "a name such as tanh or relu"): ("activation-fn",),
    ("algorithm.model.policy", _MODULE): ("features-extractor-class",),
    ("algorithm.model.std.initial", "exp of the number"): ("log-std-init",),
    ("algorithm.advantage-normalization", "minibatch, rollout or none"): ("normalize-advantage", "norm-adv"),
    ("algorithm.value-clip", _VALUE_CLIP): ("clip-range-vf",),
    ("env.options", "each as env.options.NAME"): ("env-kwargs",),
    ("env.wrappers", "each as env.wrappers.NAME.KEY"): ("wrapper-class",),
    ("evaluate.every", _EVERY): ("eval-freq",),
    ("evaluate.episodes", SAME): ("n-eval-episodes",),
    ("checkpoints.save-every", "iterations: the number divided by the steps of a rollout"): ("save-freq",),
    ("log-every", SAME): ("log-interval",),
    ("recent-episodes", SAME): ("stats-window-size",),
    ("console", "live or lines"): ("progress-bar",),
    ("algorithm.replay.capacity", SAME): ("buffer-size",),
    ("console", "verbose=0 is quiet, 1 is lines, 2 is verbose"): ("verbose",),
    ("log", "log tensorboard; the files go to the run's folder"): ("tensorboard-log",),
    ("on-iteration", f"a function, or callbacks=[...] for canter.Callback; {PYTHON_ONLY}"): ("callback",),
    ("algorithm.warmup-steps", SAME): ("learning-starts",),
    (
        "algorithm.updates-per-transition",
        "divided by the transitions between updates: train_freq times the environments",
    ): ("gradient-steps",),
}
FOREIGN = {theirs: ours for ours, names in _NAMES.items() for theirs in names}
"""Flags of Stable-Baselines3, CleanRL, RSL-RL and rl_games: name -> (Canter's flag, how the number
converts)."""


def translate_flag(flag: str) -> str | None:
    """Return Canter's flag for another library's and a converter; None if it is unknown."""
    name, conversion = FOREIGN.get(flag.lstrip("-").replace("_", "-").lower(), ("", ""))
    shown = name.replace("-", "_") if conversion.endswith(PYTHON_ONLY) else f"--{name}"
    return f"here it is {shown} ({conversion})" if name else None


def translate_key(key: str) -> str | None:
    """Return the same for a setting from Python, in whichever section it was put."""
    if key == "algorithm.policy":  # a setting of SAC and distillation
        return None
    name, conversion = FOREIGN.get(key.rpartition(".")[2].replace("_", "-").lower(), ("", ""))
    return f"here it is {name.replace('-', '_')} ({conversion})" if name else None
