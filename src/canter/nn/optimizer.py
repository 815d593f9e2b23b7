"""Adam over flat vectors, and the running mean of a policy's weights.

Gradients are averaged over ranks in one exchange and clipped in one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from canter.core import distributed
from canter.core.dispatch import plain_functions
from canter.core.plain import check_range
from canter.core.registry import UserError
from canter.functional.optimization import AdamGroup, adam_rows_, adam_step_
from canter.nn.actor_critic import Policy
from canter.nn.schedules import AnySchedule, Constant, Event, Linear, StepAt


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Adam with weight decay."""

    learning_rate: AnySchedule = field(default_factory=lambda: Constant(3e-4))
    """Step size: a constant, a linear decay, or adapted to the KL."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the running means of the gradient and of its square."""
    eps: float = 1e-5
    """Added to the root of the running mean square."""
    weight_decay: float = 0.0
    """Coefficient of weight decay."""
    weight_decay_form: Literal["decoupled", "coupled"] = "decoupled"
    """Subtracted from the parameters (AdamW), or added to the clipped gradient as L2 penalty
    (Adam)."""
    max_grad_norm: float = 0.5
    """Gradients are clipped to this norm."""

    def __post_init__(self) -> None:
        """Raise UserError for a value outside its range."""
        if not self.learning_rate.initial > 0:
            raise UserError(f"learning_rate={self.learning_rate.initial} must start above 0")
        if isinstance(self.learning_rate, Linear | StepAt) and self.learning_rate.end < 0:
            raise UserError(f"learning_rate.end={self.learning_rate.end} must not be negative")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"betas={self.betas} must both lie in 0..1, without 1")
        check_range(self, "must be above 0", "eps", "max_grad_norm")
        check_range(self, "must not be negative", "weight_decay")


def _adam_group(flat: Tensor, learning_rate: Tensor, config: OptimizerConfig) -> AdamGroup:
    """Return the state of Adam before its first step; `learning_rate` is 0-d, or `[P]` for P rows of `flat`."""
    return AdamGroup(
        flat=flat,
        gradient=torch.zeros_like(flat),
        exp_avg=torch.zeros_like(flat),
        exp_avg_sq=torch.zeros_like(flat),
        step=torch.zeros_like(learning_rate, dtype=torch.float32),
        learning_rate=learning_rate,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        max_norm=config.max_grad_norm,
        coupled=config.weight_decay_form == "coupled",
    )


def _adam_tensors(adam: AdamGroup) -> dict[str, Tensor]:
    """Return the tensors that the next step depends on, except parameters and gradients."""
    return {name: getattr(adam, name) for name in ("learning_rate", "step", "exp_avg", "exp_avg_sq")}


class ParameterGroup:
    """Parameters that share one learning rate, laid out as one flat vector.

    Parameters become views of one flat tensor, and gradients are gathered into another: all-reduce,
    norm and Adam are then one operation each for any number of layers.
    """

    def __init__(self, parameters: list[nn.Parameter], config: OptimizerConfig) -> None:
        self.config = config
        self.parameters = list({id(parameter): parameter for parameter in parameters}.values())
        flat = torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters])
        self.adam = _adam_group(flat, torch.tensor(config.learning_rate.initial, device=flat.device), config)
        self.gradients: dict[Tensor, Tensor] = {}
        """View of the flat gradient for each parameter."""
        start = 0
        for parameter in self.parameters:
            stop = start + parameter.numel()
            parameter.data = flat[start:stop].view_as(parameter)
            self.gradients[parameter] = self.adam.gradient[start:stop].view_as(parameter)
            start = stop

    @property
    def learning_rate(self) -> Tensor:
        """0-d tensor on the device of the parameters."""
        return self.adam.learning_rate

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that the next step depends on, except parameters and gradients."""
        return _adam_tensors(self.adam)


class Optimizer:
    """Steps parameter groups by the gradients written to them, clipped jointly or per group."""

    def __init__(self, groups: dict[str, ParameterGroup], clip_jointly: bool) -> None:
        self.groups = groups
        self.clip_jointly = clip_jointly
        self.adams = [group.adam for group in groups.values()]

    @staticmethod
    def single(name: str, parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> Optimizer:
        """Return an optimizer of one group of parameters."""
        return Optimizer({name: ParameterGroup(list(parameters), config)}, clip_jointly=True)

    @property
    def gradients(self) -> dict[Tensor, Tensor]:
        """Gradient of each parameter, a view that `step` reads."""
        return {parameter: view for group in self.groups.values() for parameter, view in group.gradients.items()}

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of a 0-d loss by autograd and write them to the groups."""
        groups = list(self.groups.values())
        parameters = [parameter for group in groups for parameter in group.parameters]
        # Computed rather than accumulated: one copy of all of them instead of one addition for
        # each.
        gradients = iter(torch.autograd.grad(loss, parameters, materialize_grads=True))
        for group in groups:
            torch.cat([next(gradients).reshape(-1) for _ in group.parameters], out=group.adam.gradient)

    def exchange_(self, metrics: dict[str, Tensor], weight: Tensor) -> dict[str, Tensor]:
        """Average gradients and 0-d metrics over ranks, and return the metrics.

        Each rank is weighted by its 0-d `weight`. There is one exchange for everything; afterwards
        all ranks have the same numbers and so take the same decisions.
        """
        if not distributed.active():
            return metrics
        gradients = [adam.gradient for adam in self.adams]
        numbers = torch.stack(list(metrics.values())).to(gradients[0]) if metrics else gradients[0].new_zeros(0)
        distributed.weighted_mean_([*gradients, numbers], weight)
        return dict(zip(metrics, numbers.unbind(), strict=True))

    def step(self, skip: Tensor) -> dict[str, Tensor]:
        """Clip and step, unless 0-d `skip` is True or the gradients have NaN or infinity."""
        norm, blocked = adam_step_(self.adams, self.clip_jointly, skip)
        return {"grad_norm": norm, "nonfinite_steps": blocked}

    def schedule_(self, progress: Tensor) -> None:
        """Set the learning rates at the start of an iteration."""
        for group in self.groups.values():
            group.config.learning_rate.set_(group.learning_rate, progress)

    def observe_(self, kl: Tensor, event: Event) -> None:
        """Adapt the learning rates to a measured KL."""
        for group in self.groups.values():
            group.config.learning_rate.observe_(group.learning_rate, kl, event)

    def learning_rates(self) -> dict[str, Tensor]:
        """Return the current learning rate of each group, for the log."""
        return {f"learning_rate/{name}": group.learning_rate.clone() for name, group in self.groups.items()}

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return moments, step count and learning rate of each group; the tensors themselves."""
        return {name: group.state() for name, group in self.groups.items()}


class MemberOptimizer:
    """Steps the parameters of P members side by side, each clipped and with its own learning rate.

    `parameters` are stacked, `[P, ...]` each; `self.parameters` are views of one `[P, n]` tensor
    that take their place. `configs` may differ in the first value of the learning rate only.
    """

    def __init__(self, parameters: dict[str, Tensor], configs: Sequence[OptimizerConfig]) -> None:
        schedules = [config.learning_rate for config in configs]
        flat = torch.cat([parameter.reshape(len(configs), -1) for parameter in parameters.values()], 1)
        rates = torch.tensor([schedule.initial for schedule in schedules], device=flat.device)
        self.adam = _adam_group(flat, rates, configs[0])
        self.schedules = MemberSchedules(schedules, self.adam.learning_rate)
        parts = flat.split([parameter[0].numel() for parameter in parameters.values()], 1)
        self.parameters = {
            name: part.detach().view(parameter.shape).requires_grad_()
            for (name, parameter), part in zip(parameters.items(), parts, strict=True)
        }

    def backward(self, loss: Tensor) -> None:
        """Write the gradients of the losses `[P]`; a member's loss depends on its parameters alone."""
        gradients = torch.autograd.grad(loss.sum(), list(self.parameters.values()))
        torch.cat([gradient.flatten(1) for gradient in gradients], 1, out=self.adam.gradient)

    def step(self, skip: Tensor) -> dict[str, Tensor]:
        """Clip and step each member, unless its `skip` `[P]` is True or its gradient has NaN or infinity."""
        norm, blocked = adam_rows_(self.adam, skip)
        return {"grad_norm": norm, "nonfinite_steps": blocked}

    def schedule_(self, progress: Tensor) -> None:
        """Set the learning rates at the start of an iteration; constant ones stay as they are."""
        self.schedules.set_(progress)

    def observe_(self, kl: Tensor, event: Event) -> None:
        """Adapt each learning rate to the KL `[P]` of its member."""
        self.schedules.observe_(kl, event)

    def learning_rates(self) -> dict[str, Tensor]:
        """Return the current learning rates `[P]`, for the log."""
        return {"learning_rate/model": self.adam.learning_rate.clone()}

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the live moments, step counts and learning rates."""
        return _adam_tensors(self.adam)


class MemberSchedules:
    """Schedules of one kind, with the same settings but the first value, for values `[P]` of members."""

    def __init__(self, schedules: Sequence[AnySchedule], values: Tensor) -> None:
        self.schedules = schedules
        self.values = values
        """The values, which are changed in place."""
        first = schedules[0]
        self.together = replace(first, start=values.clone()) if isinstance(first, Linear | StepAt) else None  # pyright: ignore
        """The schedule of all values at once, if there is one."""

    def set_(self, progress: Tensor) -> None:
        """Set the values at the start of an iteration.

        Constant ones are left alone, so that a value that was changed meanwhile stays.
        """
        if self.together is not None:
            self.together.set_(self.values, progress)
        elif not isinstance(self.schedules[0], Constant):
            for schedule, value in zip(self.schedules, self.values.unbind(), strict=True):
                schedule.set_(value, progress)

    def observe_(self, kl: Tensor, event: Event) -> None:
        """Adapt each value to the KL `[P]` of its member."""
        with plain_functions():  # kernels take single numbers
            self.schedules[0].observe_(self.values, kl, event)


class AveragedPolicy:
    """A copy of a policy with the running mean of its weights, which oscillates less than they do.

    Two that learn against each other, such as policy and discriminator, tend to circle around their
    solution; the mean lies inside the circle (Yazici et al., 2019). `decay` is the share of the
    mean that remains when weights are added; at first all weights count alike. Observation
    statistics are the latest ones.
    """

    def __init__(self, policy: Policy, decay: float) -> None:
        self.source = policy
        self.decay = decay
        self.policy = policy.frozen_copy()
        self.count = torch.zeros((), device=policy.spec.device)

    @torch.no_grad()
    def add_(self) -> None:
        """Add the current weights to the mean."""
        self.count += 1
        share = (1 / self.count).clamp(min=1 - self.decay)
        for mean, weight in zip(self.policy.actor.parameters(), self.source.actor.parameters(), strict=True):
            mean.lerp_(weight, share)
        for mean, statistic in zip(self.policy.actor.buffers(), self.source.actor.buffers(), strict=True):
            mean.copy_(statistic)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the live count and weights."""
        return {"count": self.count, **self.policy.actor.state_dict()}
