"""The same episodes through every way of restarting must be the same to the learner."""

from dataclasses import dataclass

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from canter.algorithms.ppo import PPOConfig
from canter.core.struct import tree_map
from canter.engines.base import PPORecord
from canter.envs.gymnasium import GymnasiumEnv
from canter.functional.returns import gae
from canter.nn.actor_critic import ModelConfig
from canter.nn.network import NetworkConfig
from canter.training.collector import Collector

NUM_ENVS = 3
HORIZON = 40
LENGTHS = (3, 5, 1, 4, 7, 2)
MODES = {"next_step": AutoresetMode.NEXT_STEP, "same_step": AutoresetMode.SAME_STEP, "disabled": AutoresetMode.DISABLED}


class Scripted(gymnasium.Env):
    """Episodes of scripted lengths that end in turn by termination, truncation and both at once."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, index):
        self.index, self.episode = index, -1

    def observe(self):
        return np.array([self.index / 3, self.episode / 7, self.t / 5])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        ended = self.t >= LENGTHS[(self.episode + self.index) % len(LENGTHS)]
        kind = self.episode % 3
        reward = float(np.sin(1 + self.index + 2 * self.episode + 3 * self.t) + action)
        return self.observe(), reward, ended and kind in (0, 2), ended and kind in (1, 2), {}


def scripted_action(obs):
    """A function of the observation alone, so that every mode plays the same episodes."""
    return ((obs["policy"] * torch.tensor([3.0, 7.0, 5.0])).round().long().sum(-1) % 2).long()


class PlainCritic(torch.nn.Module):
    """A value made of single multiplications and additions.

    Matrix products round a row differently in batches of different size, and modes differ in how many rows fit into a
    rollout; this critic rounds alike everywhere, so that what remains is what the modes do.
    """

    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, obs, state, reset):
        index, episode, t = obs["policy"].unbind(-1)
        return index * 1.3 + episode * 2.7 - t * 0.9, state

    unroll = forward


def make_algorithm(spec):
    config = PPOConfig(
        horizon=HORIZON,
        num_minibatches=1,
        gamma=0.9,
        gae_lambda=0.8,
        advantage_normalization="none",
        model=ModelConfig(policy=NetworkConfig(hidden=(8,), normalize_obs=False), normalize_value=False),
    )
    algorithm = config.build(spec, seed=0)
    algorithm.use_engine("autograd")

    def act(obs, state, reset):
        params, state = algorithm.policy.params(obs, state, reset)
        action = scripted_action(obs)
        return action, PPORecord(action, params), state

    algorithm.act = act
    return algorithm


@dataclass
class Rows:
    """Everything learned from, by (env, episode, step) of complete episodes."""

    targets: dict
    algorithm: object
    batch: object
    episodes: object


def key_of(obs):
    index, episode, t = (obs.double() * torch.tensor([3.0, 7.0, 5.0])).round().long().tolist()
    return index, episode, t


def rows_through(mode):
    envs = SyncVectorEnv([lambda i=i: Scripted(i) for i in range(NUM_ENVS)], autoreset_mode=MODES[mode], copy=True)
    env = GymnasiumEnv(envs)
    algorithm = make_algorithm(env.spec)
    collector = Collector(env, algorithm, seed=0)
    rollout = collector.collect()
    network = algorithm.model.critic
    algorithm.model.critic = PlainCritic(network.head)
    batch, _ = algorithm.prepare_batch(rollout)
    algorithm.model.critic = network
    episodes = collector.read_episodes()
    targets = {}
    for i in range(batch.valid.shape[1]):
        if batch.valid[0, i]:
            key = key_of(batch.obs["policy"][0, i])
            targets[key] = (batch.advantage[0, i].item(), batch.return_[0, i].item(), batch.action[0, i].item())
    env.close()
    return Rows(targets, algorithm, batch, episodes)


def rows_without_vectorisation(complete):
    """The definition: one environment at a time, one episode at a time, no autoreset at all."""
    critic = PlainCritic(None)
    targets = {}
    for index in range(NUM_ENVS):
        env = Scripted(index)
        for episode in range(max(ep for i, ep in complete if i == index) + 1):
            obs, done, seen, rewards = env.reset()[0], False, [], []
            actions = []
            terminated = False
            while not done:
                seen.append(torch.tensor(obs, dtype=torch.float32))
                action = scripted_action({"policy": seen[-1].unsqueeze(0)})
                actions.append(action.item())
                obs, reward, terminated, truncated, _ = env.step(action.item())
                rewards.append(reward)
                done = terminated or truncated
            seen.append(torch.tensor(obs, dtype=torch.float32))
            value, _ = critic({"policy": torch.stack(seen).unsqueeze(1)}, (), None)
            ends = torch.zeros(len(rewards), 1, dtype=torch.bool)
            ends[-1] = True
            advantage, return_ = gae(
                torch.tensor(rewards, dtype=torch.float32).unsqueeze(1),
                value[:-1],
                value[1:],
                ends & terminated,
                ends,
                0.9,
                0.8,
            )
            for t, action in enumerate(actions):
                targets[index, episode, t] = (advantage[t].item(), return_[t].item(), action)
    return targets


def complete_episodes(rows):
    """(env, episode) whose every step is among the rows."""
    found = {}
    for index, episode, t in rows:
        found.setdefault((index, episode), set()).add(t)
    return {
        (index, episode)
        for (index, episode), steps in found.items()
        if len(steps) == LENGTHS[(episode + index) % len(LENGTHS)]
    }


@pytest.fixture(scope="module")
def rows():
    return {mode: rows_through(mode) for mode in MODES}


def shared(rows):
    return set.intersection(*(complete_episodes(r.targets) for r in rows.values()))


def test_targets_of_real_steps_are_bit_equal_in_every_mode_and_without_autoreset(rows):
    complete = shared(rows)
    assert len(complete) >= 3 * 8
    reference = rows_without_vectorisation(complete)
    compared = [key for key in reference if key[:2] in complete]
    assert len(compared) > 80
    for mode, seen in rows.items():
        for key in compared:
            assert seen.targets[key] == reference[key], (mode, key)


def test_gradients_of_real_steps_are_equal_in_every_mode(rows):
    complete = shared(rows)
    gradients = {}
    for mode, seen in rows.items():
        algorithm = make_algorithm(seen.algorithm.spec)
        algorithm.model.double()
        batch = tree_map(lambda x: x.double() if x.is_floating_point() else x, seen.batch)
        # Only episodes that every mode finished: how many rows fit into a rollout differs.
        keep = [key_of(o)[:2] in complete for o in batch.obs["policy"][0]]
        batch.valid = batch.valid & torch.tensor(keep)
        loss = algorithm.engine.evaluate(batch, algorithm.coefs).loss
        grads = torch.autograd.grad(loss, list(algorithm.model.parameters()))
        gradients[mode] = torch.cat([g.flatten() for g in grads])
    for mode in MODES:
        assert torch.allclose(gradients[mode], gradients["same_step"], rtol=0, atol=1e-12), mode
    assert gradients["same_step"].abs().max() > 1e-3


def test_filler_steps_have_exactly_zero_gradient_and_enter_no_count(rows):
    seen = rows["next_step"]
    filler = ~seen.batch.valid
    assert filler.sum() > 20
    assert seen.episodes.env_steps == int(seen.batch.valid.sum())
    assert rows["same_step"].episodes.env_steps == NUM_ENVS * HORIZON
    # Whatever a filler row holds must not matter: overwrite it and compare loss, gradient, KL and metrics bit for bit.
    algorithm = seen.algorithm
    spoiled = tree_map(torch.clone, seen.batch)
    for field in ("advantage", "return_", "value", "log_prob"):
        getattr(spoiled, field)[filler] = 1e6
    spoiled.action[filler] = 1 - spoiled.action[filler]
    results = []
    for batch in (seen.batch, spoiled):
        output = algorithm.engine.evaluate(batch, algorithm.coefs)
        grads = torch.autograd.grad(output.loss, list(algorithm.model.parameters()))
        results.append([output.loss.detach(), *output.metrics.values(), *grads])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_finished_episodes_are_counted_alike_in_every_mode(rows):
    expected = list(zip(rows["same_step"].episodes.return_, rows["same_step"].episodes.length, strict=True))
    for mode, seen in rows.items():
        finished = list(zip(seen.episodes.return_, seen.episodes.length, strict=True))
        assert len(finished) >= 24, mode
        # Reset rows cost next_step some episodes at the end; those it finished are among the others', sum for sum.
        assert set(finished) <= set(expected), mode


def test_statistics_ignore_filler_steps(rows):
    statistics = {}
    for mode, seen in rows.items():
        complete = shared(rows)
        network = NetworkConfig(hidden=(8,)).build(seen.algorithm.spec.obs, "policy")
        keep = torch.tensor([key_of(o)[:2] in complete for o in seen.batch.obs["policy"][0]])
        network.update_statistics(seen.batch.obs, seen.batch.valid & keep)
        statistics[mode] = network.normalizers[0]
    for mode in MODES:
        assert statistics[mode].count == statistics["same_step"].count
        assert torch.allclose(statistics[mode].mean, statistics["same_step"].mean, rtol=0, atol=1e-14)
