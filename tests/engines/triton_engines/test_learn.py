"""Whole networks in one launch, and a whole minibatch, against the plain functions, in float64."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from canter.functional.losses import SURROGATES, VALUE_LOSSES
from canter.functional.statistics import masked_mean
from canter.nn.distributions import DiagGaussian, MultiCategorical, TanhGaussian
from canter.nn.heads import LogStd, StdConfig
from triton_device import DEVICE, NEEDS_DEVICE, relative_error

pytestmark = NEEDS_DEVICE
KINDS = {"elu": 1, "relu": 2, "tanh": 3}
ACTIVATIONS = {"elu": F.elu, "relu": torch.relu, "tanh": torch.tanh}


def parameters(widths):
    shapes = list(itertools.pairwise(widths))
    weights = [torch.randn(n, k, device=DEVICE) / k**0.5 for k, n in shapes]
    return weights, [torch.randn(n, device=DEVICE) * 0.1 for _, n in shapes]


def plain(x, weights, biases, activation):
    for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
        x = ACTIVATIONS[activation](F.linear(x, weight, bias))
    return F.linear(x, weights[-1], biases[-1])


@pytest.mark.parametrize(
    ("widths", "activation"),
    [((48, 256, 128, 64, 12), "elu"), ((3, 7, 1), "tanh"), ((17, 40, 24, 5), "relu"), ((5, 2), "elu")],
)
def test_a_network(widths, activation):
    from canter.engines.triton.chain import Layers

    weights, biases = parameters(widths)
    network, x = Layers(weights, biases, KINDS[activation]), torch.randn(300, widths[0], device=DEVICE)
    assert network.fits
    exact = plain(x.double(), [w.double() for w in weights], [b.double() for b in biases], activation)
    assert relative_error(network(x), exact) < 2e-6
    needed = torch.arange(300, device=DEVICE) == 70
    assert torch.equal(network(x, needed)[70], network(x)[70])


def test_a_network_too_wide_is_left_to_others():
    from canter.engines.triton.chain import Layers

    assert Layers(*parameters((48, 256, 128, 64, 12)), KINDS["elu"]).fits
    assert Layers(*parameters((48, 512, 256, 128, 12)), KINDS["elu"]).fits
    assert not Layers(*parameters((48, 512, 300, 128, 12)), KINDS["elu"]).fits
    assert not Layers(*parameters((300, 64, 64, 12)), KINDS["elu"]).fits


def distribution_of(kind, dim):
    if kind == "gaussian":
        return DiagGaussian(dim)
    return TanhGaussian((-1.0,) * dim, (2.0,) * dim) if kind == "tanh" else MultiCategorical((2, dim - 2))


def params_of(distribution, columns, raw):
    """Parameters from the network's columns and, of a Gaussian, the learned numbers of the std."""
    if isinstance(distribution, MultiCategorical):
        return columns
    return torch.cat([columns, LogStd(StdConfig())(raw).expand_as(columns)], -1)


def minibatch(sequences, networks, raw, activation, distribution):
    """Rows of a rollout, as PPO has them; one that is not valid holds what must not count."""
    inputs = torch.randn(2, sequences, networks[0][0][0].shape[1], device=DEVICE)
    mean, value = (plain(x, *network, activation) for x, network in zip(inputs, networks, strict=True))
    params = params_of(distribution, mean, raw)
    old = params + 0.1 * torch.randn_like(params)
    advantage, spread, error = torch.randn(3, sequences, device=DEVICE).unbind()
    old_value, valid = value.squeeze(-1) + 0.3 * spread, torch.rand(sequences, device=DEVICE) > 0.3
    advantage[~valid] = 1e3
    return [*inputs.unbind(), distribution.sample(old), old, advantage, old_value, old_value + error, valid]


def exact_terms(rows, networks, raw, activation, value_clip, distribution):
    """Means of all terms in float64, and the gradients of all parameters."""
    actor_x, critic_x, action, old, advantage, old_value, return_, valid = rows
    leaves = [[[p.double().requires_grad_() for p in kind] for kind in network] for network in networks]
    raw = raw.double().requires_grad_()
    params = params_of(distribution, plain(actor_x, *leaves[0], activation), raw)
    value = plain(critic_x, *leaves[1], activation).squeeze(-1)
    old_log_prob, log_prob = distribution.log_prob(old, action), distribution.log_prob(params, action)
    terms = [
        SURROGATES["clipped"](log_prob, old_log_prob, advantage, 0.2),
        VALUE_LOSSES["mse" if value_clip is None else "clipped"](value, old_value, return_, value_clip or 0.0),
        distribution.entropy(params),
        distribution.kl(old, params),
        ((torch.exp(log_prob - old_log_prob) - 1).abs() > 0.2).double(),
    ]
    means = masked_mean(torch.stack(terms), valid)
    flat = [raw, *(p for network in leaves for kind in network for p in kind)]
    loss = means[0] + 0.7 * means[1] - 0.013 * means[2]
    return means, torch.autograd.grad(loss, flat, allow_unused=True)


@pytest.mark.parametrize(
    ("kind", "hidden", "dim", "value_clip", "activation", "precision"),
    [
        ("gaussian", (64, 32, 16), 12, None, "elu", "highest"),
        ("gaussian", (20,), 1, 0.2, "tanh", "highest"),
        ("gaussian", (24, 40), 3, None, "relu", "highest"),
        ("gaussian", (256, 128, 64), 12, 0.2, "elu", "high"),
        ("gaussian", (512, 256, 128), 12, 0.2, "elu", "high"),
        ("tanh", (24, 40), 3, None, "relu", "highest"),
        ("discrete", (24, 40), 7, 0.2, "tanh", "highest"),
    ],
)
def test_a_minibatch_and_all_its_gradients(kind, hidden, dim, value_clip, activation, precision):
    from canter.engines.triton.chain import Layers
    from canter.engines.triton.learn import COUNT, Learner, Samples
    from canter.engines.triton.policies import Bound, policy_of

    torch.set_float32_matmul_precision(precision)
    tolerance = 1e-5 if precision == "highest" else 3e-2
    networks = [parameters((48, *hidden, out)) for out in (dim, 1)]
    distribution, bound, places, count = distribution_of(kind, dim), LogStd(StdConfig()), {}, 0
    raw = torch.randn(0 if kind == "discrete" else dim, device=DEVICE)
    rows, index = minibatch(500, networks, raw, activation, distribution), torch.randperm(500, device=DEVICE)[:270]
    flat = [raw, *(p for network in networks for kind in network for p in kind)]
    for parameter in flat:
        places[parameter], count = count, count + parameter.numel()
    layers = [Layers(*network, KINDS[activation]) for network in networks]
    learner = Learner(
        *layers, raw, policy=policy_of(distribution), std=(bound.mid, bound.half_range, "bounded"),
        bound=Bound(0, 0.0, 0.0, raw[:0]),
        clip_ratio=0.2, value_clip=value_clip, value_coef=0.7, places=places, count=count,
    )  # fmt: skip
    scales = torch.tensor([3.0, 0.5], device=DEVICE)
    sums, parts = learner(Samples(*rows, scales), index, torch.tensor(0.013, device=DEVICE))
    gradient = torch.full((count,), torch.nan, device=DEVICE)
    found = learner.products.add_up(parts, sums, sums[COUNT], gradient)
    assert sums[COUNT].sum() == rows[-1][index].sum()
    picked = [(row.double() if row.is_floating_point() else row)[index] for row in rows]
    means, gradients = exact_terms(picked, networks, raw, activation, value_clip, distribution)
    assert relative_error(found[:5], means) < tolerance
    for ours, exact in zip(gradient.split([p.numel() for p in flat]), gradients, strict=True):
        assert ours.numel() == 0 or relative_error(ours, exact.flatten()) < tolerance
