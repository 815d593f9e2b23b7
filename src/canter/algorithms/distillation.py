"""Distillation: a student imitates a teacher that sees more, in the states that the student visits.

This is DAgger (Ross et al., 2011): the student acts, the teacher labels every step with what it
would have done.

T steps, N environments, L sequence length (1 for feed-forward students), S sequences, P
distribution parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from canter.algorithms.base import Algorithm, Headline, ReportSpec, RolloutPlan, algorithms, unused_lines
from canter.algorithms.phase import Phase, check_batch
from canter.core import distributed
from canter.core.data.rollout import Rollout, as_sequences
from canter.core.plain import check_range
from canter.core.registry import UserError, nearest
from canter.core.seeding import derive_seed, draw_for_rank
from canter.core.specs import Continuous, EnvSpec
from canter.core.struct import Metrics, Obs, State, TensorStruct, tree_copy_, tree_map
from canter.engines.autograd import LossGradients, LossOutput
from canter.engines.triton.kernels import load_kernels
from canter.functional.statistics import masked_mean
from canter.nn.actor_critic import ModelConfig, Policy
from canter.nn.heads import StdConfig
from canter.nn.network import AnyNetworkConfig, NetworkConfig
from canter.nn.optimizer import Optimizer, OptimizerConfig
from canter.nn.policy_loading import load_policy
from canter.nn.schedules import AdaptiveKL, AnySchedule, Constant

DISTILLATION_REPORT = ReportSpec(
    headlines=(
        Headline("loss/distillation", "loss", "learning", "Distillation loss", "student to teacher", line="loss"),
        Headline("policy/action_error", "action error", "policy", "Action error", "student to teacher", line="error"),
        Headline("policy/agreement", "agreement", "policy", "Agreement", "steps with the same action", percent=True),
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
    """Settings of distillation: the student acts and learns what the teacher would have done."""

    report_spec: ClassVar[ReportSpec] = DISTILLATION_REPORT

    teacher: str = ""
    """Teacher: a policy file, or a run folder for its best policy."""
    teacher_obs: dict[str, str] = field(default_factory=dict)
    """Observation groups with another name in this environment: the teacher's name -> the name
    here."""
    policy: AnyNetworkConfig = field(default_factory=NetworkConfig)
    """Network of the student; `obs_groups` are what it sees."""
    std: StdConfig = field(default_factory=lambda: StdConfig(initial=0.1))
    """Standard deviation of the student for continuous actions; only `loss: kl` trains it."""
    policy_gain: float = 0.01
    """Initial gain of the student's last layer."""
    loss: Literal["auto", "mse", "huber", "kl"] = "auto"
    """Squared difference of the means, Huber's, or KL(teacher || student); "auto" takes the first
    for continuous and the last for discrete actions."""
    mixture: AnySchedule = field(default_factory=lambda: Constant(0.0))
    """Share of the steps in which the teacher acts: a number or a schedule."""
    horizon: int = 64
    """Steps per rollout in each environment."""
    sequence_length: int = 16
    """Steps of backpropagation through time; must divide `horizon`. It has no effect for a
    feed-forward student."""
    epochs: int = 2
    """Passes over each rollout."""
    num_minibatches: int = 4
    """Minibatches per pass; must divide `horizon * num_envs`, or the number of sequences if
    recurrent."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=Constant(1e-3)))
    """Optimiser of the student."""

    def __post_init__(self) -> None:
        """Refuse values out of range, by name."""
        check_range(self, "must be at least 1", "horizon", "sequence_length", "epochs", "num_minibatches")
        check_range(self, "must not be negative", "policy_gain")
        for name, schedule in (("mixture", self.mixture), ("optimizer.learning_rate", self.optimizer.learning_rate)):
            if isinstance(schedule, AdaptiveKL):
                raise UserError(f"{name}: adaptive_kl follows updates of PPO; use a number, linear or step")
        if not 0 <= self.mixture.initial <= 1:
            raise UserError(f"mixture={self.mixture.initial} must begin in 0..1")

    def load_teacher(self, spec: EnvSpec) -> tuple[Policy, dict[str, str]]:
        """Return the teacher, and for each of its observation groups the name here.

        Raises UserError if teacher and environment do not fit together.
        """
        if not self.teacher:
            raise UserError("teacher is empty: set it to a policy file or a run folder")
        teacher = load_policy(self.teacher, device=str(spec.device))
        if teacher.spec.action != spec.action:
            raise UserError(
                f"teacher {self.teacher} returns {teacher.spec.action}, the environment takes {spec.action}"
            )
        shown = {name: self.teacher_obs.get(name, name) for name in sorted(teacher.reads)}
        for name in self.teacher_obs:
            if name not in shown:
                raise UserError(f"teacher_obs names {name!r}, unknown to the teacher: {nearest(name, shown)}")
        for name, here in shown.items():
            own = teacher.spec.obs[name].shape
            if here not in spec.obs:
                shape = f"not there, {nearest(here, spec.obs)}"
            else:
                shape = spec.obs[here].shape
            if shape != own:
                raise UserError(
                    f"the teacher's observation group {name!r} has shape {own}, and {here!r} here is {shape}; "
                    f"teacher_obs={{{name}: GROUP}} names another"
                )
        return teacher, shown

    def model(self, teacher: Policy) -> ModelConfig:
        """Return the description of the student for its file, with the teacher's distribution."""
        own = ModelConfig(policy=self.policy, std=self.std, policy_gain=self.policy_gain)
        return replace(own, distribution=teacher.config.distribution, bounds=teacher.config.bounds)

    def loss_for(self, spec: EnvSpec) -> Literal["mse", "huber", "kl"]:
        """Return the loss for an environment, with "auto" resolved."""
        continuous = isinstance(spec.action, Continuous)
        if self.loss in ("mse", "huber") and not continuous:
            raise UserError(
                f"loss={self.loss} is for continuous actions, and those of {spec.env_id} are discrete: use kl"
            )
        if self.loss != "auto":
            return self.loss
        return "mse" if continuous else "kl"

    def build(self, spec: EnvSpec, seed: int) -> Distillation:
        """Return the algorithm for an environment, on the environment's device."""
        return Distillation(self, spec, seed)

    def plan(self) -> RolloutPlan:
        """Return how distillation uses a rollout."""
        return RolloutPlan(horizon=self.horizon, epochs=self.epochs, num_minibatches=self.num_minibatches)

    def unused(self, spec: EnvSpec) -> list[str]:
        """Return a line for each changed setting that has no effect in this configuration."""
        rules = [
            (not isinstance(spec.action, Continuous), "std", "the actions are discrete"),
            (getattr(self.policy, "rnn", None) is None, "sequence_length", "the student is not recurrent"),
        ]
        return unused_lines(self, rules)


@dataclass
class DistillationRecord(TensorStruct):
    """Record of a step."""

    teacher: Tensor
    """`[N, P]` distribution parameters of the teacher."""


@dataclass
class DistillationBatch(TensorStruct):
    """Samples to learn from, `[L, S, ...]`."""

    obs: Obs
    teacher: Tensor
    valid: Tensor
    reset: Tensor
    state: State
    """`[1, S, ...]` the student's recurrent state before each sequence."""


class Distillation(Algorithm[DistillationRecord]):
    """Acts as the student, in some steps as the teacher, and learns the teacher's actions."""

    streams = ("policy_rng", "shuffle_rng")

    def __init__(self, config: DistillationConfig, spec: EnvSpec, seed: int) -> None:
        if spec.device.type == "cuda":
            load_kernels()
        self.config = config
        self.spec = spec
        self.horizon = config.horizon
        self.loss = config.loss_for(spec)
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
        recurrent = self.policy.initial_state(1) != ()
        self.reads_reset = recurrent or self.teacher_state != ()
        self.sequence_length = config.sequence_length if recurrent else 1
        check_batch(self.horizon, spec.num_envs, config.num_minibatches, self.sequence_length, may_drop=False)
        self.policy_rng = torch.Generator(spec.device).manual_seed(derive_seed(seed, "policy"))
        self.shuffle_rng = torch.Generator(spec.device).manual_seed(derive_seed(seed, "shuffle"))
        self.progress = torch.zeros((), device=spec.device)
        self.mixture = torch.tensor(config.mixture.initial, device=spec.device)
        optimizer = Optimizer.single("student", self.actor.parameters(), config.optimizer)
        source = LossGradients(self.imitation_loss, optimizer)
        self.phase: Phase[DistillationBatch] = Phase(source, config.epochs, config.num_minibatches, self.shuffle_rng)

    def empty_record(self) -> DistillationRecord:
        """Return a record `[N, ...]` of the right shapes and dtypes, as a template for buffers."""
        return DistillationRecord(torch.zeros(self.spec.num_envs, self.distribution.param_dim, device=self.spec.device))

    def act(self, obs: Obs, state: State, reset: Tensor) -> tuple[Tensor, DistillationRecord, State]:
        """Sample the student's actions or take the teacher's; record the teacher's output."""
        params, state = self.policy.params(obs, state, reset)
        action = self.distribution.sample(params, self.policy_rng)
        shown = {name: obs[here] for name, here in self.shown.items()}
        teacher_params, teacher_state = self.teacher.params(shown, self.teacher_state, reset)
        tree_copy_(self.teacher_state, teacher_state)
        if self.config.mixture != Constant(0.0):
            share = draw_for_rank(torch.rand, (len(action),), generator=self.policy_rng, device=action.device)
            teacher_acts = (share < self.mixture).reshape(-1, *[1] * (action.ndim - 1))
            action = torch.where(teacher_acts, self.distribution.mode(teacher_params), action)
        return self.distribution.to_env(action), DistillationRecord(teacher_params), state

    def update(self, rollout: Rollout[DistillationRecord]) -> Metrics:
        """Learn what the teacher would have done in one rollout and return the metrics."""
        samples = {
            "obs": tree_map(lambda x: x[:-1], rollout.obs),
            "teacher": rollout.record.teacher,
            "valid": rollout.valid,
            "reset": rollout.reset[:-1],
        }
        batch = DistillationBatch(**as_sequences(samples, self.sequence_length), state=as_sequences(rollout.state, 1))
        self.phase.optimizer.schedule_(self.progress)
        metrics = self.phase.run(batch).metrics | {"policy/mixture": self.mixture.clone()}
        # After learning: the recurrent states in the batch belong to the statistics that they were
        # computed with.
        self.actor.network.update_statistics(samples["obs"], rollout.valid)
        return metrics

    def imitation_loss(self, batch: DistillationBatch) -> LossOutput:
        """Return the mean distance between student and teacher, and metrics."""
        params, _ = self.actor(batch.obs, tree_map(lambda x: x[0], batch.state), batch.reset)
        student = self.distribution.mode(params)
        teacher = self.distribution.mode(batch.teacher)
        if self.loss == "kl":
            errors = self.distribution.kl(batch.teacher, params)
        elif self.loss == "mse":
            errors = (student - teacher).square().mean(-1)
        else:
            errors = F.huber_loss(student, teacher, reduction="none").mean(-1)
        loss = masked_mean(errors, batch.valid)
        with torch.no_grad():
            metrics = {"loss/distillation": loss}
            if isinstance(self.spec.action, Continuous):
                squares = (student - teacher).square().mean(-1)
                metrics["policy/action_error"] = masked_mean(squares, batch.valid).sqrt()
                if (std := self.distribution.std(params)) is not None:
                    metrics["policy/std"] = masked_mean(std.mean(-1), batch.valid)
            else:
                same = (student == teacher).float()
                same = same.flatten(2).mean(-1) if same.ndim > 2 else same
                metrics["policy/agreement"] = masked_mean(same, batch.valid)
        return LossOutput(loss, metrics)

    def set_progress(self, fraction: float | Tensor) -> None:
        """Set the completed fraction of the run, 0..1, and the share of the teacher's actions."""
        super().set_progress(fraction)
        self.config.mixture.set_(self.mixture, self.progress)

    def about(self) -> dict[str, Any]:
        """Return the teacher and the loss."""
        return {"teacher": f"{self.config.teacher}, loss {self.loss}"}

    def state_tensors(self) -> dict[str, Any]:
        """Return the live weights of both, the teacher's recurrent state, moments and mixture."""
        return {
            "student": dict(self.actor.state_dict()),
            "teacher": dict(self.teacher.actor.state_dict()),
            "teacher_state": self.teacher_state,
            "optimizer": self.phase.optimizer.state_tensors(),
            "mixture": self.mixture,
        }


__all__ = ["Distillation", "DistillationConfig"]
