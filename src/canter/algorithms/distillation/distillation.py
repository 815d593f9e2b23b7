"""Distillation: a student learns, where it goes itself, what a teacher would do that sees more.

DAgger (Ross et al., 2011). T steps, N environments, L sequence length (1 without memory), S sequences, P distribution
parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from canter import distributed
from canter.algorithms.base import Algorithm, Declared, Headline, RolloutPlan, algorithms
from canter.algorithms.distillation.settings import DistillationSettings
from canter.algorithms.phase import Phase
from canter.algorithms.ppo.checks import check_batch
from canter.algorithms.unused import changed_below
from canter.data.rollout import Rollout, as_sequences
from canter.engines.autograd import LossGradients, LossOutput
from canter.functional.stats import masked_mean
from canter.kernels import load_kernels
from canter.optim import Optimizer, ParameterGroup
from canter.schedules import Constant
from canter.seeding import derive_seed, draw_rows
from canter.specs import Continuous, EnvSpec
from canter.struct import Metrics, Obs, State, TensorStruct, tree_copy_, tree_map

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

    def __init__(self, config: DistillationSettings, spec: EnvSpec, seed: int) -> None:
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
        self.policy_rng, self.shuffle_rng = (
            torch.Generator(spec.device).manual_seed(derive_seed(seed, name)) for name in ("policy", "shuffle")
        )
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
            how = {"generator": self.policy_rng, "device": action.device}
            drawn = draw_rows(torch.rand, (len(action),), **how) < self.mixture
            drawn = drawn.reshape(-1, *[1] * (action.ndim - 1))
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
                told = {
                    "policy/agreement": masked_mean(same.flatten(2).mean(-1) if same.ndim > 2 else same, batch.valid)
                }
        return LossOutput(loss, {"loss/distillation": loss, **told})

    def generators(self) -> list[torch.Generator]:
        """The random streams of acting and of shuffling."""
        return [self.policy_rng, self.shuffle_rng]

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

    def state_dict(self) -> dict[str, Any]:
        """Copies of all of them, and the random states."""
        random = {name: getattr(self, name).get_state() for name in ("policy_rng", "shuffle_rng")}
        return tree_map(torch.clone, self.living()) | random

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state; tensors keep their addresses."""
        self.actor.load_state_dict(state["student"])
        self.teacher.actor.load_state_dict(state["teacher"])
        tree_copy_(self.teacher_state, state["teacher_state"])
        self.phase.optimizer.load_state_dict(state["optimizer"])
        self.mixture.copy_(state["mixture"])
        self.policy_rng.set_state(state["policy_rng"])
        self.shuffle_rng.set_state(state["shuffle_rng"])


@algorithms.register("distillation")
@dataclass(frozen=True, kw_only=True)
class DistillationConfig(DistillationSettings):
    """Settings that build distillation."""

    declared: ClassVar[Declared] = DECLARED

    def build(self, spec: EnvSpec, seed: int) -> Distillation:
        """The algorithm for an environment, on the environment's device."""
        return Distillation(self, spec, seed)

    def plan(self) -> RolloutPlan:
        """How a rollout is cut up."""
        return RolloutPlan(horizon=self.horizon, epochs=self.epochs, num_minibatches=self.num_minibatches)

    def unused(self, spec: EnvSpec) -> list[str]:
        """A line for each setting that was changed and has no part in this configuration."""
        rules = [] if isinstance(spec.action, Continuous) else [("std", "the actions are choices")]
        if getattr(self.policy, "memory", None) is None:
            rules.append(("sequence_length", "the student has no memory"))
        return [
            f"algorithm.{path}={value} has no part here: {reason}"
            for key, reason in rules
            for path, value in changed_below(self, key)
        ]
