"""`canter.train`, `canter.load` and `canter.evaluate`: what Python programs begin with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from canter.config import TrainConfig
from canter.console.console import CONSOLES, ConsoleKind, make_console
from canter.envs import EnvConfig
from canter.envs.imports import refuse_while_importing
from canter.experiments.folders import check_name, located, new_run, stored_config
from canter.experiments.init_from import InitFrom
from canter.experiments.look import check_machine, environment_for
from canter.experiments.session import LOGS, TrainingResult, announcement, carry_out
from canter.experiments.settings import starting_point, with_settings
from canter.experiments.task import task_of
from canter.nn.actor_critic import Policy
from canter.play.evaluation import Evaluation
from canter.play.evaluation import evaluate as evaluate_policy
from canter.play.player import Acts
from canter.registry import nearest
from canter.runs.finding import RUNS
from canter.runs.run_folder import RunFolder
from canter.runs.writers import MetricWriter
from canter.self_play.self_play import SelfPlayEnv
from canter.specs import Env
from canter.storage.policy_file import check_fits, load_policy


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
            raise ValueError(f"{what}={name!r}: there is none of that name, {nearest(str(name), known)}")
    if not isinstance(folder, RunFolder | bool):
        raise TypeError(
            f"folder={folder!r}: expected True, False or a canter.RunFolder; run_dir= and name= say where a run goes"
        )
    if log and folder is False:
        raise ValueError(f"log={list(log)} needs a folder of the run, and folder=False leaves none")


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
        raise ValueError(f"episodes={episodes} must be at least 1")
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
