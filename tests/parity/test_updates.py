"""Updates equal those of RSL-RL 5.5.1 and rl_games 1.6.1, 1.6.5 and 2.0.

`benchmarks/parity/updates.py --write` froze their numbers.
Two iterations of 16 optimiser steps each from the same first parameters, rollouts, samples and order of rows.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from update_cases import CASES
from update_here import learn

EXPECTED = json.loads(Path(__file__).with_name("expected_updates.json").read_text())
# Parameters are of size 1 and move by about 0.02; float32 rounds each step of theirs to about 6e-8.
TOLERANCE = 1e-6


def furthest(found, expected):
    """The largest difference of a number; that of the learning rate, which is small, as a share of it."""
    scale = {"learning_rate": expected["learning_rate"][0]}
    return max(np.abs(np.ravel(found[name]) - exact).max() / scale.get(name, 1.0) for name, exact in expected.items())


@pytest.mark.parametrize("engine", ["autograd", "auto"])
@pytest.mark.parametrize("name", CASES)
def test_an_update_equals_that_of_the_source_library(name, engine, monkeypatch):
    found, expected = learn(CASES[name], engine, monkeypatch), EXPECTED[name]
    assert found.keys() - expected.keys() <= {"critic.obs_mean", "critic.obs_variance"}  # rl_games has one for both
    assert furthest(found, expected) <= TOLERANCE


NEEDED = [
    ("rsl_rl scalar", {"shuffle": "none"}),
    ("rsl_rl scalar", {"advantage_std": "population"}),
    ("rsl_rl log", {"model.std.form": "bounded"}),
    ("rsl_rl std that does not learn", {"model.std.learn": True}),
    ("rsl_rl normalisers, adaptive", {"model.policy.normalizer.eps_on": "variance"}),
    ("rsl_rl normalisers, adaptive", {"model.policy.normalizer.clip": 1.0}),
    ("rsl_rl lstm, two layers, adaptive", {"optimizer.learning_rate.every": "step"}),
    ("rsl_rl curiosity", {"extensions": [CASES["rsl_rl curiosity"]["here"]["extensions"][0] | {"variant": "paper"}]}),
    ("rl_games shared, bounds", {"shuffle": "rollout"}),
    ("rl_games input normaliser", {"obs_statistics": "update"}),
    ("rl_games input normaliser", {"model.policy.normalizer.prior_count": 0.0}),
    ("rl_games value normaliser", {"model.value_normalizer.clip": None, "model.value_normalizer.rescale": True}),
    ("rl_games value normaliser", {"model.value_normalizer.of": "returns"}),
    ("rl_games legacy adaptive", {"optimizer.learning_rate.every": "epoch"}),
    ("rl_games discrete, adaptive", {"kl": "exact"}),
    ("rl_games no bootstrap, weight decay", {"bootstrap_truncated": True}),
    ("rl_games no bootstrap, weight decay", {"optimizer.weight_decay_form": "decoupled"}),
    ("rl_games central value", {"central_value.value_coef": 1.0}),
    ("rl_games lstm central value, lstm", {"central_value.recurrence": "exact"}),
    ("rl_games lstm central value, layers only", {"central_value.recurrence": "exact"}),
    ("rl_games central value, two agents", {"central_value.agents": "all"}),
    ("rl_games lstm central value, two agents", {"central_value.recurrence": "exact"}),
    ("rl_games 1.6.1, both normalisers, legacy adaptive", {"obs_statistics": "minibatch"}),
    ("rl_games 1.6.1, both normalisers, legacy adaptive", {"model.policy.normalizer.variance": "population"}),
    ("rl_games 1.6.1, both normalisers, legacy adaptive", {"model.value_normalizer.variance": "population"}),
    ("rl_games 1.6.1, discrete, both normalisers", {"obs_statistics": "first_epoch"}),
]


@pytest.mark.parametrize(("name", "change"), NEEDED, ids=lambda part: str(part)[:60])
def test_the_switch_is_needed_for_it(name, change, monkeypatch):
    case = CASES[name] | {"here": CASES[name]["here"] | change}
    assert furthest(learn(case, "autograd", monkeypatch), EXPECTED[name]) > 10 * TOLERANCE


def test_the_numbers_are_of_the_versions_that_are_named():
    assert EXPECTED["versions"]["rsl-rl-lib"] == "5.5.1"
    assert EXPECTED["versions"]["rl_games"] == "1.6.5"
