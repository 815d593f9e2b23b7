"""Wrappers in settings, networks for small images, and ids that need a package."""

from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from canter.app.cli import main
from canter.config import TrainConfig
from canter.config.presets import preset_for
from canter.core.plain import from_plain, nest, to_plain
from canter.core.specs import Discrete, TensorSpec
from canter.envs import EnvConfig
from canter.envs.imports import allow_import
from canter.nn.cnn import DEFAULT_LAYERS, CNNConfig


def test_wrappers_of_gymnasium_go_around_each_environment_by_name_the_first_innermost():
    wrappers = {"FrameStackObservation": {"stack_size": 3}, "FlattenObservation": None}
    config = EnvConfig(num_envs=2, wrappers=wrappers)
    env = config.build("cpu")
    assert env.spec.obs["policy"].shape == (12,)
    env.close()
    assert from_plain(to_plain(TrainConfig(env=config)), TrainConfig()).env.wrappers == wrappers


def test_flags_name_wrappers_in_their_order_and_single_arguments_of_them(capsys):
    flags = ["--env.wrappers.FrameStackObservation.stack-size", "3", "--env.wrappers.FlattenObservation", "null"]
    main(["train", "CartPole-v1", *flags, "--dry-run"])
    assert "observations: policy (12,)" in capsys.readouterr().out
    given = {"env.wrappers.my.module:Scaled.by": 2, "env.wrappers.FrameStackObservation.padding_type": "zero"}
    preset = {"FrameStackObservation": {"stack_size": 4}}
    assert nest(given, {"env.wrappers": preset})["env"]["wrappers"] == {
        "FrameStackObservation": {"stack_size": 4, "padding_type": "zero"},
        "my.module:Scaled": {"by": 2},
    }
    assert preset == {"FrameStackObservation": {"stack_size": 4}}


@pytest.mark.parametrize(
    ("wrappers", "message"),
    [
        ({"FlatenObservation": None}, r"env\.wrappers\.FlatenObservation: .* did you mean FlattenObservation"),
        ({"FlattenObservation": 3}, r"env\.wrappers\.FlattenObservation=3: expected its keyword arguments"),
        ({"ClipReward": {"max": 1}}, r"ClipReward: got an unexpected .*'max'; it takes min_reward, max_reward"),
        ({"TransformReward": None}, r"TransformReward: missing a required argument: 'func'; it takes func"),
        ({"my_wraps:Mine": None}, "add --allow-import my_wraps"),
    ],
)
def test_an_unknown_wrapper_is_named(wrappers, message):
    with pytest.raises(ValueError, match=message):
        EnvConfig(wrappers=wrappers).build("cpu")


def test_a_wrapper_of_ones_own_is_used_once_its_import_is_allowed(tmp_path, monkeypatch):
    (tmp_path / "my_scale.py").write_text(
        "import gymnasium\n"
        "def scaled(env, by):\n"
        "    return gymnasium.wrappers.TransformReward(env, lambda reward: by * float(reward))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    allow_import("my_scale", str(tmp_path))
    with closing(EnvConfig(num_envs=2, wrappers={"my_scale:scaled": {"by": 3}}).build("cpu")) as env:
        env.reset(seed=0)
        assert env.step(torch.zeros(2, dtype=torch.int64)).reward.tolist() == [3.0, 3.0]


def test_other_environments_have_no_wrappers():
    with pytest.raises(ValueError, match=r"env\.wrappers \(FlattenObservation\) wrap Gymnasium's environments only"):
        EnvConfig(id="tensor:cartpole", wrappers={"FlattenObservation": None}).build("cpu")


@pytest.mark.parametrize("pixels", [1, 3, 7, 9, 10, 35, 36, 84])
def test_images_of_any_size_have_layers_that_fit(pixels):
    network = CNNConfig(layout="channels_last").build((pixels, pixels, 3), "relu", "orthogonal", 1.0)
    assert network(torch.zeros(2, pixels, pixels, 3)).shape == (2, 256)
    assert CNNConfig().layers_for([84, 84]) == DEFAULT_LAYERS[0][1]


def test_a_game_of_atari_has_its_preset_and_names_its_package():
    config = preset_for("ALE/Breakout-v5")
    assert config.env.id == "ALE/Breakout-v5"
    assert list(config.env.wrappers) == ["AtariPreprocessing", "FrameStackObservation"]
    if find_spec("ale_py") is None:
        with pytest.raises(ImportError, match='pip install "ale-py" brings ALE/'):
            config.env.build("cpu")


@pytest.mark.skipif(find_spec("ale_py") is None, reason="needs ale-py and opencv-python-headless")
def test_pong_is_grey_small_stacked_and_skips_frames_as_published(capsys):
    config = preset_for("ALE/Pong-v5")
    with closing(replace(config.env, num_envs=2).build("cpu")) as env:
        assert env.spec.obs["policy"] == TensorSpec((4, 84, 84), torch.uint8)
        assert env.spec.action == Discrete(6)
        obs = env.reset(seed=0)["policy"]
        assert obs.shape == (2, 4, 84, 84) and obs.float().std() > 1
        algorithm = config.algorithm.build(env.spec, seed=0)
        action, *_ = algorithm.act({"policy": obs}, (), torch.ones(2, dtype=torch.bool))
        step = env.step(action)
        assert step.obs["policy"].shape == (2, 4, 84, 84)
        assert torch.equal(step.obs["policy"][:, :3], obs[:, 1:])  # the oldest picture goes
    with pytest.raises(ValueError, match=r"unknown Gymnasium environment 'ALE/Pogn-v5': did you mean ALE/Pong-v5"):
        replace(config.env, id="ALE/Pogn-v5").build("cpu")
    main(["envs", "ALE/Pong"])
    assert capsys.readouterr().out == "  ALE/Pong-v5  preset Atari\n"
