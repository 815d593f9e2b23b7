"""The same iterations, however they are handed to the device."""

import logging

import pytest
import torch

from canter.algorithms.extensions import AMPConfig, RNDConfig, SymmetryConfig
from canter.algorithms.ppo import BonusValueConfig, PPOConfig
from canter.envs.gymnasium import make_gymnasium
from canter.envs.tensor import tensor_envs
from canter.nn.actor_critic import ModelConfig
from canter.nn.network import NetworkConfig
from canter.nn.optimizer import OptimizerConfig
from canter.nn.rnn import RNNConfig
from canter.nn.schedules import AdaptiveKL, Linear
from canter.training.collector import Collector
from canter.training.execution import ExecutionConfig, Graph
from covering import usual_of

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def iterate(env, mode, count, *, restart_at=None, tf32=False, **settings):
    """Parameters after some iterations; at `restart_at` everything is rebuilt and restored."""
    given = {"horizon": 8, "epochs": 2, "num_minibatches": 2, "sequence_length": 4}
    config, execution = PPOConfig(**given | settings), ExecutionConfig(mode=mode, tf32=tf32)
    execution.start(env.spec.device.type)  # as a run does: initial weights depend on the number of threads

    def build(seed):
        algorithm = config.build(env.spec, seed)
        collector = Collector(env, algorithm, seed)
        return algorithm, collector, execution.prepare(collector, algorithm)

    algorithm, collector, programs = build(0)
    for iteration in range(count):
        if iteration == restart_at:
            saved = algorithm.state_dict(), collector.state_dict()
            algorithm, collector, programs = build(1)
            algorithm.load_state_dict(saved[0])
            collector.load_state_dict(saved[1])
        algorithm.set_progress(iteration / count)
        metrics = programs.update(programs.collect())
    torch.set_float32_matmul_precision("highest")  # the default, which a run changes for good
    assert all(torch.isfinite(value) for value in metrics.values())
    learned = (*algorithm.model.parameters(), *algorithm.policy.actor.parameters())
    return torch.cat([parameter.detach().reshape(-1) for parameter in learned])


def test_auto_is_eager_on_a_cpu():
    eager = iterate(tensor_envs["cartpole"](8), "eager", 2)
    assert torch.equal(iterate(tensor_envs["cartpole"](8), "auto", 2), eager)


def test_graphs_on_a_cpu_say_why_not_and_run_eagerly(caplog):
    with caplog.at_level(logging.WARNING):
        graph = iterate(tensor_envs["cartpole"](8), "graph", 2)
    assert "execution.mode=graph has no effect on a CPU" in caplog.text
    assert torch.equal(graph, iterate(tensor_envs["cartpole"](8), "eager", 2))


MEMORY = NetworkConfig(hidden=(16,), rnn=RNNConfig(hidden=8))
STYLE = {"motions": ("canter:swimmer_wide.npz",), "hidden": (16,), "batch_size": 32, "replay": 100, "replay_rows": 30}
VARIANTS = {
    "discrete": ("cartpole", {}),
    "whole networks": (
        "pendulum",
        {"tf32": True, "target_kl": 0.02, "critic_optimizer": OptimizerConfig(learning_rate=AdaptiveKL(1e-3))},
    ),
    "continuous": ("pendulum", {"target_kl": 0.02, "optimizer": OptimizerConfig(learning_rate=AdaptiveKL(1e-3))}),
    "lstm": ("cartpole", {"model": ModelConfig(policy=MEMORY)}),
    "shared trunk": ("quadrotor", {"model": ModelConfig(shared_trunk=True)}),
    "schedules": ("null", {"entropy_coef": Linear(0.01), "optimizer": OptimizerConfig(learning_rate=Linear(1e-3))}),
    "recomputed advantages": ("pendulum", {"recompute_advantage": True}),
    "curiosity": ("maze", {"extensions": (RNDConfig(share=0.5, weight=Linear(1.0)),)}),
    "curiosity apart": ("maze", {"extensions": (RNDConfig(),), "bonus_value": BonusValueConfig()}),
    "symmetry": ("swimmer", {"extensions": (SymmetryConfig(mirror_loss=1.0),)}),
    "style": ("swimmer", {"extensions": (AMPConfig(**STYLE),), "policy_average": 0.5}),
    "style, curiosity and symmetry with memory": (
        "swimmer",
        {
            "extensions": (AMPConfig(**STYLE | {"frames": 4}), RNDConfig(), SymmetryConfig(mirror_loss=1.0)),
            "model": ModelConfig(policy=MEMORY),
        },
    ),
    "symmetry with memory": ("cartpole", {"extensions": (SymmetryConfig(),), "model": ModelConfig(policy=MEMORY)}),
}


def make(name, num_envs, device="cpu"):
    """An environment; the swimmer with what is compared with clips."""
    return tensor_envs[name](num_envs, device, **({"motion": True} if name == "swimmer" else {}))


EXTENDED = [name for name, (_, settings) in VARIANTS.items() if "extensions" in settings]


@pytest.mark.parametrize("name", usual_of(EXTENDED, ["curiosity apart", "style, curiosity and symmetry with memory"]))
def test_stopping_and_resuming_with_extensions_changes_no_bit(name):
    env, settings = VARIANTS[name]
    straight = iterate(make(env, 8), "eager", 4, **settings)
    assert torch.equal(straight, iterate(make(env, 8), "eager", 4, restart_at=2, **settings))
    without = settings | {"extensions": (), "bonus_value": None}
    assert not torch.equal(straight, iterate(make(env, 8), "eager", 4, **without))


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("name", VARIANTS)
def test_a_graph_learns_what_eager_execution_learns(name):
    env, settings = VARIANTS[name]
    eager = iterate(make(env, 64, "cuda"), "eager", 20, **settings)
    graph = iterate(make(env, 64, "cuda"), "graph", 20, **settings)
    # The same kernels in the same order; only where products of many rows are split may the last bits differ.
    torch.testing.assert_close(graph, eager, atol=1e-5, rtol=1e-5)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("restart_at", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "name", ["discrete", "continuous", "whole networks", "lstm", "curiosity apart", "symmetry with memory", "style"]
)
def test_stopping_and_resuming_a_graph_changes_no_bit(name, restart_at):
    env, settings = VARIANTS[name]
    straight = iterate(make(env, 64, "cuda"), "graph", 10, **settings)
    resumed = iterate(make(env, 64, "cuda"), "graph", 10, restart_at=restart_at, **settings)
    assert torch.equal(straight, resumed)


@gpu
@pytest.mark.gpu
def test_a_captured_collection_reports_what_the_simulator_says():
    seen = {"eager": [], "graph": []}
    for mode, rows in seen.items():
        env = tensor_envs["queue"](64, "cuda", max_episode_steps=20)
        algorithm = PPOConfig(horizon=8, num_minibatches=2).build(env.spec, 0)
        collector = Collector(env, algorithm, 0)
        programs = ExecutionConfig(mode=mode, tf32=False).prepare(collector, algorithm)
        for _ in range(6):
            programs.collect()  # the same policy throughout
            rows.append({name: value.item() for name, value in collector.env_metrics().items()})
    assert seen["graph"][0].keys() == {"env/customers", "env/idle"}
    assert [row["env/customers"] for row in seen["graph"]] == [row["env/customers"] for row in seen["eager"]]
    assert len({row["env/customers"] for row in seen["graph"]}) == 6


@gpu
@pytest.mark.gpu
def test_environments_on_the_host_get_a_graph_of_the_policy():
    results = []
    for mode in ("eager", "graph"):
        env = make_gymnasium("CartPole-v1", 4, device="cuda")
        results.append(iterate(env, mode, 6))
        env.close()
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


def draw_in_graphs(number, rounds):
    """Numbers drawn in a graph and eagerly, while a busy device lets streams wait for one another."""
    big, other = torch.zeros(4096, 4096, device="cuda"), torch.cuda.Stream()
    out = torch.empty_like(big)
    for seed in range(rounds * number, rounds * (number + 1)):
        eager, own = (torch.Generator("cuda").manual_seed(seed) for _ in range(2))
        graph = Graph(lambda own=own: torch.rand(64, device="cuda", generator=own), [own], "a draw")
        for _ in range(5):
            with torch.cuda.stream(other):
                torch.mm(big, big, out=out)
            assert graph().tolist() == torch.rand(64, device="cuda", generator=eager).tolist()


@gpu
@pytest.mark.gpu
def test_random_streams_continue_from_the_first_replay_on_a_shared_device():
    torch.multiprocessing.spawn(draw_in_graphs, (20,), nprocs=8)


@gpu
@pytest.mark.gpu
def test_functions_that_cannot_be_captured_run_eagerly_with_the_reason(caplog):
    counter = torch.zeros((), device="cuda")

    def needs_the_host():
        counter.add_(1)
        return float(counter)

    graph = Graph(needs_the_host, [], "the update")
    with caplog.at_level(logging.WARNING):
        assert [graph() for _ in range(5)] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert "the update is not captured as a CUDA graph and runs eagerly: " in caplog.text
