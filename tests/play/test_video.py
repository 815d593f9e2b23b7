import math
import os
import sys
from contextlib import closing

import gymnasium
import imageio.v3 as imageio
import numpy as np
import pytest

from canter.core.specs import Continuous, Discrete, MultiDiscrete
from canter.envs.gymnasium import make_gymnasium
from canter.envs.tensor import CartPole, Maze, Swimmer
from canter.nn.actor_critic import ModelConfig
from canter.play.player import Player
from canter.play.video import CannotRender, FrameCaption, Recorder, draw_without_display, has_display

# imageio-ffmpeg leaves the pipes of its process to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")

SIZE = (34, 51)
"""Odd in one direction, which the usual pixel format cannot hold."""


class Brighter(gymnasium.Env):
    """Grows brighter with every step; an episode has 5."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 - as Gymnasium has it
    observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode=None, fails_at=None):
        self.render_mode, self.fails_at, self.t = render_mode, fails_at, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(1, np.float32), 1.0, self.t == 5, False, {}

    def render(self):
        if self.t == self.fails_at:
            raise OSError("the screen is broken")
        return None if self.render_mode is None else np.full((*SIZE, 3), 40 * self.t, np.uint8)


@pytest.fixture(autouse=True)
def registered():
    gymnasium.register("Brighter-v0", Brighter, disable_env_checker=True)
    yield
    del gymnasium.registry["Brighter-v0"]


def record(path, env_id="Brighter-v0", games=2, max_steps=None, **options):
    env = make_gymnasium(env_id, 1, autoreset="next_step", **{"render_mode": "rgb_array", **options})
    try:
        with Recorder(env, path) as recorder:
            return Player(ModelConfig().build_policy(env.spec), env).play(games, max_steps, recorder)
    finally:
        env.close()


def test_a_video_shows_every_step_at_the_speed_of_the_task(tmp_path):
    record(tmp_path / "new" / "a.mp4")
    frames = list(imageio.imiter(tmp_path / "new" / "a.mp4"))
    assert imageio.immeta(tmp_path / "new" / "a.mp4")["fps"] == 10
    # Steps 1 to 5, the reset, and again; the last state of an episode is seen.
    brightness = [frame.mean() for frame in frames]
    assert brightness == pytest.approx([40, 80, 120, 160, 200, 0, 40, 80, 120, 160, 200], abs=3)
    assert frames[0].shape[0] == SIZE[0]
    assert abs(frames[0].shape[1] - SIZE[1]) == 1
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.mp4"]


def test_a_gif_is_made_when_the_name_asks_for_one(tmp_path):
    record(tmp_path / "a.gif", games=1)
    frames = imageio.imread(tmp_path / "a.gif")
    assert [int(frame.mean()) for frame in frames] == [40, 80, 120, 160, 200]
    assert imageio.immeta(tmp_path / "a.gif")["duration"] == 100


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("a.avi", {}, "a video file ends in .mp4 or .gif, not '.avi'"),
        ("old.mp4", {}, "old.mp4 already exists"),
        ("a.mp4", {"render_mode": None}, 'returned no picture; make it with the option render_mode="rgb_array"'),
        ("a.mp4", {"fails_at": 3}, r"cannot be rendered here \(the screen is broken\)"),
    ],
)
def test_a_failed_recording_is_explained_and_leaves_nothing(tmp_path, name, options, message):
    (tmp_path / "old.mp4").write_text("mine")
    with pytest.raises(CannotRender, match=message):
        record(tmp_path / name, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["old.mp4"]


def test_environments_in_torch_cannot_be_drawn(tmp_path):
    with pytest.raises(CannotRender, match="tensor:cartpole cannot be rendered"):
        Recorder(CartPole(1), tmp_path / "a.mp4")


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(ImportError, match=r'pip install "canter\[video\]"'):
        record(tmp_path / "a.mp4")
    assert list(tmp_path.iterdir()) == []


def test_classic_control_is_drawn(tmp_path):
    pytest.importorskip("pygame", reason="Gymnasium draws classic control with pygame")
    record(tmp_path / "a.mp4", "CartPole-v1", max_steps=3)
    frames = list(imageio.imiter(tmp_path / "a.mp4"))
    assert len(frames) == 3
    assert frames[0].std() > 1


def test_classic_control_without_pygame_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pygame", None)
    with pytest.raises(ImportError, match="pictures of CartPole-v1 need another package: pygame is not installed"):
        record(tmp_path / "a.mp4", "CartPole-v1", max_steps=3)


@pytest.mark.filterwarnings("ignore:.*:pytest.PytestUnraisableExceptionWarning")  # half-made OpenGL contexts
def test_mujoco_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "")  # so that it is as before in the end, whatever is set meanwhile
    monkeypatch.delenv("MUJOCO_GL")
    draw_without_display()
    try:
        record(tmp_path / "a.mp4", "InvertedPendulum-v5", max_steps=2)
    except CannotRender as error:
        pytest.skip(f"no OpenGL here: {error}")
    frames = list(imageio.imiter(tmp_path / "a.mp4"))
    assert len(frames) == 2
    assert frames[0].std() > 1


def test_without_a_display_mujoco_does_not_open_a_window(monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("ctypes.util.find_library", lambda name: {"OSMesa": "libOSMesa.so"}.get(name))
    assert not has_display()
    draw_without_display()
    assert os.environ["MUJOCO_GL"] == "osmesa"
    assert os.path.isdir(os.environ["XDG_RUNTIME_DIR"])  # or SDL complains on every start
    monkeypatch.setenv("MUJOCO_GL", "egl")
    draw_without_display()
    assert os.environ["MUJOCO_GL"] == "egl"


@pytest.mark.parametrize("env", [Swimmer(1), Maze(1)], ids=["swimmer", "maze"])
def test_environments_in_torch_that_offer_pictures_are_recorded(env, tmp_path):
    with Recorder(env, tmp_path / "a.gif") as recorder:
        Player(ModelConfig().build_policy(env.spec), env).play(1, 5, recorder)
    frames = imageio.imread(tmp_path / "a.gif", index=None)
    assert len(frames) >= 5 and (frames[0] != frames[-1]).any()


def test_a_caption_shows_step_return_and_action_below_the_picture(tmp_path):
    env = make_gymnasium("Brighter-v0", 1, autoreset="next_step", render_mode="rgb_array")
    captions = []
    with closing(env), Recorder(env, tmp_path / "told.gif", caption=True) as recorder:

        def look(turn):
            recorder(turn)
            captions.append((recorder.caption.step, recorder.caption.return_))

        Player(ModelConfig().build_policy(env.spec), env).play(2, None, look)
    assert captions == [*((float(t), float(t)) for t in range(1, 6)), (0, 0.0), *((t, float(t)) for t in range(1, 6))]
    pictures = imageio.imread(tmp_path / "told.gif")
    assert pictures.shape[1:3] == (SIZE[0] + FrameCaption.HEIGHT, FrameCaption.WIDTH)
    assert pictures[0, SIZE[0] :].max() > 200  # something is written


@pytest.mark.parametrize(
    ("action", "taken", "bars"),
    [
        (Continuous((-2.0, 0.0), (2.0, 1.0)), [1.0, 5.0], [(0.0, 0.75), (0.0, 1.0)]),
        (Continuous((-math.inf,), (math.inf,)), [0.0], [(0.0, 0.5)]),
        (Discrete(4), [2], [(0.5, 0.75)]),
        (MultiDiscrete((2, 5)), [1, 0], [(0.5, 1.0), (0.0, 0.2)]),
    ],
)
def test_bars_show_where_an_action_lies_between_its_bounds(action, taken, bars):
    assert FrameCaption(action).bars(taken) == bars
