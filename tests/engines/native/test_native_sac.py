"""SAC's gradients in C against the learner's own: whole updates, every setting, odd sizes, any number of threads."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from canter.algorithms.sac import SACConfig, TemperatureConfig
from canter.algorithms.sac.learner import SACLearner
from canter.core import distributed
from canter.core.data.replay import ReplayBatch, ReplayConfig
from canter.core.hints import config_keys
from canter.core.specs import Continuous, EnvSpec, TensorSpec
from canter.engines.base import unsupported_reason
from canter.engines.native import AVAILABLE, compiled
from canter.engines.native.sac import NativeSACEngine
from canter.nn.cnn import CNNConfig
from canter.nn.heads import StdConfig
from canter.nn.network import NetworkConfig
from canter.nn.normalizer import NormalizerConfig
from canter.nn.optimizer import OptimizerConfig
from canter.nn.schedules import Constant, Linear, StepAt
from canter.nn.stack import CriticConfig, StackNetworkConfig

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="there was no C compiler")

POLICY = NetworkConfig(hidden=(17, 9), activation="relu", init="default", normalize_obs=False)
CRITIC = CriticConfig(hidden=(19, 12))
BASE = SACConfig(policy=POLICY, critic=CRITIC, replay=ReplayConfig(capacity=100), warmup_steps=0)
GROUPS = {"policy": TensorSpec((7,)), "critic": TensorSpec((2, 5)), "other": TensorSpec((3,))}
RATE: dict[str, Any] = {"learning_rate": Constant(1e-2)}
ADAM = OptimizerConfig(**RATE)
NETWORK_STD = {"kind": "network", "initial": 0.5}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4}

# Every setting of sac that an update may depend on: values that the engine supports, and others that it refuses.
SUPPORTED = {
    "tau": [0.3, 0.7, 1.0],
    "pessimism": ["min", "mean"],
    "temperature.initial": [TemperatureConfig(initial=0.03)],
    "temperature.learned": [TemperatureConfig(learned=False)],
    "temperature.target_entropy": [TemperatureConfig(target_entropy=0.5)],
    "temperature.target_std": [TemperatureConfig(target_std=0.2)],
    "temperature.optimizer": [TemperatureConfig(optimizer=ADAM)],
    "policy": [replace(POLICY, hidden=hidden) for hidden in ((), (1,), (16,), (63, 65, 3))]
    + [replace(POLICY, activation=name) for name in ("tanh", "elu", "silu", "gelu", "leaky_relu")]
    + [replace(POLICY, obs_groups=("other", "critic"), normalize_obs=True, normalizer=NormalizerConfig(clip=0.5))],
    "std": [StdConfig(form=form, **NETWORK_STD) for form in ("bounded", "log", "scalar", "softplus")],
    "policy_gain": [0.01],
    "critic": [replace(CRITIC, members=members) for members in (1, 3, 8)]
    + [replace(CRITIC, hidden=hidden) for hidden in ((1,), (16,), (63, 65, 3))]
    + [replace(CRITIC, activation=name) for name in ("tanh", "elu", "silu", "gelu", "leaky_relu")]
    + [replace(CRITIC, init=init) for init in ("orthogonal", "default_zero_bias")]
    + [replace(CRITIC, obs_groups=("other", "critic"), normalize_obs=True, normalizer=NormalizerConfig(clip=None))]
    + [replace(CRITIC, normalize_obs=True, normalizer=NormalizerConfig(eps=0.3, eps_on="std", prior_count=5.0))],
    "optimizer": [
        OptimizerConfig(learning_rate=Linear(1e-2, 1e-3), betas=(0.5, 0.8), eps=1e-3),
        OptimizerConfig(weight_decay=0.3, max_grad_norm=0.01, **RATE),
        OptimizerConfig(weight_decay=0.3, weight_decay_form="coupled", **RATE),
        OptimizerConfig(learning_rate=StepAt(start=1e-2, end=1e-3)),
    ],
    "critic_optimizer": [ADAM],
}
REFUSED = {
    "policy": [
        (replace(POLICY, layer_norm=True), "policy.layer_norm=true"),
        (
            replace(POLICY, layer_norm=True, layer_norm_position="after_activation"),
            "policy.layer_norm_position=after_activation",
        ),
        (replace(POLICY, layer_norm=True, layer_norm_layers="first"), "policy.layer_norm=true"),
        (replace(POLICY, d2rl=True), "policy.d2rl=true"),
        (replace(POLICY, activation="selu"), "policy.activation=selu"),
        (replace(POLICY, precision="bfloat16"), "policy.precision=bfloat16"),
        (StackNetworkConfig(hidden=(8,)), "policy.kind: the network StackNetwork"),
        (
            replace(POLICY, cnn=CNNConfig(layers=((2, 1, 1),), sequences=True), obs_groups=("critic",)),
            "observation group 'critic'",
        ),
    ],
    "std": [
        (StdConfig(kind="parameter"), "std.kind=parameter"),
        (StdConfig(kind="parameter", learn=False), "std.learn=false"),
        (StdConfig(form="tanh", **NETWORK_STD), "std.form=tanh"),
        (StdConfig(floor=0.1, **NETWORK_STD), "std.floor=0.1"),
    ],
    "critic": [
        (replace(CRITIC, atoms=11), "critic.atoms=11"),
        (replace(CRITIC, atoms=11, support=(-9.0, 9.0)), "critic.atoms=11"),
        (replace(CRITIC, members=9), "critic.members=9"),
        (replace(CRITIC, blocks=1, expansion=2), "critic.blocks=1"),
        (replace(CRITIC, norm="layer"), "critic.norm=layer"),
        (replace(CRITIC, norm="rms"), "critic.norm=rms"),
        (replace(CRITIC, norm="batch"), "critic.norm=batch"),
        (replace(CRITIC, input_norm="rms"), "critic.input_norm=rms"),
        (replace(CRITIC, output_norm="layer"), "critic.output_norm=layer"),
        (replace(CRITIC, precision="bfloat16"), "critic.precision=bfloat16"),
        (replace(CRITIC, activation="selu"), "critic.activation=selu"),
        (replace(CRITIC, cnn=CNNConfig(layers=((2, 1, 1),)), obs_groups=("image",)), "observation group 'image'"),
    ],
}
ELSEWHERE = {
    *(
        "horizon",
        "updates_per_step",
        "updates_per_transition",
        "batch_size",
        "warmup_steps",
        "n_steps",
        "gamma",
        "policy_delay",
        "noise_repeat",
    ),
    *("scale_rewards", "return_limit", "replay"),
}
"""Decide which rows are learned from and when, before any engine is asked; tests/algorithms/test_sac.py varies them."""


def spec_of(groups=None):
    return EnvSpec(groups or GROUPS, Continuous((-2.0, -1.0, 0.0), (2.0, 3.0, 0.5)), 2)


def learners(config, dtype=torch.float64, threads=1) -> tuple[Any, Any]:
    """The same learner twice, by autograd and with the engine; critics and slow copies differ by then."""
    torch.set_num_threads(threads)
    found = []
    for native in (False, True):
        sac = config.build(spec_of(), 3)
        actor, critics = sac.policy.actor.to(dtype), sac.learner.critics.to(dtype)
        torch.manual_seed(1)
        seen = {name: 3 * torch.randn(40, 2, *group.shape, dtype=dtype) + 1 for name, group in GROUPS.items()}
        for network in (actor.network, critics.encoder):
            network.update_statistics(seen, torch.ones(40, 2, dtype=torch.bool))
        torch.set_default_dtype(dtype)  # of the temperature
        learner = SACLearner(config, actor, critics, 3)
        torch.set_default_dtype(torch.float32)
        learner.target_flat.add_(0.1 * torch.randn_like(learner.target_flat))
        if native:
            learner.engine = NativeSACEngine(learner.loss(), learner.networks(spec_of()), learner.optimizers)
        found.append(learner)
    return found[0], found[1]


def batch_of(rows, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    obs, after = ({name: 3 * draw(rows, *group.shape) for name, group in GROUPS.items()} for _ in range(2))
    valid = torch.rand(rows, generator=generator) < 0.8
    batch = ReplayBatch(obs, draw(rows, 3).tanh(), 5 * draw(rows), after, draw(rows).sigmoid(), valid)
    return batch, draw(2, rows, 3)


def update(learner, rows, dtype, count=3):
    for number in range(count):
        learner.schedule_(torch.tensor(number / 5))
        learner.update(*batch_of(rows, dtype, number), learn_policy=number != 1)


def state(learner):
    """Everything that an update moves, and what it tells."""
    parts = {"slow": learner.target_flat} | {name: o.adams[0].flat for name, o in learner.optimizers.items()}
    for name, optimizer in learner.optimizers.items():
        parts |= {f"{name}/{key}": getattr(optimizer.adams[0], key) for key in ("exp_avg", "exp_avg_sq", "step")}
    return parts | learner.metrics


def assert_same(plain, native, dtype):
    """To rounding, by the largest number of each kind."""
    ours = state(native)
    for name, theirs in state(plain).items():
        size = theirs[theirs.isfinite()].abs().max() if theirs.isfinite().any() else 0.0
        limits = {"rtol": 0.0, "atol": float(TOLERANCE[dtype] * (1 + size)), "equal_nan": True}
        torch.testing.assert_close(ours[name], theirs, **limits, msg=lambda text, name=name: f"{name}: {text}")


def supported_cases():
    for name, values in SUPPORTED.items():
        yield from ((name.split(".")[0], value) for value in values)


def test_every_setting_is_supported_refused_or_decided_elsewhere():
    tables = {name.split(".")[0] for name in (*SUPPORTED, *REFUSED)} | ELSEWHERE
    assert {key.split(".")[0] for key in config_keys(SACConfig)} == tables
    varied = {name for name in SUPPORTED if name.startswith("temperature.")}
    assert {".".join(key.split(".")[:2]) for key in config_keys(SACConfig) if key.startswith("temperature.")} == varied
    for name in ("policy", "critic", "optimizer"):
        values = [*SUPPORTED[name], *(value for value, _ in REFUSED.get(name, []))]
        usual = {"policy": POLICY, "critic": CRITIC, "optimizer": BASE.optimizer}[name]
        for field in vars(usual):
            decided_before = ("rnn", "init_gain", "init") if name == "policy" else ()
            varies = any(getattr(value, field, None) != getattr(usual, field) for value in values)
            assert varies or field in decided_before, f"{name}.{field}"


@pytest.mark.parametrize(("name", "value"), list(supported_cases()), ids=lambda value: str(value)[:70])
def test_supported_settings_compute_the_update_of_the_definition(name, value):
    plain, native = learners(replace(BASE, **{name: value}))
    update(plain, 70, torch.float64)
    update(native, 70, torch.float64)
    assert_same(plain, native, torch.float64)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 17, 63, 64, 65, 130])
@pytest.mark.filterwarnings("ignore:std")  # of the targets of a single row
def test_any_number_of_samples(rows, dtype):
    for learner in (found := learners(BASE, dtype)):
        update(learner, rows, dtype, 1)
    assert_same(*found, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [1, 64, 65, 300])
@pytest.mark.parametrize("policy", [POLICY, *SUPPORTED["policy"][-1:]], ids=["one group", "normalised groups"])
def test_actions_before_squashing_are_those_of_the_definition(policy, rows, dtype):
    plain, native = learners(replace(BASE, policy=policy), dtype, threads=2)
    batch, noise = batch_of(rows, dtype)
    mean, log_std = plain.params(batch.obs).detach().chunk(2, -1)
    for _ in range(2):
        raw = native.engine.act(batch.obs, noise[0])
        torch.testing.assert_close(raw, mean + log_std.exp() * noise[0], rtol=0.0, atol=10 * TOLERANCE[dtype])
        update(native, 8, dtype, 1)  # whose weights it then acts by
        mean, log_std = native.params(batch.obs).detach().chunk(2, -1)


@pytest.mark.parametrize("width", [1, 17, 63, 65, 256])
def test_widths_of_float32(width):
    sizes = {"policy": replace(POLICY, hidden=(width, width)), "critic": replace(CRITIC, hidden=(width, width))}
    for learner in (found := learners(replace(BASE, **sizes), torch.float32, threads=2)):
        update(learner, 100, torch.float32, 1)
    assert_same(*found, torch.float32)


def test_critics_that_agree_share_the_gradient():
    for learner in (found := learners(BASE)):
        for parameter in (*learner.critics.parameters(), *learner.target_critics.parameters()):
            parameter.data[1:] = parameter.data[:1]
        update(learner, 30, torch.float64, 1)
    assert_same(*found, torch.float64)


def test_the_number_of_threads_changes_no_bit():
    wide = {"policy": replace(POLICY, hidden=(130, 70)), "critic": replace(CRITIC, hidden=(130, 70))}
    states = []
    for threads in (1, 2, 3, 5):
        learner = learners(replace(BASE, **wide), torch.float32, threads)[1]
        update(learner, 300, torch.float32)
        states.append(state(learner))
    for other in states[1:]:
        assert all(torch.equal(states[0][name], other[name]) for name in other)


SPOILT = {
    "reward": lambda batch: batch.reward[:1],
    "obs": lambda batch: batch.obs["policy"][:1],
    "next_obs": lambda batch: batch.next_obs["policy"][:1],
    "critic's obs": lambda batch: batch.obs["critic"][:1],
    "action": lambda batch: batch.action[:1],
}


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("where", SPOILT)
@pytest.mark.parametrize("valid", [True, False])
def test_nonfinite_values_skip_the_same_steps(where, value, valid):
    counts = []
    for learner in (found := learners(BASE)):
        batch, noise = batch_of(20)
        batch.valid[0] = valid
        SPOILT[where](batch).fill_(value)
        learner.update(batch, noise, True)
        counts.append(learner.metrics["optim/nonfinite_steps"].item())
        assert learner.flat.isfinite().all() and learner.target_flat.isfinite().all()
    assert counts[0] == counts[1] > 0
    steps = [[optimizer.adams[0].step.item() for optimizer in learner.optimizers.values()] for learner in found]
    assert steps[0] == steps[1]
    assert_same(*found, torch.float64)


@pytest.mark.parametrize("member", [0, 1])
def test_one_critic_with_nan_corrupts_the_value_of_all(member):
    for learner in (found := learners(BASE)):
        learner.target_critics.head.bias[member] = math.nan
        learner.update(*batch_of(20), True)
        learner.critics.head.bias.data[member] = math.nan
        learner.update(*batch_of(20, seed=1), True)
        assert [optimizer.adams[0].step.item() for optimizer in learner.optimizers.values()] == [1, 0, 2]
    assert_same(*found, torch.float64)


def test_gradients_and_metrics_are_those_of_all_ranks(monkeypatch):
    def with_another_rank(numbers):  # whose weight is the same, and whose gradients are 0
        return torch.cat([numbers[:-1], 2 * numbers[-1:]])

    found, alone = learners(BASE), learners(BASE)[1]
    update(alone, 30, torch.float64)
    monkeypatch.setattr(distributed, "active", lambda: True)
    monkeypatch.setattr(distributed, "sum_", with_another_rank)
    for learner in found:
        update(learner, 30, torch.float64)
    assert_same(*found, torch.float64)
    assert found[1].metrics["optim/grad_norm/critic"] < 0.9 * alone.metrics["optim/grad_norm/critic"]


def refusal(learner) -> Any:
    return unsupported_reason(NativeSACEngine.capabilities, learner.loss(), learner.networks(spec_of()))


def refused(config, groups=None) -> Any:
    groups = groups or GROUPS | {"image": TensorSpec((1, 4, 4))}
    sac = config.build(spec_of(groups), 0)
    networks = sac.learner.networks(sac.spec)
    reason = unsupported_reason(NativeSACEngine.capabilities, sac.learner.loss(), networks)
    assert sac.about()["engine"] == ("native" if reason is None else f"autograd (native: {reason})")
    return reason


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [(name, *case) for name, cases in REFUSED.items() for case in cases],
    ids=lambda value: str(value)[:60],
)
def test_unsupported_settings_are_refused_by_name_and_run_by_autograd(name, value, word):
    config = replace(BASE, **{name: value})
    assert word in refused(config)
    with pytest.raises(ValueError, match=r"execution\.engine=native cannot be used here: "):
        config.build(spec_of(GROUPS | {"image": TensorSpec((1, 4, 4))}), 0).use_engine("native")


def test_observations_of_other_dtypes_are_refused():
    assert "of torch.uint8" in refused(BASE, GROUPS | {"policy": TensorSpec((7,), torch.uint8)})


def test_engines_can_be_requested_by_name():
    sac = BASE.build(spec_of(), 0)
    assert sac.about()["engine"] == "native" and isinstance(sac.learner.engine, NativeSACEngine)
    sac.use_engine("autograd")
    assert sac.about()["engine"] == "autograd" and sac.learner.engine is None
    sac.use_engine("native")
    assert isinstance(sac.learner.engine, NativeSACEngine)
    with pytest.raises(ValueError, match=r"execution\.engine=triton cannot be used here: it does not support sac"):
        sac.use_engine("triton")


def test_modules_that_somebody_changed_are_refused():
    for change, word in (
        (lambda learner: learner.critics.stack.register_forward_hook(print), "a hook"),
        (lambda learner: learner.critics.head.weight.requires_grad_(False), "requires_grad=False"),
        (lambda learner: setattr(learner.actor.head, "mean", nn.Sequential()), "the layer Sequential"),
        (lambda learner: learner.critics.double(), "float64"),
    ):
        learner = BASE.build(spec_of(), 0).learner
        change(learner)
        assert word in refusal(learner)


def test_a_subclass_of_the_learner_is_refused():
    class Mine(SACLearner):
        """With another target."""

    sac = BASE.build(spec_of(), 0)
    sac.learner = Mine(BASE, sac.policy.actor, sac.learner.critics, 3)
    sac.use_engine("auto")
    assert sac.learner.engine is None and "subclass" in sac.about()["engine"]


def test_wrong_shapes_and_dtypes_are_refused():
    engine, (batch, noise) = learners(BASE)[1].engine, batch_of(8)
    temperature = torch.ones(1)
    with pytest.raises(ValueError, match="bytes"):
        engine.learn_critics(replace(batch, reward=batch.reward[:4]), noise[0], temperature)
    with pytest.raises(TypeError, match="float32"):
        engine.learn_policy(replace(batch, action=batch.action.float()), noise[1], temperature)
    with pytest.raises(ValueError, match="arrays where"):
        compiled().sac_gradients(engine._model(8), False, 1.0, ())
