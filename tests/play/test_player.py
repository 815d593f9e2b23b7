from dataclasses import replace

import pytest
import torch

from canter.core.specs import ACTION_MASK, Discrete, EnvSpec, Step, TensorSpec
from canter.envs.gymnasium import make_gymnasium
from canter.envs.tensor import CartPole, Pendulum, QueueNetwork
from canter.nn.actor_critic import ModelConfig
from canter.nn.network import NetworkConfig
from canter.nn.rnn import RNNConfig
from canter.play.player import Episode, FixedStd, Player


class Uneven:
    """Environment i has episodes of i + 1 steps that pay 1 each; with `fillers`, a reset row follows each episode."""

    def __init__(self, num_envs, fillers):
        self.spec = EnvSpec({"policy": TensorSpec((1,))}, Discrete(2), num_envs)
        self.spec = replace(self.spec, final_obs="in_place" if fillers else "separate")
        self.lengths, self.fillers = torch.arange(num_envs) + 1, fillers

    def observe(self):
        return {"policy": self.t.float().unsqueeze(-1)}

    def reset(self, seed=None):
        self.t = torch.zeros_like(self.lengths)
        return self.observe()

    def step(self, action):
        filler = self.t == self.lengths
        self.t = torch.where(filler, 0, self.t + 1)
        done = self.t == self.lengths
        if not self.fillers:
            self.t[done] = 0
        return Step(self.observe(), torch.where(filler, 100.0, 1.0), done, torch.zeros_like(done), ~filler)

    def close(self):
        pass


class Counter:
    """A rule with memory: it counts the steps of each episode, and checks the count against what it sees."""

    def initial_state(self, num_envs):
        return (torch.full((num_envs,), -1),)  # wrong, unless the first reset is marked

    def act(self, obs, state, reset, *, deterministic, generator):
        count = torch.where(reset, 0, state[0])
        assert torch.equal(count, obs["policy"].squeeze(-1).long())
        return torch.zeros_like(count), (count + 1,)


@pytest.mark.parametrize("fillers", [False, True])
def test_recurrent_state_is_reset_where_episodes_start(fillers):
    turns = []
    games = Player(Counter(), Uneven(3, fillers)).play(max_steps=12, on_step=turns.append)
    assert len(turns) == 12
    # A reset row costs a step: an episode of i + 1 steps takes i + 2.
    assert [sum(e.env == i for e in games.finished) for i in range(3)] == ([6, 4, 3] if fillers else [12, 6, 4])
    assert all(e.return_ == e.length == e.env + 1 for e in games.finished)


def test_a_recurrent_policy_plays_the_same_in_both_ways_of_restarting():
    """Only if the rows that begin an episode are marked rightly in both."""
    torch.manual_seed(0)
    games = []
    policy = None
    for autoreset in ("same_step", "next_step"):
        env = make_gymnasium("CartPole-v1", 3, autoreset=autoreset)
        config = ModelConfig(policy=NetworkConfig(rnn=RNNConfig(hidden=8)), policy_gain=5.0)
        policy = policy or config.build_policy(env.spec)
        games.append(Player(policy, env, seed=1).play(12))
        env.close()
    assert games[0] == games[1]
    assert len({episode.length for episode in games[0].finished}) > 1


def test_every_environment_plays_its_share_of_the_games():
    games = Player(Counter(), Uneven(4, fillers=True)).play(num_games=6)
    assert games.finished == [Episode(i, i + 1.0, i + 1) for i in (0, 0, 1, 1, 2, 3)]
    assert games.unfinished == []


def test_episodes_beyond_the_step_limit_are_reported_as_unfinished():
    games = Player(Counter(), Uneven(3, fillers=False)).play(num_games=4, max_steps=2)
    assert games.finished == [Episode(0, 1.0, 1), Episode(0, 1.0, 1), Episode(1, 2.0, 2)]
    assert games.unfinished == [Episode(2, 2.0, 2)]


def test_a_task_that_never_ends_has_a_reward_per_step():
    env = QueueNetwork(4, max_episode_steps=None)
    turns = []
    policy = ModelConfig().build_policy(env.spec)
    games = Player(policy, env, deterministic=False).play(num_games=2, max_steps=50, on_step=turns.append)
    assert games.finished == []
    assert [(episode.env, episode.length) for episode in games.unfinished] == [(0, 50), (1, 50)]
    paid = sum(turn.step.reward[:2].sum() for turn in turns) / 100
    assert games.reward_per_step == pytest.approx(float(paid), rel=1e-5)


def test_masked_actions_are_never_taken():
    env = QueueNetwork(16)
    policy = ModelConfig(policy_gain=5.0).build_policy(env.spec)
    allowed = env.reset(0)[ACTION_MASK]
    forbidden = 0
    for turn, _ in zip(Player(policy, env, deterministic=False, seed=0).steps(), range(100), strict=False):
        assert allowed.gather(-1, turn.action.unsqueeze(-1)).all()
        allowed = turn.step.obs[ACTION_MASK]
        forbidden += int((~allowed).sum())
    assert forbidden > 100


def test_the_same_seed_plays_the_same_games_and_noise_plays_others():
    env = CartPole(4)
    policy = ModelConfig(policy_gain=1.0).build_policy(env.spec)
    noisy = [Player(policy, env, deterministic=False, seed=seed).play(8) for seed in (0, 0, 1)]
    assert noisy[0] == noisy[1] != noisy[2]
    assert Player(policy, env, seed=0).play(8) != noisy[0]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({}, "num_games and max_steps are both None"),
        ({"num_games": 0}, "num_games=0 must be at least 1"),
        ({"num_games": 1, "max_steps": -1}, "max_steps=-1 must be at least 1"),
    ],
)
def test_playing_needs_a_limit(limits, message):
    with pytest.raises(ValueError, match=message):
        Player(Counter(), Uneven(1, fillers=False)).play(**limits)


@pytest.mark.parametrize("distribution", ["gaussian", "tanh_gaussian"])
def test_the_noise_can_be_set(distribution):
    env = Pendulum(4000)
    policy = ModelConfig(distribution=distribution).build_policy(env.spec)
    obs = {"policy": env.reset(0)["policy"][:1].expand(4000, -1)}
    action, _ = FixedStd(policy, 0.05).act(obs, deterministic=False, generator=torch.Generator().manual_seed(0))
    mean, _ = FixedStd(policy, 0.05).act(obs)
    torch.testing.assert_close(mean, policy.act(obs)[0])
    assert float(action.std()) == pytest.approx(2 * 0.05, rel=0.05)  # torques are -2..2


def test_noise_that_cannot_be_set_is_refused():
    with pytest.raises(ValueError, match="Categorical has none"):
        FixedStd(ModelConfig().build_policy(CartPole(1).spec), 0.1)
    with pytest.raises(ValueError, match=r"std=0\.0 must be positive and finite"):
        FixedStd(ModelConfig().build_policy(Pendulum(1).spec), 0.0)
