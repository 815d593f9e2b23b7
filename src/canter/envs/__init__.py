"""Environments behind one protocol, addressed by id.

`CartPole-v1` is Gymnasium's, `envpool:Ant-v4` EnvPool's, `pettingzoo:sisl/pursuit-v5` PettingZoo's and
`tensor:cartpole` one of those written in torch here; `schemes` has what may stand before the colon, and
`module.path:name` is the user's own, once its import is allowed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any, Literal, TypeVar

from gymnasium.error import Error as GymnasiumError

from canter.core import distributed
from canter.core.registry import UserError
from canter.core.specs import INTERRUPTS, Env, EnvFailed
from canter.envs import probes as probes  # registers the probe environments
from canter.envs.failures import format_error, place_of, watched
from canter.envs.imports import PYTHON
from canter.envs.schemes import check_options, find_builder, schemes
from canter.envs.wrappers import FiniteHorizon, make_wrappers

SAID = (*INTERRUPTS, ImportError, MemoryError, TypeError, GymnasiumError)
"""What is raised while an environment is made and needs no words about whose error it is; nor do errors of Canter."""
AnyEnv = TypeVar("AnyEnv", bound=Env)
_log = logging.getLogger(__name__)

HOW_GYMNASIUM_STEPS = {
    "vectorization": "these environments come as one batch; only Gymnasium's are put together one by one",
    "autoreset": "these environments restart in one way only; only Gymnasium's have a choice",
    "close_timeout": "these environments have no worker processes to wait for; vectorization async has",
}
"""Settings that change how fast transitions come and not which, and why other environments have no use for them."""
CAPTURE = "parts of a step are recorded as CUDA graphs, and a step without a GPU runs eagerly"
"""Why mjlab's option `capture` does nothing elsewhere."""


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """Which environment, and how many of it."""

    id: str = "CartPole-v1"
    """Gymnasium id, or `envpool:ID`, `pettingzoo:ID`, `mjlab:TASK`, `isaaclab:TASK`, `tensor:NAME` or that of another
    scheme (see `canter envs`), or, where allowed, `module.path:NAME`."""
    num_envs: int = 8
    """Environments stepped together, over all ranks; where one has several agents, each of these is a row to learn
    from."""
    vectorization: Literal["auto", "sync", "threads", "forked", "async", "vector_entry_point"] = "auto"
    """Gymnasium only: one after the other, by a thread or in a forked process for each core, in a process each, or the
    environment's own vector form; "auto" is "forked" for Gymnasium's MuJoCo, or "threads" where it cannot be, and
    "sync" for others."""
    autoreset: Literal["same_step", "next_step", "disabled"] | None = None
    """Gymnasium only: when finished environments restart; None takes "same_step", which wastes no row."""
    step_timeout: float = 600.0
    """Seconds that a step or a reset may take. A worker process (vectorization "async") that takes longer is ended, and
    the run with it, which can be resumed. In the same process nothing can end it: a line says what hangs, after this
    time or a minute."""
    close_timeout: float = 60.0
    """Gymnasium only: seconds that worker processes may take to end before they are killed."""
    finite_horizon: bool = False
    """The time limit is part of the task (and time in the observation): reaching it counts as termination."""
    reset_steps: int | None = None
    """Cut episodes after so many steps, for tasks that never end; null keeps the environment's own time limit."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the environment."""
    wrappers: dict[str, Any] = field(default_factory=dict)
    """Gymnasium only: what goes around each environment, the first innermost. Names of `gymnasium.wrappers`, or where
    allowed `module.path:NAME`, each with its keyword arguments or null: `FlattenObservation: null`."""

    def __post_init__(self) -> None:
        """Refuse an empty batch of environments, empty episodes and two answers about how long these are."""
        for name, value in vars(self).items():
            if name.endswith("_timeout") and not value > 0:
                raise UserError(f"env.{name}={value} must be above 0")
            if name in ("num_envs", "reset_steps") and value is not None and value < 1:
                raise UserError(f"env.{name}={value} must be at least 1")
        if self.reset_steps is not None and (self.finite_horizon or "max_episode_steps" in self.options):
            rival = "finite_horizon" if self.finite_horizon else "options.max_episode_steps"
            raise UserError(f"env.reset_steps={self.reset_steps} leaves no room for env.{rival}")

    @property
    def is_gymnasium(self) -> bool:
        """Whether Gymnasium makes these environments, one by one, so that they may be asked to draw themselves."""
        return find_builder(self.id)[0] is schemes["gymnasium"]

    @property
    def keywords(self) -> dict[str, Any]:
        """Keyword arguments of the environment; all kinds of environments call their time limit alike."""
        return self.options if self.reset_steps is None else {**self.options, "max_episode_steps": self.reset_steps}

    def build(self, device: str) -> Env:
        """The environments of this rank, with their tensors on `device`."""
        device, num_envs = distributed.rank_device(device), distributed.share(self.num_envs, "env.num_envs")
        builder, name = find_builder(self.id)
        settings = (*HOW_GYMNASIUM_STEPS, "step_timeout")
        taken = {key: getattr(self, key) for key in settings if key in signature(builder).parameters}
        if "wrappers" in signature(builder).parameters:
            taken["wrappers"] = make_wrappers(self.wrappers)
        elif self.wrappers:
            names = ", ".join(self.wrappers)
            raise UserError(f"env.wrappers ({names}) go around Gymnasium's environments, and {self.id} is none")
        check_options(builder, self.id, self.keywords)
        try:
            with watched(self.step_timeout):
                env = builder(name, num_envs=num_envs, device=device, **taken, **self.keywords)
        except BaseException as error:
            if isinstance(error, SAID) or place_of(error).startswith(str(Path(__file__).parents[1])):
                raise
            raise EnvFailed(f"{self.id} could not be made: {format_error(error)}") from error
        if not self.finite_horizon:
            return env
        try:
            return FiniteHorizon(env)
        except ValueError:
            env.close()
            raise


@contextmanager
def closed_quietly(env: AnyEnv) -> Iterator[AnyEnv]:
    """Closes an environment at the end; what it raises there is said, and spoils nothing."""
    try:
        yield env
    finally:
        try:
            with watched():
                env.close()
        except BaseException as error:
            if isinstance(error, INTERRUPTS):
                raise
            _log.warning("the environment's close() raised %s; nothing is lost by it", format_error(error))


def unused_settings(config: EnvConfig, device: str) -> list[str]:
    """What was set and has no part in environments of this id on this device, a line for each.

    Whatever would change the task is refused when the environments are built; these settings would not.
    """
    if config.id.startswith(f"{PYTHON}:"):
        return []  # one that was given: how it is stepped was decided elsewhere
    taken, usual = signature(find_builder(config.id)[0]).parameters, EnvConfig(id=config.id)
    unused = []
    if config.id.startswith("mjlab:") and "capture" in config.options and not device.startswith("cuda"):
        unused.append(f"env.options.capture={config.options['capture']} has no part on {device}: {CAPTURE}")
    for key, why in HOW_GYMNASIUM_STEPS.items():
        has_part = key in taken and (key != "close_timeout" or config.vectorization == "async")
        if not has_part and getattr(config, key) != getattr(usual, key):
            unused.append(f"env.{key}={getattr(config, key)} has no part here: {why}")
    return unused
