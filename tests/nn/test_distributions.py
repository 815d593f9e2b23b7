import math

import pytest
import torch
import torch.distributions as td
from torch import Tensor

from canter.core.specs import Continuous
from canter.nn.actor_critic import make_distribution
from canter.nn.distributions import Beta, Categorical, DiagGaussian, MultiCategorical, TanhGaussian, mask_logits

LOW, HIGH = (-1.0, 0.0, -3.0), (1.0, 10.0, -1.0)
CONTINUOUS = [DiagGaussian(3, LOW, HIGH), TanhGaussian(LOW, HIGH), Beta(LOW, HIGH)]
DISCRETE = [Categorical(5), MultiCategorical((2, 3, 4))]
ALL = CONTINUOUS + DISCRETE


def name_of(value) -> str:
    return type(value).__name__


each = pytest.mark.parametrize("dist", ALL, ids=name_of)
each_continuous = pytest.mark.parametrize("dist", CONTINUOUS, ids=name_of)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_params(dist, rows: int = 6, seed: int = 0, dtype=torch.float64) -> Tensor:
    return 0.7 * torch.randn(rows, dist.param_dim, generator=generator(seed), dtype=dtype)


def torch_twin(dist, params: Tensor) -> td.Distribution:
    """The same distribution over stored actions by torch.distributions."""
    first, second = params.chunk(2, -1) if not isinstance(dist, Categorical | MultiCategorical) else (params, params)
    match dist:
        case DiagGaussian() | TanhGaussian():
            return td.Independent(td.Normal(first, second.exp()), 1)
        case Beta():
            softplus = torch.nn.functional.softplus
            return td.Independent(td.Beta(1 + softplus(first), 1 + softplus(second)), 1)
        case Categorical():
            return td.Categorical(logits=params)
    raise AssertionError(dist)


def density_factor(dist, action: Tensor) -> Tensor:
    """Log-derivative of the environment's action by the stored one, by autograd; none for the raw Gaussian."""
    if isinstance(dist, DiagGaussian):
        return torch.zeros(action.shape[:-1], dtype=action.dtype)
    action = action.detach().requires_grad_()
    (slope,) = torch.autograd.grad(dist.to_env(action).sum(), action)
    return slope.log().sum(-1)


@pytest.mark.parametrize("dist", [*CONTINUOUS, DISCRETE[0]], ids=name_of)
def test_log_prob_matches_torch_and_the_change_of_variables(dist):
    params = random_params(dist)
    action = dist.sample(params, generator())
    expected = torch_twin(dist, params).log_prob(action)
    if not isinstance(dist, Categorical):
        expected = expected - density_factor(dist, action)
    torch.testing.assert_close(dist.log_prob(params, action), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", ["gaussian", "tanh_gaussian", "beta"])
@pytest.mark.parametrize("raw", [(0.0, 0.0), (0.8, -1.0), (-1.5, 0.5)])
def test_density_of_the_environment_action_integrates_to_one(kind, raw):
    dist = make_distribution(Continuous((-2.0,), (5.0,)), kind, bounds="none")
    stored = torch.linspace(1e-6, 1 - 1e-6, 400_001, dtype=torch.float64)
    if kind != "beta":
        stored = 40.0 * (stored - 0.5)
    action = stored.unsqueeze(-1)
    density = dist.log_prob(torch.tensor(raw, dtype=torch.float64).expand(len(action), 2), action).exp()
    assert torch.trapezoid(density, dist.to_env(action).squeeze(-1)).item() == pytest.approx(1.0, abs=1e-4)


def test_gaussian_by_hand():
    dist = DiagGaussian(2)
    params = torch.tensor([1.0, 0.0, 0.0, math.log(2.0)])
    # One standard deviation off in the first component, none in the second: -1/2 - log 2 - log(2 pi).
    log_prob = dist.log_prob(params, torch.tensor([2.0, 0.0])).item()
    assert log_prob == pytest.approx(-0.5 - math.log(2.0) - math.log(2.0 * math.pi), rel=1e-6)
    assert dist.entropy(params).item() == pytest.approx(math.log(2.0 * math.pi * math.e) + math.log(2.0), rel=1e-6)
    assert torch.equal(dist.std(params), torch.tensor([1.0, 2.0]))


def test_multi_categorical_is_the_sum_of_its_heads():
    dist = MultiCategorical((2, 3, 4))
    p, q = random_params(dist), random_params(dist, seed=1)
    action = dist.sample(p, generator())
    heads = [Categorical(n) for n in dist.nvec]
    split_p, split_q = p.split(dist.nvec, -1), q.split(dist.nvec, -1)
    log_prob = sum(
        head.log_prob(logits, action[:, k]) for k, (head, logits) in enumerate(zip(heads, split_p, strict=True))
    )
    entropy = sum(head.entropy(logits) for head, logits in zip(heads, split_p, strict=True))
    kl = sum(head.kl(a, b) for head, a, b in zip(heads, split_p, split_q, strict=True))
    torch.testing.assert_close(dist.log_prob(p, action), log_prob)
    torch.testing.assert_close(dist.entropy(p), entropy)
    torch.testing.assert_close(dist.kl(p, q), kl)
    assert torch.equal(dist.mode(p), torch.stack([logits.argmax(-1) for logits in split_p], -1))


@pytest.mark.parametrize("dist", [CONTINUOUS[0], CONTINUOUS[2], DISCRETE[0]], ids=name_of)
def test_entropy_matches_torch(dist):
    params = random_params(dist)
    stretch = sum(math.log(hi - lo) for lo, hi in zip(LOW, HIGH, strict=True)) if isinstance(dist, Beta) else 0.0
    torch.testing.assert_close(dist.entropy(params), torch_twin(dist, params).entropy() + stretch)


@pytest.mark.parametrize(("std", "tolerance"), [(0.05, 2e-5), (0.5, 2e-5), (1.0, 2e-5), (2.0, 2e-4), (3.0, 2e-4)])
def test_tanh_gaussian_entropy_is_as_accurate_as_it_says(std, tolerance):
    dist = TanhGaussian((-2.0,), (5.0,))
    z = torch.linspace(-12, 12, 100_001, dtype=torch.float64)
    weight = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    for mean in (0.0, 0.3, 1.0, 2.5, 6.0):
        params = torch.tensor([mean, math.log(std)], dtype=torch.float64)
        log_prob = dist.log_prob(params.expand(len(z), 2), (mean + std * z).unsqueeze(-1))
        exact = -torch.trapezoid(weight * log_prob, z).item()
        assert dist.entropy(params).item() == pytest.approx(exact, abs=tolerance)
        assert dist.entropy(params.float()).item() == pytest.approx(exact, abs=tolerance + 1e-5)


@each
def test_entropy_is_the_mean_of_minus_log_prob(dist):
    params = random_params(dist, rows=1).expand(200_000, -1)
    log_prob = dist.log_prob(params, dist.sample(params, generator()))
    error = 5.0 * log_prob.std().item() / math.sqrt(len(params))
    assert -log_prob.mean().item() == pytest.approx(dist.entropy(params[0]).item(), abs=error)


@pytest.mark.parametrize("dist", [*CONTINUOUS, DISCRETE[0]], ids=name_of)
def test_kl_matches_torch(dist):
    p, q = random_params(dist), random_params(dist, seed=1)
    expected = td.kl_divergence(torch_twin(dist, p), torch_twin(dist, q))
    torch.testing.assert_close(dist.kl(p, q), expected)


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kl_of_a_distribution_with_itself_is_exactly_zero(dist, dtype):
    params = 3.0 * random_params(dist, rows=100, dtype=dtype)
    assert torch.equal(dist.kl(params, params), torch.zeros(100, dtype=dtype))


@each
def test_kl_keeps_its_digits_in_float32_when_policies_are_close(dist):
    p = random_params(dist)
    q = p + 0.05 * random_params(dist, seed=1)
    torch.testing.assert_close(dist.kl(p.float(), q.float()).double(), dist.kl(p, q), rtol=1e-3, atol=3e-7)


@each
def test_the_exact_kl_agrees_with_an_estimate_from_samples(dist):
    """The mean of (r - 1) - log r with r = new / old, over actions of the old policy."""
    p, q = random_params(dist, rows=1), random_params(dist, rows=1) + 0.1 * random_params(dist, rows=1, seed=1)
    many = p.expand(200_000, -1)
    action = dist.sample(many, generator())
    log_ratio = dist.log_prob(q.expand_as(many), action) - dist.log_prob(many, action)
    assert (log_ratio.expm1() - log_ratio).mean().item() == pytest.approx(dist.kl(p, q).item(), rel=0.1)


# Sampling.


@each
def test_sampling_is_reproduced_by_the_generator(dist):
    params = random_params(dist, rows=50, dtype=torch.float32)
    first, again, other = (dist.sample(params, generator(seed)) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@each
def test_score_has_mean_zero_under_the_policy(dist):
    """E[grad log pi] = 0 holds only if the log-probability is that of the very action that was drawn."""
    params = random_params(dist, rows=1)
    many = params.expand(200_000, -1).clone().requires_grad_()
    dist.log_prob(many, dist.sample(many.detach(), generator())).sum().backward()
    error = many.grad.std(0) / math.sqrt(len(many))
    assert (many.grad.mean(0).abs() < 5.0 * error).all()


@each_continuous
def test_samples_have_the_mean_and_std_of_the_distribution(dist):
    params = random_params(dist, rows=1)
    stored = dist.sample(params.expand(200_000, -1), generator())
    twin = torch_twin(dist, params)
    torch.testing.assert_close(stored.mean(0), twin.mean[0], rtol=0, atol=0.02)
    torch.testing.assert_close(stored.std(0), twin.stddev[0], rtol=0.02, atol=0)
    torch.testing.assert_close(dist.std(params), twin.stddev)


def test_choices_are_drawn_with_their_probabilities():
    logits = torch.log(torch.tensor([0.1, 0.2, 0.7])).expand(200_000, 3)
    frequency = torch.bincount(Categorical(3).sample(logits, generator()), minlength=3) / 200_000
    torch.testing.assert_close(frequency, torch.tensor([0.1, 0.2, 0.7]), rtol=0, atol=0.005)


def test_gaussian_sample_is_mean_plus_std_times_noise_bit_for_bit():
    params = random_params(DiagGaussian(3), dtype=torch.float32)
    mean, log_std = params[:, :3], params[:, 3:]
    expected = mean + torch.exp(log_std) * torch.randn(mean.shape, generator=generator(7))
    assert torch.equal(DiagGaussian(3).sample(params, generator(7)), expected)


def test_categorical_sample_is_gumbel_max_bit_for_bit():
    logits = random_params(Categorical(5), rows=1000, dtype=torch.float32)
    uniform = torch.rand(logits.shape, generator=generator(7)).clamp(2.0**-126, 1.0 - 2.0**-24)
    expected = (logits - torch.log(-torch.log(uniform))).argmax(-1)
    assert torch.equal(Categorical(5).sample(logits, generator(7)), expected)


@pytest.mark.parametrize("edge", [0.0, 1.0])
def test_uniform_draws_at_the_edge_of_their_interval_do_no_harm(edge, monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda shape, **kwargs: torch.full(shape, edge))
    logits = mask_logits(torch.tensor([0.0, 1.0, 0.5]), torch.tensor([True, True, False]))
    assert Categorical(3).sample(logits).item() == 1


@each
def test_actions_have_the_documented_shape_and_dtype(dist):
    params = random_params(dist, rows=6, dtype=torch.float32).reshape(2, 3, -1)
    for action in (dist.sample(params, generator()), dist.mode(params)):
        assert action.shape == {Categorical: (2, 3)}.get(type(dist), (2, 3, 3))
        assert action.dtype == (torch.int64 if dist in DISCRETE else torch.float32)
        for result in (dist.log_prob(params, action), dist.entropy(params), dist.kl(params, params)):
            assert result.shape == (2, 3) and result.dtype == torch.float32


# Mode and the environment's action.


@each
def test_mode_is_the_likeliest_stored_action(dist):
    params = random_params(dist)
    mode = dist.mode(params)
    stored = [mode, *(dist.sample(params, generator(seed)) for seed in range(50))]
    if isinstance(dist, MultiCategorical):
        log_prob = [dist.log_prob(params, action) for action in stored]
    else:
        log_prob = [torch_twin(dist, params).log_prob(action) for action in stored]
    assert all((log_prob[0] >= other - 1e-12).all() for other in log_prob[1:])


def test_beta_mode_by_hand():
    raw = math.log(math.e - 1.0)  # softplus gives 1: alpha = 2
    dist = Beta((0.0,), (1.0,))
    assert dist.mode(torch.tensor([raw, raw])).item() == pytest.approx(0.5)
    assert dist.mode(torch.tensor([raw, math.log(math.exp(3.0) - 1.0)])).item() == pytest.approx(0.25)
    flat = torch.tensor([-200.0, -200.0])  # alpha = beta = 1: uniform
    assert dist.mode(flat).item() == 0.5
    assert dist.entropy(flat).item() == pytest.approx(0.0, abs=1e-12)


INF = math.inf


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [("none", [0.5, 3.0, -9.0, 9.0]), ("clip", [0.5, 2.0, -9.0, 4.0]), ("rescale", [3.0, 2.0, -9.0, 4.0])],
)
def test_gaussian_handles_bounds_as_configured(bounds, expected):
    dist = DiagGaussian(4, (0.0, -2.0, -INF, -INF), (4.0, 2.0, INF, 4.0), bounds)
    action = torch.tensor([[0.5, 3.0, -9.0, 9.0]])
    assert torch.equal(dist.to_env(action), torch.tensor([expected]))


def test_gaussian_without_bounds_sends_the_sample_itself():
    action = torch.tensor([[-5.0, 7.0]])
    for bounds in ("rescale", "clip", "none"):
        assert torch.equal(DiagGaussian(2, bounds=bounds).to_env(action), action)


@each_continuous
def test_environment_actions_stay_within_float32_bounds(dist):
    low, high = (-0.1, 1e-3, -7.7), (0.3, 123.4, 1e-7)
    dist = DiagGaussian(3, low, high) if isinstance(dist, DiagGaussian) else type(dist)(low, high)
    params = 4.0 * random_params(dist, rows=20_000, dtype=torch.float32)
    action = dist.to_env(dist.sample(params, generator()))
    assert (action >= torch.tensor(low)).all() and (action <= torch.tensor(high)).all()


def test_squashed_actions_reach_from_low_to_high():
    ends = torch.tensor([[-30.0] * 3, [0.0] * 3, [30.0] * 3])
    expected = torch.tensor([LOW, [0.0, 5.0, -2.0], HIGH])
    assert torch.equal(TanhGaussian(LOW, HIGH).to_env(ends), expected)
    assert torch.equal(Beta(LOW, HIGH).to_env(torch.tensor([[0.5] * 3])), expected[1:2])


def test_beta_keeps_its_digits_in_float32_at_large_concentrations():
    dist = Beta((0.0,), (1.0,))
    p, q = torch.tensor([5000.0, 4000.0]).double(), torch.tensor([5010.0, 4100.0]).double()
    action = torch.tensor([0.5]).double()
    for result, exact in (
        (dist.log_prob(p.float(), action.float()), dist.log_prob(p, action)),
        (dist.entropy(p.float()), dist.entropy(p)),
        (dist.kl(p.float(), q.float()), dist.kl(p, q)),
    ):
        assert result.item() == pytest.approx(exact.item(), rel=1e-6)


# Masks.


def test_masked_choices_have_no_probability_no_entropy_and_no_gradient():
    dist, mask = Categorical(4), torch.tensor([True, False, True, False])
    raw = torch.tensor([0.0, 50.0, 0.0, 1.0], requires_grad=True)
    logits = mask_logits(raw, mask)
    assert torch.equal(logits.softmax(-1), torch.tensor([0.5, 0.0, 0.5, 0.0]))
    assert dist.entropy(logits).item() == pytest.approx(math.log(2.0))
    (dist.log_prob(logits, torch.tensor(0)) + dist.entropy(logits) + dist.kl(logits, 0.5 * logits)).backward()
    assert raw.grad is not None and raw.grad.isfinite().all()
    assert torch.equal(raw.grad[~mask], torch.zeros(2))


def test_masked_choices_leave_kl_finite():
    dist = Categorical(3)
    p = mask_logits(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([True, True, False]))
    q = mask_logits(torch.tensor([0.0, 0.0, 2.0]), torch.tensor([True, True, False]))
    assert dist.kl(p, q).item() == pytest.approx(Categorical(2).kl(p[:2], q[:2]).item())
    assert dist.log_prob(p, torch.tensor(2)).isfinite()


@pytest.mark.parametrize("dist", DISCRETE, ids=name_of)
def test_masked_choices_are_never_drawn(dist):
    params = 20.0 * random_params(dist, rows=100_000, dtype=torch.float32)
    mask = torch.rand(params.shape, generator=generator(5)) < 0.3
    heads = mask.split(list(getattr(dist, "nvec", (5,))), -1)
    for head in heads:
        head[:, 0] = True  # one allowed choice at least
    logits = mask_logits(params, mask)
    for action in (dist.sample(logits, generator()), dist.mode(logits)):
        action = action.reshape(len(action), -1)
        assert all(head.gather(-1, action[:, k : k + 1]).all() for k, head in enumerate(heads))


# Extremes.


@each_continuous
@pytest.mark.parametrize("extreme", [-30.0, -8.0, 8.0, 30.0])
def test_gradients_stay_finite_at_extreme_parameters(dist, extreme):
    params = torch.zeros(64, dist.param_dim)
    params[:, :3] = extreme
    params[:, 3:] = -10.0 if extreme < 0 else 3.0
    params.requires_grad_()
    action = dist.sample(params.detach(), generator())
    (dist.log_prob(params, action) + dist.entropy(params) + dist.kl(params, 0.9 * params.detach())).sum().backward()
    assert params.grad is not None and params.grad.isfinite().all()


def test_tanh_log_prob_is_finite_where_the_squashed_action_has_saturated():
    dist = TanhGaussian((-1.0,), (1.0,))
    params, action = torch.tensor([50.0, 0.0]), torch.tensor([50.0])
    # Density of u is 1 / sqrt(2 pi); the slope of tanh there is 4 exp(-2 u).
    expected = -0.5 * math.log(2 * math.pi) - math.log(4.0) + 100.0
    assert dist.log_prob(params, action).item() == pytest.approx(expected, rel=1e-6)


def test_constants_made_for_inference_serve_training_too():
    dist = TanhGaussian((-1.25, 0.5), (2.5, 7.75))
    params = torch.zeros(4, requires_grad=True)
    with torch.inference_mode():
        dist.entropy(params), dist.to_env(params[:2])
    (dist.entropy(params) + dist.to_env(params[:2]).sum()).backward()
    assert params.grad is not None and params.grad.isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@each
def test_everything_can_be_captured_in_a_cuda_graph(dist):
    source = torch.Generator("cuda").manual_seed(0)
    params = random_params(dist, rows=64, dtype=torch.float32).cuda()

    def step() -> tuple[Tensor, ...]:
        action = dist.sample(params, source)
        return action, dist.to_env(action), dist.log_prob(params, action), dist.entropy(params), dist.kl(params, params)

    step()
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(source)
    with torch.cuda.graph(graph):
        results = step()
    graph.replay()
    first = results[0].clone()
    graph.replay()
    assert not torch.equal(results[0], first)
    torch.testing.assert_close(results[2], dist.log_prob(params, results[0]))
