"""Pictures of a policy at work, as a file."""

from __future__ import annotations

import ctypes.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import gymnasium
import numpy as np

from canter.play.player import Turn
from canter.specs import ActionSpec, Continuous, Env


class CannotRender(ValueError):
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
