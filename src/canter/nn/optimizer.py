"""Gradient steps over flat vectors: averaged over ranks in one exchange, clipped and stepped in one call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from canter.core import distributed
from canter.core.plain import check_range
from canter.core.struct import tree_copy_, tree_map
from canter.functional.adam import AdamGroup, adam_step_
from canter.nn.schedules import AnySchedule, Constant, Event, Linear, StepAt


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Adam with weight decay."""

    learning_rate: AnySchedule = field(default_factory=lambda: Constant(3e-4))
    """Step size: a number that stays, falls linearly or follows the KL."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the gradient's running mean and square."""
    eps: float = 1e-5
    """Added to the root of the running square."""
    weight_decay: float = 0.0
    """How fast parameters fall towards 0."""
    weight_decay_form: Literal["decoupled", "coupled"] = "decoupled"
    """Taken from the parameters (AdamW), or added to the clipped gradient as an L2 penalty (Adam)."""
    max_grad_norm: float = 0.5
    """Gradients longer than this are shortened to it."""

    def __post_init__(self) -> None:
        """Refuse values outside their range, by name."""
        if not self.learning_rate.initial > 0:
            raise ValueError(f"learning_rate={self.learning_rate.initial} must start above 0")
        if isinstance(self.learning_rate, Linear | StepAt) and self.learning_rate.end < 0:
            raise ValueError(f"learning_rate.end={self.learning_rate.end} must not be negative")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas} must both lie in 0..1, without 1")
        check_range(self, "must be above 0", "eps", "max_grad_norm")
        check_range(self, "must not be negative", "weight_decay")


class ParameterGroup:
    """Parameters that share one learning rate, laid out as one flat vector.

    Parameters become views of one flat tensor, and gradients are gathered into another: all-reducing, the norm and
    Adam are then one operation each, however many layers there are.
    """

    def __init__(self, parameters: list[nn.Parameter], config: OptimizerConfig) -> None:
        self.config = config
        self.parameters = list({id(parameter): parameter for parameter in parameters}.values())
        flat = torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters])
        self.adam = AdamGroup(
            flat=flat,
            gradient=torch.zeros_like(flat),
            exp_avg=torch.zeros_like(flat),
            exp_avg_sq=torch.zeros_like(flat),
            step=torch.zeros((), dtype=torch.float32, device=flat.device),
            learning_rate=torch.tensor(config.learning_rate.initial, device=flat.device),
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            max_norm=config.max_grad_norm,
            coupled=config.weight_decay_form == "coupled",
        )
        self.gradients: dict[Tensor, Tensor] = {}
        """Where in the flat gradient that of each parameter is."""
        start = 0
        for parameter in self.parameters:
            stop = start + parameter.numel()
            parameter.data = flat[start:stop].view_as(parameter)
            self.gradients[parameter] = self.adam.gradient[start:stop].view_as(parameter)
            start = stop

    @property
    def learning_rate(self) -> Tensor:
        """0-d, on the parameters' device."""
        return self.adam.learning_rate

    def state(self) -> dict[str, Tensor]:
        """The tensors that the next step depends on, besides parameters and gradients."""
        return {name: getattr(self.adam, name) for name in ("learning_rate", "step", "exp_avg", "exp_avg_sq")}


class Optimizer:
    """Steps several parameter groups by the gradients that were written for them, clipped jointly or group by group."""

    def __init__(self, groups: dict[str, ParameterGroup], clip_jointly: bool) -> None:
        self.groups, self.clip_jointly = groups, clip_jointly
        self.adams = [group.adam for group in groups.values()]

    @property
    def gradients(self) -> dict[Tensor, Tensor]:
        """Where `step` looks for the gradient of each parameter."""
        return {parameter: view for group in self.groups.values() for parameter, view in group.gradients.items()}

    def backward(self, loss: Tensor) -> None:
        """Write the gradients of a 0-d loss, by autograd."""
        groups = list(self.groups.values())
        parameters = [parameter for group in groups for parameter in group.parameters]
        # Asked for rather than accumulated: one copy of all of them instead of one addition for each.
        found = iter(torch.autograd.grad(loss, parameters, materialize_grads=True))
        for group in groups:
            torch.cat([next(found).reshape(-1) for _ in group.parameters], out=group.adam.gradient)

    def exchange_(self, metrics: dict[str, Tensor], weight: Tensor) -> dict[str, Tensor]:
        """Average the gradients, and 0-d metrics, over ranks; each counts by its 0-d `weight`. Gives those metrics.

        One exchange for everything. Afterwards all ranks have the same numbers, so that all decide alike.
        """
        if not distributed.active():
            return metrics
        gradients = [adam.gradient for adam in self.adams]
        numbers = torch.stack(list(metrics.values())).to(gradients[0]) if metrics else gradients[0].new_zeros(0)
        distributed.mean_of_([*gradients, numbers], weight)
        return dict(zip(metrics, numbers.unbind(), strict=True))

    def step(self, skip: Tensor) -> dict[str, Tensor]:
        """Clip and step, except where 0-d `skip` holds or the gradients are not finite."""
        norm, blocked = adam_step_(self.adams, self.clip_jointly, skip)
        return {"grad_norm": norm, "nonfinite_steps": blocked}

    def schedule_(self, progress: Tensor) -> None:
        """Set the learning rates at the start of an iteration."""
        for group in self.groups.values():
            group.config.learning_rate.set_(group.learning_rate, progress)

    def observe_(self, kl: Tensor, event: Event) -> None:
        """Let the learning rates react to a measured KL."""
        for group in self.groups.values():
            group.config.learning_rate.observe_(group.learning_rate, kl, event)

    def learning_rates(self) -> dict[str, Tensor]:
        """Current learning rate of each group, for the log."""
        return {f"learning_rate/{name}": group.learning_rate.clone() for name, group in self.groups.items()}

    def living(self) -> dict[str, dict[str, Tensor]]:
        """Moments, step counts and learning rates of each group, where they live."""
        return {name: group.state() for name, group in self.groups.items()}

    def state_dict(self) -> dict[str, Any]:
        """Copies of them."""
        return tree_map(torch.clone, self.living())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore in place; tensors keep their addresses."""
        tree_copy_(self.living(), state)
