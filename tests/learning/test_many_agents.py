"""A team that solves its task with one policy, and self-play that finds an equilibrium; several seeds each."""

from dataclasses import replace

import pytest
import torch

from canter.config.presets import presets
from canter.core.plain import from_plain
from canter.play.evaluation import evaluate
from canter.training.self_play import SelfPlayEnv
from canter.training.trainer import train
from covering import usual_of

EPISODES = 96


class StraightToTheCentre:
    """Knows where everyone is and heads for the centre: what no agent can do that sees only the next one."""

    def __init__(self, env):
        self.env = env

    def initial_state(self, num_envs):
        return ()

    def act(self, obs, state, reset, *, deterministic, generator):
        position = self.env.worlds._state["position"]
        return (10 * (position.mean(1, keepdim=True) - position)).clamp(-1, 1).flatten(0, 1), ()


INDEPENDENT = pytest.param(False, id="ippo", marks=pytest.mark.long)


@pytest.mark.parametrize("joint_critic", [pytest.param(True, id="mappo"), INDEPENDENT])
def test_a_team_comes_together(joint_critic):
    preset = presets["Rendezvous"]
    if not joint_critic:
        preset = from_plain({"algorithm": {"model": {"critic": {"obs_groups": ["policy"]}}}}, preset)
    env = preset.env.build("cpu")
    best = evaluate(StraightToTheCentre(env), env, EPISODES, seed=0).mean
    returns = []
    for seed in range(3):
        policy = train(replace(preset, total_steps=60_000, seed=seed)).policy
        returns.append(evaluate(policy, env, EPISODES, seed=0).mean)
    # Standing still earns half of the best and chance a third; this short run about nine tenths.
    assert min(returns) > 0.85 * best, (returns, best)


def payoffs(stakes):
    rock, paper, scissors = stakes
    return torch.tensor([[0, -paper, rock], [paper, 0, -scissors], [-rock, scissors, 0]])


def mixed_strategies(env):
    """Probabilities `[members, 3]` with which the members of a pool play."""
    seat, obs = env._seats[0], {"policy": torch.tensor([[0.0, 0.0, 0.0, 1.0]])}
    strategies = []
    for member in range(len(env.pool)):
        env.pool.load(member, seat)
        strategies.append(seat.params(obs, ())[0][0].softmax(-1).detach())
    return torch.stack(strategies)


@pytest.mark.parametrize("seed", usual_of(range(3), [0]))
def test_the_average_of_self_play_approaches_the_equilibrium(seed):
    # With these stakes the equilibrium (1/2, 1/4, 1/4) is not where learning begins, which is at thirds.
    stakes = (1.0, 1.0, 2.0)
    preset = presets["RPS"]
    config = replace(preset, seed=seed, self_play=None, total_steps=100_000)
    games = replace(preset.env, options={"stakes": stakes}).build("cpu")
    env = SelfPlayEnv(games, preset.self_play, seed)
    train(config, env=env)
    strategies = mixed_strategies(env)
    average, table = strategies.mean(0), payoffs(stakes)
    equilibrium = torch.tensor([0.5, 0.25, 0.25])
    # What the best answer wins: nothing in the equilibrium, 1/3 against chance, 1 or more against a pure strategy. Six
    # seeds of this length were at 0.02 to 0.07, with errors up to 0.06; twice the length halves both.
    exploitable = (table @ average).max()
    assert exploitable < 0.1, (average, exploitable)
    assert (average - equilibrium).abs().max() < 0.08, average
    # It is the average that does it: single policies go on chasing each other.
    assert (table @ strategies.T).amax(0)[-50:].mean() > exploitable
