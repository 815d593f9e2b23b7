"""The native engine refuses what it does not support, and names the setting."""

import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch
from native_cases import PPOLoss, build, engine_of, refusal
from torch import nn

from canter.core.specs import TensorSpec
from canter.engines.base import BoundLossConfig
from canter.engines.native import AVAILABLE
from canter.nn.heads import StdConfig
from canter.nn.network import NetworkConfig
from canter.nn.rnn import RNNConfig

needs_it = pytest.mark.skipif(not AVAILABLE, reason="there was no C compiler")


@dataclass(frozen=True, kw_only=True)
class LaterLoss(PPOLoss):
    """With a setting that came after the engine was written."""

    margin: float | None = None


@needs_it
def test_supported_losses_are_not_refused():
    assert refusal(PPOLoss(), build()[0]) is None
    assert refusal(LaterLoss(), build()[0]) is None


@needs_it
@pytest.mark.parametrize(
    ("loss", "named"),
    [
        (PPOLoss(surrogate="spo"), "surrogate=spo"),
        (PPOLoss(value_loss="quantile"), "value_loss=quantile"),
        (PPOLoss(advantage="rank"), "advantage_normalization"),
        (PPOLoss(terms=(lambda batch, output: {},)), "the hook loss of an extension"),
        (PPOLoss(moving_kl=True), "kl=rl_games"),
        (PPOLoss(update_obs_stats_per_minibatch="minibatch"), "obs_statistics=minibatch"),
        (PPOLoss(trunk_value=True), "central_value.actor_value"),
        (LaterLoss(margin=0.0), "margin=0.0"),
    ],
)
def test_losses_are_refused_by_the_setting(loss, named):
    assert named in refusal(loss, build()[0])


@needs_it
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"network": NetworkConfig(rnn=RNNConfig(concat_input=True))}, "model.policy.rnn.concat_input=True"),
        ({"network": NetworkConfig(rnn=RNNConfig(hidden=2, layers=9))}, "model.policy.rnn.layers=9"),
        ({"network": NetworkConfig(precision="bfloat16")}, "model.policy.precision=bfloat16"),
        ({"network": NetworkConfig(d2rl=True)}, "model.policy.d2rl=true"),
        ({"network": NetworkConfig(activation="selu")}, "model.policy.activation=selu"),
        (
            {"network": NetworkConfig(layer_norm=True, layer_norm_position="after_activation")},
            "model.policy.layer_norm_position=after_activation",
        ),
        ({"std": StdConfig(form="tanh"), "action": "one_gaussian"}, "model.std.form=tanh"),
        (
            {"groups": {"policy": TensorSpec((3, 64, 64))}},
            "obs_groups: observation group 'policy' with the encoder CNN",
        ),
        ({"groups": {"policy": TensorSpec((5,), torch.float64)}}, "float64"),
    ],
)
def test_models_are_refused_by_the_setting(settings, named):
    assert named in refusal(PPOLoss(), build(**settings)[0])


class Doubled(nn.Linear):
    def forward(self, input):
        return 2.0 * super().forward(input)


def put(model, what):
    hidden = model.actor.network.hidden
    match what:
        case "linear":
            hidden[0] = Doubled(7, 16)
        case "activation":
            hidden[1] = nn.ELU(alpha=0.5)
        case "order":
            hidden[1] = nn.Linear(16, 16)
        case "hook":
            hidden[0].register_forward_hook(lambda module, given, output: output * 2)
        case "forward":
            model.actor.forward = lambda *args: None
        case "frozen":
            hidden[0].weight.requires_grad_(False)
        case "head":
            model.critic.head.linear = Doubled(9, 1)
        case "half":
            model.half()


@needs_it
@pytest.mark.parametrize("what", ["linear", "activation", "order", "hook", "forward", "frozen", "head", "half"])
def test_modules_that_users_put_into_a_model_are_refused(what):
    model, gradients = build()
    put(model, what)
    reason = refusal(PPOLoss(), model)
    assert reason is not None
    with pytest.raises(ValueError, match="is not supported"):
        engine_of(model, gradients)


@needs_it
@pytest.mark.parametrize(("settings", "form"), [({"surrogate": None}, "soft"), ({}, "other")])
def test_a_bound_loss_without_a_surrogate_or_of_another_form_is_refused(settings, form):
    model, _ = build()
    bound = replace(BoundLossConfig(), form=form).build(model.policy.distribution, torch.device("cpu"))
    reason = refusal(PPOLoss(bound=bound, **settings), model)
    assert reason is not None and "bound" in reason


IMPORTS_WITHOUT_THE_MODULE = """
import os, sys, types
import torch
before_modules_had_a_version = types.ModuleType("_native")
of_other_sources = types.SimpleNamespace(INTERFACE=1)
again = "install Canter again"
for module, reason in (None, "compiler"), (before_modules_had_a_version, again), (of_other_sources, again):
    child = os.fork()
    if child == 0:
        sys.modules["canter.engines.native._native"] = module
        from canter.engines.base import unsupported_reason
        from canter.engines.native import AVAILABLE
        from canter.engines.native.engine import NativeEngine
        told = unsupported_reason(NativeEngine.capabilities, None, None)
        os._exit(not (not AVAILABLE and reason in told))
    assert os.waitpid(child, 0)[1] == 0, reason
"""


def test_without_the_c_module_of_these_sources_the_import_goes_on():
    subprocess.run([sys.executable, "-c", IMPORTS_WITHOUT_THE_MODULE], check=True)
