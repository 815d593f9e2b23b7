"""The working directory, which environments may change: simulators do so to find their files.

The code of an environment runs in the directory that it changed to, everything else in that of the
process, so that relative paths keep their meaning on both sides.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from canter.core.streams import guarded_streams

_log = logging.getLogger(__name__)


class EnvDirectory:
    """The working directory of an environment's code; `changed` is None if it is the process's."""

    def __init__(self, env_id: str) -> None:
        self.env_id = env_id
        self.changed: str | None = None

    @contextmanager
    def during(self, call: str) -> Iterator[None]:
        """Run a call in the environment's directory, then return to that of the process.

        Streams that it closes are opened again, see `guarded_streams`.
        """
        outside = _current()
        if self.changed is not None:
            with suppress(OSError):  # it may be gone
                os.chdir(self.changed)
        try:
            with guarded_streams(self.env_id, call):
                yield
        finally:
            inside = _current()
            if outside is not None and inside != outside:
                os.chdir(outside)
                self._note(inside, outside, call)

    def _note(self, inside: str | None, outside: str, call: str) -> None:
        """Remember the directory and warn when it changes for the first time."""
        if self.changed is None and self.env_id not in _warned:
            _warned.add(self.env_id)
            text = "%s changed the working directory to %s in %s; its code goes on there, and the run stays in %s"
            _log.warning(text, self.env_id, inside or "a folder that is gone", call, outside)
        self.changed = inside


_warned: set[str] = set()
"""Environments that were warned of; the copies of an evaluation are not."""
_directories: weakref.WeakKeyDictionary[Any, EnvDirectory] = weakref.WeakKeyDictionary()


def directory_of(env: Any) -> EnvDirectory:
    """Return the directory of an environment, or of the outermost one inside that has one."""
    inner = env
    with suppress(TypeError):  # of an unhashable environment it is not kept
        while inner is not None:
            if inner in _directories:
                return _directories[inner]
            inner = getattr(inner, "env", None)  # wrappers, also those of users, keep what they wrap as `env`
    directory = EnvDirectory(env.spec.env_id or type(env).__name__)
    keep_directory(env, directory)
    return directory


def keep_directory(env: Any, directory: EnvDirectory) -> None:
    """Keep the directory that an environment's code ran in when it was made."""
    with suppress(TypeError):
        _directories[env] = directory


def _current() -> str | None:
    """Return the working directory, or None if it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return None
