"""`canter.train`, `canter.load` and `canter.evaluate`: the entry points of Python programs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from canter.app.check.before_run import check_machine, environment_for
from canter.app.console.console import CONSOLES, ConsoleKind, make_console
from canter.app.experiments.folders import check_name, find_run_or_policy, new_run, open_run, stored_config
from canter.app.experiments.session import LOGS, InitFrom, TrainingResult, announcement, run_experiment
from canter.app.experiments.settings import with_settings
from canter.app.experiments.task import plan_run, task_of
from canter.config import TrainConfig
from canter.core.registry import UserError, nearest
from canter.core.specs import Env
from canter.envs import EnvConfig, closed_quietly
from canter.envs.imports import refuse_while_importing
from canter.nn.actor_critic import Policy
from canter.nn.policy_loading import check_fits, load_policy
from canter.play.evaluation import Evaluation
from canter.play.evaluation import evaluate as evaluate_policy
from canter.play.player import ActingPolicy
from canter.runs.changes import changed_settings, flat_settings, refuse_fixed
from canter.runs.records import CONFIG, RUNS, find_run
from canter.runs.run_folder import RunFolder
from canter.runs.writers import MetricWriter
from canter.training.callbacks import Callback, count_arguments, ignore

logger = logging.getLogger(__name__)

EVAL_ENVS = 8
"""Environments that `evaluate` builds at most by default."""


def train(
    task: Any = None,
    on_iteration: Callable[..., Any] = ignore,
    *,
    callbacks: Sequence[Callback] = (),
    env: Any = None,
    config: TrainConfig | None = None,
    preset: str | None = None,
    console: ConsoleKind = "auto",
    folder: RunFolder | bool = True,
    run_dir: str | Path = RUNS,
    name: str | None = None,
    log: Sequence[str] = (),
    writers: Sequence[MetricWriter] = (),
    final_evaluation: bool | int = True,
    init_from: str | Path | InitFrom | None = None,
    **settings: Any,
) -> TrainingResult:
    """Train a policy as `canter train` does: the same console, run folder, score and report.

        canter.train(MyEnv, seed=1, total_steps=1e6, algorithm={"gamma": 0.995})

    `task` is an environment id, a Gymnasium class, a function that makes an environment, an
    environment of any kind, or a `TrainConfig`. Settings are those of `config`, of the preset, or
    the defaults; keyword arguments override them.

    `on_iteration(report, policy, trainer)` is called with every row of the log: a dict of numbers
    that it returns is added to the row, and `canter.STOP` or False ends the run. `callbacks` follow
    more of it. `writers` receive the rows, and with `log` tensorboard or wandb. `console="quiet"`
    prints nothing. `folder=False` saves nothing; else the run is saved, and resumes, in `run_dir/name`
    or the given `RunFolder`. `init_from` has initial weights. Ctrl-C saves and raises `RunStopped`.
    """
    refuse_while_importing("canter.train")
    _check_arguments(on_iteration, console, log, folder, final_evaluation)
    run_dir = Path(run_dir)
    if isinstance(init_from, str | Path):
        init_from = InitFrom(find_run_or_policy(init_from, run_dir))
    plan = plan_run(task, env, config, preset, settings)
    quiet = console == "quiet"
    notify = str if quiet else print
    check_machine(plan.config)
    check_name(run_dir, name)
    notify(announcement(plan.config, plan.source, plan.note))
    with environment_for(plan.config, quiet=quiet) if plan.env is None else nullcontext(plan.env) as built:
        run = new_run(run_dir, name, plan.config) if folder is True else folder or None
        if isinstance(run, RunFolder):
            run.adopt(plan.config, logger.warning if quiet else print)
        logs = [] if run is None else [LOGS[destination](run.path) for destination in log]
        return run_experiment(
            plan.config,
            run,
            env=built,
            only_env=plan.env is not None,
            writers=[make_console(console), *writers, *logs],
            on_iteration=on_iteration,
            callbacks=callbacks,
            final_evaluation=final_evaluation,
            init_from=init_from,
            notify=notify,
        )


def resume(
    run: str | Path,
    on_iteration: Callable[..., Any] = ignore,
    *,
    callbacks: Sequence[Callback] = (),
    env: Any = None,
    console: ConsoleKind = "auto",
    run_dir: str | Path = RUNS,
    log: Sequence[str] = (),
    writers: Sequence[MetricWriter] = (),
    final_evaluation: bool | int = True,
    accept_edits: bool = False,
    **settings: Any,
) -> TrainingResult:
    """Continue a run from its newest checkpoint, as `canter resume` does.

        canter.resume("latest", total_steps=2e6)

    `run` is the run's folder, its name or `latest`. Its settings are those of its `config.yaml`;
    keyword arguments change them from here on. Settings that cannot change are refused, as are
    edits of the file unless `accept_edits`. `env` is the task of a run whose environment has no
    name, as for `canter.train`. The other arguments are those of `canter.train`.
    """
    refuse_while_importing("canter.resume")
    _check_arguments(on_iteration, console, log, True, final_evaluation)
    path = find_run(str(run), Path(run_dir))
    stored = stored_config(path)
    config = with_settings(stored, settings)
    refuse_fixed(changed_settings(flat_settings(stored), flat_settings(config)))
    task = None if env is None else task_of(env, config.device)
    if task is not None and task.env_id != config.env.id:
        raise UserError(f"env is {task.env_id}, and {path} learns in {config.env.id}")
    check_machine(config)
    notify = str if console == "quiet" else print
    notify(announcement(config, f"the settings of {path}"))
    changes = logger.warning if console == "quiet" else print
    folder = open_run(path, stored, config, accept_edits=accept_edits, notify=changes)
    given = None if task is None else task.env
    return run_experiment(
        config,
        folder,
        env=given,
        only_env=given is not None,
        writers=[make_console(console), *writers, *(LOGS[destination](path) for destination in log)],
        on_iteration=on_iteration,
        callbacks=callbacks,
        final_evaluation=final_evaluation,
        notify=notify,
    )


def _check_arguments(
    on_iteration: Callable[..., Any], console: str, log: Sequence[str], folder: Any, final_evaluation: Any
) -> None:
    """Refuse, before a folder is made, arguments that would fail later."""
    count_arguments(on_iteration)
    if not isinstance(final_evaluation, int) or final_evaluation < 0:
        raise UserError(f"final_evaluation={final_evaluation!r}: expected True, False or a number of episodes")
    _check_name("console", console, ("auto", *CONSOLES))
    for destination in log:
        _check_name("log", destination, (*LOGS,))
    if not isinstance(folder, RunFolder | bool):
        raise TypeError(
            f"folder={folder!r}: expected True, False or a canter.RunFolder; run_dir= and name= say where a run goes"
        )
    if log and folder is False:
        raise UserError(f"log={list(log)} needs a folder of the run, and folder=False leaves none")


def _check_name(argument: str, name: Any, known: Sequence[str]) -> None:
    if name not in known:
        raise UserError(f"{argument}={name!r}: unknown name, {nearest(str(name), known)}")


def load(run_or_file: str | Path, *, run_dir: str | Path = RUNS, device: str = "cpu") -> Policy:
    """Return a policy that is ready to predict: that of a policy file, or the best of a run.

    A run is given by its folder, its name or `latest`.

        policy = canter.load("latest")
        action, state = policy.predict(observation)
    """
    return load_policy(find_run_or_policy(run_or_file, Path(run_dir)), device=device)


def evaluate(
    policy: ActingPolicy | TrainingResult | str | Path,
    env: Any = None,
    episodes: int = 100,
    seed: int = 0,
    *,
    num_envs: int | None = None,
    run_dir: str | Path = RUNS,
    **options: Any,
) -> Evaluation:
    """Evaluate a policy over whole episodes; the statistics of its normalizer stay as they are.

    `policy` is a policy, the result of `canter.train`, or an argument of `canter.load`; `env` is a
    task as in `canter.train`, by default that of the run or the policy file, in `num_envs` copies. Every
    environment contributes its first episodes, so short ones are not favoured. For the same reason
    `EpisodesUnfinished` is raised if some have not ended after `max_steps=1_000_000` steps of every
    environment. `deterministic=False` acts with noise.
    """
    if episodes < 1:
        raise UserError(f"episodes={episodes} must be at least 1")
    run = None
    if isinstance(policy, TrainingResult):
        run = policy.path
        policy = policy.policy
    elif isinstance(policy, str | Path):
        run = find_run_or_policy(policy, Path(run_dir))
        policy = load(run)
    if env is None:
        env = _env_of(policy, run)
    with _open_task(env, num_envs or min(episodes, EVAL_ENVS)) as playing:
        if isinstance(policy, Policy):
            check_fits(policy, playing.spec, "the policy")
        return evaluate_policy(policy, playing, episodes, seed, **options)


def _env_of(policy: Any, run: Path | None) -> EnvConfig:
    """Return the environment of a run or, by its id, of a policy alone."""
    folder = run.absolute().parent.parent if run is not None and run.is_file() else run
    if folder is not None and (folder / CONFIG).is_file():
        return stored_config(folder).env
    env_id = policy.spec.env_id if isinstance(policy, Policy) else ""
    if not env_id:
        raise UserError("env: this policy does not name its environment; pass one, or a run")
    return EnvConfig(id=env_id)


def _open_task(env: Any, num_envs: int) -> AbstractContextManager[Env]:
    """Return a context with the environment of a task; close it at the end if it is new."""
    if not isinstance(env, EnvConfig):
        task = task_of(env)
        if task.env is not None:
            return nullcontext(task.env)
        env = EnvConfig(id=task.env_id)
    return closed_quietly(replace(env, num_envs=num_envs).build("cpu"))
