"""Which distribution an action space gets, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from canter.distributions import Beta, Categorical, DiagGaussian, Distribution, MultiCategorical, TanhGaussian
from canter.registry import Registry
from canter.specs import ActionSpec, Continuous, Discrete, MultiDiscrete

distributions: Registry[Callable[[ActionSpec, str], Distribution]] = Registry("distribution")
"""What makes a distribution for an action space and `bounds` (that of `DiagGaussian`), or raises ValueError."""

DistributionName = Annotated[str, distributions]


def make_distribution(action_spec: ActionSpec, kind: str = "auto", bounds: str = "rescale") -> Distribution:
    """The distribution for an action space; raises ValueError when it does not fit."""
    return distributions[kind](action_spec, bounds)


FITTING: dict[type[ActionSpec], dict[str, Callable[[Any, str], Distribution]]] = {
    Continuous: {
        "gaussian": lambda spec, bounds: DiagGaussian(spec.dim, spec.low, spec.high, bounds),
        "tanh_gaussian": lambda spec, bounds: TanhGaussian(spec.low, spec.high),
        "beta": lambda spec, bounds: Beta(spec.low, spec.high),
    },
    Discrete: {"categorical": lambda spec, bounds: Categorical(spec.n)},
    MultiDiscrete: {"multi_categorical": lambda spec, bounds: MultiCategorical(spec.nvec)},
}
"""Canter's own by the kind of action; the first is what "auto" takes."""


def _built_in(kind: str, action_spec: ActionSpec, bounds: str) -> Distribution:
    fits = FITTING[type(action_spec)]
    name = next(iter(fits)) if kind == "auto" else kind
    if name not in fits:
        raise ValueError(
            f"distribution kind {kind!r} does not fit {action_spec}; use 'auto' or {', '.join(map(repr, fits))}"
        )
    return fits[name](action_spec, bounds)


for _name in ("auto", *FITTING[Continuous], *FITTING[Discrete], *FITTING[MultiDiscrete]):
    distributions.register(_name)(partial(_built_in, _name))
