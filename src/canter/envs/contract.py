"""Whether a step is what `canter.specs` promises; shapes, dtypes and devices are known without reading a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from canter.specs import ContractBroken, EnvSpec, Step
from canter.struct import Obs


def check_obs(obs: Obs, spec: EnvSpec, source: str) -> None:
    """Refuse observations that are not what the spec declares."""
    if obs.keys() != spec.obs.keys():
        raise ContractBroken(f"{source} gave the observation groups {sorted(obs)}, the spec has {sorted(spec.obs)}")
    for name, declared in spec.obs.items():
        found, shape = obs[name], (spec.num_envs, *declared.shape)
        if (tuple(found.shape), found.dtype) != (shape, declared.dtype):
            raise ContractBroken(
                f"{source} gave observation {name!r} as {found.dtype} {tuple(found.shape)}, "
                f"the spec says {declared.dtype} {shape}"
            )
        if found.device.type != spec.device.type:
            raise ContractBroken(f"{source} gave observation {name!r} on {found.device}, the spec says {spec.device}")


def check_form(step: Step, spec: EnvSpec) -> None:
    """Refuse a step of other shapes, dtypes or devices than `canter.specs.Step` has; reads no tensor."""
    check_obs(step.obs, spec, "step()")
    for name in ("reward", "terminated", "truncated", "valid"):
        dtype = torch.float32 if name == "reward" else torch.bool
        found: Tensor = getattr(step, name)
        if not isinstance(found, Tensor):
            raise ContractBroken(f"step() gave {name} as {type(found).__name__}, it must be a tensor")
        if (tuple(found.shape), found.dtype) != ((spec.num_envs,), dtype):
            raise ContractBroken(
                f"step() gave {name} as {found.dtype} {tuple(found.shape)}, it must be {dtype} ({spec.num_envs},)"
            )
    for name, value in step.metrics.items():
        if value.ndim != 0 or value.device.type != spec.device.type:
            raise ContractBroken(
                f"step() gave the metric {name!r} as {tuple(value.shape)} on {value.device}, "
                f"it must be () on {spec.device}"
            )
    if step.final_obs is not None:
        check_obs(step.final_obs, spec, "step().final_obs")


def check_step(step: Step, spec: EnvSpec) -> None:
    """Refuse a step that breaks the contract of `canter.specs.Step`; reads its flags."""
    check_form(step, spec)
    if bool((step.terminated & step.truncated).any()):
        raise ContractBroken("step() gave a row that is both terminated and truncated; terminated must win")
    if spec.final_obs == "separate" and step.final_obs is None and bool((step.terminated | step.truncated).any()):
        raise ContractBroken(
            "an episode ended without Step.final_obs, which the spec promises (final_obs: separate); if the simulator "
            'loses it, the spec must say final_obs="unknown"'
        )
