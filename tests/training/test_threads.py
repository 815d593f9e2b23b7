"""How many threads a run learns with: by sizes alone, the same for the same command."""

import time

import pytest
import torch

from canter.algorithms.ppo import PPOConfig
from canter.algorithms.sac import SACConfig
from canter.envs.tensor import tensor_envs
from canter.nn.actor_critic import ModelConfig
from canter.nn.network import NetworkConfig
from canter.nn.stack import CriticConfig
from canter.training import execution
from canter.training import execution as threads
from canter.training.collector import Collector
from canter.training.execution import ExecutionConfig, choose_threads, time_updates


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(execution, "cores", lambda: 2)


def built(hidden, num_envs=512, **settings):
    env = tensor_envs["cartpole"](num_envs)
    model = ModelConfig(policy=NetworkConfig(hidden=hidden))
    algorithm = PPOConfig(horizon=8, epochs=1, num_minibatches=2, model=model).build(env.spec, 0)
    collector = Collector(env, algorithm, 0)
    return collector, ExecutionConfig(**settings).prepare(collector, algorithm)


@pytest.mark.parametrize(
    ("widest", "steps", "cores", "chosen"),
    [
        (2**14, 2**12, 8, 8),
        (2**14 - 1, 2**12, 8, 1),
        (2**14, 2**12 - 1, 8, 1),
        (2**20, 2**20, 1, 1),
    ],
)
def test_all_cores_learn_where_layers_are_wide_and_rollouts_long(widest, steps, cores, chosen):
    assert choose_threads(widest, steps, cores) == chosen


@pytest.mark.parametrize(
    ("hidden", "num_envs", "chosen"), [((128, 128), 512, 2), ((64, 64), 512, 1), ((128, 128), 8, 1)]
)
def test_the_widest_layer_and_the_whole_rollout_count(monkeypatch, hidden, num_envs, chosen):
    monkeypatch.setattr(time, "perf_counter", iter(range(1000)).__next__)  # whatever a clock says
    collector, _ = built(hidden, num_envs)
    assert collector.threads == torch.get_num_threads() == chosen


@pytest.mark.parametrize(("engine", "hidden", "chosen"), [("auto", 128, 2), ("autograd", 128, 1), ("auto", 64, 1)])
def test_sac_in_c_takes_all_cores_for_wide_networks_however_short_its_rollouts(engine, hidden, chosen):
    env = tensor_envs["quadrotor"](4)
    network, critic = NetworkConfig(hidden=(hidden, hidden)), CriticConfig(hidden=(hidden, hidden))
    algorithm = SACConfig(policy=network, critic=critic).build(env.spec, 0)
    algorithm.use_engine(engine)
    collector = Collector(env, algorithm, 0)
    ExecutionConfig().prepare(collector, algorithm)
    assert collector.threads == torch.get_num_threads() == chosen


def test_a_resumed_run_keeps_the_number_on_a_machine_with_more_cores(monkeypatch):
    collector, _ = built((128, 128))
    saved = collector.state_dict()
    assert saved["threads"] == 2
    monkeypatch.setattr(execution, "cores", lambda: 4)
    resumed, _ = built((128, 128))
    assert resumed.threads == 4
    resumed.load_state_dict(saved)
    assert resumed.threads == torch.get_num_threads() == 2


def test_a_number_that_is_given_wins_over_the_saved_one():
    collector, _ = built((8,), num_envs=4)
    saved = collector.state_dict() | {"threads": 2}
    ExecutionConfig(threads=1).start("cpu")
    resumed, _ = built((8,), num_envs=4, threads=1)
    resumed.load_state_dict(saved)
    assert torch.get_num_threads() == 1


def test_no_threads_at_all_are_refused():
    with pytest.raises(ValueError, match="threads=0 must be at least 1"):
        ExecutionConfig(threads=0)


def test_updates_are_timed_with_each_number_from_the_same_weights(monkeypatch):
    collector, _ = built((8,), num_envs=4)
    clock, seen = [0.0], []

    def update(rollout):
        seen.append(torch.cat([p.detach().reshape(-1) for p in collector.algorithm.model.parameters()]))
        clock[0] += 1.0 / torch.get_num_threads()
        return plain(rollout)

    plain = collector.algorithm.update
    monkeypatch.setattr(collector.algorithm, "update", update)
    monkeypatch.setattr(threads.time, "perf_counter", lambda: clock[0])
    assert time_updates(collector, [1, 2], repeats=2) == pytest.approx({1: 1.0, 2: 0.5})
    assert len(seen) == 5
    assert all(torch.equal(weights, seen[0]) for weights in seen)
