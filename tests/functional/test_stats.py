import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from canter.functional.statistics import (
    explained_variance,
    masked_mean,
    merge_moments,
    moments,
    normalize,
    standardize,
    update_moments_,
)

NAN = float("nan")


def seeded(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def half(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.5


# Masked mean.


def test_masked_mean_divides_by_the_valid_count():
    x, mask = torch.tensor([1.0, 2.0, 6.0, 100.0]), torch.tensor([True, True, True, False])
    assert masked_mean(x, mask).item() == 3.0


def test_masked_mean_of_nothing_is_zero():
    x = torch.ones(3, requires_grad=True)
    mean = masked_mean(x, torch.zeros(3, dtype=torch.bool))
    assert mean.item() == 0.0
    assert torch.equal(torch.autograd.grad(mean, x)[0], torch.zeros(3))


@pytest.mark.parametrize("garbage", [NAN, float("inf"), 1e30])
def test_masked_samples_leak_neither_value_nor_gradient(garbage):
    x = torch.tensor([[1.0, garbage], [garbage, 3.0]], requires_grad=True)
    mean = masked_mean(x, torch.tensor([[True, False], [False, True]]))
    assert mean.item() == 2.0
    assert torch.equal(torch.autograd.grad(mean, x)[0], torch.tensor([[0.5, 0.0], [0.0, 0.5]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_masked_mean_keeps_the_dtype(dtype):
    x = torch.ones(70_000, dtype=dtype)
    mean = masked_mean(x, torch.ones_like(x, dtype=torch.bool))
    assert mean.dtype == dtype and mean.ndim == 0 and mean.item() == 1.0


# Moments.


def test_moments_without_mask_cover_every_element():
    count, mean, m2 = moments(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    assert (count.item(), mean.item(), m2.item()) == (4.0, 3.0, 14.0)
    assert count.dtype == mean.dtype == m2.dtype == torch.float64


def test_moments_keep_the_axes_after_the_mask_as_features():
    x, mask = seeded(5, 4, 3, 2), half(5, 4)
    x[~mask] = NAN
    count, mean, m2 = moments(x, mask)
    valid = x[mask].numpy()
    assert count.item() == len(valid)
    np.testing.assert_allclose(mean, valid.mean(0), rtol=1e-12)
    np.testing.assert_allclose(m2, valid.var(0) * len(valid), rtol=1e-12)


def test_moments_of_nothing_are_zero():
    count, mean, m2 = moments(torch.full((3, 2), NAN), torch.zeros(3, dtype=torch.bool))
    assert count.item() == 0.0
    assert torch.equal(mean, torch.zeros(2).double()) and torch.equal(m2, torch.zeros(2).double())


def test_moments_of_one_sample_have_no_spread():
    count, mean, m2 = moments(torch.tensor([5.0]))
    assert (count.item(), mean.item(), m2.item()) == (1.0, 5.0, 0.0)


def test_streamed_moments_keep_a_small_spread_around_a_large_mean():
    """A thousand chunks with mean 1e4 and std 1e-2, where float32 sums of squares have no digit left."""
    chunks = (1e4 + 1e-2 * seeded(1000, 200)).unbind()
    count, mean, m2 = functools.reduce(lambda total, chunk: merge_moments(*total, *chunk), map(moments, chunks))
    everything = torch.cat(chunks).numpy()
    assert count.item() == 200_000
    assert mean.item() == pytest.approx(everything.mean(), rel=1e-14)
    assert (m2 / count).sqrt().item() == pytest.approx(everything.std(), rel=1e-8)


def test_merged_counts_exceed_the_range_of_float32():
    chunk = (torch.tensor(5e8).double(), torch.tensor(2.0).double(), torch.tensor(5e8).double())
    one = (torch.tensor(1.0).double(), torch.tensor(2.0).double(), torch.tensor(0.0).double())
    count, mean, m2 = merge_moments(*merge_moments(*chunk, *chunk), *one)
    assert (count.item(), mean.item(), m2.item()) == (1_000_000_001.0, 2.0, 1e9)


def test_merging_by_hand():
    a, b = moments(torch.tensor([1.0, 3.0])), moments(torch.tensor([8.0]))
    count, mean, m2 = merge_moments(*a, *b)  # 1, 3, 8: mean 4, deviations 9 + 1 + 16
    assert (count.item(), mean.item(), m2.item()) == (3.0, 4.0, 26.0)


def test_merging_with_an_empty_set_changes_nothing():
    some = moments(seeded(10, 2), torch.ones(10, dtype=torch.bool))
    empty = moments(seeded(10, 2), torch.zeros(10, dtype=torch.bool))
    for merged in (merge_moments(*some, *empty), merge_moments(*empty, *some)):
        assert all(torch.equal(x, y) for x, y in zip(merged, some, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(merge_moments(*empty, *empty), empty, strict=True))


# Normalising.


def test_normalize_matches_numpy_over_the_valid_samples():
    x, mask = 3.0 + 2.0 * seeded(20, 6), half(20, 6)
    x[~mask] = NAN
    result = normalize(x, mask).numpy()
    valid = x[mask].numpy()
    np.testing.assert_allclose(result[mask], (valid - valid.mean()) / (valid.std() + 1e-8), rtol=1e-12)
    assert (result[~mask] == 0.0).all()


def test_normalize_may_divide_by_the_unbiased_std():
    x, mask = 3.0 + 2.0 * seeded(7, 3), half(7, 3)
    valid = x[mask].numpy()
    expected = (valid - valid.mean()) / (valid.std(ddof=1) + 1e-8)
    np.testing.assert_allclose(normalize(x, mask, unbiased=True)[mask].numpy(), expected, rtol=1e-12)
    assert torch.equal(normalize(x, torch.arange(21).view(7, 3) == 3, unbiased=True), torch.zeros_like(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.0, 0.1, -7.3, 1e4, 1e-20, 3e10])
def test_normalize_makes_equal_samples_exactly_zero(value, dtype):
    x = torch.full((1237, 3), value, dtype=dtype)
    mask = torch.ones_like(x, dtype=torch.bool)
    assert torch.equal(normalize(x, mask), torch.zeros_like(x))


def test_normalize_takes_rounding_noise_for_equal_samples():
    x = torch.full((100,), 0.1)
    x[::2] = torch.nextafter(x[0], torch.tensor(1.0))
    assert torch.equal(normalize(x, torch.ones(100, dtype=torch.bool)), torch.zeros(100))


def test_normalize_keeps_a_small_spread_that_is_no_rounding():
    x = torch.tensor([1e4, 1e4, 1e4 + 2.0**-7])  # exact in float32, but their mean is not
    expected = torch.tensor([-1.0, -1.0, 2.0]) / 2.0**0.5
    torch.testing.assert_close(normalize(x, torch.ones(3, dtype=torch.bool)), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("count", [0, 1])
def test_normalize_of_one_sample_or_none_is_zero(count):
    x, mask = torch.tensor([4.0, 5.0]), torch.tensor([True, False]) & (count == 1)
    assert torch.equal(normalize(x, mask), torch.zeros(2))


def test_normalize_keeps_float32():
    x = seeded(50).float()
    assert normalize(x, torch.ones(50, dtype=torch.bool)).dtype == torch.float32


# Explained variance.


def test_explained_variance_matches_numpy():
    target, mask = seeded(30, 4), half(30, 4)
    prediction = 0.5 * target + 0.3 * seeded(4, 30).T + 10.0
    y, residual = target[mask].numpy(), (target - prediction)[mask].numpy()
    target[~mask] = NAN
    result = explained_variance(prediction, target, mask)
    assert result.item() == pytest.approx(1.0 - residual.var() / y.var(), rel=1e-10)


def test_explained_variance_of_exact_constant_and_opposite_predictions():
    target, mask = torch.tensor([1.0, 2.0, 3.0]), torch.ones(3, dtype=torch.bool)
    assert explained_variance(target + 5.0, target, mask).item() == 1.0
    assert explained_variance(torch.full((3,), 7.0), target, mask).item() == 0.0
    assert explained_variance(-target, target, mask).item() == -3.0


@pytest.mark.parametrize("prediction", [0.1, 2.0])
def test_explained_variance_is_zero_when_targets_do_not_vary(prediction):
    target, mask = torch.full((1237,), 0.1), torch.ones(1237, dtype=torch.bool)
    result = explained_variance(torch.full_like(target, prediction) * torch.arange(1237), target, mask)
    assert result.item() == 0.0


# Running moments of a normaliser.


def running_moments(count: float, mean: float, m2: float) -> tuple[Tensor, Tensor, Tensor]:
    parts = torch.tensor([count, mean, m2], dtype=torch.float64)
    return parts[0], parts[1], parts[2]


@pytest.mark.parametrize(("eps_on_std", "std"), [(False, 4.5**0.5), (True, 2.5)])
def test_eps_is_added_to_the_variance_or_to_the_std(eps_on_std, std):
    shift, scale, inverse_scale = torch.zeros(3).unbind()
    derived = (shift, scale, inverse_scale)
    update_moments_(running_moments(0.0, 0.0, 0.0), running_moments(2.0, 3.0, 8.0), derived, 0.5, eps_on_std)
    assert shift.item() == 3.0  # 1 and 5: variance 4
    assert scale.item() == pytest.approx(std)
    assert inverse_scale.item() == pytest.approx(1 / std)


@pytest.mark.parametrize("number", [NAN, float("inf")])
def test_samples_that_are_not_finite_leave_the_running_moments_unchanged(number):
    running = running_moments(2.0, 3.0, 8.0)
    derived = (torch.zeros(()), torch.zeros(()), torch.zeros(()))
    update_moments_(running, running_moments(1.0, number, 0.0), derived, 0.0)
    assert [part.item() for part in running] == [2.0, 3.0, 8.0]
    assert [part.item() for part in derived] == [3.0, 2.0, 0.5]


def test_standardize_clips_at_both_ends():
    x = torch.tensor([-100.0, 5.0, 9.0, 100.0])
    shift, inverse_scale = torch.tensor(5.0), torch.tensor(0.5)
    assert standardize(x, shift, inverse_scale, 3.0).tolist() == [-3.0, 0.0, 2.0, 3.0]
    assert standardize(x, shift, inverse_scale, None).tolist() == [-52.5, 0.0, 2.0, 47.5]


# Ranks: uneven shares of the same samples; in one split a rank has none.


def splits() -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Return samples and mask of each rank."""
    x = 2.0 + seeded(9)
    seven = torch.arange(9) < 7
    nothing = torch.full((9,), NAN).double()
    return {
        "all on one rank": [(x, seven), (nothing, torch.zeros(9, dtype=torch.bool))],
        "two and five": [(x[:2], seven[:2]), (x[2:], seven[2:])],
    }


def statistics(x: Tensor, mask: Tensor) -> dict[str, Any]:
    return {
        "moments": moments(x, mask),
        "normalized": normalize(x, mask),
        "explained": explained_variance(2.0 * x, x, mask),
    }


def one_of_two_ranks(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.save({name: statistics(*parts[rank]) for name, parts in splits().items()}, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_ranks_get_the_statistics_of_all_samples(tmp_path: Path):
    spawn(one_of_two_ranks, args=(str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    x, mask = splits()["all on one rank"][0]
    valid = x[mask]
    expected = (torch.tensor(7.0).double(), valid.mean(), (valid - valid.mean()).square().sum())

    for name in splits():
        for result in (first[name], second[name]):
            torch.testing.assert_close(result["moments"], expected)
            assert result["explained"].item() == pytest.approx(0.0, abs=1e-12)
    torch.testing.assert_close(first["all on one rank"]["normalized"], normalize(x, mask))
    assert torch.equal(second["all on one rank"]["normalized"], torch.zeros(9).double())
    both = torch.cat([first["two and five"]["normalized"], second["two and five"]["normalized"]])
    torch.testing.assert_close(both, normalize(x, mask))
