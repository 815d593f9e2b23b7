"""Engines compute the loss that is described, or refuse it; nothing is ignored."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import canter
from canter.engines.autograd import AutogradEngine
from canter.engines.base import ANYTHING, Capabilities, PPOLoss, unsupported_reason
from canter.engines.choose import choose
from canter.envs.tensor import tensor_envs
from canter.nn.mlp import activations
from canter.training.collector import Collector


def build(env="pendulum", extensions=(), algorithm=canter.PPO, **settings):
    env = tensor_envs[env](8)
    config = canter.PPOConfig(horizon=16, epochs=2, num_minibatches=4, extensions=extensions, **settings)
    return algorithm(config, env.spec, 0), Collector(env, algorithm(config, env.spec, 0), 0)


def refusals(algorithm, loss):
    """Why each fast engine of this machine's device refuses a loss; None for one that does not."""
    found = {}
    for name in ("native",):
        try:
            choose(loss, algorithm.model, algorithm.optimizers["policy"], name)
            found[name] = None
        except ValueError as error:
            found[name] = str(error)
    return found


@dataclass(frozen=True, kw_only=True)
class WithPenalty(PPOLoss):
    """A loss with a made-up term."""

    penalty: float | None = None


def test_every_fast_engine_refuses_a_field_that_it_does_not_list_unless_it_is_absent():
    algorithm, _ = build()
    loss = algorithm.losses["policy"]
    fields = {name: getattr(loss, name) for name in loss.__dataclass_fields__}
    present, absent = WithPenalty(**fields, penalty=1000.0), WithPenalty(**fields)
    every = Capabilities("cpu", loss=dict.fromkeys(fields, ANYTHING), model={}, runs_modules=True)
    assert unsupported_reason(every, present, algorithm.model) == "penalty=1000.0 is not supported"
    assert unsupported_reason(every, absent, algorithm.model) is None
    assert all("penalty" in reason for reason in refusals(algorithm, present).values())
    assert refusals(algorithm, absent) == refusals(algorithm, loss)
    assert choose(present, algorithm.model, algorithm.optimizers["policy"]).engine.name == "autograd"


def test_a_further_term_takes_one_entry_counts_and_is_refused_by_fast_engines():
    algorithm, collector = build()
    batch, _ = algorithm.prepare_batch(collector.collect())
    size = (lambda batch, output: {"loss/size": 1000.0 * output.dist_params.square().sum(-1)},)
    loss = replace(algorithm.losses["policy"], terms=size)
    assert all("the hook loss of an extension" in reason for reason in refusals(algorithm, loss).values())
    every, optimizer = torch.arange(128), algorithm.optimizers["policy"]
    found = []
    for description in (algorithm.losses["policy"], loss):
        engine = choose(description, algorithm.model, optimizer).engine
        metrics, _ = engine.gradients(engine.begin(batch), every, algorithm.coefs)
        found.append(torch.cat([gradient.flatten() for gradient in optimizer.gradients.values()]))
    assert metrics["loss/size"] > 0
    assert (found[1] - found[0]).norm() > 10 * found[0].norm()


class Silent(canter.Extension):
    """Offers nothing."""


class Paying(canter.Extension):
    def reward(self, rollout):
        return rollout.reward + 1


class Turning(canter.Extension):
    def augment(self, batch):
        return batch


class Adding(canter.Extension):
    def loss(self, batch, output):
        return {"loss/none": torch.zeros_like(batch.advantage)}


@dataclass(frozen=True)
class Make:
    what: type

    def build(self, spec, model, generator):
        return self.what()


@pytest.mark.parametrize(("extension", "keeps"), [(Silent, True), (Paying, True), (Turning, False), (Adding, False)])
def test_only_an_extension_that_changes_the_loss_changes_the_engine(extension, keeps):
    bare, _ = build()
    extended, _ = build(extensions=(Make(extension),))
    assert (extended.engine.name == bare.engine.name) == (keeps or bare.engine.name == "autograd")
    if not keeps:
        assert extended.engine.name == "autograd"


def test_every_fast_engine_refuses_a_subclass_with_additional_terms():
    class Weighed(canter.PPO):
        def policy_terms(self, batch, params):
            terms = super().policy_terms(batch, params)
            return terms | {"loss/policy": 1000.0 * terms["loss/policy"]}

    algorithm, collector = build(algorithm=Weighed)
    assert algorithm.engine.name == "autograd"
    assert all("policy_terms" in reason for reason in refusals(algorithm, algorithm.losses["policy"]).values())
    batch, _ = algorithm.prepare_batch(collector.collect())
    batch = replace(batch, advantage=batch.advantage + 1)
    plain = algorithm.engine.evaluate(batch, algorithm.coefs).metrics["loss/policy"]
    algorithm.engine.loss = replace(algorithm.engine.loss, policy_terms=None)
    torch.testing.assert_close(plain, 1000.0 * algorithm.engine.evaluate(batch, algorithm.coefs).metrics["loss/policy"])


def test_a_term_without_a_weight_is_an_error():
    class Careless(canter.PPO):
        def policy_terms(self, batch, params):
            return super().policy_terms(batch, params) | {"loss/mine": params.square().sum(-1)}

    algorithm, collector = build(algorithm=Careless)
    with pytest.raises(ValueError, match=r"policy_terms returns loss/mine, for which there is no weight: .*hook"):
        algorithm.update(collector.collect())


def test_the_loss_is_the_sum_of_its_weighted_terms():
    algorithm, collector = build(value_coef=0.3, entropy_coef=canter.Constant(0.2))
    batch, _ = algorithm.prepare_batch(collector.collect())
    output = AutogradEngine(algorithm.losses["policy"], algorithm.model, None).evaluate(batch, algorithm.coefs)
    metrics = output.metrics
    total = metrics["loss/policy"] + 0.3 * metrics["loss/value"] - algorithm.coefs.entropy * metrics["policy/entropy"]
    torch.testing.assert_close(output.loss, total)
    assert "policy/kl" not in metrics and output.kl is not None


def test_an_engine_that_cannot_be_used_is_refused_with_its_reason():
    algorithm, _ = build()
    with pytest.raises(ValueError, match=r"execution.engine=triton cannot be used here: it runs on a GPU"):
        algorithm.use_engine("triton")


def test_an_activation_takes_one_entry(monkeypatch):
    monkeypatch.setattr(activations, "_items", dict(activations._items))
    canter.register("activation", "softsign")(nn.Softsign)
    model = canter.ModelConfig(policy=canter.NetworkConfig(hidden=(8,), activation="softsign"))
    algorithm, collector = build(model=model)
    assert algorithm.engine.name == "autograd"
    before = [parameter.detach().clone() for parameter in algorithm.model.parameters()]
    algorithm.update(collector.collect())
    assert all(not torch.equal(a, b) for a, b in zip(before, algorithm.model.parameters(), strict=True))
    assert isinstance(algorithm.model.actor.network.hidden[1], nn.Softsign)


def test_gradients_of_gradients_flow_through_networks():
    algorithm, collector = build()
    obs = {"policy": collector.collect().obs["policy"].clone().requires_grad_()}
    value, _ = algorithm.model.critic(obs, (), None)
    (slope,) = torch.autograd.grad(value.sum(), obs["policy"], create_graph=True)
    penalty = torch.autograd.grad(slope.square().sum(), algorithm.model.critic.network.hidden.weights[0])[0]
    assert penalty.norm() > 0
