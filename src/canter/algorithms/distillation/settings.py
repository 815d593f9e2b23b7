"""Settings of distillation, and what they refuse."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from canter.nn.actor_critic import ModelConfig, Policy
from canter.nn.heads import StdConfig
from canter.nn.network import AnyNetworkConfig, NetworkConfig
from canter.optim import OptimizerConfig
from canter.registry import nearest
from canter.schedules import AdaptiveKL, AnySchedule, Constant
from canter.specs import ACTION_MASK, Continuous, EnvSpec
from canter.storage.policy_file import load_policy


@dataclass(frozen=True, kw_only=True)
class DistillationSettings:
    """Settings of distillation: the student acts, and learns what the teacher would have done."""

    teacher: str = ""
    """The teacher: a policy file, or a run folder, of which it is the best policy."""
    teacher_obs: dict[str, str] = field(default_factory=dict)
    """For observation groups that have another name here: the teacher's name -> the name here."""
    policy: AnyNetworkConfig = field(default_factory=NetworkConfig)
    """The student's network; `obs_groups` are what it sees."""
    std: StdConfig = field(default_factory=lambda: StdConfig(initial=0.1))
    """Standard deviation of the student where actions are continuous; only `loss: kl` learns it."""
    policy_gain: float = 0.01
    """Initial scale of the student's last layer."""
    loss: Literal["auto", "mse", "huber", "kl"] = "auto"
    """What is made small: the squared difference of the means, Huber's, or KL(teacher || student); "auto" takes the
    first for continuous actions and the last for choices."""
    mixture: AnySchedule = field(default_factory=lambda: Constant(0.0))
    """Share of the steps in which the teacher acts: a number, or a schedule that fades."""
    horizon: int = 64
    """Steps per rollout in each environment."""
    sequence_length: int = 16
    """With memory: steps through which gradients flow back; must divide `horizon`, so that no step is left over.
    Without memory it has no effect."""
    epochs: int = 2
    """Passes over each rollout."""
    num_minibatches: int = 4
    """Minibatches per pass; must divide `horizon * num_envs`, with memory the number of sequences."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=Constant(1e-3)))
    """Of the student."""

    def __post_init__(self) -> None:
        """Refuse values outside their range, by name."""
        for name in ("horizon", "sequence_length", "epochs", "num_minibatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not self.policy_gain >= 0:
            raise ValueError(f"policy_gain={self.policy_gain} must not be negative")
        for name, schedule in (("mixture", self.mixture), ("optimizer.learning_rate", self.optimizer.learning_rate)):
            if isinstance(schedule, AdaptiveKL):
                raise ValueError(f"{name}: adaptive_kl follows updates of PPO; use a number, linear or step")
        if not 0 <= self.mixture.initial <= 1:
            raise ValueError(f"mixture={self.mixture.initial} must begin in 0..1")

    def load_teacher(self, spec: EnvSpec) -> tuple[Policy, dict[str, str]]:
        """The teacher, and which group here each of its own is, once they have been found to fit an environment."""
        if not self.teacher:
            raise ValueError("teacher names none: give a policy file or a run folder")
        teacher = load_policy(self.teacher, device=str(spec.device))
        if teacher.spec.action != spec.action:
            raise ValueError(f"teacher {self.teacher} gives {teacher.spec.action}, the environment takes {spec.action}")
        needed = {*teacher.actor.network.groups, *([ACTION_MASK] if teacher.actor.masked else [])}
        for name in self.teacher_obs:
            if name not in needed:
                raise ValueError(f"teacher_obs names {name!r}, unknown to the teacher: {nearest(name, needed)}")
        for name in sorted(needed):
            here, own = self.teacher_obs.get(name, name), teacher.spec.obs[name].shape
            if here not in spec.obs or spec.obs[here].shape != own:
                shape = spec.obs[here].shape if here in spec.obs else f"not there, {nearest(here, spec.obs)}"
                raise ValueError(
                    f"the teacher's observation group {name!r} has shape {own}, and {here!r} here is {shape}; "
                    f"teacher_obs={{{name}: GROUP}} names another"
                )
        return teacher, {name: self.teacher_obs.get(name, name) for name in sorted(needed)}

    def model(self, teacher: Policy) -> ModelConfig:
        """The student as its file describes it, with the teacher's kind of actions."""
        kind = teacher.config
        return ModelConfig(
            policy=self.policy,
            distribution=kind.distribution,
            bounds=kind.bounds,
            std=self.std,
            policy_gain=self.policy_gain,
        )

    def loss_for(self, spec: EnvSpec) -> Literal["mse", "huber", "kl"]:
        """What is made small in an environment."""
        continuous = isinstance(spec.action, Continuous)
        if self.loss in ("mse", "huber") and not continuous:
            raise ValueError(f"loss={self.loss} is for continuous actions, and {spec.env_id} has choices: use kl")
        return self.loss if self.loss != "auto" else "mse" if continuous else "kl"
