"""The definition of PPO's loss: which samples count, by hand."""

import torch

import canter
from canter.engines.autograd import AutogradEngine, sample_means
from canter.engines.base import PPOBatch
from canter.envs.tensor import Pendulum
from canter.training.collector import Collector


def batch_of(valid, original=None):
    """Return samples of which only the masks matter."""
    valid = torch.tensor([valid])
    numbers = torch.zeros(valid.shape)
    return PPOBatch(
        obs={},
        action=numbers,
        log_prob=numbers,
        dist_params=numbers,
        value=numbers,
        return_=numbers,
        advantage=numbers,
        valid=valid,
        reset=torch.zeros_like(valid),
        policy_state=(),
        critic_state=(),
        original=None if original is None else torch.tensor([original]),
    )


def test_entropy_kl_and_clip_fraction_are_means_over_the_samples_that_were_collected():
    names = ("loss/policy", "policy/entropy", "policy/kl", "policy/clip_fraction")
    values = {name: torch.tensor([[1.0, 3.0, float("nan"), 8.0]]) for name in names}
    valid = (True, True, False, True)
    means = sample_means(values, batch_of(valid))
    assert {name: mean.item() for name, mean in means.items()} == dict.fromkeys(names, 4.0)
    means = sample_means(values, batch_of(valid, original=(True, True, True, False)))
    assert {name: mean.item() for name, mean in means.items()} == dict.fromkeys(names, 2.0) | {"loss/policy": 4.0}


def test_statistics_of_a_minibatch_are_those_of_its_valid_samples():
    env = Pendulum(4)
    algorithm = canter.PPOConfig(horizon=4, num_minibatches=1, obs_statistics="minibatch").build(env.spec, 0)
    engine = algorithm.engine
    assert isinstance(engine, AutogradEngine)
    rollout = Collector(env, algorithm, 0).collect()
    rollout.valid[1:3] = False
    batch, _ = algorithm.prepare_batch(rollout)
    engine.gradients(engine.begin(batch), torch.arange(12), algorithm.coefs)  # the first three steps
    state = algorithm.model.state_dict()
    for network in ("actor.network", "critic.network"):
        assert state[f"{network}.normalizers.0.count"].item() == 4
        mean = state[f"{network}.normalizers.0.mean"]
        torch.testing.assert_close(mean, rollout.obs["policy"][0].double().mean(0))
