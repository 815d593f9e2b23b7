"""Environments behind one protocol, addressed by id.

`CartPole-v1` is Gymnasium's, `envpool:Ant-v4` EnvPool's, `pettingzoo:sisl/pursuit-v5` PettingZoo's
and `tensor:cartpole` one of those written in torch here. `schemes` has a builder for each prefix
before the colon, here or in a plugin; `module.path:name` is the user's class, once its import is
allowed.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from gymnasium.error import Error as GymnasiumError

from canter.core import distributed
from canter.core.registry import Registry, UserError, nearest
from canter.core.specs import INTERRUPTS, ContractBroken, Env, EnvFailed
from canter.envs import probes as probes  # registers the probe environments
from canter.envs.directory import EnvDirectory, directory_of, keep_directory
from canter.envs.envpool import EnvPoolEnv
from canter.envs.failures import failure, format_error, place_of, watched
from canter.envs.gymnasium import GymnasiumEnv, make_gymnasium
from canter.envs.gymnasium.make import check_registered
from canter.envs.imports import PYTHON, find_factory, makes_a_batch, parameters_of, registered_id
from canter.envs.jax_envs import make_brax, make_gymnax, make_playground
from canter.envs.pettingzoo import make_pettingzoo
from canter.envs.robots.isaaclab import make_isaaclab
from canter.envs.robots.maniskill import make_maniskill
from canter.envs.robots.mjlab import make_mjlab
from canter.envs.robots.vec_env import VecEnv, make_vec_env
from canter.envs.tensor import tensor_envs
from canter.envs.wrappers import FiniteHorizon, make_wrappers

Builder = Callable[..., Env]
"""Called with the part of the id after the colon, `num_envs` and `device` as keywords, and
`env.options`.

A time limit (`env.reset_steps`) comes as the option `max_episode_steps`. A builder that has
parameters `vectorization`, `autoreset`, `step_timeout`, `close_timeout` or `wrappers` receives
these settings too. `canter envs` shows the first line of its docstring.
"""

SETTINGS = {"num_envs", "device", "vectorization", "log_info", "autoreset", "step_timeout", "close_timeout", "wrappers"}
"""Keywords of builders that are separate settings, so that `env.options` cannot set them."""


def _check(builder: Builder) -> None:
    if not makes_a_batch(builder):
        names = ", ".join(parameters_of(builder))
        raise TypeError(f"expected a function of name, num_envs, device and options, not one of {names}")


schemes: Registry[Builder] = Registry("scheme", _check, default="gymnasium")
"""Builders by the prefix of an id; an id without a colon is Gymnasium's."""


def make_tensor(name: str, num_envs: int, *, device: str, **options: Any) -> Env:
    """Written in torch, batched, on any device."""
    factory = tensor_envs[name]
    check_options(factory, f"tensor:{name}", options)
    return factory(num_envs, device, **options)


schemes.register("gymnasium")(make_gymnasium)
schemes.register("envpool")(EnvPoolEnv)
schemes.register("pettingzoo")(make_pettingzoo)
schemes.register("tensor")(make_tensor)
schemes.register("mjlab")(make_mjlab)
schemes.register("isaaclab")(make_isaaclab)
schemes.register("maniskill")(make_maniskill)
for name, builder in {"gymnax": make_gymnax, "brax": make_brax, "playground": make_playground}.items():
    schemes.register(name)(builder)


def find_builder(env_id: str) -> partial[Env]:
    """Return the builder of an id's environments, which takes all but the name."""
    scheme, colon, name = env_id.partition(":")
    if colon and scheme in schemes:
        return partial(schemes[scheme], name)
    factory = find_factory(env_id, schemes) if colon else None
    if factory is None:
        return partial(make_gymnasium, env_id)
    return partial(factory) if makes_a_batch(factory) else partial(make_gymnasium, registered_id(env_id, factory))


def check_known(env_id: str) -> None:
    """Raise UserError for an unknown environment; tasks of other simulators are not looked up."""
    builder = find_builder(env_id)
    if builder.func is make_gymnasium:
        check_registered(builder.args[0])
    elif builder.func is make_tensor:
        _ = tensor_envs[builder.args[0]]  # raises


def check_options(builder: Callable[..., Any], env_id: str, options: Mapping[str, Any]) -> None:
    """Raise UserError for an entry of `env.options` that the builder does not take."""
    parameters = parameters_of(builder)
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    for name, value in options.items():
        if name in SETTINGS:
            setting = "device" if name == "device" else f"env.{name}"
            raise UserError(f"env.options.{name}={value!r} is not an option of {env_id}; set {setting} instead")
        if not takes_any and name not in parameters:
            limit = " (nor env.reset_steps, which sets it)" if name == "max_episode_steps" else ""
            known = nearest(name, parameters.keys() - SETTINGS)
            raise UserError(f"env.options.{name}={value!r}{limit}: {env_id} takes no such option, {known}")


RAISED_UNCHANGED = (*INTERRUPTS, ImportError, MemoryError, TypeError, GymnasiumError)
"""Errors of making an environment whose cause is clear from their text; so are all errors that
Canter raises."""
AnyEnv = TypeVar("AnyEnv", bound=Env)
_log = logging.getLogger(__name__)

GYMNASIUM_ONLY = {
    "vectorization": "these environments come as one batch; only Gymnasium's are put together one by one",
    "log_info": "these environments have no info; they report metrics of their own",
    "autoreset": "these environments restart in one way only; only Gymnasium's have a choice",
    "close_timeout": "these environments have no processes to wait for; vectorization async and forked have",
}
"""Settings that do not change which transitions come, and why they have no effect on
other environments."""
CAPTURE = "parts of a step are recorded as CUDA graphs, and a step without a GPU runs eagerly"
"""Reason why mjlab's option `capture` has no effect on a CPU."""


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """The environment of a run and the number of its copies."""

    id: str = "CartPole-v1"
    """Gymnasium id, or `envpool:ID`, `pettingzoo:ID`, `mjlab:TASK`, `isaaclab:TASK`, `tensor:NAME`,
    an id of another scheme (see `canter envs`) or, if its import is allowed, `module.path:NAME`."""
    num_envs: int = 8
    """Number of environments stepped together, over all ranks; each agent of an environment is a
    row to learn from."""
    vectorization: Literal["auto", "sync", "threads", "forked", "async", "vector_entry_point"] = "auto"
    """Gymnasium only: one after the other, in one thread or forked process per core, in one process
    each, or the environment's own vector form; "auto" is "forked" for Gymnasium's MuJoCo, or
    "threads" if it cannot be, and "sync" for others."""
    autoreset: Literal["same_step", "next_step", "disabled"] | None = None
    """Gymnasium only: when ended environments restart; None takes "same_step", which wastes no
    row."""
    step_timeout: float = 600.0
    """Seconds that a step or a reset may take. A process (vectorization "async" or "forked") that
    takes longer is ended, and the run with it, which can be resumed. In the same process nothing can
    end it: after this time, or a minute, a line says which environment hangs and at which line of
    code."""
    close_timeout: float = 60.0
    """Gymnasium only: seconds that worker and forked processes may take to end before they are
    killed."""
    log_info: bool = True
    """Gymnasium only: average the numbers in `info` over steps and environments, and log them as
    `env/KEY`."""
    finite_horizon: bool = False
    """The time limit is part of the task (and time in the observation): reaching it counts as
    termination."""
    reset_steps: int | None = None
    """Number of steps after which episodes are cut, for tasks that never end; null keeps the
    environment's own time limit."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the environment."""
    wrappers: dict[str, Any] = field(default_factory=dict)
    """Gymnasium only: wrappers around each environment, the first innermost. Names of
    `gymnasium.wrappers` or, if the import is allowed, `module.path:NAME`, each with its keyword
    arguments or null: `FlattenObservation: null`."""

    def __post_init__(self) -> None:
        """Raise UserError for an empty batch, empty episodes, and two settings of their length."""
        for name, value in vars(self).items():
            if name.endswith("_timeout") and not value > 0:
                raise UserError(f"env.{name}={value} must be above 0")
            if name in ("num_envs", "reset_steps") and value is not None and value < 1:
                raise UserError(f"env.{name}={value} must be at least 1")
        if self.reset_steps is not None and (self.finite_horizon or "max_episode_steps" in self.options):
            rival = "finite_horizon" if self.finite_horizon else "options.max_episode_steps"
            raise UserError(f"env.reset_steps={self.reset_steps} contradicts env.{rival}; leave one of them out")

    @property
    def is_gymnasium(self) -> bool:
        """True if Gymnasium makes these environments one by one, so that each can render itself."""
        return find_builder(self.id).func is make_gymnasium

    @property
    def keywords(self) -> dict[str, Any]:
        """Keyword arguments of the environment; the time limit has one name in all schemes."""
        return self.options if self.reset_steps is None else {**self.options, "max_episode_steps": self.reset_steps}

    def build(self, device: str) -> Env:
        """Make the environments of this rank, with their tensors on `device`."""
        env = self._make(distributed.rank_device(device), distributed.share(self.num_envs, "env.num_envs"))
        if not self.finite_horizon:
            return env
        try:
            return FiniteHorizon(env)
        except ValueError:
            env.close()
            raise

    def _make(self, device: str, num_envs: int) -> Env:
        builder = find_builder(self.id)
        parameters = parameters_of(builder)
        settings = {key: getattr(self, key) for key in (*GYMNASIUM_ONLY, "step_timeout") if key in parameters}
        if "wrappers" in parameters:
            settings["wrappers"] = make_wrappers(self.wrappers)
        elif self.wrappers:
            names = ", ".join(self.wrappers)
            raise UserError(f"env.wrappers ({names}) wrap Gymnasium's environments only, and {self.id} is not one")
        check_options(builder, self.id, self.keywords)
        directory = EnvDirectory(self.id)
        try:
            with watched(self.step_timeout), directory.during("__init__() or reset()"):
                env = builder(num_envs=num_envs, device=device, **settings, **self.keywords)
            if isinstance(env, VecEnv):
                env = make_vec_env(env, self.id, num_envs, device)
            if isinstance(env, GymnasiumEnv):
                env.spec = replace(env.spec, env_id=self.id)  # `module:name` for an imported class
            keep_directory(env, directory)
            return env
        except (ContractBroken, EnvFailed) as error:
            raise failure(error, "reset", None) from error
        except BaseException as error:
            if isinstance(error, RAISED_UNCHANGED) or place_of(error).startswith(str(Path(__file__).parents[1])):
                raise
            raise EnvFailed(f"{self.id} could not be made: {format_error(error)}") from error


@contextmanager
def closed_quietly(env: AnyEnv) -> Iterator[AnyEnv]:
    """Close an environment after the block; an error of its `close` is logged and ignored."""
    try:
        yield env
    finally:
        try:
            with watched(), directory_of(env).during("close()"):
                env.close()
        except BaseException as error:
            if isinstance(error, INTERRUPTS):
                raise
            _log.warning("the environment's close() raised %s; no data was lost", format_error(error))


def unused_settings(config: EnvConfig, device: str) -> list[str]:
    """Return a line for each setting that has no effect on environments of this id on this device.

    Settings that would change the task are refused when the environments are built; these would
    not.
    """
    if config.id.startswith(f"{PYTHON}:"):
        return []  # the environment was made by the caller
    parameters = parameters_of(find_builder(config.id))
    defaults = EnvConfig(id=config.id)
    unused = []
    if config.id.startswith("mjlab:") and "capture" in config.options and not device.startswith("cuda"):
        unused.append(f"env.options.capture={config.options['capture']} has no effect on {device}: {CAPTURE}")
    for key, reason in GYMNASIUM_ONLY.items():
        has_effect = key in parameters and (key != "close_timeout" or config.vectorization in ("async", "forked"))
        if not has_effect and getattr(config, key) != getattr(defaults, key):
            unused.append(f"env.{key}={getattr(config, key)} has no effect here: {reason}")
    return unused
