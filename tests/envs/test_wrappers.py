"""Wrappers in settings, networks for small images, and ids that need a package."""

import gymnasium
import pytest
import torch

from canter.config import TrainConfig
from canter.envs import EnvConfig
from canter.nn.cnn import FITTING, CNNConfig
from canter.plain import from_plain, to_plain
from canter.recipes import preset_for


def test_wrappers_of_gymnasium_go_around_each_environment_by_name_the_first_innermost():
    wrappers = {"FrameStackObservation": {"stack_size": 3}, "FlattenObservation": None}
    config = EnvConfig(num_envs=2, wrappers=wrappers)
    env = config.build("cpu")
    assert env.spec.obs["policy"].shape == (12,)
    env.close()
    assert from_plain(to_plain(TrainConfig(env=config)), TrainConfig()).env.wrappers == wrappers


@pytest.mark.parametrize(
    ("wrappers", "message"),
    [
        ({"FlatenObservation": None}, r"env\.wrappers\.FlatenObservation: .* did you mean FlattenObservation"),
        ({"FlattenObservation": 3}, r"env\.wrappers\.FlattenObservation=3: expected its keyword arguments"),
        ({"my_wraps:Mine": None}, "say --allow-import my_wraps"),
    ],
)
def test_what_is_no_wrapper_is_named(wrappers, message):
    with pytest.raises(ValueError, match=message):
        EnvConfig(wrappers=wrappers).build("cpu")


def test_other_environments_have_no_wrappers():
    with pytest.raises(ValueError, match=r"env\.wrappers \(FlattenObservation\) go around Gymnasium's environments"):
        EnvConfig(id="tensor:cartpole", wrappers={"FlattenObservation": None}).build("cpu")


@pytest.mark.parametrize("pixels", [1, 3, 7, 9, 10, 35, 36, 84])
def test_images_of_any_size_have_layers_that_fit(pixels):
    network = CNNConfig(layout="channels_last").build((pixels, pixels, 3), "relu", "orthogonal", 1.0)
    assert network(torch.zeros(2, pixels, pixels, 3)).shape == (2, 256)
    assert CNNConfig().layers_for([84, 84]) == FITTING[0][1]


def test_a_game_of_atari_has_its_preset_and_names_its_package():
    config = preset_for("ALE/Breakout-v5")
    assert config.env.id == "ALE/Breakout-v5"
    assert list(config.env.wrappers) == ["AtariPreprocessing", "FrameStackObservation"]
    if "ALE/Breakout-v5" not in gymnasium.registry:
        with pytest.raises(ImportError, match='pip install "ale-py" brings ALE/'):
            config.env.build("cpu")
