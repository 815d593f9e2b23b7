"""rl_games' agents and observers over Canter's trainer, as scripts see them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from canter.compat.drop_in import is_first, open_writer, optimizer_view, save_file, saves_on_failure
from canter.compat.pickled_file import read_pickled
from canter.compat.rl_games import checkpoint, sac
from canter.compat.rl_games.env import RlGamesEnv, call_env, find_network, refuse_user_model, registered_env
from canter.compat.rl_games.hooks import looks_at_infos, refuse_overrides
from canter.compat.rl_games.own_network import import_own_network
from canter.compat.settings.importing import Imported, import_config
from canter.compat.weights import Weights
from canter.core.plain import ConfigError
from canter.core.specs import Env, EnvSpec
from canter.training.progress import Report
from canter.training.trainer import Trainer

_log = logging.getLogger(__name__)

TAGS = {
    "losses/a_loss": "loss/policy",
    "losses/entropy": "policy/entropy",
    "losses/bounds_loss": "loss/bound",
    "info/kl": "policy/kl",
}
"""rl_games' names of metrics, and Canter's."""


def imported_settings(params: Mapping[str, Any], spec: EnvSpec | None = None, **options: Any) -> Imported:
    """Return the imported settings of Runner's params; `spec` is needed to build a user's network."""
    options["without"] = (params["config"].get("features") or {}).get("ignore", ())
    builder = find_network(str((params.get("network") or {}).get("name")))
    if builder is None:
        return import_config({"params": plain(params)}, **options)
    return import_own_network(plain(params), builder, spec, options)


OBJECTS = ("env_info", "vec_env", "features", "observer", "reward_shaper_object")
"""Keys of `config` below which scripts put objects."""


def plain(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return Runner's params without the objects that scripts put into them."""
    return {**params, "config": {key: value for key, value in params["config"].items() if key not in OBJECTS}}


def number_of_actors(config: Mapping[str, Any]) -> int:
    """Return the number of environments, which scripts fill in where a file does not."""
    number = config.get("num_actors")
    if type(number) is not int or number < 1:
        key = "params.config.num_actors"
        raise ConfigError(f"{key}={number!r}: expected a whole number above 0, set by the file or its script", key)
    return number


def make_env(params: Mapping[str, Any], num_actors: int, device: str, parity: bool) -> Env:
    """Return the environment of the settings: a registered one, or one that Canter knows."""
    registered = registered_env(params["config"], num_actors, device)
    if registered is not None:
        return registered
    imported = imported_settings(params, parity=parity, num_envs=num_actors)
    if not imported.names_env:
        name = str(params["config"].get("env_name", ""))
        raise ConfigError(f"env_name={name!r}: register it (vecenv.register, env_configurations.register) before run()")
    return replace(imported.config.env, num_envs=num_actors).build(device)


class Agent:
    """The agent of `algo_factory`.

    Trains, saves to `<train_dir>/<experiment>/nn` and calls the observer.

    A subclass may override `save`, `restore`, `get_param` and the like. Training itself is
    Canter's: a subclass that overrides it is refused, with the extension point to use.
    """

    parity = True
    release: str | None = None
    """Release of rl_games whose numbers are kept, such as `rl_games-1.6.1`; None for the installed
    one, else the one that the settings show."""
    files: Any = checkpoint
    """The module that reads and writes checkpoint files."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse a subclass that overrides training."""
        super().__init_subclass__(**options)
        refuse_overrides(cls, Agent)

    def __init__(self, base_name: str, params: Mapping[str, Any]) -> None:
        self.params = params
        self.config = params["config"]
        refuse_user_model(str((params.get("model") or {}).get("name")))
        usual = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
        by_rank = "cuda" in usual and self.config.get("multi_gpu")  # as rl_games does, overriding the file
        self.ppo_device = self.device = usual if by_rank else str(self.config.get("device", usual))
        num_actors = number_of_actors(self.config)
        self.vec_env = make_env(params, num_actors, self.device, self.parity)
        self.num_actors = num_actors
        self.num_agents = self.vec_env.spec.num_agents
        self._check_env()
        own = {"parity": self.parity, "num_envs": num_actors, "agents": self.num_agents, "release": self.release}
        self.imported = imported_settings(params, self.vec_env.spec, **own)
        if is_first():
            print(f"settings of {self.imported.report.dialect}", flush=True)
        self.observer: Any = (self.config.get("features") or {}).get("observer")
        self.name = str(self.config.get("name", "run"))
        given = self.config.get("full_experiment_name")
        self.experiment_name = str(given or f"{self.name}{time.strftime('_%d-%H-%M-%S')}")
        self.train_dir = str(self.config.get("train_dir", "runs"))
        self.experiment_dir = os.path.join(self.train_dir, self.experiment_name)
        self.nn_dir = os.path.join(self.experiment_dir, "nn")
        self._call("before_init", base_name, self.config, self.experiment_name)
        self.summaries_dir = os.path.join(self.experiment_dir, "summaries")
        for folder in (self.nn_dir, self.summaries_dir) if is_first() else ():
            os.makedirs(folder, exist_ok=True)
        config = replace(self.imported.config, device=self.device)
        self.trainer = Trainer(config, self._after_iteration, env=self.vec_env)
        self.algorithm: Any = self.trainer.algorithm
        self._check_files()
        self.writer: Any = open_writer(self.summaries_dir)
        self.games_to_track = int(self.config.get("games_to_track", 100))
        self.epoch_num = 0
        self.frame = 0
        self.game_rewards = Meter(0.0, 0)
        self.episode_infos: dict[str, float] = {}
        """The simulator's `infos["episode"]` of the last rollout."""
        self.mean_rewards = self.last_mean_rewards = -1e9
        if isinstance(self.vec_env, RlGamesEnv):
            self.vec_env.algo = self
            if looks_at_infos(self.observer):
                self.vec_env.hook = self.observer.process_infos
        self.global_rank = int(os.environ.get("RANK", "0"))
        self._call("after_init", self)

    def _call(self, name: str, *arguments: Any) -> None:
        """Call a method of the observer, if it has it."""
        getattr(self.observer, name, lambda *_: None)(*arguments)

    def _check_env(self) -> None:
        """Raise ConfigError for an environment that lacks what the algorithm needs."""

    def _check_files(self) -> None:
        """Raise ConfigError, before training, for settings whose files rl_games could not load."""
        separate = (self.params.get("network") or {}).get("separate") in (True, "True")
        if separate and self.config.get("central_value_config"):
            raise ConfigError(
                "network.separate=True with central_value_config: rl_games' file also holds the actor's own critic, "
                "which is not trained here; write separate: False, its values are used by neither"
            )
        self.files.dump(self.algorithm, 0, 0, 0.0)

    def train(self) -> tuple[float, int]:
        """Train to the end of the run; return the best mean reward and the number of epochs."""
        if self.trainer.finished:
            most = self.config.get("max_epochs")
            _log.warning("max_epochs=%s: the file is of epoch %d, so nothing is left to train", most, self.epoch_num)
        self._call("after_clear_stats")
        with saves_on_failure(self._save_last):
            self.trainer.learn()
        self._save_last()
        self.trainer.close()
        self.writer.flush()
        return self.last_mean_rewards, self.epoch_num

    def _save_last(self) -> str:
        """Write the file of the newest epoch, by rl_games' name of the last one; return a line about it."""
        fn = os.path.join(self.nn_dir, f"last_{self.name}_ep_{self.epoch_num}_rew__{self.mean_rewards:g}_")
        self.save(fn)
        return f"The newest state is in {fn}.pth"

    def _after_iteration(self, report: Report) -> None:
        self.epoch_num = report.iteration
        self.frame = report.env_steps
        if report.return_ is not None:
            self.game_rewards = Meter(report.return_, min(report.episodes, self.games_to_track))
        simulated = ((name.removeprefix("env/"), value) for name, value in report.metrics.items() if name[:4] == "env/")
        self.episode_infos = {name: value for name, value in simulated if value == value}
        self._call("after_steps")
        self._write(report)
        if self.config.get("print_stats", True) and is_first():
            print(self._line(report), flush=True)
        self._call("after_print_stats", self.frame, self.epoch_num, report.seconds)
        if report.return_ is None:
            return
        self.mean_rewards = report.return_
        name = f"last_{self.name}_ep_{self.epoch_num}_rew_{self.mean_rewards:g}"
        every = int(self.config.get("save_frequency", 0) or 0)
        if every > 0 and self.epoch_num % every == 0:
            self.save(os.path.join(self.nn_dir, name))
        late = self.epoch_num >= int(self.config.get("save_best_after", 100))
        if late and self.mean_rewards > self.last_mean_rewards:
            self.last_mean_rewards = self.mean_rewards
            print(f"saving next best rewards:  [{self.mean_rewards:g}]", flush=True)
            self.save(os.path.join(self.nn_dir, self.name))

    def _line(self, report: Report) -> str:
        """Return rl_games' line about an epoch."""
        times = report.times
        learning = times.get("update", 0.0)
        seconds = {"step": times.get("env", 0.0), "step and policy inference": sum(times.values()) - learning}
        seconds["total"] = sum(times.values())
        speeds = [f"fps {name}: {report.rollout_steps / max(spent, 1e-9):.0f}" for name, spent in seconds.items()]
        most = [int(self.config.get(key, -1)) for key in ("max_epochs", "max_frames")]
        epochs, frames = (f"/{number}" if number > 0 else "" for number in most)
        return " ".join([*speeds, f"epoch: {self.epoch_num}{epochs} frames: {self.frame}{frames}"])

    def _write(self, report: Report) -> None:
        """Write a row of the log under rl_games' tags, and all metrics under their own."""
        times = report.times
        x_axes = {"step": self.frame, "iter": self.epoch_num, "time": int(report.seconds)}
        scalars = {tag: report.metrics.get(name) for tag, name in TAGS.items()}
        rate = next((v for name, v in report.metrics.items() if name.startswith("optim/learning_rate")), None)
        scalars |= {"info/last_lr": rate, "info/epochs": self.epoch_num, "performance/step_time": times.get("env")}
        if "loss/value" in report.metrics:
            scalars["losses/c_loss"] = 2 * report.metrics["loss/value"]  # half the square here
        scalars["performance/rl_update_time"] = times.get("update")
        scalars["performance/step_inference_rl_update_fps"] = report.rollout_steps / max(sum(times.values()), 1e-9)
        for tag, value in (scalars | report.metrics).items():
            if value is not None and value == value:  # NaN is what was not reported
                self.writer.add_scalar(tag, value, self.frame)
        for tag, value in (("rewards", report.return_), ("episode_lengths", report.length)):
            for axis, x in x_axes.items() if value is not None else ():
                self.writer.add_scalar(f"{tag}/{axis}", value, x)

    def save(self, fn: str) -> None:
        """Write `fn.pth` in rl_games' layout, on the first rank."""
        if is_first():
            save_file(self.get_full_state_weights(), f"{fn}.pth")

    def get_full_state_weights(self) -> dict[str, Any]:
        """Return the contents of a file, in rl_games' layout."""
        tree = self.files.dump(self.algorithm, self.epoch_num, self.frame, float(self.last_mean_rewards))
        return tree | {"env_state": call_env(self.vec_env, "get_env_state")}

    def restore(self, fn: str, set_epoch: bool = True) -> None:
        """Continue from a file of rl_games, or of this class, without running code in it."""
        path = with_suffix(fn)
        self._take(read_pickled(path), path, set_epoch)

    def restore_central_value_function(self, fn: str) -> None:
        """Load only the central value from a file; rl_games' `load_critic_only`."""
        if getattr(self.algorithm.config, "central_value", None) is None:
            raise ConfigError("load_critic_only=True: the settings have no central_value_config")
        path = with_suffix(fn)
        self.files.load(self.algorithm, self.files.weights_in(read_pickled(path), path), ("critic",))

    def set_full_state_weights(self, weights: Mapping[str, Any], set_epoch: bool = True) -> None:
        """Continue from the contents of a file."""
        self._take(weights, Path("weights"), set_epoch)

    def _take(self, tree: Mapping[str, Any], path: Path, set_epoch: bool) -> None:
        weights: Weights = self.files.weights_in(tree, path)
        self.files.load(self.algorithm, weights)
        call_env(self.vec_env, "set_env_state", tree.get("env_state"))
        if set_epoch:
            self.epoch_num = weights.iteration
            self.frame = weights.env_steps
            progress = self.trainer.progress  # max_epochs counts these too
            counts = {"rollouts": self.epoch_num, "updates": self.epoch_num, "env_steps": self.frame}
            progress.counters = replace(progress.counters, **counts)

    @property
    def last_lr(self) -> float:
        """Current learning rate of the policy."""
        return self.optimizer.learning_rate

    @property
    def model(self) -> Any:
        """The networks."""
        return self.algorithm.model

    @property
    def optimizer(self) -> Any:
        """Torch's view of the policy's optimizer, to be read only."""
        return optimizer_view(next(iter(self._optimizers()["policy"].groups.values())))

    def _optimizers(self) -> Mapping[str, Any]:
        return self.algorithm.optimizers

    @property
    def is_rnn(self) -> bool:
        """The policy has a recurrent state."""
        return self.algorithm.policy.initial_state(1) != ()

    def get_param(self, name: str) -> Any:
        """Return a setting of the file."""
        return self.config.get(name)

    def set_param(self, name: str, value: Any) -> None:
        """Raise ConfigError: settings are fixed during a run."""
        advice = "settings are fixed in a run; see schedules, docs/extending.md"
        raise ConfigError(f"set_param({name!r}, {value!r}): {advice}")


class AmpAgent(Agent):
    """The agent of `amp_continuous`; `config.amp` names its clips."""

    def _check_env(self) -> None:
        group = (self.config.get("amp") or {}).get("obs_group") or "amp"
        spec = self.vec_env.spec
        if group not in spec.obs and spec.motion is None:
            raise ConfigError(
                f"amp_continuous: the environment returns no observation group {group!r}: return frames [N, D] by that "
                "name beside obs, with clips named by config.amp.motions; or let its task have IsaacGymEnvs' "
                "fetch_amp_obs_demo and reset_done, and infos['amp_obs'] and infos['terminate']"
            )


class SacAgent(Agent):
    """The agent of `sac`. Files hold no replay buffer: a restored agent collects a new one."""

    files = sac

    @property
    def model(self) -> nn.Module:
        """The networks, by rl_games' names."""
        return nn.ModuleDict(sac.modules_of(self.algorithm))

    def _optimizers(self) -> Mapping[str, Any]:
        return self.algorithm.learner.optimizers


@dataclass(frozen=True)
class Meter:
    """Mean return of the last episodes as rl_games' `AverageMeter`."""

    mean: float
    current_size: int
    """Number of episodes, up to `games_to_track`."""

    def get_mean(self) -> np.ndarray:
        """Return the mean as an array of one number, 0 without episodes."""
        return np.array([self.mean], dtype=np.float32)


def with_suffix(fn: str) -> Path:
    """Return a file's name with `.pth`."""
    path = Path(fn)
    with suppress(OSError):
        if not path.exists() and path.with_name(f"{path.name}.pth").exists():
            return path.with_name(f"{path.name}.pth")
    return path
