"""Which distribution an action space gets, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

from canter.distributions import Beta, Categorical, DiagGaussian, Distribution, MultiCategorical, TanhGaussian
from canter.registry import Registry
from canter.specs import ActionSpec, Continuous, Discrete, MultiDiscrete

distributions: Registry[Callable[[ActionSpec, str], Distribution]] = Registry("distribution")
"""What makes a distribution for an action space and `bounds` (that of `DiagGaussian`), or raises ValueError."""

DistributionName = Annotated[str, distributions]


def make_distribution(action_spec: ActionSpec, kind: str = "auto", bounds: str = "rescale") -> Distribution:
    """The distribution for an action space; raises ValueError when it does not fit."""
    return distributions[kind](action_spec, bounds)


def _built_in(kind: str, action_spec: ActionSpec, bounds: str) -> Distribution:
    fits: dict[str, Callable[[], Distribution]]
    match action_spec:
        case Continuous(low, high):
            fits = {
                "gaussian": lambda: DiagGaussian(len(low), low, high, bounds),
                "tanh_gaussian": lambda: TanhGaussian(low, high),
                "beta": lambda: Beta(low, high),
            }
        case Discrete(n):
            fits = {"categorical": lambda: Categorical(n)}
        case MultiDiscrete(nvec):
            fits = {"multi_categorical": lambda: MultiCategorical(nvec)}
    name = next(iter(fits)) if kind == "auto" else kind
    if name not in fits:
        raise ValueError(
            f"distribution kind {kind!r} does not fit {action_spec}; use 'auto' or {', '.join(map(repr, fits))}"
        )
    return fits[name]()


for _name in ("auto", "gaussian", "tanh_gaussian", "beta", "categorical", "multi_categorical"):
    distributions.register(_name)(partial(_built_in, _name))
