"""Pictures of a policy at work, as a file.

mjlab's own viewers, in which a policy acts: a window (`native`), or a page for a browser (`viser`).

N is the number of parallel environments.
"""

from __future__ import annotations

import ctypes.util
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import gymnasium
import numpy as np
import torch

from canter.core.registry import UserError
from canter.core.specs import ActionSpec, Continuous, Env
from canter.envs import EnvConfig
from canter.envs.robots.adapter import ManagerEnv
from canter.play.player import Account, Games, Player, Turn


class CannotRender(UserError):
    """An environment that gives no pictures, or a file that cannot hold them; the message says why."""


@runtime_checkable
class Renders(Protocol):
    """What an environment offers on top when it can be seen."""

    @property
    def render_fps(self) -> float:
        """Pictures per second that show the task at its own speed."""
        ...

    def render(self) -> list[np.ndarray]:
        """A picture `[H, W, 3]` uint8 of every environment."""
        ...


class Recorder:
    """Writes what the first environment looks like to a new `.mp4` or `.gif` file; to be called after every turn.

    The file gets its name when it is complete; what an error interrupts is removed. With a `caption`, a strip below
    each picture tells step, return and action.
    """

    def __init__(self, env: Env, path: Path, *, caption: bool = False) -> None:
        self.env, self.env_id, self.path = check_video(env, path), env.spec.env_id, path
        self.caption = Caption(env.spec.action) if caption else lambda picture, turn: picture

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            folder = tempfile.TemporaryDirectory(prefix=f".{self.path.name}-", dir=self.path.parent)
            self.scratch = Path(stack.enter_context(folder)) / self.path.name
            options = _OPTIONS[self.path.suffix](self.env.render_fps)
            self.writer = stack.enter_context(_import_imageio().get_writer(self.scratch, mode="I", **options))
            self.stack = stack.pop_all()
        return self

    def __call__(self, turn: Turn) -> np.ndarray:
        """Add a picture of what there is now; gives it `[H, W, 3]`."""
        picture = self.caption(self._picture(), turn)
        self.writer.append_data(picture)
        return picture

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        with self.stack:
            self.writer.close()
            if kind is None:
                os.replace(self.scratch, self.path)

    def _picture(self) -> np.ndarray:
        try:
            pictures = self.env.render()
        except ImportError:
            raise
        except Exception as error:  # a missing OpenGL raises different errors on different systems
            hint = "MuJoCo needs EGL or OSMesa to be installed and MUJOCO_GL=egl or MUJOCO_GL=osmesa to be set"
            raise CannotRender(f"{self.env_id} cannot be drawn here ({error}); without a display, {hint}") from error
        if not pictures or pictures[0].ndim != 3:
            raise CannotRender(f'{self.env_id} gave no picture; make it with the option render_mode="rgb_array"')
        return pictures[0]


class Caption:
    """A strip below each picture: step and return of the episode, and a bar for each part of the action."""

    HEIGHT, WIDTH, MARGIN = 40, 160, 6

    def __init__(self, action: ActionSpec) -> None:
        self.action = action
        self.step, self.return_, self.over = 0, 0.0, False

    def __call__(self, picture: np.ndarray, turn: Turn) -> np.ndarray:
        """The picture `[H, W, 3]` with its strip."""
        from PIL import Image, ImageDraw  # comes with imageio

        if self.over:
            self.step, self.return_ = 0, 0.0
        step = turn.step
        if step.valid[0]:
            self.step, self.return_ = self.step + 1, self.return_ + float(step.reward[0])
        self.over = bool(step.terminated[0] | step.truncated[0])
        width = max(picture.shape[1], self.WIDTH)
        whole = Image.new("RGB", (width, picture.shape[0] + self.HEIGHT))
        whole.paste(Image.fromarray(picture), ((width - picture.shape[1]) // 2, 0))
        draw, top = ImageDraw.Draw(whole), picture.shape[0]
        text = f"step {self.step}   return {self.return_:.1f}"
        draw.text((self.MARGIN, top + 3), text, fill="white", font_size=min(15, width // 16))
        bars = self.bars(turn.action[0].reshape(-1).tolist())
        room = (width - self.MARGIN) / len(bars)
        for place, (begin, end) in enumerate(bars):
            left, wide = self.MARGIN + place * room, room - self.MARGIN
            draw.rectangle((left, top + 24, left + wide, top + 34), fill="#333b45")
            draw.rectangle((left + begin * wide, top + 24, left + end * wide, top + 34), fill="#56b4e9")
        return np.asarray(whole)

    def bars(self, action: list[float]) -> list[tuple[float, float]]:
        """Where each bar is filled, 0..1: up from the lower bound, or the chosen of as many parts as choices."""
        if isinstance(self.action, Continuous):
            bounds = zip(action, self.action.low, self.action.high, strict=True)
            finite = [(a, max(low, -FAR), min(high, FAR)) for a, low, high in bounds]
            return [(0.0, min(max((a - low) / (high - low), 0.0), 1.0)) for a, low, high in finite]
        return [(choice / n, (choice + 1) / n) for choice, n in zip(action, self.action.nvec, strict=True)]


class Strip:
    """A few small pictures of an episode, evenly spread and side by side; how long it will be need not be known."""

    COUNT, HEIGHT, MOST, GAP = 5, 160, 40, 4

    def __init__(self) -> None:
        self.kept: list[np.ndarray] = []
        self.seen, self.every = 0, 1

    def add(self, picture: np.ndarray) -> None:
        """Take note of the next picture `[H, W, 3]`."""
        from PIL import Image  # comes with imageio

        if self.seen % self.every == 0:
            size = max(1, round(picture.shape[1] * self.HEIGHT / len(picture))), self.HEIGHT
            self.kept.append(np.asarray(Image.fromarray(picture).resize(size)))
        self.seen += 1
        if len(self.kept) > self.MOST:
            self.kept, self.every = self.kept[::2], 2 * self.every

    def save(self, path: Path) -> None:
        """Write it as one picture, if there was anything to see."""
        if self.kept:
            places = np.linspace(0, len(self.kept) - 1, min(self.COUNT, len(self.kept))).round().astype(int)
            # Grey between them, as many pictures are white up to their edges.
            apart = [np.pad(self.kept[i], ((0, 0), (0, self.GAP), (0, 0)), constant_values=128) for i in places]
            _import_imageio().imwrite(path, np.concatenate(apart, axis=1)[:, : -self.GAP])


FAR = 3.0
"""Where a bar ends whose action has no bounds."""


def check_video(env: Env, path: Path) -> Renders:
    """The environment; refuses one that cannot be drawn, a file that exists or can hold no video, missing packages."""
    if path.suffix not in _OPTIONS:
        raise CannotRender(f"{path}: a video is a file in {' or '.join(_OPTIONS)}, not {path.suffix!r}")
    if path.exists():
        raise CannotRender(f"{path} exists already; remove it or give another name")
    if not isinstance(env, Renders):
        hint = "Gymnasium's environments can, and others that offer `render`"
        raise CannotRender(f"{env.spec.env_id} cannot be drawn; {hint}")
    _import_imageio()
    return env


_OPTIONS: dict[str, Callable[[float], dict[str, Any]]] = {
    # Sizes are rounded to even numbers, which is all that the usual pixel format needs.
    ".mp4": lambda fps: {"format": "FFMPEG", "fps": fps, "macro_block_size": 2, "ffmpeg_log_level": "error"},
    ".gif": lambda fps: {"format": "GIF", "duration": 1000 / fps, "loop": 0},
}
"""What imageio needs for each kind of file, by pictures per second."""


def _import_imageio() -> Any:
    try:
        import imageio.v2 as imageio
        import imageio_ffmpeg as imageio_ffmpeg
    except ImportError as error:
        raise ImportError(f'videos need further packages: pip install "canter[video]" ({error})') from error
    return imageio


@contextmanager
def pictures_explained() -> Iterator[None]:
    """Say in one line what environments say in many ways: that they cannot be drawn."""
    try:
        yield
    except gymnasium.error.DependencyNotInstalled as error:
        raise ImportError(str(error)) from error
    except TypeError as error:
        if "render_mode" not in str(error):
            raise
        raise CannotRender(f"this environment cannot be drawn ({error})") from error


def has_display() -> bool:
    """Whether a window could be opened."""
    return sys.platform != "linux" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def draw_without_display() -> None:
    """Where there is no display, let MuJoCo draw with EGL or OSMesa instead of looking for a window."""
    os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())  # SDL complains where it is missing
    installed = [name for name in ("EGL", "OSMesa") if ctypes.util.find_library(name)]
    if installed and not has_display():
        os.environ.setdefault("MUJOCO_GL", installed[0].lower())


VIEWERS = {"native": "NativeMujocoViewer", "viser": "ViserPlayViewer"}
"""mjlab's classes, by what `canter play --viewer` takes."""
OTHERWISE = "--viewer viser shows it in a browser, --video FILE.mp4 records it"


def viewed(env: EnvConfig, viewer: str) -> EnvConfig:
    """One environment for a viewer, whose controls no recorded part of a step would notice."""
    if not env.id.startswith("mjlab:"):
        meant = f"--viewer {viewer} is for environments of mjlab (mjlab:TASK), and {env.id} is none"
        raise CannotRender(f"{meant}; --video FILE.mp4 records it if it can be drawn")
    if viewer == "native" and not has_display():
        missing = "neither DISPLAY nor WAYLAND_DISPLAY is set"
        raise CannotRender(f"--viewer native needs a display, and {missing}; {OTHERWISE}")
    return replace(env, num_envs=1, options={**env.options, "capture": False})


class Stage:
    """A player as mjlab's viewers know an environment: each of their steps is a turn of the player.

    Viewers restart environments by themselves; the policy then sees the new episode's first observation, and what was
    counted of the old one is forgotten.
    """

    def __init__(self, player: Player, num_games: int | None, max_steps: int | None) -> None:
        env = player.env
        self._adapter: Any = env if isinstance(env, ManagerEnv) else getattr(env, "env", None)
        self.unwrapped, self.num_envs = self._adapter.env, env.spec.num_envs
        self.cfg, self.device = self.unwrapped.cfg, self.unwrapped.device
        self.account, self.max_steps, self.steps = Account(env, num_games), max_steps, 0
        self.error: Exception | None = None
        """What a turn raised; viewers would print it and wait."""
        self._turns, self._last = player.turns(), None

    @property
    def over(self) -> bool:
        """Whether as much was played as was asked for, or nothing more can be."""
        return self.error is not None or self.account.complete or self.steps == self.max_steps

    def get_observations(self) -> None:
        """None: the player has them."""

    def act(self, obs: None) -> None:
        """None: the player acts."""

    def step(self, actions: None) -> None:
        """Play a turn."""
        if self.over:
            return
        try:
            if self._last is not None:
                self._begin_restarted(self._last)
            self._last = next(self._turns)
        except Exception as error:
            self.error = error
            return
        self.account.add(self._last.step)
        self.steps += 1

    def _begin_restarted(self, last: Turn) -> None:
        """Let the policy see what a viewer has restarted since the last turn."""
        begun = self.unwrapped.episode_length_buf == 0  # `[N]`
        if not bool((begun & ~last.reset).any()):
            return
        seen = self._adapter._groups(self.unwrapped.observation_manager.compute())
        for name, group in last.step.obs.items():
            rows = begun.view(-1, *(1,) * (group.dim() - 1))
            last.step.obs[name] = torch.where(rows, seen[name], group)
        last.reset.logical_or_(begun)
        self.account.forget(begun)

    def reset(self) -> None:
        """Begin new episodes everywhere."""
        self.unwrapped.reset()

    def close(self) -> None:
        """Leave it open: whoever made it closes it."""


def watch(player: Player, viewer: str, num_games: int | None = None, max_steps: int | None = None) -> Games:
    """Let a player play in a viewer until it is closed (or Ctrl+C), or so many games or steps were played."""
    stage = Stage(player, num_games, max_steps)
    if viewer == "native":
        _check_window()
    try:
        shown: Any = getattr(import_module("mjlab.viewer"), VIEWERS[viewer])(stage, stage.act)
        still_open = shown.is_running
        shown.is_running = lambda: still_open() and not stage.over
        shown.run()
    except ImportError as error:
        raise ImportError(f"--viewer {viewer} needs the package {error.name}: pip install {error.name}") from error
    except Exception as error:
        if stage.steps:
            raise
        raise CannotRender(f"--viewer {viewer} could not be opened ({error}); {OTHERWISE}") from error
    if stage.error is not None:
        raise stage.error
    return stage.account.games()


def _check_window() -> None:
    """Try whether a window can be opened: MuJoCo's viewer would wait for one for ever."""
    import glfw

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        can = glfw.init()
    if not can:
        why = f" ({said[0].message})" if said else ""
        raise CannotRender(f"--viewer native could not open a window{why}; {OTHERWISE}")
    glfw.terminate()
