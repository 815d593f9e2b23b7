"""Every kernel of the dispatch table against its plain function, on the same arguments; none may be without a case."""

import importlib
import itertools
import pkgutil
from dataclasses import fields, is_dataclass

import pytest
import torch
from torch import nn

import canter.functional
from canter.core.dispatch import Dispatched
from canter.engines.triton.kernels import load_kernels
from canter.functional.optimization import AdamGroup
from triton_device import DEVICE, NEEDS_DEVICE

pytest.importorskip("triton", reason="Triton comes with the GPU builds of torch")
pytestmark = NEEDS_DEVICE


def table():
    """All plain functions that have kernels in Triton, with those, by name."""
    load_kernels()
    names = [f"canter.functional.{module.name}" for module in pkgutil.iter_modules(canter.functional.__path__)]
    modules = [importlib.import_module(name) for name in (*names, "canter.nn.schedules")]
    found = {name: value for module in modules for name, value in vars(module).items() if isinstance(value, Dispatched)}
    entries = [(name, of, kernel) for name, of in found.items() for _, kernel in of.kernels]
    return {
        name: (of, kernel)
        for name, of, kernel in entries
        if kernel.__module__.startswith("canter.engines.triton.kernels")
    }


def normal(*shape):
    return torch.randn(shape, device=DEVICE)


def flags(*shape):
    return torch.rand(shape, device=DEVICE) > 0.8


def parameters(*widths):
    return [tensor for k, n in itertools.pairwise(widths) for tensor in (normal(n, k) / k**0.5, normal(n))]


def group(size, max_norm):
    flat, gradient, mean, root = normal(4, size)
    step, rate = torch.tensor([3.0, 0.01], device=DEVICE)
    return AdamGroup(
        flat, gradient, mean, root.square(), step.clone(), rate.clone(),
        betas=(0.9, 0.99), eps=1e-8, weight_decay=0.01, max_norm=max_norm,
    )  # fmt: skip


def running(*shape):
    count = torch.tensor(40.0, dtype=torch.float64, device=DEVICE)
    return count, normal(*shape).double(), normal(*shape).double().square()


def derived(running):
    """Mean, standard deviation and its inverse, as a normaliser keeps them."""
    count, mean, m2 = running
    std = (m2 / count + 1e-8).sqrt()
    return mean.float(), std.float(), (1 / std).float()


def absorbed(shape, bad=1.0):
    old, (count, mean, m2) = running(*shape), running(*shape)
    return old, (count, mean, m2 * bad), derived(old), 1e-8


def order(count, taken):
    """A stretch of a permutation, as a minibatch has it."""
    return torch.randperm(count, device=DEVICE)[3 : 3 + taken]


def tree():
    """Return leaves of several types, lengths and shapes, like a recurrent minibatch."""
    obs = {"policy": normal(5, 90, 48), "image": (50 * normal(5, 90, 3, 4, 4)).to(torch.uint8), "mask": flags(5, 90, 3)}
    scalars = {"action": torch.randint(9, (5, 90), device=DEVICE), "advantage": normal(5, 90), "valid": flags(5, 90)}
    return {**obs, **scalars, "state": (normal(1, 90, 300), (normal(1, 90, 7).double(),)), "none": None, "empty": ()}


CASES = {
    "linear_layers": [
        lambda: (normal(3, 70, 17), nn.ELU(), parameters(17, 40, 5)),
        lambda: (normal(130, 300), nn.Tanh(), parameters(300, 20)),
    ],
    "recurrent_layer": [
        lambda: (normal(4, 19, 7), nn.LSTMCell(7, 20).to(DEVICE), (normal(19, 20), normal(19, 20)), flags(4, 19)),
        lambda: (normal(1, 5, 3), nn.GRUCell(3, 6).to(DEVICE), (normal(5, 6),), None),
    ],
    "gaussian_params": [
        lambda: (normal(3, 70, 5), normal(5), -2.0, 3.0),
        lambda: (normal(1, 1), normal(1), 0.5, 1.0),
        lambda: (normal(3, 70, 5), normal(5), -2.0, 3.0, "log"),
        lambda: (normal(3, 70, 5), normal(5), -2.0, 3.0, "scalar"),
    ],
    "diag_gaussian_log_prob": [lambda: (normal(3, 70, 10), normal(3, 70, 5)), lambda: (normal(1, 2), normal(1, 1))],
    "standardize": [lambda: (9 * normal(3, 70, 5), normal(5), normal(5).abs(), 2.0)],
    "update_moments_": [
        lambda: absorbed((300,)),
        lambda: absorbed(()),
        lambda: absorbed((5,), torch.nan),
        lambda: (*absorbed((5,)), True),
    ],
    "project_distribution": [
        lambda: (normal(70, 11).softmax(-1), 3 * normal(70, 11), -2.0, 2.0),
        lambda: (normal(3, 101).softmax(-1), 3 * normal(3, 101), -2.0, 2.0),
    ],
    "batch_norm": [
        lambda: (2 + normal(2, 700, 70), normal(2, 1, 70), normal(2, 1, 70), 1e-5),
        lambda: (normal(1, 3, 1), normal(1, 1, 1), normal(1, 1, 1), 1e-5),
        lambda: (normal(40, 5).expand(2, 40, 5), normal(2, 1, 5), normal(2, 1, 5), 1e-5),
    ],
    "local_moments": [lambda: (normal(3, 700, 5), flags(3, 700)), lambda: (normal(900), flags(900))],
    "gae": [lambda: (*normal(3, 24, 70), flags(24, 70), flags(24, 70), 0.97, 0.95)],
    "follow_kl_": [lambda: (normal().abs(), normal().abs(), 0.5, 1.5, 0.1, 2.0)],
    "adam_step_": [
        lambda: ([group(3000, 1.0), group(70, 2.0)], True, torch.tensor(False, device=DEVICE)),
        lambda: ([group(3000, 1.0), group(70, 1e9)], False, torch.tensor(False, device=DEVICE)),
        lambda: ([group(3000, 1.0)], True, torch.tensor(True, device=DEVICE)),
    ],
    "take_sequences": [
        lambda: (tree(), order(90, 33)),
        lambda: (normal(1, 3000, 48), order(3000, 2500)),
        lambda: ((normal(2, 50, 1), normal(2, 50, 0)), order(50, 1)),
        lambda: (normal(2, 50, 3), order(50, 0)),
        lambda: (normal(50, 4, 3).transpose(0, 1), torch.arange(49, -1, -2, device=DEVICE)[::2]),
        lambda: ({"state": ()}, order(50, 7)),
    ],
}


def tensors(x):
    """All tensors of nested arguments or results."""
    if isinstance(x, torch.Tensor):
        return [x]
    if is_dataclass(x):
        # Whether a step leaves the gradient as it was or shortened is left open: nobody reads it again.
        x = [getattr(x, field.name) for field in fields(x) if field.name != "gradient"]
    parts = x.values() if isinstance(x, dict) else x if isinstance(x, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors(part)]


def test_every_kernel_has_a_case():
    # A random order is another one than torch's: what holds of both has a test of its own.
    assert set(CASES) | {"permutation"} == set(table())


@pytest.mark.parametrize(("name", "number"), [(name, i) for name, cases in CASES.items() for i in range(len(cases))])
def test_a_kernel_equals_its_plain_function(name, number):
    (function, kernel), results = table()[name], []
    for which in (kernel, function.plain):
        torch.manual_seed(0)
        arguments = CASES[name][number]()
        results.append((which(*arguments), arguments))
    # Arguments too: some are changed in place, and none of the others may be.
    ours, exact = (tensors(result) for result in results)
    assert [x.shape for x in ours] == [x.shape for x in exact]
    for one, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, equal_nan=True)
