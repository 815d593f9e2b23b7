"""The quadrotor with a hidden load and a hidden charge: what they do, who sees them, restarts and resumes."""

import pytest
import torch

from canter.core.struct import tree_map
from canter.envs.tensor import Quadrotor
from canter.envs.tensor.quadrotor import CHARGE, GRAVITY, HEIGHT, HOVER_THRUST, MAX_LOAD


def still(load, charge, thrust=1.0, **options):
    """At rest and level at the target, with rotors at `thrust` times what hovers without a load."""
    env = Quadrotor(1, loaded=True, **options)
    env.reset(seed=0)
    saved = env.state_dict()
    for name in ("velocity", "rates", "amplitude"):
        saved["state"][name].zero_()
    saved["state"]["position"].copy_(torch.tensor([0.0, 0.0, HEIGHT]))
    saved["state"]["attitude"].copy_(torch.tensor([1.0, 0.0, 0.0, 0.0]))
    saved["state"]["rotors"].fill_(thrust * HOVER_THRUST)
    saved["state"]["load"].fill_(load)
    saved["state"]["charge"].fill_(charge)
    env.load_state_dict(saved)
    return env


def lift(thrust):
    """The action that keeps the rotors at `thrust` times what hovers without a load."""
    return torch.tensor([[thrust - 1.0, 0.0, 0.0, 0.0]])


def fly(env, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (env.num_envs, 4)
    return [env.step(2 * torch.rand(shape, generator=generator) - 1).map(torch.clone) for _ in range(steps)]


def test_a_load_of_half_its_mass_makes_it_sink_with_a_third_of_gravity():
    env = still(load=0.5, charge=10.0, drag=0.0)
    for _ in range(25):  # half a second; the thrust carries 1 of 1.5 masses
        env.step(lift(1.0))
    assert env._state["velocity"][0].tolist() == pytest.approx([0.0, 0.0, -GRAVITY / 3 * 0.5], abs=1e-4)
    assert env._state["position"][0, 2].item() == pytest.approx(HEIGHT - GRAVITY / 3 * 0.5**2 / 2, abs=1e-4)


def test_half_as_much_thrust_again_carries_half_its_mass():
    env = still(load=0.5, charge=10.0, thrust=1.5)
    for _ in range(50):
        env.step(lift(1.5))
    assert env._state["position"][0].tolist() == pytest.approx([0.0, 0.0, HEIGHT], abs=1e-3)


@pytest.mark.parametrize("thrust", [1.0, 1.5])
def test_a_second_of_flight_takes_thrust_to_the_power_of_one_and_a_half_from_the_charge(thrust):
    env = still(load=thrust - 1.0, charge=10.0, thrust=thrust)
    for _ in range(50):
        env.step(lift(thrust))
    assert env._state["charge"].item() == pytest.approx(10.0 - thrust**1.5, abs=1e-3)


def test_an_empty_battery_ends_the_flight_and_a_new_one_starts_charged():
    env = still(load=0.0, charge=0.03)  # one step of 20 ms and half of another
    first, second = env.step(lift(1.0)).map(torch.clone), env.step(lift(1.0)).map(torch.clone)
    assert not first.terminated.item() and second.terminated.item() and not second.truncated.item()
    assert second.reward.item() == pytest.approx(1.0, abs=1e-4)  # it still hovered well
    assert second.final_obs is not None
    assert second.final_obs["critic"][0, -1].item() == pytest.approx(-0.01, abs=1e-5)
    assert second.obs["critic"][0, -1].item() >= CHARGE[0]


def test_only_the_critic_sees_load_and_charge():
    env, plain = Quadrotor(64, loaded=True), Quadrotor(64)
    obs = env.reset(seed=0)
    saved = env.state_dict()
    hidden = {name: saved["state"].pop(name) for name in ("load", "charge")}
    plain.load_state_dict(saved)
    assert torch.equal(obs["policy"], plain.observe()["policy"])  # nothing of them is in it
    assert torch.equal(obs["critic"], torch.cat((obs["policy"], hidden["load"], hidden["charge"]), -1))
    assert {name: spec.shape for name, spec in env.spec.obs.items()} == {"policy": (29,), "critic": (31,)}
    assert set(plain.spec.obs) == {"policy"}


def test_every_flight_draws_its_own_load_and_charge():
    env = Quadrotor(1000, loaded=True)
    load, charge = env.reset(seed=0)["critic"][:, -2:].unbind(-1)
    for values, low, high in ((load, 0.0, MAX_LOAD), (charge, *CHARGE)):
        assert low <= values.min() < low + 0.02 * (high - low) and high - 0.02 * (high - low) < values.max() < high
    before = torch.stack((load, charge), -1)
    step = fly(env, 1)[0]
    done = step.terminated | step.truncated
    assert not done.any()
    assert torch.equal(step.obs["critic"][:, -2], before[:, 0])  # the load stays
    assert (step.obs["critic"][:, -1] < before[:, 1]).all()  # the charge falls


def test_it_resumes_bit_for_bit_and_names_what_another_kind_of_flight_lacks():
    env, other = Quadrotor(8, loaded=True), Quadrotor(8, loaded=True)
    env.reset(seed=1)
    fly(env, 40)
    other.load_state_dict(env.state_dict())
    expected, resumed = fly(env, 120, seed=2), fly(other, 120, seed=2)
    tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), tuple(resumed), tuple(expected))
    assert any(step.terminated.any() for step in expected)
    with pytest.raises(ValueError, match=r"differ in shape or dtype: charge, load$"):
        Quadrotor(8).load_state_dict(env.state_dict())
