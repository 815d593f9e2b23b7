import math

import pytest
import torch
from torch import nn

from canter.core import distributed
from canter.core.struct import tree_copy_, tree_map
from canter.nn.optimizer import Optimizer, OptimizerConfig, ParameterGroup
from canter.nn.schedules import AdaptiveKL, Constant, Linear

NEVER = torch.tensor(False)


def two_layers(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(3, 4), nn.Linear(4, 1)


def loss_of(layers, x):
    return layers[1](torch.tanh(layers[0](x))).square().sum()


def make(layers, config, *, separate=False, clip_jointly=True):
    first, second = list(layers[0].parameters()), list(layers[1].parameters())
    groups = {"model": ParameterGroup(first + second, config)}
    if separate:
        groups = {"policy": ParameterGroup(first, config), "critic": ParameterGroup(second, config)}
    optimizer = Optimizer(groups, clip_jointly)
    return optimizer


def step(optimizer, loss, skip=NEVER):
    optimizer.backward(loss)
    return optimizer.step(skip)


def expected_after(layers, x, config, *, clip_jointly, steps):
    """torch's own AdamW and clip_grad_norm_ on a copy that is not flattened."""
    groups = [list(layer.parameters()) for layer in layers]
    everything = [p for group in groups for p in group]
    adam = torch.optim.AdamW(
        everything, config.learning_rate.initial, config.betas, config.eps, config.weight_decay, fused=False
    )
    for _ in range(steps):
        adam.zero_grad()
        loss_of(layers, x).backward()
        for clipped in [everything] if clip_jointly else groups:
            nn.utils.clip_grad_norm_(clipped, config.max_grad_norm)
        adam.step()
    return everything


@pytest.mark.parametrize("clip_jointly", [True, False])
@pytest.mark.parametrize("separate", [True, False])
def test_steps_equal_torch_adamw_with_clipped_gradients(clip_jointly, separate):
    if not (separate or clip_jointly):
        pytest.skip("one group has one norm")
    config = OptimizerConfig(learning_rate=Constant(1e-2), weight_decay=0.1, max_grad_norm=0.3)
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1)) * 3
    layers = two_layers()
    optimizer = make(layers, config, separate=separate, clip_jointly=clip_jointly)
    for _ in range(5):
        step(optimizer, loss_of(layers, x), NEVER)
    theirs = expected_after(two_layers(), x, config, clip_jointly=clip_jointly, steps=5)
    ours = [p for layer in layers for p in layer.parameters()]
    for our, their in zip(ours, theirs, strict=True):
        # torch's clip adds 1e-6 to the norm; ours does not.
        assert torch.allclose(our, their, atol=1e-6)


def test_a_blocked_step_changes_nothing_not_even_the_moments():
    layers, x = two_layers(), torch.ones(2, 3)
    optimizer = make(layers, OptimizerConfig())
    step(optimizer, loss_of(layers, x), NEVER)
    before = [p.detach().clone() for layer in layers for p in layer.parameters()]
    state = tree_map(torch.clone, optimizer.state_tensors()["model"])
    step(optimizer, loss_of(layers, x), torch.tensor(True))
    for old, layer_parameter in zip(before, [p for layer in layers for p in layer.parameters()], strict=True):
        assert torch.equal(old, layer_parameter)
    for name, value in optimizer.state_tensors()["model"].items():
        assert torch.equal(value, state[name]), name


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_a_gradient_whose_norm_is_not_finite_is_skipped_and_counted(poison):
    layers, x = two_layers(), torch.ones(2, 3)
    optimizer = make(layers, OptimizerConfig(), separate=True, clip_jointly=False)
    before = [p.detach().clone() for layer in layers for p in layer.parameters()]
    metrics = step(optimizer, loss_of(layers, x) * poison, NEVER)
    assert metrics["nonfinite_steps"].item() == 1
    for old, parameter in zip(before, [p for layer in layers for p in layer.parameters()], strict=True):
        assert torch.equal(old, parameter)
    metrics = step(optimizer, loss_of(layers, x), NEVER)
    assert metrics["nonfinite_steps"].item() == 0
    assert not torch.equal(before[0], layers[0].weight)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": Constant(0.0)}, "learning_rate=0.0 must start above 0"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"eps": 0.0}, "eps=0.0 must be above 0"),
        ({"max_grad_norm": -1.0}, "max_grad_norm=-1.0 must be above 0"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1 must not be negative"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**settings)


def test_an_exchange_weights_each_rank_by_its_samples(monkeypatch):
    """This rank has 3 samples, the other one 1: its gradient is 6 and its loss 8."""
    monkeypatch.setattr(distributed, "active", lambda: True)
    monkeypatch.setattr(distributed, "sum_", lambda flat: flat.add_(torch.tensor([6.0, 8.0, 1.0])))
    group = ParameterGroup([nn.Parameter(torch.zeros(1))], OptimizerConfig())
    group.adam.gradient.fill_(2.0)
    metrics = Optimizer({"model": group}, clip_jointly=True).exchange_({"loss": torch.tensor(0.0)}, torch.tensor(3.0))
    assert group.adam.gradient.tolist() == [(3 * 2 + 6) / 4]
    assert {name: value.item() for name, value in metrics.items()} == {"loss": 8 / 4}


def test_a_parameter_listed_twice_is_trained_once():
    layer = nn.Linear(2, 2)
    group = ParameterGroup([*layer.parameters(), *layer.parameters()], OptimizerConfig())
    assert group.adam.flat.numel() == 6


def test_policy_and_critic_can_have_schedules_of_their_own():
    layers = two_layers()
    groups = {
        "policy": ParameterGroup(
            list(layers[0].parameters()), OptimizerConfig(learning_rate=AdaptiveKL(1e-3, every="minibatch"))
        ),
        "critic": ParameterGroup(list(layers[1].parameters()), OptimizerConfig(learning_rate=Linear(1e-2))),
    }
    optimizer = Optimizer(groups, clip_jointly=False)
    optimizer.schedule_(torch.tensor(0.5))
    optimizer.observe_(torch.tensor(1.0), "minibatch")
    rates = {name: rate.item() for name, rate in optimizer.learning_rates().items()}
    assert rates == pytest.approx({"learning_rate/policy": 1e-3 / 1.5, "learning_rate/critic": 5e-3})


def test_a_restored_optimizer_continues_bit_for_bit():
    config, x = OptimizerConfig(learning_rate=AdaptiveKL(1e-3, every="minibatch")), torch.ones(2, 3)
    layers, copy = two_layers(), two_layers()
    optimizer = make(layers, config)
    for _ in range(3):
        optimizer.observe_(torch.tensor(1.0), "minibatch")
        step(optimizer, loss_of(layers, x), NEVER)
    restored = make(copy, config)
    address = restored.groups["model"].learning_rate.data_ptr()
    for layer, source in zip(copy, layers, strict=True):
        layer.load_state_dict(source.state_dict())
    tree_copy_(restored.state_tensors(), optimizer.state_tensors())
    assert restored.groups["model"].learning_rate.data_ptr() == address
    for pair in ((optimizer, layers), (restored, copy)):
        pair[0].observe_(torch.tensor(1e-3), "minibatch")
        step(pair[0], loss_of(pair[1], x))
    for layer, source in zip(copy, layers, strict=True):
        assert torch.equal(layer.weight, source.weight)
