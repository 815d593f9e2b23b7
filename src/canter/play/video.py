"""Pictures of a policy at work: a video file, or one of mjlab's viewers.

mjlab has a viewer in a window (`native`) and one in a browser (`viser`). N is the number of
parallel environments.
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
from canter.play.player import EpisodeCounter, Player, PlayResult, PlayStep

BAR_LIMIT = 3.0
"""Action value at the end of a caption's bar where the action has no bound."""
VIEWERS = {"native": "NativeMujocoViewer", "viser": "ViserPlayViewer"}
"""mjlab's viewer classes by the name that `canter play --viewer` takes."""
VIEWER_HINT = "--viewer viser shows it in a browser, --video FILE.mp4 records it"

RENDER_HINT = (
    'take render_mode in its __init__, list "rgb_array" in metadata["render_modes"], and return an array '
    "[H, W, 3] of uint8 from render(); without pictures: leave out --video"
)


class CannotRender(UserError):
    """An environment without pictures, or a file that cannot hold a video."""


@runtime_checkable
class Renderable(Protocol):
    """Optional for an environment: it renders itself."""

    @property
    def render_fps(self) -> float:
        """Pictures per second that show the task in real time."""
        ...

    def render(self) -> list[np.ndarray]:
        """Return a picture `[H, W, 3]` uint8 of every environment."""
        ...


class Recorder:
    """Writes pictures of the first environment to a new `.mp4` or `.gif` file, one each step.

    Call it after every step. The file appears under its name when it is complete; after an error
    nothing is left. With `caption`, a strip below each picture shows step, return and action.
    """

    def __init__(self, env: Env, path: Path, *, caption: bool = False) -> None:
        self.env = check_video(env, path)
        self.env_id = env.spec.env_id
        self.path = path
        self.caption = FrameCaption(env.spec.action) if caption else None

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            folder = tempfile.TemporaryDirectory(prefix=f".{self.path.name}-", dir=self.path.parent)
            self.scratch = Path(stack.enter_context(folder)) / self.path.name
            options = _OPTIONS[self.path.suffix](self.env.render_fps)
            self.writer = stack.enter_context(_import_imageio().get_writer(self.scratch, mode="I", **options))
            self.stack = stack.pop_all()
        return self

    def __call__(self, played: PlayStep) -> np.ndarray:
        """Add a picture `[H, W, 3]` of the current state and return it."""
        picture = self._picture()
        if self.caption is not None:
            picture = self.caption(picture, played)
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
        except NotImplementedError as error:
            raise CannotRender(f"{self.env_id} has no pictures: {RENDER_HINT}") from error
        except Exception as error:  # a missing OpenGL raises different errors on different systems
            hint = "install EGL or OSMesa and set MUJOCO_GL=egl or MUJOCO_GL=osmesa"
            raise CannotRender(
                f"{self.env_id} cannot be rendered here ({error}); MuJoCo without a display: {hint}"
            ) from error
        if not pictures or pictures[0].ndim != 3:
            raise CannotRender(f'{self.env_id} returned no picture; make it with the option render_mode="rgb_array"')
        return pictures[0]


class FrameCaption:
    """A strip below each picture: step and return of the episode, a bar per action component."""

    HEIGHT = 40
    WIDTH = 160
    """Smallest width; narrower pictures are centred above it."""
    MARGIN = 6

    def __init__(self, action: ActionSpec) -> None:
        self.action = action
        self.step = 0
        self.return_ = 0.0
        self.ended = False

    def __call__(self, picture: np.ndarray, played: PlayStep) -> np.ndarray:
        """Return the picture `[H, W, 3]` with its caption."""
        from PIL import Image, ImageDraw  # comes with imageio

        self._count(played)
        height = picture.shape[0]
        width = max(picture.shape[1], self.WIDTH)
        image = Image.new("RGB", (width, height + self.HEIGHT))
        image.paste(Image.fromarray(picture), ((width - picture.shape[1]) // 2, 0))
        draw = ImageDraw.Draw(image)
        text = f"step {self.step}   return {self.return_:.1f}"
        draw.text((self.MARGIN, height + 3), text, fill="white", font_size=min(15, width // 16))
        bars = self.bars(played.action[0].reshape(-1).tolist())
        spacing = (width - self.MARGIN) / len(bars)
        length = spacing - self.MARGIN
        top = height + 24
        bottom = height + 34
        for i, (begin, end) in enumerate(bars):
            left = self.MARGIN + i * spacing
            draw.rectangle((left, top, left + length, bottom), fill="#333b45")
            draw.rectangle((left + begin * length, top, left + end * length, bottom), fill="#56b4e9")
        return np.asarray(image)

    def bars(self, action: list[float]) -> list[tuple[float, float]]:
        """Return the filled part of each bar, 0..1.

        A continuous component fills its bar from the lower bound up to its value; of a discrete
        action the bar has one segment per option, and the chosen one is filled.
        """
        if not isinstance(self.action, Continuous):
            return [(choice / n, (choice + 1) / n) for choice, n in zip(action, self.action.nvec, strict=True)]
        bars: list[tuple[float, float]] = []
        for value, low, high in zip(action, self.action.low, self.action.high, strict=True):
            start = max(low, -BAR_LIMIT)
            end = min(high, BAR_LIMIT)
            bars.append((0.0, min(max((value - start) / (end - start), 0.0), 1.0)))
        return bars

    def _count(self, played: PlayStep) -> None:
        if self.ended:
            self.step = 0
            self.return_ = 0.0
        step = played.step
        if step.valid[0]:
            self.step += 1
            self.return_ += float(step.reward[0])
        self.ended = bool(step.terminated[0] | step.truncated[0])


class FilmStrip:
    """Small pictures of an episode of unknown length, evenly spaced in time, side by side."""

    COUNT = 5
    """Pictures in the strip."""
    HEIGHT = 160
    """Height of a picture in pixels."""
    MAX_KEPT = 40
    """Pictures in memory; above it every second one is dropped."""
    GAP = 4
    """Pixels between pictures."""

    def __init__(self) -> None:
        self.kept: list[np.ndarray] = []
        self.seen = 0
        self.every = 1

    def add(self, picture: np.ndarray) -> None:
        """Add the next picture `[H, W, 3]`."""
        from PIL import Image  # comes with imageio

        if self.seen % self.every == 0:
            size = (max(1, round(picture.shape[1] * self.HEIGHT / len(picture))), self.HEIGHT)
            self.kept.append(np.asarray(Image.fromarray(picture).resize(size)))
        self.seen += 1
        if len(self.kept) > self.MAX_KEPT:
            self.kept = self.kept[::2]
            self.every *= 2

    def save(self, path: Path) -> None:
        """Write the strip as one picture, unless there were no pictures."""
        if not self.kept:
            return
        chosen = np.linspace(0, len(self.kept) - 1, min(self.COUNT, len(self.kept))).round().astype(int)
        # Many pictures are white up to their edges: a grey gap separates them.
        padded = [np.pad(self.kept[i], ((0, 0), (0, self.GAP), (0, 0)), constant_values=128) for i in chosen]
        _import_imageio().imwrite(path, np.concatenate(padded, axis=1)[:, : -self.GAP])


_OPTIONS: dict[str, Callable[[float], dict[str, Any]]] = {
    # The usual pixel format supports only even sizes, so sizes are rounded.
    ".mp4": lambda fps: {"format": "FFMPEG", "fps": fps, "macro_block_size": 2, "ffmpeg_log_level": "error"},
    ".gif": lambda fps: {"format": "GIF", "duration": 1000 / fps, "loop": 0},
}
"""Options of imageio for each suffix, by pictures per second."""


def check_video(env: Env, path: Path) -> Renderable:
    """Return the environment as one that renders.

    Raises CannotRender if it does not, or if the file exists or has the wrong suffix, and
    ImportError for missing packages.
    """
    if path.suffix not in _OPTIONS:
        raise CannotRender(f"{path}: a video file ends in {' or '.join(_OPTIONS)}, not {path.suffix!r}")
    if path.exists():
        raise CannotRender(f"{path} already exists; remove it or choose another name")
    if not isinstance(env, Renderable):
        hint = "Gymnasium environments can, and others that have a method `render`"
        raise CannotRender(f"{env.spec.env_id} cannot be rendered; {hint}")
    _import_imageio()
    return env


def _import_imageio() -> Any:
    try:
        import imageio.v2 as imageio
        import imageio_ffmpeg as imageio_ffmpeg
    except ImportError as error:
        raise ImportError(f'videos need further packages: pip install "canter[video]" ({error})') from error
    return imageio


@contextmanager
def pictures_explained() -> Iterator[None]:
    """Turn the different errors of environments that cannot render into one of one line."""
    try:
        yield
    except gymnasium.error.DependencyNotInstalled as error:
        raise ImportError(str(error)) from error
    except TypeError as error:
        if "render_mode" not in str(error):
            raise
        raise CannotRender(f"this environment cannot be rendered ({error}); {RENDER_HINT}") from error


def has_display() -> bool:
    """Return whether a window could be opened."""
    return sys.platform != "linux" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def draw_without_display() -> None:
    """Make MuJoCo render with EGL or OSMesa instead of a window if there is no display."""
    os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())  # SDL complains without it
    installed = [name for name in ("EGL", "OSMesa") if ctypes.util.find_library(name)]
    if installed and not has_display():
        os.environ.setdefault("MUJOCO_GL", installed[0].lower())


def viewer_env_config(env: EnvConfig, viewer: str) -> EnvConfig:
    """Return the settings of one environment for a viewer of mjlab.

    Its step is not captured in a CUDA graph, as the viewer's controls would not reach it there.
    """
    if not env.id.startswith("mjlab:"):
        raise CannotRender(
            f"--viewer {viewer} shows only environments of mjlab (mjlab:TASK), not {env.id}; "
            "--video FILE.mp4 records it if it can be rendered"
        )
    if viewer == "native" and not has_display():
        missing = "neither DISPLAY nor WAYLAND_DISPLAY is set"
        raise CannotRender(f"--viewer native needs a display, and {missing}; {VIEWER_HINT}")
    return replace(env, num_envs=1, options={**env.options, "capture": False})


class ViewerEnv:
    """A player behind the interface that mjlab's viewers expect of an environment and its policy.

    Each step of the viewer is a step of the player. Viewers also reset environments by themselves;
    the policy then sees the first observation of the new episode, and the old one is not counted.
    """

    def __init__(self, player: Player, num_games: int | None, max_steps: int | None) -> None:
        env = player.env
        # A wrapper such as FiniteHorizon keeps mjlab's adapter as `env`.
        self._adapter: Any = env if isinstance(env, ManagerEnv) else getattr(env, "env", None)
        self.unwrapped = self._adapter.env
        self.num_envs = env.spec.num_envs
        self.cfg = self.unwrapped.cfg
        self.device = self.unwrapped.device
        self.counter = EpisodeCounter(env, num_games)
        self.max_steps = max_steps
        self.steps = 0
        self.error: Exception | None = None
        """Error of a step; viewers would print it and wait."""
        self._played_steps = player.steps()
        self._last: PlayStep | None = None

    @property
    def done(self) -> bool:
        """All requested episodes or steps were played, or a step failed."""
        return self.error is not None or self.counter.complete or self.steps == self.max_steps

    def get_observations(self) -> None:
        """Return None: the player has the observations."""

    def act(self, obs: None) -> None:
        """Return None: the player acts."""

    def step(self, actions: None) -> None:
        """Play one step."""
        if self.done:
            return
        try:
            if self._last is not None:
                self._apply_viewer_resets(self._last)
            self._last = next(self._played_steps)
        except Exception as error:
            self.error = error
            return
        self.counter.add(self._last.step)
        self.steps += 1

    def _apply_viewer_resets(self, last: PlayStep) -> None:
        """Show the policy the episodes that a viewer has started since the last step."""
        started = self.unwrapped.episode_length_buf == 0  # `[N]`
        if not bool((started & ~last.reset).any()):
            return
        current = self._adapter._groups(self.unwrapped.observation_manager.compute())
        for name, group in last.step.obs.items():
            mask = started.view(-1, *(1,) * (group.dim() - 1))
            last.step.obs[name] = torch.where(mask, current[name], group)
        last.reset.logical_or_(started)
        self.counter.discard(started)

    def reset(self) -> None:
        """Begin new episodes in all environments."""
        self.unwrapped.reset()

    def close(self) -> None:
        """Do nothing: the caller that made the environment closes it."""


def play_in_viewer(
    player: Player, viewer: str, num_games: int | None = None, max_steps: int | None = None
) -> PlayResult:
    """Play in a viewer until it is closed (or Ctrl+C), or the episodes or steps are played."""
    env = ViewerEnv(player, num_games, max_steps)
    if viewer == "native":
        _check_window()
    try:
        window: Any = getattr(import_module("mjlab.viewer"), VIEWERS[viewer])(env, env.act)
        is_open = window.is_running
        window.is_running = lambda: is_open() and not env.done
        window.run()
    except ImportError as error:
        raise ImportError(f"--viewer {viewer} needs the package {error.name}: pip install {error.name}") from error
    except Exception as error:
        if env.steps:
            raise
        raise CannotRender(f"--viewer {viewer} could not be opened ({error}); {VIEWER_HINT}") from error
    if env.error is not None:
        raise env.error
    return env.counter.result()


def _check_window() -> None:
    """Raise CannotRender if no window can be opened; MuJoCo's viewer would wait for ever."""
    import glfw

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opened = glfw.init()
    if not opened:
        reason = f" ({caught[0].message})" if caught else ""
        raise CannotRender(f"--viewer native could not open a window{reason}; {VIEWER_HINT}")
    glfw.terminate()
