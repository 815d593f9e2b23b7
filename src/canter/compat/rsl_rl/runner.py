"""Drop-in replacements for RSL-RL's runners over Canter's trainer: scripts change one import."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from canter.algorithms.ppo import PPO
from canter.compat.drop_in import is_first, optimizer_view, save_file, saves_on_failure
from canter.compat.pickled_file import CheckpointRefused, read_pickled
from canter.compat.rsl_rl import checkpoint
from canter.compat.rsl_rl.env import RslRlEnv, symmetries_in
from canter.compat.rsl_rl.logger import Logger
from canter.compat.rsl_rl.own_model import own_models, use_own_models, with_stand_ins
from canter.compat.rsl_rl.policy import InferenceCritic, InferencePolicy
from canter.compat.settings.importing import import_config
from canter.compat.settings.rsl_rl_network import generation_of
from canter.compat.weights import StdOf
from canter.config import TrainConfig
from canter.core.plain import ConfigError
from canter.nn.optimizer import ParameterGroup
from canter.training.progress import Report, UntilConfig
from canter.training.trainer import Trainer

_log = logging.getLogger(__name__)

ENDLESS = 10**15
"""Steps of a run that ends when the caller stops it."""


class LearningAlg:
    """An algorithm as RSL-RL's scripts and subclasses see it."""

    rnd = None

    def __init__(self, policy: InferencePolicy, group: ParameterGroup) -> None:
        self.policy = policy
        self._group = group

    @property
    def optimizer(self) -> Any:
        """Return torch's view of the optimizer, to be read only."""
        return optimizer_view(self._group)

    @property
    def learning_rate(self) -> float:
        """Current learning rate of the policy."""
        return float(self._group.learning_rate)

    def get_policy(self) -> InferencePolicy:
        """Return the policy."""
        return self.policy

    def train_mode(self) -> None:
        """Do nothing: networks here have no modes."""

    def eval_mode(self) -> None:
        """Do nothing: networks here have no modes."""


class Alg(LearningAlg):
    """RSL-RL's view of PPO."""

    def __init__(self, ppo: PPO, policy: InferencePolicy, generation: int, std_type: StdOf | None = None) -> None:
        super().__init__(policy, next(iter(ppo.optimizers["policy"].groups.values())))
        self.ppo = ppo
        self.generation = generation
        self.std_type: StdOf | None = std_type
        """`std_type` that the settings write; None for that of PPO's std."""
        self.actor = policy
        self.critic = InferenceCritic(ppo.critic, policy.groups)
        self.actor_critic = policy
        """Name of the policy in 1.x; scripts of that time export its `actor`."""

    def save(self) -> dict[str, Any]:
        """Return RSL-RL's mapping of networks and optimizer, in the generation of the settings."""
        tree = checkpoint.dump(self.ppo, 0, generation=self.generation, std=self.std_type)
        return {key: value for key, value in tree.items() if key not in ("iter", "infos")}

    def load(
        self, loaded_dict: Mapping[str, Any], load_cfg: Mapping[str, Any] | None = None, strict: bool = True
    ) -> bool:
        """Load networks and optimizer from a mapping of any generation.

        Return True to load the iteration.
        """
        requested = dict.fromkeys((*checkpoint.PARTS, "iteration"), True) if load_cfg is None else dict(load_cfg)
        parts = tuple(part for part in checkpoint.PARTS if requested.get(part))
        own = checkpoint.own_buffers(self.ppo)
        weights = checkpoint.weights_in(loaded_dict, Path("loaded_dict"), own)
        checkpoint.load(self.ppo, weights, parts, strict=strict)
        return bool(requested.get("iteration", False))


def with_step_time(train_cfg: Mapping[str, Any], env: Any) -> Mapping[str, Any]:
    """Return settings with curiosity's weight times the environment's time step, as in RSL-RL."""
    algorithm = train_cfg.get("algorithm") or {}
    curiosity = algorithm.get("rnd_cfg")
    if not curiosity:
        return train_cfg
    step_time = getattr(getattr(env, "unwrapped", env), "step_dt", None)
    if step_time is None:
        key = "algorithm.rnd_cfg.weight"
        raise ConfigError(f"{key}: RSL-RL multiplies it by env.unwrapped.step_dt, which the environment lacks", key)
    own = {**curiosity, "weight": float(curiosity.get("weight") or 0.0) * step_time}
    # Schedules count the steps of a run, which is endless here.
    iterations = ENDLESS // (int(env.num_envs) * int(train_cfg["num_steps_per_env"]))
    return {**train_cfg, "max_iterations": iterations, "algorithm": {**algorithm, "rnd_cfg": own}}


def bounded_std_type(train_cfg: Mapping[str, Any]) -> StdOf | None:
    """Return "log" if `std_type` is "log" with a `std_range`, for which the std here has another form."""
    distribution = (train_cfg.get("actor") or {}).get("distribution_cfg") or {}
    return "log" if distribution.get("std_type") == "log" and distribution.get("std_range") else None


class OnPolicyRunner:
    """A drop-in replacement for `rsl_rl.runners.OnPolicyRunner` over Canter's PPO.

    `train_cfg` may be of any generation. With `parity` (of the class, or an argument of the
    constructor) RSL-RL's numbers are kept, the default, so that files can be continued in both
    libraries. `ignore` are keys to leave out that would be refused. A run writes `model_N.pt` files to
    `log_dir` in the layout of the generation that the settings are written for.
    """

    parity = True

    def __init__(
        self,
        env: Any,
        train_cfg: Mapping[str, Any],
        log_dir: str | None = None,
        device: str = "cpu",
        *,
        parity: bool | None = None,
        ignore: Sequence[str] = (),
    ) -> None:
        self.env = env
        self.cfg = train_cfg
        self.device = device
        self.log_dir = log_dir
        self.gpu_world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.gpu_global_rank = int(os.environ.get("RANK", 0))
        self.gpu_local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.is_distributed = self.gpu_world_size > 1
        self.adapter = RslRlEnv(env, device)
        self.adapter.spec = replace(self.adapter.spec, symmetries=symmetries_in(train_cfg, self.adapter))
        settings = with_step_time(self._with_groups(train_cfg), env)
        own = own_models(settings)
        parity = self.parity if parity is None else parity
        known = with_stand_ins(settings, own)
        imported = import_config(known, parity=parity, num_envs=int(env.num_envs), without=ignore)
        if own:
            imported = use_own_models(imported, settings, own, self.adapter.spec, env)
        self.report = imported.report
        self.deviations = self.report  # the former name
        for entry in imported.report.of("changed"):
            _log.info("%s", entry.line())
        seed = train_cfg.get("seed")
        seed = seed if isinstance(seed, int) and seed >= 0 else torch.initial_seed() % 2**31
        config = replace(imported.config, device=str(device), seed=seed, total_steps=ENDLESS, until=UntilConfig())
        self.trainer, self.alg = self._build(config)
        section = train_cfg.get("runner", train_cfg)
        self.logger = Logger(log_dir, section)
        self.logger_type, self.disable_logs = self.logger.logger_type, self.logger.disable_logs
        """Place of these attributes up to 3.x, for subclasses."""
        self.current_learning_iteration = 0
        self._first, self._last = 0, 0
        """First iteration of `learn`, and the one after its last."""
        self.save_interval = int(section.get("save_interval", 50))
        self._next = 0
        """Number of the next iteration, counted as in RSL-RL: the iteration of a loaded file is run
        once more."""

    def _with_groups(self, train_cfg: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return settings with RSL-RL's default observation groups: the group of the network's name, else `policy`.

        Images come last, as RSL-RL joins them behind vectors.
        """
        known = self.adapter.spec.obs
        groups = dict(train_cfg.get("obs_groups") or {})
        if train_cfg.get("obs_groups") is None and "policy" in known:
            return train_cfg
        actor = "actor" if "actor" in train_cfg else "policy"
        for name in (actor, "critic"):
            if name not in groups:
                groups[name] = [name if name in known else "policy"]
            groups[name] = sorted(groups[name], key=lambda group: group in known and len(known[group].shape) == 3)
        return {**train_cfg, "obs_groups": groups}

    def _build(self, config: TrainConfig) -> tuple[Trainer, Any]:
        trainer = Trainer(config, self._after_iteration, env=self.adapter)
        assert isinstance(trainer.algorithm, PPO)
        policy = InferencePolicy(trainer.algorithm.policy, self.adapter.groups)
        dialect = generation_of(self.cfg)
        alg = Alg(trainer.algorithm, policy, dialect.number if dialect else 5, bounded_std_type(self.cfg))
        if self.log_dir is not None:
            alg.save()  # so that settings whose files RSL-RL could not load are refused before training
        return trainer, alg

    def learn(self, num_learning_iterations: int, init_at_random_ep_len: bool = False) -> None:
        """Train for a number of iterations; may be called again."""
        if init_at_random_ep_len:
            lengths = self.env.episode_length_buf
            self.env.episode_length_buf = torch.randint_like(lengths, high=int(self.env.max_episode_length))
        self._next = self._first = self.current_learning_iteration
        self._last = self._first + num_learning_iterations
        self.logger.init_logging_writer()
        self.alg.policy.reset()
        with saves_on_failure(self._save_newest):
            self.trainer.learn(num_learning_iterations)
        self._save_newest()
        if self.logger.log_dir is not None:
            self.logger.stop_logging_writer()

    def _save_newest(self) -> str:
        """Write the file of the newest iteration, if there is a folder for it; return a line about it."""
        if self.logger.log_dir is None:
            return "Nothing was saved, as there is no log_dir"
        path = os.path.join(self.logger.log_dir, f"model_{self.current_learning_iteration}.pt")
        self.save(path)
        return f"The newest state is in {path}"

    def _after_iteration(self, report: Report) -> None:
        self.current_learning_iteration = self._next
        self._next = self._next + 1
        if self.logger.log_dir is not None:
            self.log(self._locals(report))
            if self.current_learning_iteration % self.save_interval == 0:
                self._save_newest()

    def _locals(self, report: Report) -> dict[str, Any]:
        """Return what RSL-RL up to 4.x passes to `log`, and Canter's `report`."""
        rows = self.logger.rows(report)
        return {
            "it": self.current_learning_iteration,
            "start_iter": self._first,
            "tot_iter": self._last,
            "num_learning_iterations": self._last - self._first,
            "collection_time": rows["Perf/collection_time"],
            "learn_time": rows.get("Perf/learning_time", 0.0),
            "loss_dict": {tag[5:]: value for tag, value in rows.items() if tag.startswith("Loss/")},
            "rewbuffer": [] if report.return_ is None else [report.return_],
            "lenbuffer": [] if report.length is None else [report.length],
            "ep_infos": [{tag[8:]: value for tag, value in rows.items() if tag.startswith("Episode/")}],
            "report": report,
        }

    def log(self, locs: dict[str, Any], width: int = 80, pad: int = 35) -> None:
        """Write and print an iteration; a subclass may override it, as up to 4.x."""
        self.logger.write(locs["report"], locs["it"])
        if is_first():
            self.logger.print(locs["report"], locs["it"], locs["start_iter"], locs["tot_iter"])

    def save(self, path: str, infos: dict[str, Any] | None = None) -> None:
        """Write a file that RSL-RL loads, on the first rank."""
        if is_first():
            save_file({**self.alg.save(), "iter": self.current_learning_iteration, "infos": infos}, path)
            self.logger.save_model(path, self.current_learning_iteration)

    def load(
        self, path: str, load_cfg: Any = None, strict: bool = True, map_location: str | None = None, **old: Any
    ) -> Any:
        """Load a file of any generation, without running code in it; return its `infos`.

        `load_optimizer`, of 2.x and 3.x, is accepted too. `map_location` has no effect: tensors are
        copied into the existing ones.
        """
        if isinstance(load_cfg, bool) or "load_optimizer" in old:
            optimizer = bool(old.pop("load_optimizer", load_cfg))
            load_cfg = {"actor": True, "critic": True, "optimizer": optimizer, "iteration": True}
        if old:
            raise TypeError(f"load: unexpected arguments {', '.join(old)}")
        tree = read_pickled(path)
        if not checkpoint.is_rsl_rl(tree) and "student_state_dict" not in tree:
            raise CheckpointRefused(Path(path), f"no file of RSL-RL: it has {', '.join(map(str, list(tree)[:8]))}")
        if self.alg.load(tree, load_cfg, strict):
            self.current_learning_iteration = int(tree["iter"])
        return tree.get("infos")

    def get_inference_policy(self, device: str | None = None) -> InferencePolicy:
        """Return the deterministic policy.

        It takes observations on any device and returns actions on `device`.
        """
        self.alg.policy.reset()
        self.alg.policy.device = device
        return self.alg.policy

    @property
    def obs_normalizer(self) -> Any:
        """Copy of the policy's normalizer, by its name in 2.x."""
        return self.alg.policy.actor_obs_normalizer

    def export_policy_to_jit(self, path: str, filename: str = "policy.pt") -> None:
        """Write TorchScript: concatenated observations to actions."""
        os.makedirs(path, exist_ok=True)
        torch.jit.script(self.alg.policy.as_jit()).save(os.path.join(path, filename))

    def export_policy_to_onnx(self, path: str, filename: str = "policy.onnx", verbose: bool = False) -> None:
        """Write ONNX, opset 18: `obs -> actions`, with the recurrent state as input and output."""
        os.makedirs(path, exist_ok=True)
        model: Any = self.alg.policy.as_onnx(verbose).train(False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about its own code
            torch.onnx.export(
                model,
                model.get_dummy_inputs(),
                os.path.join(path, filename),
                input_names=model.input_names,
                output_names=model.output_names,
                opset_version=18,
                verbose=verbose,
            )

    def add_git_repo_to_log(self, repo_file_path: str) -> None:
        """Register a repository whose state `learn` stores in `log_dir/git`."""
        self.logger.git_status_repos.append(repo_file_path)

    def train_mode(self) -> None:
        """Call the algorithm's method of this name, as before 5.x."""
        self.alg.train_mode()

    def eval_mode(self) -> None:
        """Call the algorithm's method of this name, as before 5.x."""
        self.alg.eval_mode()

    def close(self) -> None:
        """Close the trainer; the environment stays open."""
        self.trainer.close()
