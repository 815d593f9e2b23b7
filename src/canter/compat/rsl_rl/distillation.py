"""RSL-RL's runner for students, over Canter's distillation.

RSL-RL's files name layers as those of actors and critics. So student and teacher have a stand-in
each, a PPO that never learns and holds the same actor: files are read and written through it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from canter.algorithms.distillation import Distillation, DistillationConfig
from canter.algorithms.ppo import PPO
from canter.compat.rsl_rl import checkpoint
from canter.compat.rsl_rl.policy import InferencePolicy
from canter.compat.rsl_rl.runner import LearningAlg, OnPolicyRunner
from canter.compat.settings.importing import import_config
from canter.compat.settings.rsl_rl_network import class_name
from canter.config import TrainConfig
from canter.core.plain import ConfigError
from canter.nn.policy_file import save_policy
from canter.training.trainer import Trainer

ROLES = ("student", "teacher")
PARTS = (*ROLES, "optimizer", "iteration")


def section_of(train_cfg: Mapping[str, Any], role: str) -> dict[str, Any]:
    """Return the settings of student or teacher in the form of 5.x."""
    if train_cfg.get("student"):
        own = dict(train_cfg[role])
        before_5 = ("init_noise_std", "noise_std_type", "stochastic", "state_dependent_std")
        old = {key: own.pop(key) for key in before_5 if key in own}
    else:
        old = dict(train_cfg["policy"])
        usual = train_cfg.get("empirical_normalization", False)
        own = {
            "hidden_dims": old.get(f"{role}_hidden_dims", [256, 256, 256]),
            "activation": old.get("activation", "elu"),
            "obs_normalization": old.get(f"{role}_obs_normalization", usual),
        }
        recurrent = str(class_name(old.get("class_name"))).endswith("Recurrent")
        if recurrent and (role == "student" or old.get("teacher_recurrent")):
            own |= {key: old[key] for key in ("rnn_type", "rnn_hidden_dim", "rnn_num_layers") if key in old}
            own["class_name"] = "RNNModel"
    std = {"init_std": old.get("init_noise_std", 0.1), "std_type": old.get("noise_std_type", "scalar")}
    own["distribution_cfg"] = {"class_name": "GaussianDistribution", **std, **(own.get("distribution_cfg") or {})}
    if role == "teacher":  # which adds no noise, and so may begin with none
        own["distribution_cfg"]["init_std"] = 1.0
    return own


class DistillationAlg(LearningAlg):
    """RSL-RL's view of distillation."""

    teacher_loaded = False

    def __init__(
        self, algorithm: Distillation, stand_ins: Mapping[str, PPO], policy: InferencePolicy, *, teacher_has_std: bool
    ) -> None:
        super().__init__(policy, algorithm.phase.optimizer.groups["student"])
        self.algorithm = algorithm
        self.stand_ins = stand_ins
        self.teacher_has_std = teacher_has_std
        self.student = stand_ins["student"].model.actor = algorithm.actor
        self.teacher = stand_ins["teacher"].model.actor = algorithm.teacher.actor
        groups = stand_ins["student"].optimizers["policy"].groups
        groups.clear()
        groups["policy"] = self._group

    def save(self) -> dict[str, Any]:
        """Return RSL-RL 5.x's mapping of both networks and the optimizer."""
        trees = {role: checkpoint.dump(self.stand_ins[role], 0) for role in ROLES}
        student, teacher = (trees[role]["actor_state_dict"] for role in ROLES)
        optimizer = trees["student"]["optimizer_state_dict"]
        count = sum(not name.startswith("obs_normalizer.") for name in student)
        optimizer["param_groups"][0]["params"] = list(range(count))  # without the stand-in's critic
        if not self.teacher_has_std:
            teacher = {name: tensor for name, tensor in teacher.items() if not name.startswith("distribution.")}
        return {"student_state_dict": student, "teacher_state_dict": teacher, "optimizer_state_dict": optimizer}

    def load(
        self, loaded_dict: Mapping[str, Any], load_cfg: Mapping[str, Any] | None = None, strict: bool = True
    ) -> bool:
        """Load the teacher from a file of PPO, or everything from one of distillation.

        Return True to load the iteration.
        """
        names = loaded_dict.get("model_state_dict", ())
        of_student = "student_state_dict" in loaded_dict or any(name.startswith("student.") for name in names)
        usual = dict.fromkeys(PARTS if of_student else ("teacher",), True)
        requested = usual if load_cfg is None else load_cfg
        for role in ROLES:
            if requested.get(role):
                self._load(role, loaded_dict, of_student, bool(requested.get("optimizer")), strict)
        self.teacher_loaded |= bool(requested.get("teacher"))
        return bool(requested.get("iteration", False))

    def _load(self, role: str, tree: Mapping[str, Any], of_student: bool, optimizer: bool, strict: bool) -> None:
        ppo = self.stand_ins[role]
        tree = _as_actor(tree, role) if of_student else dict(tree)
        weights = checkpoint.weights_in(tree, Path("loaded_dict"))
        if not {checkpoint.STD, checkpoint.LOG_STD} & weights.parameters.keys():  # a teacher need not have one
            weights.parameters[checkpoint.STD] = torch.ones(ppo.distribution.param_dim // 2)
        parts = ("actor", "optimizer") if optimizer and role == "student" else ("actor",)
        checkpoint.load(ppo, weights, parts, strict=strict)


def _as_actor(tree: Mapping[str, Any], role: str) -> dict[str, Any]:
    """Return one network of a file of distillation in the layout of PPO's actor.

    Up to 3.x one optimizer had the parameters of both in another order: its moments are left out.
    """
    rest = {"iter": tree.get("iter", 0)}
    if "student_state_dict" in tree:
        own = {"optimizer_state_dict": tree.get("optimizer_state_dict")} if role == "student" else {}
        return {"actor_state_dict": tree[f"{role}_state_dict"], "critic_state_dict": {}, **own, **rest}
    names = {f"{role}.": "actor.", f"memory_{role[0]}.": "memory_a.", "std": "std", "log_std": "log_std"}
    names[f"{role}_obs_normalizer."] = "actor_obs_normalizer."
    model = {
        new + name[len(old) :]: tensor
        for name, tensor in tree["model_state_dict"].items()
        for old, new in names.items()
        if name.startswith(old)
    }
    key = "obs_norm_state_dict" if role == "student" else "privileged_obs_norm_state_dict"
    return {"model_state_dict": model, **rest} | ({"obs_norm_state_dict": tree[key]} if key in tree else {})


class DistillationRunner(OnPolicyRunner):
    """A drop-in replacement for `rsl_rl.runners.DistillationRunner`.

    `load` reads the teacher from any file of RSL-RL's PPO, as RSL-RL's does, or continues one of
    distillation. Files are written in the layout of 5.x.
    """

    alg: DistillationAlg

    def learn(self, num_learning_iterations: int, init_at_random_ep_len: bool = False) -> None:
        """Train for a number of iterations; the teacher must be loaded."""
        if not self.alg.teacher_loaded:
            raise ConfigError("no teacher was loaded: runner.load(FILE) takes one from a file of RSL-RL's PPO")
        super().learn(num_learning_iterations, init_at_random_ep_len)

    def _with_groups(self, train_cfg: Mapping[str, Any]) -> Mapping[str, Any]:
        given = dict(train_cfg.get("obs_groups") or {})
        student = "student" if train_cfg.get("student") else "policy"
        known = self.adapter.spec.obs
        sets = {name: given.get(name) or [name if name in known else "policy"] for name in (student, "teacher")}
        self.groups = {"student": sets[student], "teacher": sets["teacher"]}
        return {**train_cfg, "obs_groups": given | sets}

    def _build(self, config: TrainConfig) -> tuple[Trainer, DistillationAlg]:
        assert isinstance(config.algorithm, DistillationConfig)
        stand_ins = {role: self._stand_in(role) for role in ROLES}
        model = stand_ins["student"].config.model
        with TemporaryDirectory() as folder:
            path = Path(folder) / "teacher.safetensors"
            save_policy(path, stand_ins["teacher"].policy)
            own = replace(config.algorithm, policy=model.policy, std=model.std, policy_gain=model.policy_gain)
            config = replace(config, algorithm=replace(own, teacher=str(path)))
            trainer = Trainer(config, self._after_iteration, env=self.adapter)
        assert isinstance(trainer.algorithm, Distillation)
        policy = InferencePolicy(trainer.algorithm.policy, self.adapter.groups)
        teacher_has_std = bool((self.cfg.get("teacher") or {}).get("distribution_cfg"))
        return trainer, DistillationAlg(trainer.algorithm, stand_ins, policy, teacher_has_std=teacher_has_std)

    def _stand_in(self, role: str) -> PPO:
        groups = dict.fromkeys(("actor", "critic"), self.groups[role])
        tree = {
            "num_steps_per_env": 1,
            "obs_groups": groups,
            "actor": section_of(self.cfg, role),
            "critic": {"hidden_dims": [1]},
            "algorithm": {"class_name": "PPO", "num_mini_batches": 1, "schedule": "fixed"},
        }
        config = import_config(tree, parity=True, num_envs=int(self.env.num_envs)).config.algorithm
        built = config.build(self.adapter.spec, 0)
        assert isinstance(built, PPO)
        return built
