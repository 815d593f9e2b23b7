import pytest

from canter.algorithms.phase import check_batch
from canter.algorithms.ppo import PPOConfig
from canter.config.presets import preset_for, presets, read_presets


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


def test_a_preset_may_extend_another_and_shared_settings_are_no_preset(tmp_path):
    file = tmp_path / "family.yaml"
    file.write_text(
        "_shared: {total_steps: 1_000, algorithm: {horizon: 16, gamma: 0.9}}\n"
        "first: {extends: _shared, env: {id: CartPole-v1}}\n"
        "second: {extends: first, algorithm: {gamma: 0.8}}\n"
    )
    family = dict(read_presets(file))
    assert list(family) == ["first", "second"]
    second = family["second"]
    assert (second.env.id, second.total_steps) == ("CartPole-v1", 1000)
    assert (second.algorithm.horizon, second.algorithm.gamma) == (16, 0.8)


def test_presets_of_every_file_are_installed():
    assert {"CartPole", "HalfCheetah", "Atari", "Rendezvous", "tensor:maze", "sac"} <= {*presets}
    assert not [name for name in presets if name.startswith("_")]


def test_a_landing_of_either_ending_is_a_success():
    success = presets["LunarLander"].success
    assert success.holds(250.0, terminated=False) and success.holds(250.0, terminated=True)
    assert not success.holds(150.0, terminated=True)
