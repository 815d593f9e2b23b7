import pytest

from canter import distributed
from canter.seeding import PURPOSES, derive_seed


def test_streams_of_all_purposes_ranks_and_seeds_are_distinct(monkeypatch):
    streams = []
    for rank in range(8):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        streams += [derive_seed(seed, p) for seed in range(4) for p in PURPOSES if p != "init"]
    assert len(set(streams)) == len(streams)


def test_weights_start_alike_on_every_rank(monkeypatch):
    monkeypatch.setattr(distributed, "rank", lambda: 3)
    on_rank_three = derive_seed(7, "init")
    monkeypatch.setattr(distributed, "rank", lambda: 0)
    assert derive_seed(7, "init") == on_rank_three


def test_seed_zero_is_a_seed_like_any_other():
    assert derive_seed(0, "policy") == derive_seed(0, "policy")
    assert derive_seed(0, "policy") != derive_seed(1, "policy")


def test_a_negative_seed_is_refused_by_name():
    with pytest.raises(ValueError, match="seed=-1"):
        derive_seed(-1, "env")
