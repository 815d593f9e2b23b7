"""The pool: an even sample of all policies, frozen, with ratings."""

from collections import Counter
from functools import cache

import pytest
import torch

from canter.core.specs import Discrete, EnvSpec, TensorSpec
from canter.nn.actor_critic import ModelConfig
from canter.nn.network import NetworkConfig
from canter.training.self_play import FIRST_RATING, RATING_SCALE, RATING_STEP, OpponentPool

SPEC = EnvSpec({"policy": TensorSpec((1,))}, Discrete(2), 1)
MODEL = ModelConfig(policy=NetworkConfig(hidden=(), normalize_obs=False))


@cache
def marked(number):
    """Return a policy that differs from others by its weights."""
    policy = MODEL.build_policy(SPEC)
    for parameter in policy.actor.parameters():
        parameter.data.fill_(number)
    return policy


def pool_of(size, joined, seed=0):
    pool = OpponentPool(size, seed)
    for number in range(joined):
        pool.add(marked(number))
    return pool


def marks(pool):
    return [int(next(iter(weights.values())).flatten()[0]) for weights in pool.weights]


def test_members_are_copies_that_stay_as_they_were():
    pool, learner, seat = OpponentPool(3, seed=0), MODEL.build_policy(SPEC), MODEL.build_policy(SPEC)
    for number in (1, 2):
        learner.actor.load_state_dict(marked(number).actor.state_dict())
        pool.add(learner)
    assert marks(pool) == [1, 2]
    pool.load(0, seat)
    assert all((parameter == 1).all() for parameter in seat.actor.parameters())


def test_a_full_pool_is_an_even_sample_of_all_that_ever_joined():
    size, joined, repeats = 4, 10, 600
    seen = Counter(mark for seed in range(repeats) for mark in marks(pool_of(size, joined, seed)))
    assert sum(seen.values()) == size * repeats
    # Each is there with probability 0.4; 240 times with a standard deviation of 12.
    assert all(abs(seen[number] - 240) < 5 * 12 for number in range(joined))


def test_opponents_are_drawn_evenly_and_spread_over_the_pool():
    pool = pool_of(5, 5)
    draws = [pool.draw(3) for _ in range(1000)]
    drawn = Counter(member for draw in draws for member in draw)
    # 3000 draws from 5: 600 each, with a standard deviation below that of independent ones, 22.
    assert set(drawn) == set(range(5))
    assert all(abs(count - 600) < 5 * 22 for count in drawn.values())
    assert all(draw[0] < 2 and draw[2] >= 3 for draw in draws)
    assert pool_of(2, 2).draw(4) == [0, 0, 1, 1]


def test_a_full_pool_stays_in_the_order_of_joining():
    found = marks(pool_of(4, 30))
    assert found == sorted(found) and len(found) == 4


def test_a_policy_joins_with_the_rating_that_the_learner_has():
    pool = pool_of(3, 1)
    pool.rate(0, score=1.0)
    pool.add(marked(1))
    assert pool.ratings == [FIRST_RATING - RATING_STEP / 2, FIRST_RATING + RATING_STEP / 2]


@pytest.mark.parametrize(("score", "moves"), [(1.0, 1 / 11), (10 / 11, 0.0), (0.0, -10 / 11)])
def test_a_rating_moves_by_how_much_the_score_surprises(score, moves):
    pool = pool_of(1, 1)
    pool.elo = pool.ratings[0] + RATING_SCALE  # ten to one is expected
    pool.rate(0, score)
    assert pool.elo == pytest.approx(FIRST_RATING + RATING_SCALE + RATING_STEP * moves)
    assert pool.elo + pool.ratings[0] == pytest.approx(2 * FIRST_RATING + RATING_SCALE)


def test_ratings_settle_where_they_predict_the_score():
    pool = pool_of(1, 1)
    for _ in range(500):
        pool.rate(0, score=0.75)
    expected = 1 / (1 + 10 ** ((pool.ratings[0] - pool.elo) / RATING_SCALE))
    assert expected == pytest.approx(0.75, abs=1e-6)


def test_a_restored_pool_continues_alike():
    pool, other = pool_of(3, 5), OpponentPool(3, seed=9)
    pool.rate(1, 1.0)
    other.load_state_dict(pool.state_dict())
    for each in (pool, other):
        for number in range(5, 12):
            each.add(marked(number))
    assert marks(pool) == marks(other)
    assert pool.draw(20) == other.draw(20)
    assert (pool.elo, pool.ratings, pool.joined) == (other.elo, other.ratings, other.joined)
    assert all(torch.equal(a, b) for a, b in zip(pool.weights[0].values(), other.weights[0].values(), strict=True))
