"""Kernels over the steps of a rollout against the plain functions that define them, in float64."""

import importlib

import pytest
import torch

from canter.core.seeding import MemberStreams
from canter.functional import returns
from canter.functional import statistics as stats
from canter.nn.normalizer import Normalizer
from triton_device import DEVICE, INTERPRETED, NEEDS_DEVICE

pytest.importorskip("triton", reason="Triton comes with the GPU builds of torch")
rollout = importlib.import_module("canter.engines.triton.kernels.rollout")
statistics = importlib.import_module("canter.engines.triton.kernels.statistics")

pytestmark = NEEDS_DEVICE


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("shape", [(24, 300), (1, 5), (7, 33)])
def test_advantages_and_returns(shape, per_row):
    reward, value, next_value = torch.randn(3, *shape).unbind()
    terminated, done = torch.rand(shape) > 0.9, torch.rand(shape) > 0.9
    next_value[terminated] = torch.nan
    gamma = 0.9 + 0.1 * torch.rand(shape) if per_row else 0.97
    flags = (terminated, done | terminated)
    exact = returns.gae.plain(
        *(x.double() for x in (reward, value, next_value)), *flags, gamma.double() if per_row else gamma, 0.95
    )
    tensors = [x.to(DEVICE) for x in (reward, value, next_value, *flags)]
    ours = rollout.gae(*tensors, gamma.to(DEVICE) if per_row else gamma, 0.95)
    for one, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(3000,), (24, 50, 7), (5, 70), (1, 600, 3, 5), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_moments(shape, dtype, share):
    features = {1: 0, 2: 0, 3: 1, 4: 2}[len(shape)]
    x = (1e4 + torch.randn(shape, dtype=torch.float64)).to(dtype)
    mask = torch.rand(shape[: len(shape) - features]) < share
    x[~mask] = torch.nan
    exact = stats.local_moments.plain(x, mask)
    ours = statistics.local_moments(x.to(DEVICE), mask.to(DEVICE))
    for one, other in zip(ours, exact, strict=True):
        assert one.dtype == torch.float64
        torch.testing.assert_close(one.cpu(), other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(), (5,), (300,)])
def test_a_normaliser_counts_finite_samples_only(shape):
    plain, ours = Normalizer(shape), Normalizer(shape).to(DEVICE)
    for scale in (1.0, 100.0, torch.nan, torch.inf, 3.0):
        x, mask = 5.0 + torch.randn(200, *shape), torch.rand(200) < 0.7
        x[3] *= scale
        plain.update(x, mask)
        running, derived = (ours.count, ours.mean, ours.m2), (ours.shift, ours.scale, ours.inverse_scale)
        statistics.update_moments_(running, statistics.local_moments(x.to(DEVICE), mask.to(DEVICE)), derived, ours.eps)
        for name, buffer in plain.state_dict().items():
            torch.testing.assert_close(ours.state_dict()[name].cpu(), buffer, rtol=1e-7, atol=0.0)


@pytest.mark.parametrize("count", [1, 2, 3, 24, 100, 1000, 4096])
def test_a_random_order_has_every_number_once(count):
    generator = torch.Generator(DEVICE).manual_seed(0)
    for _ in range(3):
        assert sorted(rollout.permutation(count, generator).tolist()) == list(range(count))


def test_random_orders_of_members_depend_on_their_own_stream_alone():
    streams = [MemberStreams(torch.device(DEVICE), seeds) for seeds in ([1, 2, 3], [2])]
    for stream in streams:
        stream.draw_ahead(2)
    for _ in range(2):
        members, alone = (rollout.permutation(1000, stream).cpu() for stream in streams)
        assert all(sorted(order.tolist()) == list(range(1000)) for order in members)
        assert members[1].equal(alone[0]) and not members[1].equal(members[0])


def test_random_orders_are_even():
    generator, count, draws = torch.Generator(DEVICE).manual_seed(0), 6, 3000 if not INTERPRETED else 300
    orders = torch.stack([rollout.permutation(count, generator) for _ in range(draws)]).cpu()
    for place in range(count):
        found = torch.bincount(orders[:, place], minlength=count).double()
        # The 99.99th percentile of chi-square with five degrees of freedom is 25.7.
        assert ((found - draws / count).square() / (draws / count)).sum() < 25.7
    # Which of two neighbours comes first, and how far apart they end up, must not depend on where they were.
    ahead = (orders[:, 1:] > orders[:, :-1]).double().mean(0)
    assert (ahead - 0.5).abs().max() < 4 * 0.5 / draws**0.5
