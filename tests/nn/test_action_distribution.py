import math

import pytest
import torch

from canter.core.specs import Continuous, Discrete, MultiDiscrete
from canter.nn.actor_critic import make_distribution
from canter.nn.distributions import Beta, Categorical, DiagGaussian, MultiCategorical, TanhGaussian

LOW, HIGH = (-1.0, 0.0, -3.0), (1.0, 10.0, -1.0)


@pytest.mark.parametrize(
    ("spec", "kind", "expected"),
    [
        (Continuous(LOW, HIGH), "auto", DiagGaussian(3, LOW, HIGH, "clip")),
        (Continuous(LOW, HIGH), "gaussian", DiagGaussian(3, LOW, HIGH, "clip")),
        (Continuous(LOW, HIGH), "tanh_gaussian", TanhGaussian(LOW, HIGH)),
        (Continuous(LOW, HIGH), "beta", Beta(LOW, HIGH)),
        (Discrete(4), "auto", Categorical(4)),
        (MultiDiscrete((2, 3)), "auto", MultiCategorical((2, 3))),
    ],
)
def test_make_distribution_fits_the_action_space(spec, kind, expected):
    dist = make_distribution(spec, kind, bounds="clip")
    assert dist == expected
    assert dist.sample(torch.zeros(5, dist.param_dim)).shape[0] == 5


@pytest.mark.parametrize("kind", ["tanh_gaussian", "beta"])
def test_squashing_without_finite_bounds_is_refused_by_name(kind):
    with pytest.raises(ValueError, match=rf"{kind} .*component 1 has low=0\.0, high=inf.*kind='gaussian'"):
        make_distribution(Continuous((-1.0, 0.0), (1.0, math.inf)), kind)


@pytest.mark.parametrize(
    ("spec", "kind", "fits"),
    [
        (Discrete(4), "beta", "'categorical'"),
        (MultiDiscrete((2, 3)), "gaussian", "'multi_categorical'"),
        (Continuous((0.0,), (1.0,)), "categorical", "'gaussian', 'tanh_gaussian', 'beta'"),
    ],
)
def test_a_kind_that_does_not_fit_is_refused_with_what_does(spec, kind, fits):
    with pytest.raises(ValueError) as error:
        make_distribution(spec, kind)
    assert repr(kind) in str(error.value) and repr(spec) in str(error.value) and fits in str(error.value)


def test_gaussian_refuses_unknown_bounds_and_lengths_that_differ():
    with pytest.raises(ValueError, match="'clamp' is unknown; use one of rescale, clip, none"):
        DiagGaussian(1, (0.0,), (1.0,), "clamp")
    with pytest.raises(ValueError, match="low has 1 components, but dim=2"):
        DiagGaussian(2, (0.0,), (1.0, 1.0))


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(KeyError, match="unknown distribution 'gausian': did you mean gaussian"):
        make_distribution(Continuous((0.0,), (1.0,)), "gausian")
