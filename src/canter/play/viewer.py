"""mjlab's own viewers, in which a policy acts: a window (`native`), or a page for a browser (`viser`).

N is the number of parallel environments.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from canter.envs import EnvConfig
from canter.envs.robots.adapter import ManagerEnv
from canter.play.player import Account, Games, Player, Turn
from canter.play.video import CannotRender, has_display

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
