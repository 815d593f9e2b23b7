import math

import pytest
import torch

from canter.core.plain import from_plain
from canter.nn.normalizer import IdentityNormalizer, Normalizer, NormalizerConfig


def rows(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_before_the_first_update_it_is_the_identity():
    x = rows(4, 3)
    assert torch.equal(Normalizer((3,))(x), x)


def test_statistics_are_those_of_all_samples_in_any_chunking():
    x = rows(1000, 3) * torch.tensor([1.0, 10.0, 0.1]) + 5
    whole, chunked = Normalizer((3,)), Normalizer((3,))
    whole.update(x, torch.ones(1000, dtype=torch.bool))
    for part in x.split([1, 9, 90, 900]):
        chunked.update(part, torch.ones(len(part), dtype=torch.bool))
    assert torch.allclose(whole.mean, chunked.mean, rtol=1e-12)
    assert torch.allclose(whole.m2, chunked.m2, rtol=1e-12)
    assert torch.allclose(whole.mean, x.double().mean(0))
    assert torch.allclose(whole.scale.double() ** 2, x.double().var(0, correction=0), rtol=1e-5)


def test_masked_samples_are_never_counted():
    x = rows(10, 2)
    mask = torch.tensor([True, False] * 5)
    spoiled = torch.where(mask.unsqueeze(-1), x, torch.nan)
    masked, picked = Normalizer((2,)), Normalizer((2,))
    masked.update(spoiled, mask)
    picked.update(x[mask], torch.ones(5, dtype=torch.bool))
    assert masked.count == 5
    assert torch.allclose(masked.mean, picked.mean)
    assert torch.allclose(masked.m2, picked.m2)


def test_eps_may_be_added_to_the_std():
    normalizer, x = NormalizerConfig(eps=0.5, eps_on="std", clip=None).build((1,)), 3 * rows(500, 1) + 2
    assert torch.allclose(normalizer(x), x / 1.5)  # before the first update too
    normalizer.update(x, torch.ones(500, dtype=torch.bool))
    assert torch.allclose(normalizer(x), (x - x.mean()) / (x.std(correction=0) + 0.5), atol=1e-5)


def test_unseen_samples_count_as_mean_0_and_variance_1():
    normalizer, x = NormalizerConfig(prior_count=4.0).build((1,)), 3 * rows(6, 1) + 2
    normalizer.update(x, torch.ones(6, dtype=torch.bool))
    seen = torch.cat([x, torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])]).double()
    assert torch.allclose(normalizer.mean, seen.mean(0))
    assert torch.allclose(normalizer.scale.double() ** 2, seen.var(0, correction=0))


def test_a_clip_holds_both_ways():
    normalizer = NormalizerConfig(clip=2.0).build(())
    assert normalizer(torch.tensor([-9.0, 1.0])).tolist() == [-2.0, 1.0]
    assert normalizer.inverse(torch.tensor([-9.0, 1.0])).tolist() == [-2.0, 1.0]


@pytest.mark.parametrize("settings", [{"eps": -1.0}, {"prior_count": -1.0}, {"clip": 0.0}, {"eps": float("inf")}])
def test_settings_outside_their_range_are_named(settings):
    ((name, _),) = settings.items()
    with pytest.raises(ValueError, match=name):
        NormalizerConfig(**settings)


def test_inverse_undoes_forward():
    normalizer = Normalizer(())
    normalizer.update(rows(100) * 300 + 1000, torch.ones(100, dtype=torch.bool))
    x = rows(50, seed=1) * 300 + 1000
    # Rounding is relative to the size of the mean and spread, here about 1000.
    assert torch.allclose(normalizer.inverse(normalizer(x)), x, rtol=0, atol=2e-4)


def test_a_long_stream_neither_freezes_nor_cancels():
    # mean 1e4 and std 1e-2: float32 moments would see no variance at all
    normalizer = Normalizer(())
    ones = torch.ones(1000, dtype=torch.bool)
    for seed in range(50):
        normalizer.update(1e4 + 1e-2 * rows(1000, seed=seed).double(), ones)
    # A count far beyond float32's 2^24 still moves.
    normalizer.count.fill_(1e9)
    normalizer.update(1e4 + 1e-2 * rows(1000, seed=99).double(), ones)
    assert normalizer.count == 1e9 + 1000
    fresh = Normalizer(())
    fresh.update(1e4 + 1e-2 * rows(50_000).double(), torch.ones(50_000, dtype=torch.bool))
    assert (
        abs(fresh.scale.item() - 1e-2) < 2e-4
    )  # sampling error of 50,000 draws is 3e-5, plus eps 1e-8 in the variance


def test_values_that_are_not_finite_do_not_poison_the_statistics():
    normalizer = Normalizer((2,))
    mask = torch.ones(10, dtype=torch.bool)
    normalizer.update(rows(10, 2), mask)
    before = {name: buffer.clone() for name, buffer in normalizer.named_buffers()}
    bad = rows(10, 2)
    bad[3, 1] = torch.inf
    normalizer.update(bad, mask)
    for name, buffer in normalizer.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_updates_keep_addresses():
    normalizer = Normalizer((2,))
    addresses = [buffer.data_ptr() for buffer in normalizer.buffers()]
    normalizer.update(rows(10, 2), torch.ones(10, dtype=torch.bool))
    assert [buffer.data_ptr() for buffer in normalizer.buffers()] == addresses


def test_output_is_clipped_only_on_request():
    mask = torch.ones(100, dtype=torch.bool)
    clipped, free = Normalizer((), clip=2.0), Normalizer(())
    for normalizer in (clipped, free):
        normalizer.update(rows(100), mask)
    assert clipped(torch.tensor(100.0)) == 2.0
    assert free(torch.tensor(100.0)) > 50


def test_identity_leaves_everything_as_it_is():
    x = rows(3)
    identity = IdentityNormalizer()
    identity.update(x)
    assert torch.equal(identity(x), x)
    assert torch.equal(identity.inverse(x), x)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip": 0.0}, r"clip=0\.0 must be above 0, or null"),
        ({"clip": math.nan}, "clip=nan must be above 0, or null"),
        ({"eps": -1.0}, r"eps=-1\.0 must be finite and not negative"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        NormalizerConfig(**settings)
    assert NormalizerConfig(clip=None).clip is None


def test_the_old_value_of_eps_on_is_read():
    assert from_plain({"eps_on": "deviation"}, NormalizerConfig()) == NormalizerConfig(eps_on="std")
