"""The engine of SAC in C, on a CPU: acts, and writes the gradients of critics and policy.

B samples, A action components. `canter.algorithms.sac.learner` is the definition: tests compare
every supported configuration with it. Optimizer steps are those of any other engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from canter.core.data.replay import ReplayBatch
from canter.core.struct import Obs
from canter.engines.base import Capabilities, SACLoss, unsupported_reason
from canter.engines.native import build_requirement, compiled
from canter.engines.native.description import SACDescription
from canter.engines.native.engine import LAYERS
from canter.nn.describe import SACModel
from canter.nn.optimizer import Optimizer

CAPABILITIES = Capabilities(
    device="cpu",
    loss={"pessimism": {"min", "mean"}},
    model=LAYERS
    | {
        "std kind": {"network"},
        "critics": {"standard"},
        "members": range(1, 9),
        "atoms": {1},
    },
    requirement=build_requirement,
)


class NativeSACEngine:
    """Writes the gradients of a `SACModel`.

    Raises ValueError with the reason where it does not support it. Parameters and gradients must
    keep their addresses. A call uses up to as many threads as torch has; results do not depend on
    their number.
    """

    name = "native"
    capabilities = CAPABILITIES

    def __init__(self, loss: SACLoss, model: SACModel, optimizers: Mapping[str, Optimizer]) -> None:
        reason = unsupported_reason(CAPABILITIES, loss, model)
        if reason is not None:
            raise ValueError(reason)
        gradients = optimizers["policy"].gradients | optimizers["critic"].gradients
        self._description = SACDescription(loss, model, gradients)
        self._policy_groups = model.actor.network.groups
        self._groups = (*self._policy_groups, *model.critics.encoder.groups)
        self._models: dict[tuple[int, int], Any] = {}

    def act(self, obs: Obs, noise: Tensor) -> Tensor:
        """Return the policy's actions before squashing `[N, A]`, from noise `[N, A]`."""
        params = noise.new_empty(len(noise), 2 * self._description.action_dim)
        raw = torch.empty_like(noise)
        arrays = [self._checked(array) for array in (*[obs[name] for name in self._policy_groups], noise)]
        compiled().act(self._model(len(noise)), len(noise), (*arrays, params, raw))
        return raw

    def learn_critics(self, batch: ReplayBatch, noise: Tensor, temperature: Tensor) -> dict[str, float]:
        """Write the critics' gradients for samples `[B, ...]`.

        `noise` `[B, A]` draws the next actions.
        """
        arrays = [*self._read(batch.obs), batch.action, *self._read(batch.next_obs), batch.action]
        valid = self._checked(batch.valid, torch.bool)
        arrays = [self._checked(array) for array in (*arrays, batch.reward, batch.discount)]
        means = self._call(False, temperature, (*arrays, valid, self._checked(noise)))
        return {"loss/critic": means[0], "value/target_std": means[1]}

    def learn_policy(self, batch: ReplayBatch, noise: Tensor, temperature: Tensor) -> dict[str, float]:
        """Write the policy's gradients, with noise `[B, A]` of the policy's actions."""
        arrays = [self._checked(array) for array in (*self._read(batch.obs), batch.action, noise)]
        loss, log_prob, std, value = self._call(True, temperature, tuple(arrays))
        return {"loss/policy": loss, "policy/entropy": -log_prob, "policy/std": std, "value/mean": value}

    def _read(self, obs: Obs) -> list[Tensor]:
        return [obs[name] for name in self._groups]

    def _call(self, policy: bool, temperature: Tensor, arrays: tuple[Tensor, ...]) -> tuple[float, float, float, float]:
        return compiled().sac_gradients(self._model(len(arrays[-1])), policy, temperature.tolist()[0], arrays)

    def _model(self, batch_size: int) -> Any:
        """Return the model in C with room for a batch and for as many threads as torch may use."""
        made_for = (torch.get_num_threads(), batch_size)
        if made_for not in self._models:
            self._models[made_for] = self._description.build(*made_for)
        return self._models[made_for]

    def _checked(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        if tensor.dtype is not (dtype or self._description.dtype):
            raise TypeError(f"a tensor of {tensor.dtype} where the native engine needs {self._description.dtype}")
        return tensor.contiguous()
