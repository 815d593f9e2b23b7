import pytest

from canter.algorithms.phase import check_batch
from canter.algorithms.ppo import PPOConfig
from canter.config.presets import preset_for, presets


@pytest.mark.parametrize("name", [name for name in presets if isinstance(presets[name].algorithm, PPOConfig)])
def test_every_preset_has_a_batch_that_comes_out_even(name):
    preset = presets[name]
    check_batch(preset.algorithm.horizon, preset.env.num_envs, preset.algorithm.num_minibatches)


@pytest.mark.parametrize(
    ("env_id", "found"),
    [
        ("CartPole-v1", True),
        ("HalfCheetah-v5", True),
        ("envpool:HalfCheetah-v4", True),
        ("tensor:pendulum", True),
        ("tensor:cartpole", True),
        ("MountainCar-v0", False),
        ("tensor:null", False),
    ],
)
def test_presets_are_found_by_environment_id(env_id, found):
    preset = preset_for(env_id)
    assert (preset is not None) == found
    if preset:
        assert preset.env.id == env_id
