"""Steps of environments in host memory reach the device unchanged, in one copy."""

from dataclasses import replace

import pytest
import torch
from counter_env import counters

from canter.core.specs import Step
from canter.core.struct import tree_map
from canter.envs.gymnasium import GymnasiumEnv
from canter.envs.spaces import PinnedCopier

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]


def example():
    return Step(
        obs={"policy": torch.randn(3, 5), "camera": torch.randint(0, 255, (3, 2, 2, 3), dtype=torch.uint8)},
        reward=torch.randn(3),
        terminated=torch.tensor([True, False, True]),
        truncated=torch.zeros(3, dtype=torch.bool),
        valid=torch.ones(3, dtype=torch.bool),
        final_obs={"policy": torch.randn(3, 5), "camera": torch.zeros(3, 2, 2, 3, dtype=torch.uint8)},
        info={"count": torch.tensor([1, 2**40, 3])},
    )


def leaves(tree):
    found = []
    tree_map(found.append, tree)
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_every_tensor_arrives_with_its_shape_dtype_and_numbers(device):
    step = example()
    copier = PinnedCopier(step, torch.device(device))
    for _ in range(5):
        step.reward.add_(1)
        step.obs["policy"].mul_(-2)
        arrived = copier()
        assert type(arrived) is Step and arrived.info.keys() == step.info.keys()
        for there, here in zip(leaves(arrived), leaves(step), strict=True):
            assert there.device.type == device and there.dtype == here.dtype
            assert torch.equal(there.cpu(), here)


@pytest.mark.parametrize("device", DEVICES)
def test_one_step_stays_while_the_next_is_on_its_way(device):
    step = example()
    copier = PinnedCopier(step, torch.device(device))
    first, before = copier(), step.reward.clone()
    step.reward.add_(1)
    second = copier()
    assert torch.equal(first.reward.cpu(), before)
    assert torch.equal(second.reward.cpu(), before + 1)


@pytest.mark.parametrize("device", DEVICES)
def test_an_environment_returns_the_same_through_a_copier(device):
    plain = GymnasiumEnv(counters("same_step"), info_keys=("clock",))
    carried = GymnasiumEnv(counters("same_step"), info_keys=("clock",))
    everything = replace(carried._step, final_obs=carried._final.tensors)
    carried._copier = PinnedCopier(everything, torch.device(device))
    assert torch.equal(plain.reset(0)["policy"], carried.reset(0)["policy"].cpu())
    for _ in range(12):
        action = torch.tensor([1, 2])
        expected, step = plain.step(action), carried.step(action.to(device))
        assert (expected.final_obs is None) == (step.final_obs is None)
        ended = expected.terminated | expected.truncated
        if expected.final_obs is not None:
            assert torch.equal(step.final_obs["policy"].cpu()[ended], expected.final_obs["policy"][ended])
        assert torch.equal(step.info["clock"].cpu(), expected.info["clock"])
        for name in ("reward", "terminated", "truncated", "valid"):
            assert torch.equal(getattr(step, name).cpu(), getattr(expected, name))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_waits_for_the_device_and_memory_is_pinned():
    copier = PinnedCopier(example(), torch.device("cuda"))
    copier()
    assert all(buffers.host.is_pinned() for buffers in copier.buffers)
    try:
        torch.cuda.set_sync_debug_mode("error")
        copier()
    finally:
        torch.cuda.set_sync_debug_mode("default")
