"""The single-file PPO: its numbers by hand, its promises, and that it learns."""

import importlib.util
import math
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

PATH = Path(__file__).parents[2] / "reference" / "ppo_single_file.py"


def load():
    spec = importlib.util.spec_from_file_location("ppo_single_file", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


ppo = load()


def make_envs(env_id, num_envs):
    kwargs = {"autoreset_mode": AutoresetMode.SAME_STEP}
    return gym.make_vec(env_id, num_envs, vectorization_mode="sync", vector_kwargs=kwargs)


def make_agent(env_id, config, seed=0):
    env = gym.make(env_id)
    return ppo.Agent(env.observation_space, env.action_space, config, torch.Generator().manual_seed(seed))


class ObservationIsValue:
    """A critic that answers with the observation, so that every value can be chosen."""

    def value(self, obs):
        return obs.squeeze(-1)


def hand_rollout(obs, reward, terminated, truncated, final_obs):
    def column(x):
        return torch.tensor(x).unsqueeze(-1)  # one environment

    zeros = torch.zeros(len(reward), 1)
    return ppo.Rollout(
        column(obs).unsqueeze(-1),
        zeros,
        zeros,
        column(reward),
        column(terminated),
        column(truncated),
        column(final_obs).unsqueeze(-1),
    )


def hand_targets(terminated, truncated):
    rollout = hand_rollout([1.0, 2.0, 4.0], [1.0, 1.0], terminated, truncated, [10.0, 20.0])
    advantage, return_ = ppo.targets(ObservationIsValue(), rollout, ppo.Config(gamma=0.5, gae_lambda=0.5))
    return advantage.squeeze(-1).tolist(), return_.squeeze(-1).tolist()


def test_gae_without_an_ending():
    # delta = (1 + .5*2 - 1, 1 + .5*4 - 2) = (1, 1); A = (1 + .25*1, 1); returns add V = (1, 2)
    assert hand_targets([False, False], [False, False]) == ([1.25, 1.0], [2.25, 3.0])


def test_gae_does_not_bootstrap_a_terminated_step():
    # delta_0 = 1 + 0 - 1 = 0, and the chain is cut
    assert hand_targets([True, False], [False, False]) == ([0.0, 1.0], [1.0, 3.0])


def test_gae_bootstraps_a_truncated_row_from_its_final_observation():
    # delta_0 = 1 + .5*10 - 1 = 5, and the chain is cut
    assert hand_targets([False, False], [True, False]) == ([5.0, 1.0], [6.0, 3.0])


def test_gae_bootstraps_a_truncated_last_row():
    # delta_1 = 1 + .5*20 - 2 = 9; A_0 = 1 + .25*9
    assert hand_targets([False, False], [False, True]) == ([3.25, 9.0], [4.25, 11.0])


def test_terminated_wins_over_truncated():
    assert hand_targets([True, False], [True, False]) == hand_targets([True, False], [False, False])


def test_collect_keeps_the_final_observation_and_the_true_end():
    config = ppo.Config(horizon=60, num_envs=2)
    envs = make_envs("CartPole-v1", 2)
    obs = torch.tensor(envs.reset(seed=[1, 2])[0])
    rollout = ppo.collect(envs, make_agent("CartPole-v1", config), obs, 60, torch.Generator().manual_seed(0))
    done = rollout.terminated | rollout.truncated
    assert done.any()
    assert rollout.obs.shape == (61, 2, 4) and rollout.obs.dtype == rollout.reward.dtype == torch.float32
    assert torch.equal(rollout.final_obs[~done], rollout.obs[1:][~done])
    final, first = rollout.final_obs[done], rollout.obs[1:][done]
    assert ((final[:, 0].abs() > 2.4) | (final[:, 2].abs() > 0.2094)).all()  # CartPole's rule for falling
    assert (first.abs() <= 0.05).all()  # CartPole's start box
    assert not (rollout.terminated & rollout.truncated).any()


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_first_ratio_is_one_although_statistics_and_parameters_have_moved(env_id):
    config = ppo.Config(env_id=env_id, num_envs=4, horizon=64, normalize_obs=True)
    envs, agent = make_envs(env_id, 4), make_agent(env_id, config)
    optimizer = torch.optim.AdamW(agent.parameters(), 1e-3, eps=1e-5, weight_decay=0.0)
    obs, rng = torch.tensor(envs.reset(seed=[1, 2, 3, 4])[0], dtype=torch.float32), torch.Generator().manual_seed(0)
    for _ in range(3):
        rollout = ppo.collect(envs, agent, obs, 64, rng)
        metrics = ppo.update(agent, optimizer, rollout, *ppo.targets(agent, rollout, config), config, rng)
        assert metrics["first_ratio_error"] <= 1e-6
        assert metrics["kl"] > 0
        agent.update_statistics_(rollout.obs[:-1])
        obs = rollout.obs[-1]


def test_statistics_equal_those_of_all_samples_seen():
    agent = make_agent("CartPole-v1", ppo.Config(normalize_obs=True))
    chunks = [1e4 + 1e-2 * torch.randn(t, 3, 4, generator=torch.Generator().manual_seed(t)) for t in (1, 5, 20)]
    for chunk in chunks:
        agent.update_statistics_(chunk)
    rows = torch.cat(chunks).reshape(-1, 4).double().numpy()
    assert agent.obs_count.item() == len(rows)
    np.testing.assert_allclose(agent.obs_mean.numpy(), rows.mean(0), rtol=1e-12)
    np.testing.assert_allclose(agent.obs_var.numpy(), rows.var(0), rtol=1e-7)


def test_gaussian_density_and_bounded_std():
    agent = make_agent("Pendulum-v1", ppo.Config())
    torch.testing.assert_close(agent.log_std(), torch.zeros(1), atol=1e-6, rtol=0)
    mean, action = torch.randn(5, 1), torch.randn(5, 1)
    log_prob, entropy = agent.evaluate(mean, action)
    normal = torch.distributions.Normal(mean, agent.log_std().exp())
    torch.testing.assert_close(log_prob, normal.log_prob(action).sum(-1))
    torch.testing.assert_close(entropy, normal.entropy().sum(-1)[0])
    for raw, bound in ((1e3, math.log(10.0)), (-1e3, math.log(0.01))):
        agent.raw_std.data.fill_(raw)
        (slope,) = torch.autograd.grad(agent.log_std().sum(), [agent.raw_std])
        assert abs(agent.log_std().item() - bound) < 1e-3 and slope.item() > 0


def test_environment_gets_a_clipped_and_scaled_copy():
    agent = make_agent("Pendulum-v1", ppo.Config())  # torque in [-2, 2]
    action = torch.tensor([[-3.0], [-1.0], [0.25], [9.0]])
    assert agent.to_env(action).tolist() == [[-2.0], [-2.0], [0.5], [2.0]]
    assert action.tolist() == [[-3.0], [-1.0], [0.25], [9.0]]


def test_categorical_sampling_follows_the_logits():
    agent = make_agent("CartPole-v1", ppo.Config())
    logits = torch.tensor([0.2, 0.3, 0.5]).log().expand(200_000, 3)
    share = agent.sample(logits, torch.Generator().manual_seed(0)).bincount() / len(logits)
    torch.testing.assert_close(share, torch.tensor([0.2, 0.3, 0.5]), atol=0.005, rtol=0)


@pytest.mark.parametrize("env_id", ["CartPole-v1", pytest.param("Pendulum-v1", marks=pytest.mark.long)])
def test_equal_seeds_make_equal_runs_and_others_differ(env_id):
    def run(seed):
        config = ppo.Config(env_id=env_id, seed=seed, total_steps=768, num_envs=4, horizon=64, normalize_obs=True)
        agent, _ = ppo.train(config)
        return torch.cat([x.flatten() for x in agent.state_dict().values()])

    first = run(0)
    torch.manual_seed(123)  # the global generator has no say
    assert torch.isfinite(first).all()  # three iterations
    assert torch.equal(first, run(0))
    assert not torch.equal(first, run(1))


def test_training_accepts_environments_and_an_agent():
    config = ppo.Config(num_envs=2, horizon=32, total_steps=640)
    agent = make_agent("CartPole-v1", config, seed=5)
    before = [p.clone() for p in agent.parameters()]
    trained, returns = ppo.train(config, make_envs("CartPole-v1", 2), agent)
    assert trained is agent and len(returns) > 0
    assert all(not torch.equal(a, b) for a, b in zip(before, agent.parameters(), strict=True))


def test_minibatches_must_divide_the_rollout():
    with pytest.raises(ValueError, match="num_minibatches=7 does not divide"):
        ppo.train(ppo.Config(num_minibatches=7))


@pytest.mark.long  # that it and the library are equal to 1e-5 is tested in tests/parity
def test_cartpole_preset_learns():
    _, returns = ppo.train(ppo.PRESETS["CartPole-v1"])
    assert np.mean(returns[-20:]) >= 400
