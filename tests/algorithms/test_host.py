"""Acting and learning leave the host alone, so that they can be captured in a CUDA graph."""

from contextlib import contextmanager

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from canter.algorithms.extensions import AMPConfig, RNDConfig, SymmetryConfig
from canter.algorithms.ppo import BonusValueConfig, PPOConfig
from canter.algorithms.ppo.rewards import RewardConfig
from canter.core.dispatch import Dispatched
from canter.engines.base import BoundLossConfig
from canter.envs.tensor import CartPole, Null, Pendulum, Swimmer
from canter.nn.actor_critic import ModelConfig
from canter.nn.network import NetworkConfig
from canter.nn.optimizer import OptimizerConfig
from canter.nn.rnn import RNNConfig
from canter.nn.schedules import AdaptiveKL, StepAt
from canter.training.collector import Collector


class NoSyncOperator(TorchDispatchMode):
    """Refuses operators that make the host wait for the device or whose result has a shape that depends on data."""

    REFUSED = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::is_nonzero", "aten::item")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.name() not in self.REFUSED, f"{func.name()} asks the host"
        return func(*args, **(kwargs or {}))


class NoSyncMethod(TorchFunctionMode):
    """Refuses methods that read a tensor from the host without an operator, as they do on a CPU."""

    REFUSED = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.cpu)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert func not in self.REFUSED, f"Tensor.{func.__name__} asks the host"
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def definitions(monkeypatch):
    """Run the plain functions; their kernels in C may read tensors, which lie in the host's memory."""
    monkeypatch.setattr(Dispatched, "__call__", lambda self, *args, **kwargs: self.plain(*args, **kwargs))


@contextmanager
def no_host_sync():
    """Refuse every read of a tensor by the host."""
    with NoSyncOperator(), NoSyncMethod():
        yield


def collector_of(env, algorithm):
    """Return a collector of what runs on a GPU: NaN is searched for when a row is logged, all values are computed."""
    values = algorithm.engine.values
    algorithm.engine.values = lambda obs, state, reset, needed=None: values(obs, state, reset)
    collector = Collector(env, algorithm, seed=0)
    collector.tracker.reads_at_once = False
    return collector


@pytest.mark.parametrize(
    "read", [lambda x: x.tolist(), lambda x: x.numpy(), lambda x: x.item(), lambda x: x.cpu(), bool, float]
)
def test_the_guard_sees_every_way_to_read_a_tensor(read):
    with pytest.raises(AssertionError, match="asks the host"), no_host_sync():
        read(torch.ones(()))


@pytest.mark.parametrize("env_class", [CartPole, Null])
@pytest.mark.parametrize("every", ["minibatch", "epoch", "update"])
def test_acting_and_learning_never_ask_the_host(env_class, every):
    env = env_class(8)
    config = PPOConfig(
        horizon=8,
        epochs=2,
        num_minibatches=2,
        optimizer=OptimizerConfig(learning_rate=AdaptiveKL(1e-3, every=every)),
        critic_optimizer=OptimizerConfig(),
        gradient_clipping="per_network",
    )
    algorithm = config.build(env.spec, seed=0)
    algorithm.use_engine("autograd")
    collector = collector_of(env, algorithm)
    with no_host_sync():
        algorithm.update(collector.collect())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("objective", ["discounted", "average"])
def test_nothing_that_is_made_of_rewards_asks_the_host(objective, precision):
    env = Pendulum(8, max_episode_steps=5)
    config = PPOConfig(
        horizon=8,
        epochs=2,
        num_minibatches=2,
        objective=objective,
        discount_per="time",
        recompute_advantage=True,
        reward=RewardConfig(time="divide", squash="symlog", maximum=1.0, centering=0.1, normalize=True),
        bound_loss=BoundLossConfig(),
        model=ModelConfig(policy=NetworkConfig(precision=precision)),
    )
    algorithm = config.build(env.spec, seed=0)
    algorithm.use_engine("autograd")
    collector = collector_of(env, algorithm)
    with no_host_sync():
        algorithm.update(collector.collect())


@pytest.mark.parametrize("memory", [None, RNNConfig(hidden=4)])
@pytest.mark.parametrize("env_class", [CartPole, Swimmer])
def test_extensions_never_ask_the_host(env_class, memory):
    env = env_class(8, motion=True) if env_class is Swimmer else env_class(8)
    extensions = (RNDConfig(share=0.5, weight=StepAt(1.0, 0.5)), SymmetryConfig(mirror_loss=1.0))
    if env_class is Swimmer:
        extensions += (AMPConfig(motions=("canter:swimmer_wide.npz",), batch_size=16, hidden=(8,)),)
    config = PPOConfig(
        horizon=8,
        epochs=1,
        num_minibatches=2,
        sequence_length=4,
        model=ModelConfig(policy=NetworkConfig(rnn=memory)),
        extensions=extensions,
        bonus_value=BonusValueConfig(episodic=memory is not None),
    )
    algorithm = config.build(env.spec, seed=0)
    algorithm.use_engine("autograd")
    collector = collector_of(env, algorithm)
    with no_host_sync():
        algorithm.update(collector.collect())
