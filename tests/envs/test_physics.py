"""Conditions under which a step of physics begins with the forces, with a stand-in for mjlab's simulation.

`tests/envs/test_mjlab.py` compares the numbers with mjlab's own.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from canter.envs.robots import replacements as physics


class Bridge:
    """mjlab's view of a struct of Warp: the arrays that were accessed."""

    def __init__(self, **arrays):
        shown = {name: SimpleNamespace(_tensor=tensor) for name, tensor in arrays.items()}
        self._wrapped_cache = shown | {"contact": SimpleNamespace(_wrapped_cache={})}


class Sim:
    use_cuda_graph, step_graph, wp_device, wp_data, data = False, None, None, None, None
    nan_guard = SimpleNamespace(watch=lambda data: nullcontext())

    def __init__(self, flags=0, control=None):
        options = SimpleNamespace(enableflags=flags)
        self.wp_model = SimpleNamespace(opt=options, callback=SimpleNamespace(control=control))
        self.qpos, self.ctrl, self.mass = torch.zeros(3, 2), torch.zeros(3, 2), torch.ones(3)
        self._data_bridge, self._model_bridge = Bridge(qpos=self.qpos, ctrl=self.ctrl), Bridge(mass=self.mass)
        self.done = []

    def step(self):
        self.done.append("whole")

    def forward(self):
        self.done.append("forward")


@pytest.fixture
def made(monkeypatch):
    warp = SimpleNamespace(EnableBit=SimpleNamespace(SLEEP=16), ScopedDevice=lambda device: nullcontext())
    monkeypatch.setattr(physics, "import_module", lambda name: warp)

    def make(**options):
        sim = Sim(**options)
        monkeypatch.setattr(physics, "_step_from_forces", lambda model, data: sim.done.append("rest"))
        return sim, physics.Physics(sim)

    return make


def test_only_the_first_step_after_forward_starts_with_the_forces(made):
    sim, own = made()
    own.step()
    own.forward()
    sim.ctrl.fill_(1.0)
    own.step(), own.step()
    assert sim.done == ["whole", "forward", "rest", "whole"]


@pytest.mark.parametrize("name", ["qpos", "mass"])
def test_a_step_recomputes_after_writes_to_the_state_or_the_model(made, name):
    sim, own = made()
    own.forward()
    getattr(sim, name)[1].add_(1.0)  # through a view
    own.step()
    own.forward(), own.step()
    assert sim.done == ["forward", "whole", "forward", "rest"]


def test_a_part_that_writes_is_remembered_and_one_that_was_put_back_is_not_blamed(made):
    sim, own = made()
    own.forward()
    before = own.count_writes()
    sim.qpos.copy_(sim.qpos.clone())
    own.attribute_writes("commands", before, restored=True)
    own.step()
    assert sim.done == ["forward", "rest"] and own.full_step_reason is None
    own.forward()
    before = own.count_writes()
    own.attribute_writes("observations", before, restored=False)
    sim.qpos.zero_()
    own.attribute_writes("commands", before, restored=False)
    own.step(), own.forward(), own.step()
    assert sim.done[2:] == ["forward", "whole", "forward", "whole"]
    assert own.full_step_reason == "commands write to the simulation"


def test_putting_back_what_had_changed_before_does_not_settle_it(made):
    sim, own = made()
    own.forward()
    sim.qpos.fill_(2.0)
    before = own.count_writes()
    sim.qpos.fill_(2.0)
    own.attribute_writes("actions", before, restored=True)
    own.step()
    assert sim.done == ["forward", "whole"]


@pytest.mark.parametrize(("options", "why"), [({"flags": 16}, "sleep"), ({"control": print}, "callback")])
def test_other_effects_of_forward_are_never_left_out(made, options, why):
    sim, own = made(**options)
    own.forward(), own.step()
    assert sim.done == ["forward", "whole"] and why in own.full_step_reason
