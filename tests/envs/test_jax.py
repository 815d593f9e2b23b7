"""Simulators in JAX: bit for bit the simulator's own loop, exact ends, and exact resumption."""

# ruff: noqa: E402 - what follows needs the packages that are tested for here

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

REASON = 'needs pip install "canter[jax]"'
jax = pytest.importorskip("jax", reason=REASON)
gymnax = pytest.importorskip("gymnax", reason=REASON)
envs = pytest.importorskip("brax.envs", reason=REASON)

from brax.envs.wrappers import training

from canter.algorithms.ppo import PPOConfig
from canter.config import TrainConfig
from canter.core.registry import UserError
from canter.core.specs import Continuous, Discrete
from canter.core.storage.tree import encode
from canter.envs import EnvConfig
from canter.envs.wrappers import FiniteHorizon
from canter.nn.actor_critic import ModelConfig
from canter.nn.network import NetworkConfig
from canter.runs.run_folder import CheckpointConfig, RunFolder
from canter.training.trainer import Trainer

pytestmark = pytest.mark.filterwarnings("ignore:Brax System, piplines:UserWarning", "ignore::DeprecationWarning")

N = 4
STEPS = 1000


def make(env_id, num_envs=N, **options):
    return EnvConfig(id=env_id, num_envs=num_envs, options=options).build("cpu")


def random_actions(spec, steps=STEPS):
    """Return the same random actions `[steps, N, ...]` for both loops."""
    generator = torch.Generator().manual_seed(1)
    if isinstance(spec.action, Discrete):
        return torch.randint(spec.action.n, (steps, spec.num_envs), generator=generator)
    assert isinstance(spec.action, Continuous)
    return torch.rand(steps, spec.num_envs, spec.action.dim, generator=generator) * 2 - 1


def tensor(array):
    return torch.from_dlpack(jax.numpy.asarray(array))


def own(action):
    """Return a tensor as an array of JAX, which has no int64."""
    return jax.numpy.asarray(action.numpy())


def equal(ours, theirs):
    return torch.equal(ours, tensor(theirs).to(ours.dtype))


@pytest.mark.parametrize(("name", "limit"), [("CartPole-v1", 25), ("Pendulum-v1", 200)])
def test_gymnax_equals_its_own_loop_bit_for_bit(name, limit):
    env = make(f"gymnax:{name}", max_episode_steps=limit)
    theirs, params = gymnax.make(name)
    params = params.replace(max_steps_in_episode=limit)
    key, draw = jax.random.split(jax.random.PRNGKey(7))
    obs, state = jax.vmap(theirs.reset, (0, None))(jax.random.split(draw, N), params)
    assert equal(env.reset(7)["policy"], obs)
    loop = jax.jit(jax.vmap(lambda *arguments: theirs.step(*arguments, params)))
    age = torch.zeros(N, dtype=torch.int64)
    ends = torch.zeros(2, dtype=torch.int64)
    for action in random_actions(env.spec):
        step = env.step(action)
        key, draw = jax.random.split(key)
        obs, state, reward, terminated, _, info = loop(jax.random.split(draw, N), state, own(action))
        assert equal(step.obs["policy"], obs) and equal(step.reward, reward) and equal(step.terminated, terminated)
        assert equal(step.final_obs["policy"], info["final_observation"])
        age += 1
        assert torch.equal(step.truncated, (age >= limit) & ~step.terminated)
        age[step.terminated | step.truncated] = 0
        ends += torch.stack([step.terminated.sum(), step.truncated.sum()])
    assert ends[1] > 10 and (ends[0] > 10) == (name == "CartPole-v1")


@pytest.mark.parametrize(
    ("name", "limit", "options"),
    [("fast", 30, {}), pytest.param("inverted_pendulum", 12, {"backend": "spring"}, marks=pytest.mark.long)],
)
def test_brax_equals_its_own_loop_bit_for_bit(name, limit, options):
    env = make(f"brax:{name}", max_episode_steps=limit, **options)
    theirs = envs.get_environment(name, **options)
    wrapped = training.wrap(theirs, episode_length=limit)
    without_restart = jax.jit(training.VmapWrapper(theirs).step)
    loop = jax.jit(wrapped.step)
    state = wrapped.reset(jax.random.split(jax.random.split(jax.random.PRNGKey(7))[1], N))
    assert equal(env.reset(7)["policy"], state.obs)
    age = torch.zeros(N, dtype=torch.int64)
    ends = torch.zeros(2, dtype=torch.int64)
    for action in random_actions(env.spec):
        step = env.step(action)
        alone = without_restart(state.replace(done=jax.numpy.zeros(N)), own(action))
        state = loop(state, own(action))
        assert equal(step.obs["policy"], state.obs) and equal(step.reward, state.reward)
        assert equal(step.terminated | step.truncated, state.done)
        assert equal(step.final_obs["policy"], alone.obs) and equal(step.terminated, alone.done)
        for metric, values in state.metrics.items():
            assert step.metrics[metric] == pytest.approx(float(values.mean()), rel=1e-5)
        age += 1
        assert torch.equal(step.truncated, (age >= limit) & ~step.terminated)
        age[step.terminated | step.truncated] = 0
        ends += torch.stack([step.terminated.sum(), step.truncated.sum()])
    assert ends[1] > 10 and (ends[0] > 10) == (name == "inverted_pendulum")


@pytest.mark.long
def test_playground_equals_its_own_loop_bit_for_bit():
    playground = pytest.importorskip("mujoco_playground", reason='needs pip install "canter[playground]"')
    env = make("playground:CartpoleBalance", max_episode_steps=8, impl="jax")
    theirs = playground.registry.load("CartpoleBalance", config_overrides={"impl": "jax"})
    without_restart = jax.jit(training.EpisodeWrapper(training.VmapWrapper(theirs), 8, 1).step)
    wrapped = playground.wrapper.wrap_for_brax_training(theirs, episode_length=8)
    loop = jax.jit(wrapped.step)
    state = jax.jit(wrapped.reset)(jax.random.split(jax.random.split(jax.random.PRNGKey(7))[1], N))
    assert equal(env.reset(7)["policy"], state.obs)
    ends = 0
    for action in random_actions(env.spec, 40):
        step = env.step(action)
        alone = without_restart(state.replace(done=jax.numpy.zeros(N)), own(action))
        state = loop(state, own(action))
        assert equal(step.obs["policy"], state.obs) and equal(step.reward, state.reward)
        assert equal(step.truncated, state.done) and not step.terminated.any()
        if step.truncated.any():
            assert equal(step.final_obs["policy"], alone.obs) and not equal(step.obs["policy"], alone.obs)
            ends += 1
    assert ends == 5


CHILD = """
import os, signal, sys
sys.path[:0] = [{tests!r}]
import test_jax
def die(report):
    if report.iteration >= {kill}:
        os.kill(os.getpid(), signal.SIGKILL)
test_jax.train({path!r}, {env_id!r}, die)
"""


def train(path, env_id, *callbacks):
    """Train, or continue, until iteration 9, with a checkpoint every second one."""
    options = {"impl": "jax"} if env_id.startswith("playground:") else {}
    settings = TrainConfig(
        env=EnvConfig(id=env_id, num_envs=N, options={"max_episode_steps": 7, **options}),
        algorithm=PPOConfig(horizon=8, num_minibatches=2, model=ModelConfig(policy=NetworkConfig(hidden=(8,)))),
        checkpoints=CheckpointConfig(save_every=2),
        total_steps=9 * 8 * N,
        seed=3,
    )
    with Trainer(settings, *callbacks, folder=RunFolder(path, settings.checkpoints)) as trainer:
        trainer.learn()
    return trainer


@pytest.mark.parametrize(
    "env_id",
    [
        "gymnax:CartPole-v1",
        pytest.param("brax:fast", marks=pytest.mark.long),
        pytest.param("playground:CartpoleBalance", marks=pytest.mark.long),
    ],
)
def test_after_kill_9_the_run_ends_with_the_bits_of_one_that_was_never_stopped(tmp_path, env_id):
    if env_id.startswith("playground:"):
        pytest.importorskip("mujoco_playground", reason='needs pip install "canter[playground]"')
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    expected = train(whole, env_id)
    child = CHILD.format(tests=str(Path(__file__).parent), path=str(killed), kill=5, env_id=env_id)
    died = subprocess.run([sys.executable, "-c", child], capture_output=True, timeout=300)
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    continued = train(killed, env_id)
    assert encode(continued.algorithm.state_dict()) == encode(expected.algorithm.state_dict())
    (_, one), (_, other) = (RunFolder(path).store.load_latest() for path in (whole, killed))
    assert encode(one["collector"]["env"]) == encode(other["collector"]["env"])
    assert one["collector"]["episodes_restart"] is None


def test_observations_of_state_and_privileged_state_are_policy_and_critic():
    env = make("brax:fast", asymmetric_obs=True, obs_mode="dict_state")
    assert {name: spec.shape for name, spec in env.spec.obs.items()} == {"policy": (2,), "critic": (4,)}
    assert env.reset(0).keys() == env.step(torch.zeros(N, 1)).final_obs.keys() == env.spec.obs.keys()


def test_observations_and_actions_of_several_kinds():
    env = make("gymnax:FrozenLake-misc")  # one of 16 places
    assert env.spec.obs["policy"].shape == (16,) and torch.equal(
        env.reset(0)["policy"].argmax(-1), torch.zeros(N).long()
    )
    env = make("gymnax:Reacher-misc")
    assert env.spec.action == Continuous((-1.0, -1.0), (1.0, 1.0))


def test_seeds_reproduce_and_without_one_the_stream_continues():
    env = make("gymnax:Pendulum-v1")
    first = env.reset(3)["policy"].clone()
    second = env.reset()["policy"].clone()
    assert torch.equal(env.reset(3)["policy"], first) and torch.equal(env.reset()["policy"], second)
    assert not torch.equal(first, second) and not torch.equal(env.reset(4)["policy"], first)


def test_results_stay_as_they_were_when_later_steps_come():
    env = make("gymnax:CartPole-v1")
    env.reset(0)
    step = env.step(torch.ones(N, dtype=torch.int64))
    kept = step.obs["policy"].clone()
    for _ in range(20):
        env.step(torch.ones(N, dtype=torch.int64))
    assert torch.equal(step.obs["policy"], kept)


def test_time_limits_can_be_part_of_the_task():
    env = FiniteHorizon(make("gymnax:Pendulum-v1", max_episode_steps=2))
    env.reset(0)
    env.step(torch.zeros(N, 1))
    step = env.step(torch.zeros(N, 1))
    assert step.terminated.all() and not step.truncated.any()


@pytest.mark.parametrize(
    ("env_id", "options", "message"),
    [
        ("gymnax:CartPol-v1", {}, "unknown environment 'gymnax:CartPol-v1': did you mean CartPole-v1"),
        (
            "gymnax:CartPole-v1",
            {"force": 1.0},
            r"env.options.force=1.0: gymnax:CartPole-v1 takes no such option, .*force_mag",
        ),
        (
            "gymnax:CartPole-v1",
            {"matmul_precision": "hi"},
            "matmul_precision='hi' must be one of default, high, highest",
        ),
        ("gymnax:CartPole-v1", {"max_episode_steps": 0}, "max_episode_steps=0 must be at least 1"),
        ("brax:aunt", {}, "unknown environment 'brax:aunt': did you mean ant"),
        ("brax:ant", {"backen": "spring"}, "env.options.backen='spring': brax:ant takes no such option, .*backend"),
        ("brax:fast", {"episode_length": 3, "max_episode_steps": 4}, "max_episode_steps=4 contradicts env.options.epi"),
    ],
)
def test_bad_input(env_id, options, message):
    with pytest.raises(UserError, match=message):
        make(env_id, **options)


def test_a_state_of_another_size_is_refused():
    env = make("gymnax:CartPole-v1")
    env.reset(0)
    with pytest.raises(UserError, match="does not fit gymnax:CartPole-v1 with num_envs=2"):
        make("gymnax:CartPole-v1", num_envs=2).load_state_dict(env.state_dict())


def test_commands(run_canter, empty_folder):
    assert "gymnax:CartPole-v1" in run_canter("envs", "gymnax:").out and "brax:ant" in run_canter("envs", "brax:").out
    checked = run_canter("check", "gymnax:CartPole-v1")
    assert checked.code == 0 and "a step is one XLA program on cpu" in checked.out, checked
