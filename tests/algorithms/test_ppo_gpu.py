"""Tests of PPO that need a GPU."""

import pytest
import torch

from canter.algorithms.ppo import PPOConfig
from canter.envs.tensor import tensor_envs
from canter.nn.actor_critic import ModelConfig
from canter.nn.network import NetworkConfig
from canter.nn.optimizer import OptimizerConfig
from canter.nn.schedules import AdaptiveKL
from canter.training.collector import Collector

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]


@pytest.mark.parametrize("name", ["cartpole", "pendulum", "quadrotor", "queue", "null"])
def test_an_iteration_never_waits_for_the_gpu(name):
    env = tensor_envs[name](64, "cuda")
    config = PPOConfig(
        horizon=8,
        epochs=2,
        num_minibatches=2,
        target_kl=1.0,
        optimizer=OptimizerConfig(learning_rate=AdaptiveKL(1e-3, every="minibatch")),
    )
    algorithm = config.build(env.spec, seed=0)
    collector = Collector(env, algorithm, seed=0)
    algorithm.update(collector.collect())  # constants are copied to the device once
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        metrics = algorithm.update(collector.collect())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("name", ["cartpole", "pendulum", "quadrotor"])
def test_the_first_ratio_is_one_in_bfloat16(name):
    env = tensor_envs[name](4096, "cuda")
    model = ModelConfig(policy=NetworkConfig(hidden=(256, 128, 64), precision="bfloat16"))
    algorithm = PPOConfig(horizon=24, epochs=5, num_minibatches=4, model=model).build(env.spec, seed=0)
    collector = Collector(env, algorithm, seed=0)
    for _ in range(10):
        algorithm.update(collector.collect())
    batch, _ = algorithm.prepare_batch(collector.collect())
    size = batch.advantage.shape[1] // 4
    minibatch = batch[:, :size]
    with torch.no_grad():
        params, _ = algorithm.model(minibatch.obs, (), (), minibatch.reset)
        ratio = torch.exp(algorithm.distribution.log_prob(params, minibatch.action) - minibatch.log_prob)
    assert (ratio - 1).abs().max() <= 1e-3


def test_gpu_and_cpu_learn_the_same_from_the_same_rollout():
    results = []
    for device in ("cpu", "cuda"):
        env = tensor_envs["cartpole"](16, device)
        algorithm = PPOConfig(horizon=8, epochs=1, num_minibatches=1).build(env.spec, seed=0)
        collector = Collector(env, algorithm, seed=0)
        rollout = collector.collect()
        if device == "cpu":
            recorded = rollout.map(torch.clone)
        else:
            rollout.copy_(recorded)
        algorithm.update(rollout)
        results.append([parameter.detach().cpu() for parameter in algorithm.model.parameters()])
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.fixture
def tf32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("clipping", ["joint", "per_network"])
def test_whole_networks_in_one_launch_learn_what_layers_do(tf32, clipping):
    env = tensor_envs["quadrotor"](512, "cuda")
    model = ModelConfig(policy=NetworkConfig(hidden=(256, 128, 64), activation="elu"))
    config = PPOConfig(horizon=24, epochs=5, num_minibatches=4, model=model, gradient_clipping=clipping)
    algorithm = config.build(env.spec, seed=0)
    collector = Collector(env, algorithm, seed=0)
    for _ in range(3):
        algorithm.update(collector.collect())
    batch, _ = algorithm.prepare_batch(collector.collect())
    optimizer, minibatch = algorithm.phases["policy"].optimizer, batch[:, :3000]
    assert algorithm.engine.name == "triton"
    every = torch.arange(3000, device="cuda")
    metrics, kl = algorithm.engine.gradients(algorithm.engine.begin(minibatch), every, algorithm.coefs)
    # Acting and learning are the same function to the last bit.
    assert kl.item() == 0.0
    ours = {parameter: gradient.clone() for parameter, gradient in optimizer.gradients.items()}
    for other in ("triton_layers", "autograd"):
        algorithm.use_engine(other)
        plain, plain_kl = algorithm.engine.gradients(algorithm.engine.begin(minibatch), every, algorithm.coefs)
        for parameter, theirs in optimizer.gradients.items():
            assert (ours[parameter] - theirs).norm() <= 5e-3 * theirs.norm()
        torch.testing.assert_close(kl, plain_kl, rtol=1e-3, atol=1e-5)
        for name, value in plain.items():
            torch.testing.assert_close(metrics[name], value, rtol=1e-3, atol=1e-5)
