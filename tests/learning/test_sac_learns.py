"""SAC learns; the study with five seeds and 20,000 steps is benchmarks/learning/sac.py."""

from dataclasses import replace

import pytest

import canter
from canter.envs.tensor import tensor_envs
from canter.training.trainer import train


@pytest.mark.long
def test_pendulum_is_swung_up_within_six_thousand_steps():
    preset = canter.presets["Pendulum-sac"]
    algorithm = replace(
        preset.algorithm,
        batch_size=128,
        policy=replace(preset.algorithm.policy, hidden=(32, 32)),
        critic=replace(preset.algorithm.critic, hidden=(32, 32)),
    )
    env = replace(preset.env, id="tensor:pendulum", num_envs=2)
    config = replace(preset, env=env, total_steps=6_000, algorithm=replace(algorithm, updates_per_step=2.0))
    trained = train(config)
    score = canter.evaluate(trained.policy, tensor_envs["pendulum"](20, "cpu"), 20, seed=1).mean
    # Random actions earn about -1,200, the best policies about -150; on x86 and ARM it came to -466 and above.
    assert score > -600
