import pytest
import torch

from canter.core import distributed
from canter.core.seeding import PURPOSES, derive_seed, draw_for_rank


def test_streams_of_all_purposes_and_seeds_are_distinct():
    streams = [derive_seed(seed, purpose) for seed in range(32) for purpose in PURPOSES]
    assert len(set(streams)) == len(streams)


@pytest.mark.parametrize("draw", [torch.rand, torch.randn])
def test_ranks_draw_the_numbers_of_one_process_for_their_environments(draw, monkeypatch):
    whole = draw_for_rank(draw, (12, 3), generator=torch.Generator().manual_seed(1))
    parts = []
    for rank in range(3):
        monkeypatch.setattr(distributed, "world_size", lambda: 3)
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        parts.append(draw_for_rank(draw, (4, 3), generator=torch.Generator().manual_seed(1)))
    assert torch.equal(torch.cat(parts), whole)


def test_seed_zero_is_a_seed_like_any_other():
    assert derive_seed(0, "policy") == derive_seed(0, "policy")
    assert derive_seed(0, "policy") != derive_seed(1, "policy")


def test_a_negative_seed_is_refused_by_name():
    with pytest.raises(ValueError, match="seed=-1"):
        derive_seed(-1, "env")
