"""Rollouts as one XLA program take the actions of the step-by-step collection, and resume bit for bit."""

# ruff: noqa: E402 - what follows needs the packages that are tested for here

from dataclasses import replace

import pytest
import torch

REASON = 'needs pip install "canter[jax]"'
jax = pytest.importorskip("jax", reason=REASON)
pytest.importorskip("gymnax", reason=REASON)
pytest.importorskip("brax.envs", reason=REASON)

import jax.numpy as jnp

from canter.algorithms.ppo import PPOConfig
from canter.algorithms.sac import SACConfig
from canter.config import TrainConfig
from canter.core.registry import UserError
from canter.core.specs import Continuous
from canter.core.storage.tree import encode
from canter.envs import EnvConfig
from canter.envs.jax_envs.adapter import JaxEnv, JaxTask, Outcome
from canter.nn.actor_critic import ModelConfig
from canter.nn.heads import StdConfig
from canter.nn.network import NetworkConfig
from canter.nn.rnn import RNNConfig
from canter.runs.run_folder import CheckpointConfig, RunFolder
from canter.training.collector import Collector
from canter.training.execution import ExecutionConfig
from canter.training.trainer import Trainer

pytestmark = pytest.mark.filterwarnings("ignore:Brax System, piplines:UserWarning", "ignore::DeprecationWarning")

N = 16
HORIZON = 12


def slide():
    """Return an environment with groups and metrics: a point, pushed along a line, whose episodes end in 9 steps."""

    def observe(state):
        return {"state": state[0][:, None], "privileged_state": jnp.stack(state, -1)}

    def reset(key):
        state = (jax.random.uniform(key, (N,)), jnp.zeros(N))
        return state, observe(state)

    def step(key, state, action):
        moved = (state[0] + 0.1 * action[:, 0], state[1] + 1)
        late = moved[1] >= 9
        fresh = (jax.random.uniform(key, (N,)), jnp.zeros(N))
        state = jax.tree.map(lambda new, old: jnp.where(late, new, old), fresh, moved)
        metrics = {"place": moved[0], "age": moved[1]}
        return state, Outcome(observe(state), -jnp.abs(moved[0]), late & False, late, observe(moved), metrics)

    return JaxEnv(JaxTask("slide", N, Continuous((-1.0,), (2.0,)), reset, step), "cpu")


def collectors(env_id, model):
    """Return two equal collectors, stepping and scanning, with statistics of observations and weights that act."""
    pair = []
    for mode in ("eager", "scan"):
        config = EnvConfig(id=env_id, num_envs=N, options={"max_episode_steps": 9})
        env = slide() if env_id == "slide" else config.build("cpu")
        algorithm = PPOConfig(horizon=HORIZON, model=model).build(env.spec, 3)
        generator = torch.Generator().manual_seed(5)
        seen = {name: 0.1 * torch.randn(64, *spec.shape, generator=generator) for name, spec in env.spec.obs.items()}
        algorithm.model.update_statistics(seen, torch.ones(64, dtype=torch.bool))
        collector = Collector(env, algorithm, seed=7)
        if mode == "scan":
            collector.fill = algorithm.compile_rollout(env)
        pair.append(collector)
    return pair


def assert_close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


NETWORK = NetworkConfig(hidden=(16, 8), activation="elu")
MODELS = {
    "gymnax:CartPole-v1": ModelConfig(policy=NetworkConfig(hidden=(16,)), policy_gain=1.0),
    "gymnax:Pendulum-v1": ModelConfig(policy=NETWORK, policy_gain=1.0, std=StdConfig(form="softplus", initial=0.5)),
    "gymnax:Reacher-misc": ModelConfig(policy=NETWORK, distribution="tanh_gaussian"),
    "slide": ModelConfig(policy=NETWORK, policy_gain=1.0),
    "brax:fast": ModelConfig(policy=NETWORK, policy_gain=1.0),
}


@pytest.mark.parametrize("env_id", [*list(MODELS)[:-1], pytest.param("brax:fast", marks=pytest.mark.long)])
def test_both_ways_take_the_same_actions(env_id):
    stepping, scanning = collectors(env_id, MODELS[env_id])
    for _ in range(2):  # the second continues the episodes of the first
        expected = stepping.collect()
        rollout = scanning.collect()
        assert_close(rollout.record.action, expected.record.action)
        assert_close(rollout.record.dist_params, expected.record.dist_params)
        for name in ("obs", "reward", "terminated", "truncated", "valid", "reset"):
            assert_close(getattr(rollout, name), getattr(expected, name))
        ended = expected.done
        assert ended.any() and len(rollout.record.action.unique()) > 1
        for name, final in expected.final_obs.items():
            assert_close(rollout.final_obs[name][ended], final[ended])
        assert stepping.env_metrics().keys() == scanning.env_metrics().keys()
        for name, mean in stepping.env_metrics().items():
            assert_close(scanning.env_metrics()[name], mean)
    assert env_id != "slide" or list(stepping.env_metrics()) == ["env/place", "env/age"]
    assert torch.equal(stepping.algorithm.policy_rng.get_state(), scanning.algorithm.policy_rng.get_state())
    ours = scanning.state_dict()
    for name, tensor in stepping.state_dict()["env"].items():
        assert_close(ours["env"][name], tensor)


def train(path, iterations=None):
    settings = TrainConfig(
        env=EnvConfig(id="gymnax:CartPole-v1", num_envs=N),
        algorithm=PPOConfig(horizon=8, model=ModelConfig(policy=NetworkConfig(hidden=(8,)))),
        execution=ExecutionConfig(mode="scan"),
        checkpoints=CheckpointConfig(save_every=1),
        total_steps=6 * 8 * N,
        seed=3,
    )
    with Trainer(settings, folder=RunFolder(path, settings.checkpoints)) as trainer:
        trainer.learn(iterations)
    return trainer


def test_a_run_trains_and_resumes_bit_for_bit(tmp_path):
    whole = train(tmp_path / "whole")
    train(tmp_path / "parts", 3)
    resumed = train(tmp_path / "parts")
    assert encode(resumed.algorithm.state_dict()) == encode(whole.algorithm.state_dict())
    (_, one), (_, other) = (RunFolder(tmp_path / name).store.load_latest() for name in ("whole", "parts"))
    assert encode(one["collector"]["env"]) == encode(other["collector"]["env"])


@pytest.mark.parametrize(
    ("env", "algorithm", "message"),
    [
        (EnvConfig(id="tensor:pendulum"), PPOConfig(), "mode=scan is for simulators in JAX .* not for tensor:pendulum"),
        (EnvConfig(id="gymnax:Pendulum-v1", finite_horizon=True), PPOConfig(), "without env.finite_horizon"),
        (EnvConfig(id="gymnax:Pendulum-v1"), SACConfig(), "mode=scan is for PPO, not for SAC"),
        (
            EnvConfig(id="gymnax:CartPole-v1"),
            PPOConfig(model=ModelConfig(policy=NetworkConfig(rnn=RNNConfig()))),
            "mode=scan: .*rnn.* is not supported",
        ),
        (
            EnvConfig(id="gymnax:Pendulum-v1"),
            PPOConfig(model=ModelConfig(distribution="beta")),
            "mode=scan: model.distribution=beta is not supported",
        ),
    ],
)
def test_what_cannot_be_scanned_is_refused_by_name(env, algorithm, message):
    config = TrainConfig(env=env, algorithm=algorithm, execution=ExecutionConfig(mode="scan"))
    with pytest.raises(UserError, match=message):
        Trainer(replace(config, total_steps=100))
