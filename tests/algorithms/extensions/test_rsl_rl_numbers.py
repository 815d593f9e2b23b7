"""Curiosity and symmetry equal RSL-RL's numbers on the same batch, where definitions agree.

`benchmarks/extensions/rsl_rl_numbers.py` wrote the expectations with rsl-rl-lib 5.5.1. What differs on purpose, without
`variant: rsl_rl`: RSL-RL scores the observation after a reset where an episode ended, its predictor learns from the
observation before the step in every minibatch of every epoch, its statistics of observations divide by `std + 0.01`
and move after the update, those of bonuses at every step rather than once for a rollout, and schedules begin anew when
a run resumes.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import canter
from canter.algorithms.extensions.rnd import Samples
from canter.core.data.rollout import Rollout
from canter.core.declarations import Mirror, Symmetry
from canter.core.struct import TensorStruct
from canter.engines.base import ModelOutput, PPOBatch

EXPECTED = json.loads((Path(__file__).parent / "rsl_rl_5_5_1.json").read_text())
OBS = torch.tensor(EXPECTED["obs"], dtype=torch.float64)
STEPS, ENVS, WIDTH = OBS.shape
SPEC = canter.EnvSpec({"policy": canter.TensorSpec((WIDTH,))}, canter.Continuous((-1.0,) * 3, (1.0,) * 3), ENVS)


def rnd_with(weights, **settings):
    config = canter.RNDConfig(
        hidden=(8,), outputs=3, error="norm", weight=canter.Constant(0.7), normalize_obs=False, **settings
    )
    algorithm = canter.PPOConfig(horizon=STEPS, num_minibatches=1, extensions=(config,)).build(SPEC, 0)
    (rnd,) = algorithm.extensions
    rnd.double()
    for network in ("target", "predictor"):
        for mine, theirs in zip(getattr(rnd, network).parameters(), weights[network], strict=True):
            mine.data = torch.tensor(theirs, dtype=torch.float64)
    return rnd


def rollout():
    """One in which these observations follow one another, without ends and rewards."""
    empty = Rollout.allocate(STEPS, {"policy": OBS[0]}, TensorStruct(), SPEC)
    return replace(
        empty,
        obs={"policy": torch.cat([OBS[:1], OBS])},
        reward=torch.zeros(STEPS, ENVS, dtype=torch.float64),
        valid=torch.ones_like(empty.valid),
    )


def test_bonus_and_loss_of_curiosity():
    theirs = EXPECTED["rnd"]
    rnd = rnd_with(theirs, normalize_bonus=False)
    with torch.no_grad():
        np.testing.assert_allclose(rnd.reward(rollout()).numpy(), theirs["bonus"], atol=1e-6)
        samples = Samples(OBS, torch.ones((STEPS, ENVS), dtype=torch.bool))
        assert rnd.prediction_loss(samples).loss.item() == pytest.approx(theirs["loss"], abs=1e-6)


def test_normalised_bonuses_step_by_step():
    """Ours are divided once a rollout; rollouts of one step are RSL-RL's way. Its variance needs a second step."""
    theirs = EXPECTED["rnd_normalized"]
    rnd, whole = rnd_with(theirs), rollout()
    for t in range(STEPS):
        row = replace(
            whole[t : t + 1],
            obs={"policy": whole.obs["policy"][t : t + 2]},
            reset=whole.reset[t : t + 2],
            state=(),
        )
        with torch.no_grad():
            np.testing.assert_allclose(rnd.reward(row)[0].numpy(), theirs["bonus"][t], rtol=1e-6, atol=1e-6)


def test_augmentation_and_mirror_loss():
    theirs = EXPECTED["symmetry"]
    mirrors = {"policy": Mirror(tuple(theirs["signs"]))}, Mirror(tuple(theirs["action_signs"]))
    spec = replace(SPEC, symmetries=(Symmetry("mirror", *mirrors),))
    config = canter.SymmetryConfig(mirror_loss=0.5, old_log_prob="repeated")
    algorithm = canter.PPOConfig(horizon=STEPS, num_minibatches=1, extensions=(config,)).build(spec, 0)
    (symmetry,) = algorithm.extensions

    def given(name):
        return torch.tensor(theirs["given"][name], dtype=torch.float64).squeeze(-1).unsqueeze(0)

    count = STEPS * ENVS
    batch = PPOBatch(
        obs={"policy": OBS.reshape(1, count, WIDTH)},
        action=given("actions"),
        log_prob=given("old_actions_log_prob"),
        dist_params=torch.zeros(1, count, 6, dtype=torch.float64),
        value=given("values"),
        return_=given("returns"),
        advantage=given("advantages"),
        valid=torch.ones(1, count, dtype=torch.bool),
        reset=torch.zeros(1, count, dtype=torch.bool),
        policy_state=(),
        critic_state=(),
    )
    both = symmetry.augment(batch)
    mine = {
        "observations": both.obs["policy"],
        "actions": both.action,
        "old_actions_log_prob": both.log_prob,
        "values": both.value,
        "advantages": both.advantage,
        "returns": both.return_,
    }
    for name, numbers in theirs["augmented"].items():
        expected = np.array(numbers)
        np.testing.assert_allclose(mine[name][0].numpy().reshape(expected.shape), expected, atol=1e-6)
    weight, bias = (torch.tensor(numbers, dtype=torch.float64) for numbers in theirs["actor"])
    mean = both.obs["policy"] @ weight.T + bias
    terms = symmetry.loss(both, ModelOutput(torch.cat([mean, torch.zeros_like(mean)], -1), None))
    assert terms["policy/asymmetry"].mean().item() == pytest.approx(theirs["mirror_loss"], abs=1e-6)
    assert terms["loss/mirror"].mean().item() == pytest.approx(0.5 * theirs["mirror_loss"], abs=1e-6)
