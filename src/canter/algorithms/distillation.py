"""Distillation: a student learns, where it goes itself, what a teacher would do that sees more.

DAgger (Ross et al., 2011). T steps, N environments, L sequence length (1 without memory), S sequences, P distribution
parameters.

Distillation: a student learns what a teacher does.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from canter.algorithms.base import Algorithm, Declared, Headline, RolloutPlan, algorithms, unused_lines
from canter.algorithms.phase import Phase, check_batch
from canter.core import distributed
from canter.core.data.rollout import Rollout, as_sequences
from canter.core.plain import check_range
from canter.core.registry import nearest
from canter.core.seeding import derive_seed, draw_rows
from canter.core.specs import Continuous, EnvSpec
from canter.core.struct import Metrics, Obs, State, TensorStruct, tree_copy_, tree_map
from canter.engines.autograd import LossGradients, LossOutput
from canter.engines.triton.kernels import load_kernels
from canter.functional.statistics import masked_mean
from canter.nn.actor_critic import ModelConfig, Policy
from canter.nn.heads import StdConfig
from canter.nn.network import AnyNetworkConfig, NetworkConfig
from canter.nn.optimizer import Optimizer, OptimizerConfig, ParameterGroup
from canter.nn.policy_file import load_policy
from canter.nn.schedules import AdaptiveKL, AnySchedule, Constant

DECLARED = Declared(
    headlines=(
        Headline("loss/distillation", "loss", "learning", "Distillation loss", "student to teacher", line="loss"),
        Headline("policy/action_error", "action error", "policy", "Action error", "student to teacher", line="error"),
        Headline("policy/agreement", "agreement", "policy", "Agreement", "steps with the same choice", percent=True),
        Headline("policy/mixture", "teacher acts", "policy", "Teacher acts", "share of the steps", percent=True),
        Headline("policy/std", "std", "policy", "Standard deviation", "of the student's actions"),
        Headline("optim/learning_rate", "learning rate", "learning", "Learning rate", "step size of the optimiser"),
        Headline("optim/grad_norm", "gradient norm", "", "Gradient norm", "before clipping"),
    ),
    optimizer_steps="optim/minibatch_updates",
    counters={"optim/nonfinite_steps": "Steps skipped for NaN or infinity"},
)


@algorithms.register("distillation")
@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """Settings of distillation: the student acts, and learns what the teacher would have done."""

    declared: ClassVar[Declared] = DECLARED

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
        check_range(self, "must be at least 1", "horizon", "sequence_length", "epochs", "num_minibatches")
        check_range(self, "must not be negative", "policy_gain")
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
        shown = {name: self.teacher_obs.get(name, name) for name in sorted(teacher.reads)}
        for name in self.teacher_obs:
            if name not in shown:
                raise ValueError(f"teacher_obs names {name!r}, unknown to the teacher: {nearest(name, shown)}")
        for name, here in shown.items():
            own = teacher.spec.obs[name].shape
            if here not in spec.obs or spec.obs[here].shape != own:
                shape = spec.obs[here].shape if here in spec.obs else f"not there, {nearest(here, spec.obs)}"
                raise ValueError(
                    f"the teacher's observation group {name!r} has shape {own}, and {here!r} here is {shape}; "
                    f"teacher_obs={{{name}: GROUP}} names another"
                )
        return teacher, shown

    def model(self, teacher: Policy) -> ModelConfig:
        """The student as its file describes it, with the teacher's kind of actions."""
        own = ModelConfig(policy=self.policy, std=self.std, policy_gain=self.policy_gain)
        return replace(own, distribution=teacher.config.distribution, bounds=teacher.config.bounds)

    def loss_for(self, spec: EnvSpec) -> Literal["mse", "huber", "kl"]:
        """What is made small in an environment."""
        continuous = isinstance(spec.action, Continuous)
        if self.loss in ("mse", "huber") and not continuous:
            raise ValueError(f"loss={self.loss} is for continuous actions, and {spec.env_id} has choices: use kl")
        return self.loss if self.loss != "auto" else "mse" if continuous else "kl"

    def build(self, spec: EnvSpec, seed: int) -> Distillation:
        """The algorithm for an environment, on the environment's device."""
        return Distillation(self, spec, seed)

    def plan(self) -> RolloutPlan:
        """How a rollout is cut up."""
        return RolloutPlan(horizon=self.horizon, epochs=self.epochs, num_minibatches=self.num_minibatches)

    def unused(self, spec: EnvSpec) -> list[str]:
        """A line for each setting that was changed and has no part in this configuration."""
        rules = [
            (not isinstance(spec.action, Continuous), "std", "the actions are choices"),
            (getattr(self.policy, "memory", None) is None, "sequence_length", "the student has no memory"),
        ]
        return unused_lines(self, rules)


@dataclass
class DistillationRecord(TensorStruct):
    """What is remembered of a step."""

    teacher: Tensor
    """`[N, P]` distribution parameters of what the teacher would have done."""


@dataclass
class DistillationBatch(TensorStruct):
    """Rows to learn from, `[L, S, ...]`."""

    obs: Obs
    teacher: Tensor
    valid: Tensor
    reset: Tensor
    state: State
    """`[1, S, ...]` the student's memory before each sequence."""


class Distillation(Algorithm[DistillationRecord]):
    """Acts as the student, perhaps at times as the teacher, and learns the teacher's actions."""

    streams = ("policy_rng", "shuffle_rng")

    def __init__(self, config: DistillationConfig, spec: EnvSpec, seed: int) -> None:
        if spec.device.type == "cuda":
            load_kernels()
        self.config, self.spec, self.horizon, self.loss = config, spec, config.horizon, config.loss_for(spec)
        self.teacher, self.shown = config.load_teacher(spec)
        self.teacher.actor.requires_grad_(False)
        self.teacher_state = self.teacher.initial_state(spec.num_envs)
        with torch.random.fork_rng(devices=[spec.device] if spec.device.type == "cuda" else []):
            torch.manual_seed(derive_seed(seed, "init"))
            self.policy = config.model(self.teacher).build_policy(spec)
        self.actor = self.policy.actor.to(spec.device)
        self.distribution = self.policy.distribution
        for tensor in self.actor.state_dict().values():
            distributed.broadcast_(tensor)
        has_memory = self.policy.initial_state(1) != ()
        self.reads_reset = has_memory or self.teacher_state != ()
        self.sequence_length = config.sequence_length if has_memory else 1
        check_batch(self.horizon, spec.num_envs, config.num_minibatches, self.sequence_length, may_drop=False)
        self.policy_rng = torch.Generator(spec.device).manual_seed(derive_seed(seed, "policy"))
        self.shuffle_rng = torch.Generator(spec.device).manual_seed(derive_seed(seed, "shuffle"))
        self.progress = torch.zeros((), device=spec.device)
        self.mixture = torch.tensor(config.mixture.initial, device=spec.device)
        optimizer = Optimizer({"student": ParameterGroup(list(self.actor.parameters()), config.optimizer)}, True)
        source = LossGradients(self.imitation_loss, optimizer)
        self.phase: Phase[DistillationBatch] = Phase(source, config.epochs, config.num_minibatches, self.shuffle_rng)

    def empty_record(self) -> DistillationRecord:
        """A record `[N, ...]` of the right shapes and dtypes, to allocate buffers by."""
        return DistillationRecord(torch.zeros(self.spec.num_envs, self.distribution.param_dim, device=self.spec.device))

    def act(self, obs: Obs, state: State, reset: Tensor) -> tuple[Tensor, DistillationRecord, State]:
        """Sample the student's actions, or take the teacher's; the record keeps what the teacher says in any case."""
        params, state = self.policy.params(obs, state, reset)
        action = self.distribution.sample(params, self.policy_rng)
        shown = {name: obs[here] for name, here in self.shown.items()}
        wanted, teacher_state = self.teacher.params(shown, self.teacher_state, reset)
        tree_copy_(self.teacher_state, teacher_state)
        if self.config.mixture != Constant(0.0):
            drawn = draw_rows(torch.rand, (len(action),), generator=self.policy_rng, device=action.device)
            drawn = (drawn < self.mixture).reshape(-1, *[1] * (action.ndim - 1))
            action = torch.where(drawn, self.distribution.mode(wanted), action)
        return self.distribution.to_env(action), DistillationRecord(wanted), state

    def update(self, rollout: Rollout[DistillationRecord]) -> Metrics:
        """Learn what the teacher would have done in one rollout."""
        rows = {
            "obs": tree_map(lambda x: x[:-1], rollout.obs),
            "teacher": rollout.record.teacher,
            "valid": rollout.valid,
            "reset": rollout.reset[:-1],
        }
        batch = DistillationBatch(**as_sequences(rows, self.sequence_length), state=as_sequences(rollout.state, 1))
        self.phase.optimizer.schedule_(self.progress)
        metrics = self.phase.run(batch) | {"policy/mixture": self.mixture.clone()}
        # After learning, as the memory in the batch belongs to the statistics that it was made with.
        self.actor.network.update_statistics(rows["obs"], rollout.valid)
        return metrics

    def imitation_loss(self, batch: DistillationBatch) -> LossOutput:
        """The mean distance of student and teacher, in the measure of the settings."""
        params, _ = self.actor(batch.obs, tree_map(lambda x: x[0], batch.state), batch.reset)
        mine, wanted = self.distribution.mode(params), self.distribution.mode(batch.teacher)
        if self.loss == "kl":
            errors = self.distribution.kl(batch.teacher, params)
        elif self.loss == "mse":
            errors = (mine - wanted).square().mean(-1)
        else:
            errors = F.huber_loss(mine, wanted, reduction="none").mean(-1)
        loss = masked_mean(errors, batch.valid)
        with torch.no_grad():
            if isinstance(self.spec.action, Continuous):
                told = {"policy/action_error": masked_mean((mine - wanted).square().mean(-1), batch.valid).sqrt()}
                if (std := self.distribution.std(params)) is not None:
                    told["policy/std"] = masked_mean(std.mean(-1), batch.valid)
            else:
                same = (mine == wanted).float()
                same = same.flatten(2).mean(-1) if same.ndim > 2 else same
                told = {"policy/agreement": masked_mean(same, batch.valid)}
        return LossOutput(loss, {"loss/distillation": loss, **told})

    def set_progress(self, fraction: float | Tensor) -> None:
        """Tell how much of the run is done, 0..1."""
        self.progress.fill_(fraction)
        self.config.mixture.set_(self.mixture, self.progress)

    def about(self) -> dict[str, Any]:
        """Who teaches, and what is made small."""
        return {"teacher": f"{self.config.teacher}, loss {self.loss}"}

    def living(self) -> dict[str, Any]:
        """Weights of both, memory of the teacher, moments and the mixture, where they live."""
        return {
            "student": dict(self.actor.state_dict()),
            "teacher": dict(self.teacher.actor.state_dict()),
            "teacher_state": self.teacher_state,
            "optimizer": self.phase.optimizer.living(),
            "mixture": self.mixture,
        }


__all__ = ["Distillation", "DistillationConfig"]
