"""The engine `plain`: no kernel in C is called, and the numbers are those of autograd up to rounding."""

import inspect
import io
import pdb
from dataclasses import replace

import pytest
import torch

import canter
from canter.core.dispatch import Dispatched, plain_functions
from canter.engines.native import kernels
from canter.functional import returns
from canter.functional.returns import gae, reverse_discounted_sum_


def config_with(engine, algorithm) -> canter.TrainConfig:
    env = canter.EnvConfig(id="tensor:pendulum", num_envs=4)
    return canter.TrainConfig(env=env, algorithm=algorithm, execution=canter.ExecutionConfig(engine=engine))


PPO = canter.PPOConfig(horizon=8, epochs=1, num_minibatches=2)
SAC = canter.SACConfig(horizon=8, warmup_steps=16, batch_size=8)


@pytest.mark.parametrize("algorithm", [PPO, SAC], ids=["ppo", "sac"])
def test_nothing_is_computed_in_c(algorithm, monkeypatch):
    def refuse():
        raise AssertionError("C was called")

    monkeypatch.setattr(kernels, "compiled", refuse)
    with canter.Trainer(config_with("plain", algorithm)) as trainer:
        trainer.learn(3)
        assert str(trainer.algorithm.about()["engine"]).startswith("plain")
    assert not Dispatched.plain_only


def test_plain_is_autograd_up_to_rounding():
    policies = []
    for engine in ("plain", "autograd"):
        with canter.Trainer(config_with(engine, PPO)) as trainer:
            policies.append(trainer.learn(3).policy.actor.state_dict())
    for name, tensor in policies[0].items():
        torch.testing.assert_close(tensor, policies[1][name], rtol=1e-4, atol=1e-5)


def test_kernels_are_used_again_after_the_block(monkeypatch):
    calls = []
    kernel = (lambda *_: True, lambda x, decay: calls.append(x))
    monkeypatch.setattr(reverse_discounted_sum_, "kernels", [kernel])
    x = torch.ones(3, 1)
    with plain_functions():
        reverse_discounted_sum_(x.clone(), x)
    assert calls == []
    reverse_discounted_sum_(x, x)
    assert len(calls) == 1


def test_a_debugger_finds_a_function_with_kernels_by_its_name():
    """`break canter.functional.returns.gae` in pdb sets the breakpoint by the function's code."""
    debugger = pdb.Pdb(stdin=io.StringIO(), stdout=io.StringIO(), nosigint=True, readrc=False)
    debugger.curframe = inspect.currentframe()
    debugger.curframe_locals = {"gae": gae}
    debugger.do_break("gae")
    try:
        (file,) = debugger.get_all_breaks()
        assert file == debugger.canonic(returns.__file__)
    finally:
        debugger.clear_all_breaks()


def test_the_engine_is_a_setting():
    assert replace(config_with("plain", PPO).execution, threads=1).engine == "plain"
