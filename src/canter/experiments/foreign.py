"""What other libraries call a setting, and how the number becomes Canter's."""

from __future__ import annotations

SAME = "the same number"
_ROLLOUT = "minibatches of a rollout: horizon x num_envs / batch size"

FOREIGN: dict[str, tuple[str, str]] = {
    "lr": ("algorithm.optimizer.learning-rate", SAME),
    "learning-rate": ("algorithm.optimizer.learning-rate", SAME),
    "n-steps": ("algorithm.horizon", "the same number: steps of each environment in a rollout"),
    "num-steps": ("algorithm.horizon", "the same number: steps of each environment in a rollout"),
    "num-steps-per-env": ("algorithm.horizon", "the same number"),
    "horizon-length": ("algorithm.horizon", "the same number"),
    "rollout-length": ("algorithm.horizon", "the same number"),
    "batch-size": ("algorithm.num-minibatches", _ROLLOUT),
    "minibatch-size": ("algorithm.num-minibatches", _ROLLOUT),
    "num-mini-batches": ("algorithm.num-minibatches", SAME),
    "n-epochs": ("algorithm.epochs", SAME),
    "update-epochs": ("algorithm.epochs", SAME),
    "mini-epochs": ("algorithm.epochs", SAME),
    "num-learning-epochs": ("algorithm.epochs", SAME),
    "ent-coef": ("algorithm.entropy-coef", SAME),
    "vf-coef": (
        "algorithm.value-coef",
        "the same number from CleanRL, twice that from Stable-Baselines3, whose loss has no half; 1 is usual where "
        "values are normalised, as they are unless algorithm.model.normalize-value is false",
    ),
    "critic-coef": ("algorithm.value-coef", "the same number: both halve the square"),
    "value-loss-coef": ("algorithm.value-coef", "twice the number: half the square is the loss here"),
    "clip-range": ("algorithm.clip-ratio", SAME),
    "clip-coef": ("algorithm.clip-ratio", SAME),
    "clip-param": ("algorithm.clip-ratio", SAME),
    "e-clip": ("algorithm.clip-ratio", SAME),
    "lam": ("algorithm.gae-lambda", SAME),
    "tau": (
        "algorithm.gae-lambda",
        "the same number, where advantages are meant; for slow copies of critics it is algorithm.tau",
    ),
    "desired-kl": ("algorithm.optimizer.learning-rate.target-kl", "the same number, with .kind adaptive_kl"),
    "kl-threshold": ("algorithm.optimizer.learning-rate.target-kl", "the same number, with .kind adaptive_kl"),
    "grad-norm": ("algorithm.optimizer.max-grad-norm", SAME),
    "total-timesteps": ("total-steps", "the same number: transitions over all environments"),
    "timesteps": ("total-steps", "the same number, if it counts transitions over all environments"),
    "max-iterations": ("until.iterations", "the same number, with --total-steps null"),
    "max-epochs": ("until.iterations", "the same number, with --total-steps null"),
    "num-actors": ("num-envs", SAME),
    "n-envs": ("num-envs", SAME),
    "net-arch": ("algorithm.model.policy.hidden", "a list such as 256,256"),
    "buffer-size": ("algorithm.replay.capacity", SAME),
    "learning-starts": ("algorithm.warmup-steps", SAME),
    "train-freq": ("algorithm.horizon", SAME),
    "gradient-steps": ("algorithm.updates-per-step", "divided by the steps between updates"),
}
"""Flags of Stable-Baselines3, CleanRL, RSL-RL and rl_games: name -> (Canter's flag, how the number converts)."""


def translated(flag: str) -> str | None:
    """What to type instead of another library's flag; None for one that is not known."""
    name, how = FOREIGN.get(flag.lstrip("-").replace("_", "-").lower(), ("", ""))
    return f"here it is --{name} ({how})" if name else None


def translated_key(key: str) -> str | None:
    """The same for a setting from Python, wherever it was put."""
    name, how = FOREIGN.get(key.rpartition(".")[2].replace("_", "-").lower(), ("", ""))
    return f"here it is {name.replace('-', '_')} ({how})" if name else None
