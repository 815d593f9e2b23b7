import pytest
import torch

from canter.core.specs import Continuous, Discrete, EnvSpec, MultiDiscrete, TensorSpec
from canter.core.storage.validity import (
    Mismatch,
    NonFiniteParameters,
    check_finite,
    check_same,
    check_same_shape,
    flatten,
    spec_from_plain,
    spec_to_plain,
)

CPU = torch.device("cpu")


def test_leaves_have_dotted_paths():
    tree = {"a": {"b": [1, 2], "c": ({"d": 3}, 4)}, "e": None}
    assert flatten(tree) == {"a.b": [1, 2], "a.c.0.d": 3, "a.c.1": 4, "e": None}


@pytest.mark.parametrize(
    ("saved", "here", "message"),
    [
        ({"a": 1}, {"a": 2}, "X does not fit: a is 1 in what was saved and 2 here"),
        ({"a": {"b": 1}}, {"a": {}}, "a.b is 1 in what was saved and missing here"),
        ({}, {"c": [1]}, "c is missing in what was saved and [1] here"),
        ({"a": "x" * 999}, {"a": ""}, "x... in what was saved and  here"),
    ],
)
def test_the_first_difference_is_reported_with_both_values(saved, here, message):
    with pytest.raises(Mismatch) as caught:
        check_same("X", saved, here)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400
    check_same("X", saved, saved)


def test_tensors_are_compared_by_kind_and_shape():
    here = {"a": torch.zeros(2, 3), "n": 1}
    check_same_shape("X", {"a": torch.ones(2, 3), "n": 7}, here)
    for saved, message in (
        ({"a": torch.zeros(3, 2), "n": 1}, r"a is float32 \[3, 2\] in what was saved and float32 \[2, 3\] here"),
        ({"a": torch.zeros(2, 3, dtype=torch.float64), "n": 1}, "a is float64"),
        ({"a": torch.zeros(2, 3), "n": "1"}, "n is str in what was saved and int here"),
        ({"n": 1}, "a is missing"),
    ):
        with pytest.raises(Mismatch, match=message):
            check_same_shape("X", saved, here)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_nonfinite_values_are_named(bad, dtype):
    tree = {"fine": torch.zeros(3), "count": torch.tensor([1, 2]), "deep": {"er": [torch.zeros(2, 2, dtype=dtype)]}}
    check_finite(tree, "X")
    tree["deep"]["er"][0][1, 0] = bad
    with pytest.raises(NonFiniteParameters, match=r"X was not saved: 1 of 4 numbers in deep\.er\.0 are NaN"):
        check_finite(tree, "X")


def test_a_tree_without_tensors_is_finite():
    check_finite({"a": [], "b": 1}, "X")


SPECS = [
    EnvSpec({"policy": TensorSpec((3,)), "image": TensorSpec((8, 8, 3), torch.uint8)}, Discrete(4), 1, env_id="A-v0"),
    EnvSpec({"policy": TensorSpec(())}, Continuous((-1.5, float("-inf")), (2.0, float("inf"))), 1),
    EnvSpec({"z": TensorSpec((2,), torch.float64), "a": TensorSpec((1,), torch.bool)}, MultiDiscrete((2, 3)), 1),
]


@pytest.mark.parametrize("spec", SPECS)
def test_what_an_environment_shows_and_accepts_comes_back(spec):
    plain = spec_to_plain(spec)
    assert spec_from_plain(plain, CPU) == spec
    assert list(spec_from_plain(plain, CPU).obs) == list(spec.obs)


def test_the_order_of_observations_counts():
    turned = EnvSpec(dict(reversed(SPECS[0].obs.items())), SPECS[0].action, 1, env_id="A-v0")
    with pytest.raises(Mismatch, match=r"groups is \['policy', 'image'\] in what was saved and \['image', 'policy'\]"):
        check_same("X", spec_to_plain(SPECS[0]), spec_to_plain(turned))
