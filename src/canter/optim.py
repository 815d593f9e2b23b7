"""Gradient steps: zero, backward, average over ranks, clip and step in one call."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from canter import distributed
from canter.kernels import usable
from canter.schedules import AnySchedule, Constant, Event
from canter.struct import tree_copy_


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Adam with decoupled weight decay."""

    learning_rate: AnySchedule = field(default_factory=lambda: Constant(3e-4))
    """Step size: a number that stays, falls linearly or follows the KL."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the gradient's running mean and square."""
    eps: float = 1e-5
    """Added to the root of the running square."""
    weight_decay: float = 0.0
    """Decoupled weight decay (AdamW)."""
    max_grad_norm: float = 0.5
    """Gradients longer than this are shortened to it."""

    def __post_init__(self) -> None:
        """Refuse values outside their range, by name."""
        if not self.learning_rate.initial > 0:
            raise ValueError(f"learning_rate={self.learning_rate.initial} must start above 0")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas} must both lie in 0..1, without 1")
        for name in ("eps", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay={self.weight_decay} must not be negative")


class ParameterGroup:
    """Parameters that share one learning rate, laid out as one flat vector.

    Parameters become views of one flat tensor, and gradients are gathered into another: all-reducing, the norm and
    Adam are then one operation each, however many layers there are.
    """

    def __init__(self, parameters: list[nn.Parameter], config: OptimizerConfig) -> None:
        self.config = config
        self.parameters = list({id(parameter): parameter for parameter in parameters}.values())
        self.flat = flat = torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters])
        self.gradient = torch.zeros_like(flat)
        self.gradients: dict[Tensor, Tensor] = {}
        """Where in `gradient` that of each parameter is."""
        start = 0
        for parameter in self.parameters:
            stop = start + parameter.numel()
            parameter.data = flat[start:stop].view_as(parameter)
            self.gradients[parameter] = self.gradient[start:stop].view_as(parameter)
            start = stop
        self.learning_rate = torch.tensor(config.learning_rate.initial, device=flat.device)
        self.moments = {
            "step": torch.zeros((), device=flat.device),
            "exp_avg": torch.zeros_like(flat),
            "exp_avg_sq": torch.zeros_like(flat),
        }

    def state(self) -> dict[str, Tensor]:
        """The tensors that the next step depends on, besides parameters and gradients."""
        return {"learning_rate": self.learning_rate, **self.moments}

    def step(self, norm: Tensor, skip: Tensor) -> None:
        """One Adam step on gradients scaled by `max_grad_norm / norm` where that is below one; none where `skip` is 1.

        Fused Adam divides by `grad_scale` and obeys `found_inf` inside its kernel, so clipping and skipping are free.
        """
        if usable(self.flat):
            from canter.kernels.adam import adamw_

            config = self.config
            adamw_(
                self.flat,
                self.gradient,
                **self.moments,
                learning_rate=self.learning_rate,
                norm=norm,
                max_norm=config.max_grad_norm,
                skip=skip,
                betas=config.betas,
                eps=config.eps,
                weight_decay=config.weight_decay,
            )
            return
        self.moments["step"].add_(1.0 - skip)
        self._adamw_((norm / self.config.max_grad_norm).clamp_(min=1.0), skip)

    def step_on_host(self, norm: float) -> None:
        """The same on a CPU, where the host knows the norm and that the step is taken."""
        if norm > self.config.max_grad_norm:
            self.gradient.mul_(self.config.max_grad_norm / norm)
        self.moments["step"].add_(1.0)
        self._adamw_(None, None)

    def _adamw_(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        # Private, but torch's own optimiser spends more time around this call than in it.
        torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
            [self.flat],
            [self.gradient],
            [self.moments["exp_avg"]],
            [self.moments["exp_avg_sq"]],
            [],
            [self.moments["step"]],
            lr=self.learning_rate,
            beta1=self.config.betas[0],
            beta2=self.config.betas[1],
            weight_decay=self.config.weight_decay,
            eps=self.config.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=grad_scale,
            found_inf=found_inf,
        )


class Optimizer:
    """Steps one or several parameter groups on one loss; gradients are clipped jointly or group by group."""

    def __init__(self, groups: dict[str, ParameterGroup], clip_jointly: bool) -> None:
        self.groups, self.clip_jointly = groups, clip_jointly
        self.host_gradients = [group.gradient.numpy() for group in groups.values() if group.gradient.is_cpu]
        """The gradients as arrays on a CPU; without them, steps are decided by tensors, as on a GPU."""

    @property
    def gradients(self) -> dict[Tensor, Tensor]:
        """Where `step` looks for the gradient of each parameter."""
        return {parameter: view for group in self.groups.values() for parameter, view in group.gradients.items()}

    def step(self, loss: Tensor | None, skip: Tensor) -> dict[str, Tensor]:
        """Descend `loss`, except where the 0-d bool `skip` holds or a gradient is not finite.

        Without a loss, descend the `gradients` as they are.
        """
        groups = list(self.groups.values())
        if loss is not None:
            parameters = [parameter for group in groups for parameter in group.parameters]
            # Asked for rather than accumulated: one copy of all of them instead of one addition for each.
            found = iter(torch.autograd.grad(loss, parameters, materialize_grads=True))
            for group in groups:
                torch.cat([next(found).reshape(-1) for _ in group.parameters], out=group.gradient)
        for group in groups:
            distributed.mean_(group.gradient)
        if self.host_gradients:
            return self._step_on_host(bool(skip.numpy()))
        # A dot product uses the whole device; the norm of one vector runs on a single processor of a GPU.
        squares = [torch.dot(group.gradient, group.gradient) for group in groups]
        total, blocked, skipped = self._verdict(squares, skip)
        for group, square in zip(groups, squares, strict=True):
            group.step(total if self.clip_jointly else square.sqrt(), skipped)
        return {"grad_norm": total, "nonfinite_steps": blocked}

    def _step_on_host(self, skip: bool) -> dict[str, Tensor]:
        """The step on a CPU, which decides by numbers: they are at hand there, and tensors of one number are slow."""
        with np.errstate(all="ignore"):  # an infinite norm is dealt with below
            squares = [float(np.dot(gradient, gradient)) for gradient in self.host_gradients]
        total = math.sqrt(sum(squares))
        blocked = not total < math.inf  # nor is a NaN
        if not (skip or blocked):
            for group, square in zip(self.groups.values(), squares, strict=True):
                group.step_on_host(total if self.clip_jointly else math.sqrt(square))
        norm, nonfinite = torch.from_numpy(np.array([total, blocked], np.float32)).unbind()
        return {"grad_norm": norm, "nonfinite_steps": nonfinite}

    def _verdict(self, squares: list[Tensor], skip: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The norm of all gradients, 1 where it is not finite, and 1 where no step is to be taken; all 0-d.

        The gradients are already averaged, so all ranks see the same norm and decide alike.
        """
        if usable(squares[0]):
            from canter.kernels.adam import decide

            # Counts the step as well.
            return decide(squares, [group.moments["step"] for group in self.groups.values()], skip)
        total = (squares[0] if len(squares) == 1 else torch.stack(squares).sum()).sqrt()
        blocked = ~(total < math.inf)  # nor is a NaN
        return total, blocked.to(torch.float32), (skip | blocked).to(torch.float32)

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

    def state_dict(self) -> dict[str, Any]:
        """Moments, step counts and learning rates."""
        return {
            name: {key: value.clone() for key, value in group.state().items()} for name, group in self.groups.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore in place; tensors keep their addresses."""
        for name, group in self.groups.items():
            tree_copy_(group.state(), state[name])
