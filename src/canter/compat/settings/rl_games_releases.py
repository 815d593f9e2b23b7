"""Releases of rl_games that learn differently from the same file."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from canter.core.plain import ConfigError
from canter.core.registry import nearest


@dataclass(frozen=True)
class Release:
    """Defaults and behaviour of a release, where they differ."""

    name: str
    value_bootstrap: bool
    """Default of the key."""
    obs_statistics: str
    """Time of the observation statistics with continuous actions; see `PPOConfig.obs_statistics`."""
    variance: str
    """Variance of a batch in running statistics; see `NormalizerConfig.variance`."""
    schedule_types: tuple[str, ...] = ("legacy", "standard")
    """Values of `schedule_type` with which an adaptive rate changes."""
    counts_frames: bool = False
    """A linear rate may follow `max_frames`; else only `max_epochs`."""
    mixed_precision: bool = False
    """Default of the key on GPUs with bfloat16."""
    unread: str = ""
    """Keys that a later release reads."""


UNREAD = "min_lr max_lr lr_multiplier sigma_parametrization min_sigma logstd_bounds max_sigma"
RELEASES = {
    "1.6.1": Release("1.6.1", False, "first_epoch", "sample", unread=UNREAD),
    "1.6.5": Release("1.6.5", True, "minibatch", "population", unread=UNREAD),
    "2.0": Release(
        "2.0", True, "minibatch", "population", ("legacy", "standard", "per_minibatch"), True, mixed_precision=True
    ),
}
"""1.6.1 stands for all releases before it, and for the fork that Isaac Lab installs."""
SOURCES = {f"rl_games-{name}": release for name, release in RELEASES.items()}
"""Releases by the names that `--source` takes."""


def release_named(source: str) -> Release:
    """Return the release of a name that `--source` takes."""
    if source not in SOURCES:
        raise ConfigError(f"source={source!r}: expected one of {', '.join(SOURCES)}, {nearest(source, SOURCES)}")
    return SOURCES[source]


def release_of_version(text: str) -> Release:
    """Return the release that behaves as a version, such as 1.6.1."""
    numbers = tuple(int(part) for part in text.split(".")[:3] if part.isdigit())
    if numbers < (1, 6, 2):
        return RELEASES["1.6.1"]
    return RELEASES["1.6.5" if numbers < (2,) else "2.0"]


def installed_version() -> str | None:
    """Return the version of the installed rl_games; None without one."""
    try:
        return version("rl_games")
    except PackageNotFoundError:
        return None
