"""What to learn in, however it is given: an id, a class, a function, one environment, or many of them.

`canter.train`, `canter.load` and `canter.evaluate`: what Python programs begin with.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.vector import SyncVectorEnv, VectorEnv

from canter.app.check.before_run import check_machine, environment_for
from canter.app.console.console import CONSOLES, ConsoleKind, make_console
from canter.app.experiments.session import LOGS, InitFrom, TrainingResult, announcement, carry_out
from canter.app.experiments.settings import starting_point, with_settings
from canter.app.experiments.sweep import check_name, located, new_run, stored_config
from canter.config import TrainConfig
from canter.core.registry import UserError, nearest
from canter.core.specs import Env
from canter.envs import EnvConfig
from canter.envs.gymnasium import GymnasiumEnv
from canter.envs.imports import PYTHON, allow_import, introduce, refuse_while_importing
from canter.nn.actor_critic import Policy
from canter.nn.policy_file import check_fits, load_policy
from canter.play.evaluation import Evaluation
from canter.play.evaluation import evaluate as evaluate_policy
from canter.play.player import Acts
from canter.runs.metrics import MetricWriter
from canter.runs.records import RUNS
from canter.runs.run_folder import RunFolder
from canter.training.self_play import SelfPlayEnv

EXPECTED = (
    "an environment id, a Gymnasium class or a function that makes an environment, one gymnasium.Env, a "
    "gymnasium.vector.VectorEnv, or an environment with Canter's own interface (canter.Env)"
)

UNNAMED = (
    "This environment has no name that other commands could use: to play, evaluate or resume by command, train "
    "its class or a function of a module instead"
)


@dataclass(frozen=True)
class Task:
    """What to learn in."""

    env_id: str
    env: Env | None = None
    """The environment itself, where it was given and cannot be made again."""
    note: str = ""
    """What its user should know; empty for nothing."""

    def settings(self, env: EnvConfig) -> EnvConfig:
        """The settings of an environment, for this one."""
        num_envs = env.num_envs if self.env is None else self.env.spec.num_envs // self.env.spec.num_agents
        return replace(env, id=self.env_id, num_envs=num_envs)


def task_of(what: Any, device: str = "cpu") -> Task:
    """The task that an object means; a wrong one is named with what is expected."""
    if isinstance(what, str):
        return Task(what)
    if isinstance(what, VectorEnv):
        return Task(_unnamed(what.unwrapped), GymnasiumEnv(what, device=device), UNNAMED)
    if isinstance(what, gymnasium.Env):
        alone = SyncVectorEnv([lambda: what], autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP)
        note = "One environment was given, so one is stepped; give its class or a function that makes it to step many"
        return Task(_unnamed(what.unwrapped), GymnasiumEnv(alone, device=device), f"{note}. {UNNAMED}")
    if isinstance(what, Env) and not isinstance(what, type):
        name = what.spec.env_id
        if ":" in name or name in gymnasium.registry:
            return Task(name, what)
        return Task(f"{PYTHON}:{name}" if name else _unnamed(what), what, UNNAMED)
    if callable(what):
        return _named(what)
    shown = repr(what) if len(repr(what)) <= 60 else f"{repr(what)[:60]}..."
    raise TypeError(f"{shown} ({type(what).__name__}) is nothing to train in: expected {EXPECTED}")


def _unnamed(env: Any) -> str:
    return f"{PYTHON}:{type(env).__name__}"


def _named(factory: Callable[..., Any]) -> Task:
    """A class or function, by the name under which it can be imported again."""
    inner = factory
    while isinstance(inner, functools.partial):
        inner = inner.func
    name, module = getattr(inner, "__qualname__", ""), getattr(inner, "__module__", "")
    place = _place(module) if name.isidentifier() and inner is factory else None
    if place is None:
        env_id = f"{PYTHON}:{name if name.isidentifier() else 'environment'}"
        introduce(env_id, factory)
        return Task(env_id, note=UNNAMED)
    module, folder, note = place
    allow_import(module, folder)
    introduce(f"{module}:{name}", factory)
    return Task(f"{module}:{name}", note=note)


def _place(module: str) -> tuple[str, str, str] | None:
    """Name of a module, the folder it is found in and what to know; None where it has no file, as in a notebook."""
    found = sys.modules.get(module)
    file = getattr(found, "__file__", None)
    if file is None:
        return None
    path = Path(file).resolve()
    if module == "__main__":
        spec = getattr(found, "__spec__", None)
        module = path.stem if spec is None else spec.name
    if not all(part.isidentifier() for part in module.split(".")):
        return None
    depth = len(module.split(".")) - (path.name != "__init__.py")
    note = ""
    if found is sys.modules.get("__main__") and "__name__" not in path.read_text(errors="replace"):
        note = f'Put canter.train(...) under `if __name__ == "__main__":`; other commands import {path.name}'
    return module, str(path.parents[depth]), note


def train(
    what: Any = None,
    on_iteration: Callable[..., Any] = lambda report: None,
    *,
    env: Any = None,
    config: TrainConfig | None = None,
    preset: str | None = None,
    console: ConsoleKind = "auto",
    folder: RunFolder | bool = True,
    run_dir: str | Path = RUNS,
    name: str | None = None,
    log: Sequence[str] = (),
    writers: Sequence[MetricWriter] = (),
    final_evaluation: bool = True,
    init_from: str | Path | InitFrom | None = None,
    **settings: Any,
) -> TrainingResult:
    """Train a policy as `canter train` does: the same console, the same run folder, the same score and report.

        canter.train(MyEnv, seed=1, total_steps=1e6, algorithm={"gamma": 0.995})
        canter.train(lambda: MyEnv(size=5), num_envs=16, console="quiet")

    `what` is an environment id, a Gymnasium class or a function that makes an environment, one environment, a vector
    environment, an environment with Canter's own interface, or a whole `TrainConfig`. Settings are those of `config`,
    or of the environment's preset, or the defaults, changed by what is given under their names; `env` may be a mapping
    of its settings.

    `on_iteration(report, policy, trainer)`, or with fewer arguments, is called with every row of the log and ends the
    run by returning `canter.STOP` or False. `console="quiet"` says nothing. `folder=False` leaves nothing on disk;
    otherwise the run is `run_dir/name`, or in the `RunFolder` given, where a run that was interrupted goes on. `log`
    names further places for metrics: tensorboard, wandb. `init_from` is a run to take the weights of, or a policy file.
    Ctrl-C ends the run after the iteration, saves it and raises `RunStopped`.
    """
    refuse_while_importing("canter.train")
    _refuse_misspelt(console, log, folder)
    begin, (what, config) = _begin(init_from, Path(run_dir)), _either(what, env, config)
    given = {"env": dict(env), **settings} if isinstance(env, Mapping) else settings
    if isinstance(given.get("algorithm"), str):
        given["algorithm"] = {"kind": given["algorithm"]}
    config, source, own_env, note = _prepare(what, config, preset, given)
    quiet, say = console == "quiet", (lambda text: None) if console == "quiet" else print
    check_machine(config)
    check_name(Path(run_dir), name)
    say("\n".join([announcement(config, source), *([note] if note else [])]))
    look = environment_for(config, quiet=quiet) if own_env is None else nullcontext(own_env)
    with look as built:
        run = new_run(Path(run_dir), name, config) if folder is True else folder or None
        shown = [make_console(console), *writers, *(LOGS[place](run.path) for place in log if run is not None)]
        return carry_out(
            config,
            run,
            env=built,
            only_env=own_env is not None,
            writers=shown,
            on_iteration=on_iteration,
            final_evaluation=final_evaluation,
            init_from=begin,
            say=say,
        )


def _refuse_misspelt(console: str, log: Sequence[str], folder: Any) -> None:
    """Refuse what is no console, no place for metrics and no folder, before anything is made."""
    for what, name, known in (("console", console, ("auto", *CONSOLES)), *(("log", place, LOGS) for place in log)):
        if name not in known:
            raise UserError(f"{what}={name!r}: there is none of that name, {nearest(str(name), known)}")
    if not isinstance(folder, RunFolder | bool):
        raise TypeError(
            f"folder={folder!r}: expected True, False or a canter.RunFolder; run_dir= and name= say where a run goes"
        )
    if log and folder is False:
        raise UserError(f"log={list(log)} needs a folder of the run, and folder=False leaves none")


def _begin(init_from: str | Path | InitFrom | None, run_dir: Path) -> InitFrom | None:
    """What a run begins with, from the name of a run or a policy file."""
    return InitFrom(located(init_from, run_dir)) if isinstance(init_from, str | Path) else init_from


def _either(what: Any, env: Any, config: TrainConfig | None) -> tuple[Any, TrainConfig | None]:
    """What to train in, and settings that were given as a whole."""
    if isinstance(what, TrainConfig):
        if config is not None:
            raise TypeError("two configs: give one")
        what, config = None, what
    if env is not None and not isinstance(env, Mapping):
        if what is not None:
            raise TypeError("two environments: give one, and its settings as env={...}")
        what = env
    return what, config


def _prepare(
    what: Any, config: TrainConfig | None, preset: str | None, given: dict[str, Any]
) -> tuple[TrainConfig, str, Env | None, str]:
    """Settings, in words where they are from, the environment where it cannot be made again, and a note."""
    if isinstance(what, EnvConfig):
        given, what = {"env": what, **given}, None
    algorithm = given.get("algorithm")
    kind = algorithm.get("kind") if isinstance(algorithm, Mapping) else None
    device = given.get("device") or (config.device if config is not None else "cpu")
    task = None if what is None else task_of(what, device)
    source = "the settings given"
    if config is None:
        part = given.get("env")
        named = part.id if isinstance(part, EnvConfig) else (part or {}).get("id")
        config, source = starting_point(named if task is None else task.env_id, preset, kind, given.get("device"))
    if task is None:
        return with_settings(config, given), source, None, ""
    config = with_settings(replace(config, env=task.settings(config.env)), given)
    if task.env is not None:
        config = replace(config, env=task.settings(config.env))
        if isinstance(task.env, SelfPlayEnv) and "self_play" not in given:
            config = replace(config, self_play=None)  # a preset's; this one has its opponents already
    return config, source, task.env, task.note


def load(run_or_file: str | Path, *, run_dir: str | Path = RUNS, device: str = "cpu") -> Policy:
    """A policy that is ready to predict: the best of a run, by its folder, name or `latest`, or that of a policy file.

    policy = canter.load("latest")
    action, state = policy.predict(observation)
    """
    return load_policy(located(run_or_file, Path(run_dir)), device=device)


def evaluate(
    policy: Acts | TrainingResult | str | Path,
    env: Any = None,
    episodes: int = 100,
    seed: int = 0,
    *,
    num_envs: int | None = None,
    run_dir: str | Path = RUNS,
    **options: Any,
) -> Evaluation:
    """Play whole episodes; normaliser statistics stay as they are.

    `policy` is a policy, the result of `canter.train`, or what `canter.load` takes; `env` is what `canter.train` takes,
    by default the environment of the run, in `num_envs` copies. Every environment contributes its first episodes, so
    short ones are not favoured. For the same reason `EpisodesUnfinished` is raised when some have not ended after
    `max_steps=1_000_000` steps of every environment. `deterministic=False` acts with noise.
    """
    if episodes < 1:
        raise UserError(f"episodes={episodes} must be at least 1")
    run = None
    if isinstance(policy, TrainingResult):
        policy, run = policy.policy, policy.path
    elif isinstance(policy, str | Path):
        run = located(policy, Path(run_dir))
        policy = load(run)
    if env is None:
        if run is None or run.is_file():
            raise TypeError("env: a policy alone does not say in which environment; give one, or a run")
        env = stored_config(run).env
    with _opened(env, num_envs or min(episodes, 8)) as playing:
        if isinstance(policy, Policy):
            check_fits(policy, playing.spec, "the policy")
        return evaluate_policy(policy, playing, episodes, seed, **options)


def _opened(what: Any, num_envs: int) -> AbstractContextManager[Env]:
    """The environment that is meant; one that is built here is closed in the end."""
    if not isinstance(what, EnvConfig):
        task = task_of(what)
        if task.env is not None:
            return nullcontext(task.env)
        what = EnvConfig(id=task.env_id)
    return closing(replace(what, num_envs=num_envs).build("cpu"))
