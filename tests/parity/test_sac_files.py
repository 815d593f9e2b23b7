"""A file that rl_games 1.6.5's SAC saved, and what it did next: `benchmarks/parity/sac.py --write` froze both."""

import json
from pathlib import Path

import pytest
import torch
from sac_cases import OBS, settings
from sac_here import differences

from canter import Continuous, EnvSpec, TensorSpec
from canter.compat import import_config
from canter.compat.pickled_file import read_pickled
from canter.compat.rl_games import sac as files
from canter.core.plain import ConfigError

FILE = Path(__file__).with_name("rl_games_sac.pth")
SPEC = EnvSpec({"policy": TensorSpec((OBS,))}, Continuous((-1.0, -1.0), (1.0, 1.0)), 4)


def build(parity=True, **changes):
    given = settings("normalised")
    given["params"]["network"]["mlp"] |= changes
    return import_config(given, parity=parity).config.algorithm.build(SPEC, 0)


def test_actions_values_and_two_further_updates_equal_those_of_rl_games_and_so_does_the_file_written_back(tmp_path):
    expected = json.loads(FILE.with_suffix(".json").read_text())
    found = differences("normalised", FILE, expected, tmp_path / "ours.pth")
    assert max(found.values()) <= 1e-6, found
    theirs, ours = read_pickled(FILE), read_pickled(tmp_path / "ours.pth")
    assert ours.keys() - theirs.keys() == {"log_alpha", "last_mean_rewards", "env_state"}
    for part in ("actor", "critic", "critic_target", "running_mean_std"):
        assert list(ours[part]) == list(theirs[part])
        for name, tensor in theirs[part].items():
            torch.testing.assert_close(ours[part][name], tensor, rtol=0, atol=1e-7)
    for part in ("actor", "critic"):
        for place, state in theirs[f"{part}_optimizer"]["state"].items():
            torch.testing.assert_close(ours[f"{part}_optimizer"]["state"][place], state, rtol=0, atol=1e-7)


def test_the_replay_buffer_is_in_no_file_of_rl_games_and_is_refilled():
    sac = build()
    files.load(sac, files.weights_in(read_pickled(FILE), FILE))
    sac.begin_iteration()
    assert not sac.stage.random and not sac.stage.learns, "the policy collects, and nothing is learned yet"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parity": False}, r"algorithm\.std: form=bounded, .* rl_games' SAC has form=tanh"),
        ({"units": [6, 5]}, r"actor\.trunk\.2\.weight: \(4, 6\) in the file, \(5, 6\) by the settings"),
        ({"units": [6, 4, 4]}, r"the file has no actor\.trunk\.6\.weight, which is actor\.head\.mean\.weight"),
    ],
)
def test_other_settings_are_refused_and_change_nothing(options, message):
    sac = build(**options)
    before = [parameter.clone() for parameter in sac.policy.actor.parameters()]
    with pytest.raises(ConfigError, match=message):
        files.load(sac, files.weights_in(read_pickled(FILE), FILE))
    assert all(map(torch.equal, before, sac.policy.actor.parameters()))


def test_broken_moments_are_refused_before_anything_is_changed():
    sac, weights = build(), files.weights_in(read_pickled(FILE), FILE)
    mean, square = weights.moments["critic.Q1.0.weight"]
    weights.moments["critic.Q1.0.weight"] = mean, square[:, :1]
    before = sac.learner.flat.clone()
    with pytest.raises(ConfigError, match=r"critic\.Q1\.0\.weight: \(6, 1\) in the file, \(6, 5\) by the settings"):
        files.load(sac, weights)
    assert torch.equal(before, sac.learner.flat)
