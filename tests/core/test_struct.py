from dataclasses import dataclass

import pytest
import torch

from canter.core.struct import TensorStruct, tree_copy_, tree_map


@dataclass
class Pair(TensorStruct):
    obs: dict
    reward: torch.Tensor
    extra: torch.Tensor | None = None


def pair():
    return Pair({"a": torch.arange(6.0).view(3, 2), "b": torch.ones(3)}, torch.tensor([1.0, 2.0, 3.0]))


def test_indexing_indexes_every_tensor_alike_and_keeps_none():
    row = pair()[1]
    assert row.obs["a"].tolist() == [2.0, 3.0]
    assert row.reward.item() == 2.0
    assert row.extra is None


def test_copy_keeps_addresses():
    target, source = pair(), pair().map(lambda x: x + 10)
    address = target.obs["a"].data_ptr()
    target.copy_(source)
    assert target.obs["a"].data_ptr() == address
    assert target.obs["a"][0].tolist() == [10.0, 11.0]


def test_copy_into_a_view_writes_through():
    buffer = {"x": torch.zeros(2, 3)}
    tree_copy_(tree_map(lambda x: x[1], buffer), {"x": torch.ones(3)})
    assert buffer["x"].tolist() == [[0, 0, 0], [1, 1, 1]]


def test_structures_that_do_not_match_are_refused():
    with pytest.raises((KeyError, ValueError)):
        tree_map(lambda a, b: a, {"x": torch.zeros(1)}, {"y": torch.zeros(1)})
    with pytest.raises(ValueError, match="shorter"):
        tree_map(lambda a, b: a, (torch.zeros(1),), ())
    with pytest.raises(TypeError, match="not str"):
        tree_map(lambda a: a, "text")
