import math

import pytest
import torch

from canter.nn.heads import GaussianHead, LinearHead, LogStd, StdConfig, ValueHead, ValueNormalizerConfig


@pytest.mark.parametrize("kind", ["parameter", "network"])
def test_a_gaussian_starts_at_its_initial_std(kind):
    head = GaussianHead(4, 3, StdConfig(kind=kind, initial=0.3), "orthogonal", 0.01)
    params = head(torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), None)
    assert params.shape == (5, 6)
    assert torch.allclose(params[:, 3:].exp(), torch.tensor(0.3), atol=0.01 if kind == "network" else 1e-5)


@pytest.mark.parametrize("form", ["bounded", "tanh", "log", "scalar", "softplus"])
def test_a_floor_is_added_to_the_std_and_counts_in_its_start(form):
    head = GaussianHead(4, 3, StdConfig(form=form, initial=0.3, floor=0.1), "orthogonal", 0.01)
    torch.testing.assert_close(head(torch.randn(5, 4), None)[:, 3:].exp(), torch.full((5, 3), 0.3))
    raw = torch.tensor([-30.0, 0.25, 2.0])
    plain = LogStd(StdConfig(form=form, initial=0.2))
    torch.testing.assert_close(head.log_std(raw).exp(), 0.1 + plain(raw).exp())


def test_a_linear_std_is_the_number_itself_well_above_its_floor():
    head = GaussianHead(4, 3, StdConfig(form="linear", initial=0.3, floor=0.1), "orthogonal", 0.01)
    torch.testing.assert_close(head(torch.randn(5, 4), None)[:, 3:].exp(), torch.full((5, 3), 0.3))
    std = head.log_std(torch.tensor([-30.0, 20.0])).exp()
    torch.testing.assert_close(std, torch.tensor([0.1, 20.0]))


def test_a_std_that_does_not_learn_is_no_parameter_but_is_saved():
    frozen, other = (GaussianHead(4, 2, StdConfig(initial=std, learn=False), "orthogonal", 0.01) for std in (0.3, 0.7))
    assert [name for name, _ in frozen.named_parameters()] == ["mean.weight", "mean.bias"]
    other.load_state_dict(frozen.state_dict())
    torch.testing.assert_close(other(torch.zeros(1, 4), None)[:, 2:].exp(), torch.full((1, 2), 0.3))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"floor": 1.0}, "floor=1.0"),
        ({"floor": 0.995}, "without the floor"),
        ({"learn": False, "kind": "network"}, "kind=parameter"),
        ({"form": "linear"}, "form=linear needs a floor"),
    ],
)
def test_a_std_that_cannot_be_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        StdConfig(**settings)


def test_log_std_stays_within_bounds_and_keeps_a_gradient_at_both():
    bound = LogStd(StdConfig(minimum=0.01, maximum=10.0))
    raw = torch.tensor([-1e3, -50.0, 0.0, 50.0, 1e3], requires_grad=True)
    log_std = bound(raw)
    assert (log_std.exp() >= 0.01 * (1 - 1e-6)).all()
    assert (log_std.exp() <= 10.0 * (1 + 1e-6)).all()
    (slope,) = torch.autograd.grad(log_std.sum(), raw)
    assert (slope > 0).all()


@pytest.mark.parametrize("direction", [-1.0, pytest.param(1.0, marks=pytest.mark.long)])
def test_a_std_driven_to_its_bound_for_long_comes_back(direction):
    bound = LogStd(StdConfig())
    raw = torch.nn.Parameter(torch.zeros(1))
    adam = torch.optim.Adam([raw], lr=5e-2)

    def push(sign, steps):
        for _ in range(steps):
            adam.zero_grad()
            (-sign * bound(raw)).sum().backward()
            adam.step()
        return bound(raw).exp().item()

    extreme = push(direction, 2_000)
    assert 0.01 < extreme < 10.0
    assert extreme < 0.02 or extreme > 5.0
    back = push(-direction, 2_400)
    assert math.log(back / extreme) * -direction > 1.0


@pytest.mark.parametrize("form", ["bounded", "tanh", "log", "scalar", "softplus"])
@pytest.mark.parametrize("initial", [0.05, 1.0, 4.0])
def test_every_std_parameterisation_starts_at_its_initial_value(form, initial):
    std = LogStd(StdConfig(form=form, initial=initial))
    assert std(torch.tensor(std.initial)).exp().item() == pytest.approx(initial, rel=1e-5)


def test_a_std_that_is_the_number_itself_stops_above_zero():
    raw = torch.tensor([-1.0, 1e-7, 0.5], requires_grad=True)
    log_std = LogStd(StdConfig(form="scalar"))(raw)
    assert torch.allclose(log_std.exp(), torch.tensor([1e-6, 1e-6, 0.5]))
    assert torch.autograd.grad(log_std.sum(), raw)[0].tolist() == [0.0, 0.0, 2.0]


def test_std_bounds_that_do_not_hold_the_initial_value_are_refused():
    with pytest.raises(ValueError, match=r"initial=0\.001"):
        StdConfig(initial=0.001)


def test_forbidden_choices_get_no_probability():
    head = LinearHead(4, 3, "orthogonal", 1.0)
    mask = torch.tensor([[True, False, True]])
    probabilities = torch.softmax(head(torch.ones(1, 4), mask), -1).detach()
    assert probabilities[0, 1] == 0
    assert probabilities.sum() == pytest.approx(1.0)


def test_moving_value_statistics_moves_no_prediction():
    generator = torch.Generator().manual_seed(0)
    head = ValueHead(8, "orthogonal", 1.0, ValueNormalizerConfig())
    features = torch.randn(50, 8, generator=generator)
    for scale in (3.0, 500.0, 40.0):
        before = head.normalizer.inverse(head(features)).detach()
        head.update_statistics(torch.randn(200, generator=generator) * scale + 7 * scale, torch.ones(200) > 0)
        after = head.normalizer.inverse(head(features)).detach()
        assert (after - before).abs().max() <= 1e-5 * after.abs().max().clamp(min=scale)


def test_without_rescaling_predictions_move_with_the_statistics():
    head = ValueHead(8, "orthogonal", 1.0, ValueNormalizerConfig(rescale=False))
    weight, return_ = head.linear.weight.clone(), torch.tensor([3.0, 7.0])
    value, normalised = head.update_and_normalize(torch.zeros(2), return_, torch.ones(2) > 0)
    assert torch.equal(head.linear.weight, weight)
    assert torch.allclose(normalised, torch.tensor([-1.0, 1.0]))
    assert torch.allclose(value, torch.tensor([-2.5, -2.5]))  # mean 5, deviation 2


def test_values_may_be_counted_before_the_returns():
    head = ValueHead(8, "orthogonal", 1.0, ValueNormalizerConfig(rescale=False, of="values_and_returns"))
    value, return_ = torch.tensor([0.0, 2.0]), torch.tensor([4.0, 6.0])
    normalised_value, normalised = head.update_and_normalize(value, return_, torch.ones(2) > 0)
    assert torch.allclose(normalised_value, torch.tensor([-1.0, 1.0]))  # by mean 1, deviation 1
    assert torch.allclose(normalised, (return_ - 3.0) / 5**0.5)  # by those of all four


@pytest.mark.parametrize(("normalizer", "std"), [(ValueNormalizerConfig(), 2.0), (None, 1.0)])
def test_a_shift_is_in_the_units_of_the_reward(normalizer, std):
    head = ValueHead(8, "orthogonal", 1.0, normalizer)
    head.update_statistics(torch.tensor([3.0, 7.0]), torch.ones(2) > 0)  # std 2
    features = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    normalised = head(features).detach()
    before = head.normalizer.inverse(normalised)
    head.shift_(torch.tensor(6.0))
    torch.testing.assert_close(head(features), normalised + 6.0 / std)
    torch.testing.assert_close(head.normalizer.inverse(head(features)), before + 6.0)


def test_a_clip_of_values_that_are_to_be_rescaled_is_refused():
    with pytest.raises(ValueError, match=r"clip=5\.0 .* rescale"):
        ValueNormalizerConfig(clip=5.0)


def test_value_head_without_normalisation_ignores_statistics():
    head = ValueHead(8, "orthogonal", 1.0, None)
    weight = head.linear.weight.clone()
    head.update_statistics(torch.arange(10.0), torch.ones(10) > 0)
    assert torch.equal(head.linear.weight, weight)
