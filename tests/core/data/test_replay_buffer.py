"""Returns of a few transitions in the replay buffer, by hand."""

import torch

from canter.core.data.replay import ReplayConfig
from canter.core.data.rollout import Rollout
from canter.core.specs import Continuous, EnvSpec, TensorSpec

SPEC = EnvSpec({"policy": TensorSpec((1,))}, Continuous((-1.0,), (1.0,)), num_envs=1)


def test_a_return_stops_before_a_step_that_is_no_transition():
    rollout = Rollout.allocate(4, {"policy": torch.zeros(1, 1)}, (), SPEC)
    rollout.obs["policy"].copy_(torch.arange(5.0).view(5, 1, 1))
    rollout.reward.copy_(torch.tensor([[1.0], [10.0], [100.0], [1000.0]]))
    rollout.valid.copy_(torch.tensor([[True], [True], [False], [True]]))
    replay = ReplayConfig(capacity=8).build(SPEC, 1)
    replay.write(rollout, torch.zeros(4, 1, 1))
    batch = replay.gather(torch.tensor([0, 1, 3]), steps=4, gamma=0.5)
    assert batch.reward.tolist() == [1.0 + 0.5 * 10.0, 10.0, 1000.0]
    assert batch.discount.tolist() == [0.25, 0.5, 0.5]
    assert batch.obs["policy"].tolist() == [[0.0], [1.0], [3.0]]
    assert batch.next_obs["policy"].tolist() == [[2.0], [2.0], [4.0]]
    assert batch.valid.all()
