"""`canter play`, `canter eval` and `canter export`."""

import json
import re
import shutil

import gymnasium
import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from canter.algorithms.ppo import PPOConfig
from canter.app.cli import main
from canter.config import TrainConfig
from canter.config.files import dump_config
from canter.core.seeding import derive_seed
from canter.envs import EnvConfig
from canter.nn.policy_file import save_policy
from canter.nn.policy_loading import load_policy
from canter.play.evaluation import evaluate
from canter.runs.run_folder import RunFolder
from canter.training.trainer import train


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setattr("sys.platform", "linux")


@pytest.fixture
def say(capsys):
    """Run a command; return its output, and its log or error line."""

    def run(*arguments):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as leaving:
            assert leaving.code == 2
        return capsys.readouterr()

    return run


def trained(path, env_id="tensor:cartpole", **options):
    """A run of one rollout, whose best policy is another one than the final one."""
    config = TrainConfig(
        env=EnvConfig(id=env_id, num_envs=4, options=options),
        algorithm=PPOConfig(horizon=16, num_minibatches=16, epochs=1),
        total_steps=64,
    )
    algorithm = train(config, folder=RunFolder(path, settings=dump_config(config)))
    for parameter in algorithm.policy.actor.parameters():
        nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(1))
    save_policy(path / "policies" / "best.safetensors", algorithm.policy)
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs") / "first")


@pytest.fixture
def run(made, tmp_path):
    """`runs/first` in the current folder."""
    return shutil.copytree(made, tmp_path / "runs" / "first")


def test_an_evaluation_is_written_as_json(run, say):
    plain = json.loads(say("eval", "first", "--episodes", 6, "--json").out)
    assert plain["policy"].endswith("first/policies/best.safetensors")
    assert (plain["env"], plain["num_envs"], plain["seed"]) == ("tensor:cartpole", 4, 0)
    assert plain["deterministic"] is True
    env = EnvConfig(id="tensor:cartpole", num_envs=4).build("cpu")
    expected = evaluate(load_policy(run), env, 6, derive_seed(0, "eval"))
    assert plain | expected.to_dict() == plain
    assert say("eval", "first", "--episodes", 6, "--json", "new/result.json").out.count("\n") == 4
    assert json.loads((run.parents[1] / "new" / "result.json").read_text()) == plain


def test_an_evaluation_is_printed_in_words(run, say):
    out = say("eval", run, "--episodes", 6, "--stochastic", "--num-envs", 2, "--seed", 7).out
    plain = json.loads(say("eval", run, "--episodes", 6, "--stochastic", "--num-envs", 2, "--seed", 7, "--json").out)
    low, high = plain["confidence_interval_95"]
    assert "acting with noise, seed 7" in out
    assert f"return over 6 episodes: mean {plain['mean']:.1f} (95 % interval {low:.1f} to {high:.1f})" in out
    assert plain["num_envs"] == 2
    assert plain != json.loads(say("eval", run, "--episodes", 6, "--num-envs", 2, "--seed", 7, "--json").out)


@pytest.mark.parametrize(
    ("arguments", "file"),
    [
        (["first"], "best"),
        (["fi", "--policy", "final"], "final_actor"),
        (["first", "--policy", "final_actor"], "final_actor"),
        (["first", "--policy", "runs/first/policies/final_actor.safetensors"], "final_actor"),
        (["runs/first/policies/final_actor.safetensors"], "final_actor"),
    ],
)
def test_the_policy_can_be_chosen(run, say, arguments, file):
    plain = json.loads(say("eval", *arguments, "--episodes", 2, "--json").out)
    assert plain["policy"].endswith(f"policies/{file}.safetensors")
    assert plain["num_envs"] == 2


def test_a_policy_file_alone_is_enough(run, say, tmp_path):
    shutil.move(run / "policies" / "best.safetensors", tmp_path / "mine.safetensors")
    shutil.rmtree(run)
    assert json.loads(say("eval", "mine.safetensors", "--episodes", 2, "--json").out)["env"] == "tensor:cartpole"


def test_a_run_without_policy_files_is_taken_from_its_newest_checkpoint(run, say):
    final = json.loads(say("eval", "first", "--policy", "final", "--episodes", 3, "--num-envs", 1, "--json").out)
    shutil.rmtree(run / "policies")
    plain = json.loads(say("eval", "first", "--episodes", 3, "--num-envs", 1, "--json").out)
    assert plain["policy"].endswith("checkpoints/step-000000000001")
    assert plain["returns"] == final["returns"]
    shutil.rmtree(run / "checkpoints")
    assert "holds no policy" in say("eval", "first").err


def test_a_policy_can_be_taken_to_another_environment_that_it_fits(run, say):
    plain = json.loads(say("eval", "first", "--env", "CartPole-v1", "--episodes", 2, "--json").out)
    assert plain["env"] == "CartPole-v1"
    assert "obs.policy.shape is [4] in what was saved and [6] here" in say("eval", "first", "--env", "Acrobot-v1").err


def test_changed_settings_of_the_environment_are_printed(run, say):
    flags = ["--env.options.max-episode-steps", 3, "--env.num-envs", 2]
    plain = json.loads(say("eval", "first", "--episodes", 2, *flags, "--json").out)
    assert plain["lengths"] == [3, 3]
    assert plain["changes"] == {
        "env.num_envs": ["4", "2"],
        "env.options.max_episode_steps": ["(absent)", "3"],
    }
    said = "tensor:cartpole with env.options.max_episode_steps (absent) -> 3,"
    assert f"{said} acting without noise" in say("eval", "first", "--episodes", 2, *flags[:2]).out
    printed = say("play", "first", *flags[:2])
    assert f"{said} without noise" in printed.out
    assert "length 3" in printed.out
    assert json.loads(say("eval", "first", "--episodes", 2, "--json").out)["changes"] == {}


def test_the_reward_per_step_of_an_endless_task_is_printed(tmp_path, say):
    path = trained(tmp_path / "endless", "tensor:queue", max_episode_steps=None)
    plain = json.loads(say("eval", path, "--episodes", 2, "--max-steps", 30, "--json").out)
    assert (plain["episodes"], plain["unfinished"]) == (0, 2)
    assert plain["reward_per_step"] < 0
    assert "mean" not in plain
    out = say("eval", path, "--episodes", 2, "--max-steps", 30).out
    assert "after 30 steps only 0 of 2 episodes had ended, so there is no mean return; mean reward per step -" in out
    assert "unfinished after 20 steps: return so far" in say("play", path, "--max-steps", 20).out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "secnd"], "no run 'secnd' here or under runs"),
        (["eval", "first", "--policy", "bst"], "no such policy in runs/first: did you mean best"),
        (["eval", "runs/first/policies/best.safetensors", "--policy", "final"], "two policies"),
        (["eval", "first", "--episodes", "0"], "argument --episodes: '0' is not an integer above 0"),
        (["eval", "first", "--json", "old"], "--json old already exists"),
        (["eval", "first", "--seed", "-1"], "seed=-1"),
        (["eval", "first", "--device", "gpu"], "device: 'gpu' is no device"),
        (["eval", "runs/first/config.yaml"], "config.yaml cannot be used"),
        (["eval", "runs/first/policies/final_critic.safetensors"], "it holds the critic, not the actor"),
        (["eval", "first", "--algorithm.gamma", "0.9"], "unknown flag --algorithm.gamma"),
        (["eval", "first", "--num-envs", "0"], "env.num_envs=0 must be at least 1"),
        (["eval", "first", "--env.autoreset", "disabled"], "env.autoreset=disabled has no effect here"),
        (
            ["eval", "first", "--average", "9", "--env.reset-steps", "5"],
            "--env.reset-steps 5 cannot be used: this command",
        ),
        (["play", "first", "--env.num-envs", "3"], "--env.num-envs 3 cannot be used: this command needs 1"),
        (["play", "first", "--override-std", "0.1"], "Categorical has none"),
        (["play", "first", "--video", "a.mp4"], "tensor:cartpole cannot be rendered; Gymnasium environments can"),
        (["play", "first", "--env", "CartPole-v1", "--video", "a.avi"], "a video file ends in .mp4 or .gif"),
        (
            ["export", "first", "--output", "a.bin"],
            "must end in .onnx or .pt2 or .h or .npz or .pt or .pth",
        ),
        (["export", "first", "--output", "a.h", "--to", "c"], "--output a.h and --to c: pass only one of them"),
        (["export", "first", "--int8"], "--int8 is for a C header alone: --to c, not onnx,torch"),
        (["export", "first", "--int8", "--output", "a.pt"], "--int8 is for a C header alone: --to c, not a.pt"),
        (["export", "first", "--output", "old.onnx"], "old.onnx already exists"),
        (["export", "first", "--output", "old/a.h"], "old/a.h cannot be written: "),
        (["play", "first", "--viewer", "viser"], "--viewer viser shows only environments of mjlab (mjlab:TASK)"),
        (["play", "first", "--viewer", "vizer"], "argument --viewer: unknown name 'vizer'"),
        (["play", "first", "--viewer", "viser", "--video", "a.mp4"], "--viewer viser and --video a.mp4: pass only one"),
    ],
)
def test_bad_input_gets_one_clear_line(run, say, arguments, message, tmp_path):
    (tmp_path / "old").touch()
    (tmp_path / "old.onnx").touch()
    *others, error = say(*arguments).err.splitlines()
    assert error.startswith("canter: ")
    assert message in error
    assert all("played without a picture" in line for line in others)


def test_playing_without_a_display_says_so_and_offers_a_video(run, say):
    printed = say("play", "first", "--env", "CartPole-v1", "--episodes", 2)
    reason = "no window: neither DISPLAY nor WAYLAND_DISPLAY is set"
    assert f"{reason}, so it is played without a picture (--video FILE.mp4 records one)" in printed.err
    assert "Playing runs/first/policies/best.safetensors in CartPole-v1, without noise" in printed.out
    assert printed.out.count("\nepisode ") == 2


def test_the_noise_of_a_gaussian_policy_can_be_set(tmp_path, say):
    path = trained(tmp_path / "swing", "tensor:pendulum", max_episode_steps=10)
    quiet, loud = (say("play", path, "--override-std", std).out for std in (1e-6, 20))
    assert "with noise" in quiet
    returns = [out.split("return ")[1].split(",")[0] for out in (say("play", path).out, quiet, loud)]
    assert returns[0] == returns[1] != returns[2]


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # of imageio-ffmpeg
def test_a_video_is_recorded(run, say, tmp_path):
    pytest.importorskip("pygame", reason="Gymnasium draws classic control with pygame")
    out = say("play", "first", "--env", "CartPole-v1", "--video", "a.gif", "--max-steps", 5).out
    assert "The video is in a.gif" in out
    assert (tmp_path / "a.gif").read_bytes().startswith(b"GIF8")


class Blind(gymnasium.Env):
    """Seen and steered like CartPole, and never drawn."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)


def test_a_gymnasium_environment_that_cannot_be_drawn_is_refused(run, say, tmp_path):
    gymnasium.register("Blind-v0", Blind)
    try:
        printed = say("play", "first", "--env", "Blind-v0", "--video", "a.mp4")
    finally:
        del gymnasium.registry["Blind-v0"]
    assert printed.err.startswith("canter: this environment cannot be rendered (")
    assert "return an array [H, W, 3] of uint8 from render()" in printed.err
    assert not (tmp_path / "a.mp4").exists()


class Undrawn(gymnasium.Env):
    """Has a render mode and no method `render`."""

    metadata = {"render_modes": ("rgb_array",), "render_fps": 10}  # noqa: RUF012 - as Gymnasium writes it
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        return np.zeros(4, np.float32), {}

    def step(self, action):
        return np.zeros(4, np.float32), 0.0, False, True, {}


def test_a_video_without_a_method_render_names_what_to_write(run, say, tmp_path):
    gymnasium.register("Undrawn-v0", Undrawn)
    try:
        printed = say("play", "first", "--env", "Undrawn-v0", "--video", "a.mp4")
    finally:
        del gymnasium.registry["Undrawn-v0"]
    (line,) = printed.err.splitlines()
    assert line.startswith("canter: Undrawn-v0 has no pictures: take render_mode in its __init__")
    assert "from render()" in line and "MuJoCo" not in line
    assert not (tmp_path / "a.mp4").exists()


def test_agents_play_without_a_policy(run, say):
    zero = say("play", "--agent", "zero", "--env", "tensor:pendulum", "--env.options.max-episode-steps", "5").out
    assert "Playing zero actions in tensor:pendulum" in zero and "length 5" in zero
    random = [say("play", "first", "--agent", "random", "--seed", seed).out for seed in (1, 1, 2)]
    assert "Playing random actions in tensor:cartpole" in random[0]
    assert random[0] == random[1] != random[2]
    for arguments, message in (
        (["play"], "RUN is missing"),
        (["play", "--agent", "random"], "--agent random needs an environment: --env ID, or the folder of a run"),
        (["play", "first", "--agent", "zero", "--override-std", "1"], "--override-std has no effect with --agent zero"),
        (["play", "first", "--agent", "zeros"], "unknown name 'zeros', did you mean zero"),
    ):
        assert message in say(*arguments).err


def test_an_export_is_verified_and_says_how_well_it_fits(run, say):
    out = say("export", "first", "--observations", 40).out
    folder = run / "exports"
    assert {path.name for path in folder.iterdir()} == {
        *("best.onnx", "best.onnx.json", "best.pt2", "best.pt2.json"),
        "best.contract.yaml",
    }
    assert "runs/first/exports/best.onnx: the same actions on 40 observations, largest difference 0.0e+00" in out
    obs = torch.randn(3, 4)
    expected, _ = load_policy(run).act({"policy": obs})
    got = onnxruntime.InferenceSession(folder / "best.onnx").run(["action"], {"policy": obs.numpy()})[0]
    assert got.tolist() == expected.tolist()
    assert json.loads((folder / "best.pt2.json").read_text())["observations"] == 40


@pytest.mark.parametrize("file", ["best.npz", "best.h.json", "best.leapp.yaml"])
def test_nothing_is_exported_if_one_of_the_files_exists(file, run, say):
    folder = run / "exports"
    folder.mkdir()
    (folder / file).touch()
    printed = say("export", "first", "--to", "c,numpy,leapp")
    assert printed.out == "" and f"exports/{file} already exists; remove it" in printed.err
    assert [path.name for path in folder.iterdir()] == [file]


def test_an_export_to_c_and_numpy_is_measured(run, say, tmp_path):
    out = say("export", "first", "--observations", 40, "--output", tmp_path / "a.npz", "--bench").out
    assert "a.npz: the same actions on 40 observations" in out and "a.contract.yaml: what the numbers mean" in out
    assert re.search(r"numpy  p50 +\d+\.\d us   p99 +\d+\.\d us", out)
    out = say("export", "first", "--observations", 40, "--output", tmp_path / "b.h", "--int8").out
    assert re.search(r"b.h: weights of 8 bits change actions by at most [01]\n", out)
