"""The gradient of a gradient penalty through kernels is that of the plain functions, in float64."""

import itertools

import pytest
import torch
from torch import nn
from torch.func import functional_call

from canter.functional.densities import gaussian_params
from canter.functional.layers import batch_norm, linear_layers, recurrent_layer
from triton_device import DEVICE, NEEDS_DEVICE, relative_error

pytest.importorskip("triton", reason="Triton comes with the GPU builds of torch")
pytestmark = NEEDS_DEVICE


def penalty_gradients(function, inputs, weights, by):
    """The penalty `|d loss / d inputs[by]|^2`, for a loss that is not linear, and its gradients by all inputs."""
    inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    loss = (function(*inputs) * weights.to(inputs[0])).pow(3).sum()
    slopes = torch.autograd.grad(loss, [inputs[i] for i in by], create_graph=True)
    penalty = sum(slope.square().sum() for slope in slopes)
    return [penalty.detach(), *torch.autograd.grad(penalty, inputs, materialize_grads=True)]


def same(kernel, plain, inputs, weights, by):
    ours = penalty_gradients(kernel, inputs, weights, by)
    exact = penalty_gradients(plain, [tensor.double() for tensor in inputs], weights, by)
    for one, other in zip(ours, exact, strict=True):
        assert one.dtype == torch.float32
        assert other.norm() > 0
        assert relative_error(one, other) < 1e-5


@pytest.mark.parametrize("activation", [nn.ELU(), nn.Tanh()], ids=str)
@pytest.mark.parametrize("by", [(0,), (0, 1, 4)], ids=["input", "input_and_parameters"])
def test_through_layers(activation, by):
    from canter.engines.triton.kernels.linear import fused_layers

    parameters = []
    for width, following in itertools.pairwise((7, 20, 5)):
        parameters += [torch.randn(following, width, device=DEVICE) / width**0.5, torch.randn(following, device=DEVICE)]
    inputs, weights = [torch.randn(2, 40, 7, device=DEVICE), *parameters], torch.randn(5, device=DEVICE)
    same(
        lambda x, *own: fused_layers(x, activation, own),
        lambda x, *own: linear_layers.plain(x, activation, own),
        inputs,
        weights,
        by,
    )


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_through_a_recurrent_layer(kind):
    from canter.engines.triton.kernels.recurrent import Sequence

    cell = kind(5, 6).to(DEVICE)
    count = 2 if kind is nn.LSTMCell else 1
    names, parameters = zip(*cell.named_parameters(), strict=True)
    inputs = [torch.randn(3, 20, 5, device=DEVICE), *torch.randn(count, 20, 6, device=DEVICE).unbind(), *parameters]
    reset = torch.rand(3, 20, device=DEVICE) < 0.3

    def plain(x, *tensors):
        def run(*args):
            return functional_call(cell, dict(zip(names, tensors[count:], strict=True)), args)

        return recurrent_layer.plain(x, run, tensors[:count], reset)[-1]

    same(
        lambda x, *tensors: Sequence.apply(True, cell, x, reset, *tensors)[-1],
        plain,
        [tensor.detach() for tensor in inputs],
        torch.randn(6, device=DEVICE),
        (0, 1, count + 2),
    )


@pytest.mark.parametrize("by", [(0, 1), (1,)], ids=["mean_and_std", "std"])
def test_through_the_parameters_of_a_gaussian(by):
    from canter.engines.triton.kernels.gaussian_params import gaussian_params as fused

    # Mixed, so that the slope by each of the two depends on the other.
    mix, weights = torch.randn(6, 6, device=DEVICE), torch.randn(6, device=DEVICE)
    inputs = [torch.randn(2, 40, 3, device=DEVICE), torch.randn(3, device=DEVICE)]
    same(
        lambda mean, raw: fused(mean, raw, -1.0, 2.0) @ mix,
        lambda mean, raw: gaussian_params.plain(mean, raw, -1.0, 2.0) @ mix.to(mean),
        inputs,
        weights,
        by,
    )


def test_the_first_gradient_alone_is_the_same_with_and_without_a_graph():
    from canter.engines.triton.kernels.linear import fused_layers

    x = torch.randn(40, 7, device=DEVICE, requires_grad=True)
    own = [torch.randn(5, 7, device=DEVICE), torch.randn(5, device=DEVICE)]
    found = [
        torch.autograd.grad(fused_layers(x, nn.ELU(), own).square().sum(), x, create_graph=graph)[0]
        for graph in (False, True)
    ]
    torch.testing.assert_close(*found)


def test_through_a_batch_norm():
    from canter.engines.triton.kernels.sac import fused_batch_norm

    inputs = [torch.randn(2, 40, 7, device=DEVICE), *torch.randn(2, 2, 1, 7, device=DEVICE).unbind()]
    same(
        lambda *own: fused_batch_norm(*own, 1e-2)[0],
        lambda *own: batch_norm.plain(*own, 1e-2)[0],
        inputs,
        torch.randn(2, 40, 7, device=DEVICE),
        (0, 1),
    )
