"""A population on a GPU: no host reads, one graph, the same members as alone."""

from dataclasses import fields

import pytest
import torch

import canter
from canter.algorithms.ppo import MemberConfig, PopulationConfig
from canter.envs.tensor import tensor_envs
from canter.training.collector import Collector

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

MEMBERS = (MemberConfig(seed=3), MemberConfig(seed=4, clip_ratio=0.05), MemberConfig(seed=5, learning_rate=3e-3))
PPO = canter.PPOConfig(horizon=8, epochs=2, num_minibatches=2, target_kl=1.0)


def population(members, config=PPO):
    shared = {each.name: getattr(config, each.name) for each in fields(canter.PPOConfig)}
    return PopulationConfig(**shared, members=tuple(members))


def trainer(env_id, members, steps=8):
    config = canter.TrainConfig(
        env=canter.EnvConfig(id=env_id, num_envs=32 * len(members)),
        algorithm=population(members),
        total_steps=10_000_000,
        device="cuda",
        execution=canter.ExecutionConfig(tf32=False),
    )
    return canter.Trainer(config)


@pytest.mark.parametrize("env_id", ["cartpole", "quadrotor"])
def test_an_iteration_never_waits_for_the_gpu(env_id):
    env = tensor_envs[env_id](96, "cuda")
    adaptive = canter.OptimizerConfig(learning_rate=canter.AdaptiveKL(1e-3, every="minibatch"))
    config = canter.PPOConfig(horizon=8, epochs=2, num_minibatches=2, target_kl=1.0, optimizer=adaptive)
    algorithm = population([MemberConfig()] * 3, config).build(env.spec, 0)
    collector = Collector(env, algorithm, 0)
    algorithm.update(collector.collect())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        metrics = algorithm.update(collector.collect())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("env_id", ["tensor:cartpole", "tensor:quadrotor"])
def test_members_of_a_captured_population_equal_the_members_alone(env_id):
    with trainer(env_id, MEMBERS) as together:
        together.learn(5)  # two eager iterations, then graphs
    for number, member in enumerate(MEMBERS):
        with trainer(env_id, [member]) as alone:
            alone.learn(5)
        left = together.algorithm.views[number].actor.state_dict()
        right = alone.algorithm.views[0].actor.state_dict()
        assert all(torch.allclose(left[name], right[name], rtol=1e-3, atol=1e-4) for name in left)


def test_settings_change_without_a_new_capture():
    weights = []
    for change in (False, True):
        with trainer("tensor:cartpole", MEMBERS) as run:
            run.learn(4)
            before = run.algorithm.optimizer.adam.flat.clone()
            if change:
                run.algorithm.optimizer.adam.learning_rate[1] = 0.0
            run.learn(1)
            weights.append(run.algorithm.optimizer.adam.flat.clone())
    unchanged, changed = weights
    assert changed[0].equal(unchanged[0])
    assert changed[2].equal(unchanged[2])
    normalized = torch.isclose(changed[1], before[1], rtol=0, atol=0)
    assert normalized.float().mean() > 0.9  # all but the critic's last layer, which follows its statistics
    assert not torch.isclose(unchanged[1], before[1], rtol=0, atol=0).float().mean() > 0.9
