import json

import numpy as np
import pytest
import torch

from canter.core.specs import Discrete, EnvSpec, Step, TensorSpec
from canter.envs.tensor import CartPole
from canter.nn.actor_critic import ModelConfig
from canter.play.evaluation import EpisodesUnfinished, Evaluation, evaluate


class Uneven:
    """Environment i has episodes of i + 1 steps that pay i + 1 in all; a filler row follows each in odd ones."""

    def __init__(self, num_envs):
        self.spec = EnvSpec({"policy": TensorSpec((1,))}, Discrete(2), num_envs, final_obs="in_place")
        self.lengths = torch.arange(num_envs) + 1

    def reset(self, seed=None):
        self.t = torch.zeros_like(self.lengths)
        return {"policy": torch.zeros(len(self.lengths), 1)}

    def step(self, action):
        filler = self.t == self.lengths
        self.t = torch.where(filler, 0, self.t + 1)
        done = self.t == self.lengths
        reward = torch.where(filler, 100.0, 1.0)
        return Step({"policy": torch.zeros(len(done), 1)}, reward, done, torch.zeros_like(done), ~filler)

    def close(self):
        pass


def policy_for(env):
    return ModelConfig().build_policy(env.spec)


def test_every_environment_contributes_its_first_episodes_so_short_ones_are_not_favoured():
    env = Uneven(4)
    result = evaluate(policy_for(env), env, episodes=10, seed=0)
    assert sorted(result.length) == [1, 1, 1, 2, 2, 2, 3, 3, 4, 4]
    assert result.return_ == [float(length) for length in result.length]  # filler rows pay nothing
    assert result.mean == sum(result.length) / 10


def test_evaluation_is_repeatable_and_moves_no_statistics():
    env = CartPole(4)
    policy = policy_for(env)
    before = {name: value.clone() for name, value in policy.actor.state_dict().items()}
    results = [evaluate(policy, env, 8, seed=3, deterministic=False) for _ in range(2)]
    assert results[0] == results[1]
    for name, value in policy.actor.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_episodes_that_never_end_are_reported():
    env = Uneven(2)
    with pytest.raises(RuntimeError, match="after 3 steps only 3 of 4 episodes had ended"):
        evaluate(policy_for(env), env, episodes=4, seed=0, max_steps=3)


def of(*returns):
    return Evaluation(list(map(float, returns)), [10 * i for i in range(1, len(returns) + 1)])


def test_the_statistics_are_those_of_the_returns():
    returns = np.random.default_rng(0).normal(5.0, 2.0, 12).tolist()
    result = of(*returns)
    plain = result.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["episodes"] == 12
    assert plain["mean"] == pytest.approx(np.mean(returns))
    assert plain["std"] == pytest.approx(np.std(returns))
    assert plain["median"] == pytest.approx(np.median(returns))
    assert (plain["min"], plain["max"]) == (min(returns), max(returns))
    assert plain["iqm"] == pytest.approx(np.sort(returns)[3:9].mean())
    assert (plain["returns"], plain["lengths"], plain["mean_length"]) == (returns, result.length, 65.0)


@pytest.mark.parametrize(("returns", "iqm"), [((7,), 7.0), ((2, 1), 1.5), ((0, 12, 0), 2.0), ((0, 0, 0, 0, 20), 0.0)])
def test_a_return_that_a_quartile_cuts_counts_in_part(returns, iqm):
    assert of(*returns).iqm == pytest.approx(iqm)
    assert of(*returns * 3).iqm == pytest.approx(iqm)  # the same returns thrice are the same distribution


def test_the_confidence_interval_is_the_one_of_the_mean():
    rng = np.random.default_rng(1)
    few, many = (of(*rng.normal(3.0, 2.0, n)) for n in (50, 1000))
    for result in (few, many):
        low, high = result.confidence_interval
        half = 1.96 * result.std / len(result.return_) ** 0.5
        assert (low, high) == pytest.approx((result.mean - half, result.mean + half), abs=0.1 * half)
    assert few.confidence_interval == of(*few.return_).confidence_interval
    assert of(4, 4, 4).confidence_interval == (4.0, 4.0)


def test_results_of_unfinished_episodes_are_kept():
    env = Uneven(2)
    with pytest.raises(EpisodesUnfinished) as caught:
        evaluate(policy_for(env), env, episodes=4, seed=0, max_steps=3)
    assert [episode.length for episode in caught.value.result.finished] == [1, 1, 2]
