"""How many threads a run learns with: decided once, by its own update, without a trace of the trial."""

import pytest
import torch

from canter.algorithms.ppo import PPOConfig
from canter.envs.tensor import tensor_envs
from canter.nn.actor_critic import ModelConfig
from canter.nn.network import NetworkConfig
from canter.training import threads
from canter.training.collector import Collector
from canter.training.execution import ExecutionConfig
from canter.training.threads import ThreadChoice


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def built(hidden, num_envs=512, **execution):
    env = tensor_envs["cartpole"](num_envs)
    model = ModelConfig(policy=NetworkConfig(hidden=hidden))
    algorithm = PPOConfig(horizon=8, epochs=1, num_minibatches=2, model=model).build(env.spec, 0)
    collector = Collector(env, algorithm, 0)
    return algorithm, collector, ExecutionConfig(**execution).prepare(collector, algorithm)


def parameters(algorithm):
    return torch.cat([parameter.detach().reshape(-1) for parameter in algorithm.model.parameters()])


@pytest.fixture
def two_cores(monkeypatch):
    """Two cores, and a clock by which an update with two threads takes the given share of one with one."""
    monkeypatch.setattr(threads, "cores", lambda: 2)
    passed = [0.0]

    def take(share):
        def read():
            passed[0] += share if torch.get_num_threads() == 2 else 1.0
            return passed[0]

        monkeypatch.setattr(threads.time, "perf_counter", read)

    return take


@pytest.mark.parametrize(("share", "chosen"), [(0.6, 2), (0.9, 1), (30.0, 1)])
def test_several_threads_are_taken_where_they_are_clearly_faster(two_cores, share, chosen):
    two_cores(share)
    _, collector, programs = built((128, 128))
    programs.update(programs.collect())
    assert collector.threads == torch.get_num_threads() == chosen


def test_a_trial_leaves_no_trace(two_cores):
    two_cores(2.0)
    chosen, _, programs = built((128, 128))
    plain, _, others = built((128, 128), threads=1)
    for _ in range(2):
        programs.update(programs.collect())
        others.update(others.collect())
    assert torch.equal(parameters(chosen), parameters(plain))


@pytest.mark.parametrize(("hidden", "num_envs"), [((64, 64), 512), ((128, 128), 8)])
def test_small_work_is_not_worth_a_trial(two_cores, monkeypatch, hidden, num_envs):
    two_cores(0.1)
    monkeypatch.setattr(ThreadChoice, "_seconds", lambda *_: pytest.fail("there was a trial"))
    _, collector, programs = built(hidden, num_envs)
    programs.update(programs.collect())
    assert collector.threads == 1


def test_a_resumed_run_keeps_the_choice(two_cores, monkeypatch):
    two_cores(0.5)
    _, collector, programs = built((128, 128))
    programs.update(programs.collect())
    saved = collector.state_dict()
    torch.set_num_threads(1)
    monkeypatch.setattr(ThreadChoice, "_seconds", lambda *_: pytest.fail("there was a trial"))
    _, resumed, programs = built((128, 128))
    resumed.load_state_dict(saved)
    programs.update(programs.collect())
    assert resumed.threads == torch.get_num_threads() == 2


def test_a_number_that_is_given_wins_over_the_saved_one():
    _, collector, _ = built((8,), num_envs=4)
    saved = collector.state_dict() | {"threads": 2}
    _, resumed, _ = built((8,), num_envs=4, threads=1)
    resumed.load_state_dict(saved)
    assert torch.get_num_threads() == 1


def test_no_threads_at_all_are_refused():
    with pytest.raises(ValueError, match="threads=0 must be at least 1"):
        ExecutionConfig(threads=0)
