"""Policies and critics built from policy files, and the check that a policy fits an environment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from canter.core.declarations import OwnArrays
from canter.core.interface import Interface, name_differences
from canter.core.plain import from_plain
from canter.core.specs import ACTION_MASK, EnvSpec, TensorSpec
from canter.core.storage.validity import Mismatch, check_same, check_same_shape, spec_from_plain, spec_to_plain
from canter.nn.actor_critic import ActorCritic, ModelConfig, Policy, ValueFunction
from canter.nn.policy_file import FINAL_CRITIC, POLICIES, PolicyFileCorrupt, PolicyInfo, find_policy, read_policy_file


def load_policy(path: str | Path, *, env: EnvSpec | None = None, device: str = "cpu") -> Policy:
    """Return the policy of a file or of a run folder: its best, else its final, else its newest.

        policy = canter.load_policy("runs/latest")
        action, state = policy.act({"policy": torch.as_tensor(observation)[None]})

    Observations are groups of `[N, ...]` tensors (listed in `policy.spec.obs`), here one of a
    single environment; actions are `[N, ...]` as the environment takes them. Pass `state` to the
    next call: it is the recurrent state, `()` for feed-forward policies.

    With the spec of an `env`, raises `Mismatch` if the policy was made for other observations or
    actions.
    """
    path = find_policy(Path(path))
    info, tensors = read_policy_file(path, "actor")
    policy = _build(path, info, torch.device(device)).policy
    _load_tensors(path, policy.actor, tensors, device)
    if env is not None:
        check_fits(policy, env, f"policy {path}")
    return policy


def load_critic(path: str | Path, *, device: str = "cpu") -> ValueFunction:
    """Return the critic of a file, or the final critic of a run folder.

    `value, _ = critic.value(obs)` returns values in units of the reward.
    """
    path = Path(path)
    path = path / POLICIES / FINAL_CRITIC if path.is_dir() else path
    info, tensors = read_policy_file(path, "critic")
    model = _build(path, info, torch.device(device))
    _load_tensors(path, model.critic, tensors, device)
    return ValueFunction(model.critic, model.policy.config, model.policy.spec)


def load_policy_weights(policy: Policy, path: str | Path) -> None:
    """Copy the weights and statistics of a saved policy with the same networks into `policy`."""
    saved = load_policy(path, env=policy.spec, device=str(policy.spec.device))
    check_same_shape(f"policy {path}", saved.actor.state_dict(), policy.actor.state_dict())
    policy.actor.load_state_dict(saved.actor.state_dict())


def check_fits(policy: Policy, env: EnvSpec, what: str) -> None:
    """Raise `Mismatch` unless an environment has the observations and actions of a policy.

    Names of terms and components are compared where both declare them.
    """
    groups = {*policy.actor.network.groups, *([ACTION_MASK] if policy.actor.masked else [])}

    def used(spec: EnvSpec) -> dict[str, Any]:
        obs = {name: group for name, group in spec.obs.items() if name in groups}
        plain = spec_to_plain(replace(spec, obs=obs, interface=Interface()))
        return {"obs": plain["obs"], "action": plain["action"]}

    check_same(what, used(policy.spec), used(env))
    for name, saved, here in name_differences(policy.spec.interface, env.interface):
        raise Mismatch(what, name, saved, here)


def _build(path: Path, info: PolicyInfo, device: torch.device) -> ActorCritic:
    """Return the model of a file, without storage for its tensors: the file may claim any size."""
    try:
        config = from_plain(info.model, ModelConfig())
        spec = _parse_spec(info.env, device)
        with torch.device("meta"):
            return config.build(spec)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OverflowError) as error:
        raise PolicyFileCorrupt(path, f"its model cannot be built: {error}") from error


def _parse_spec(plain: dict[str, Any], device: torch.device) -> EnvSpec:
    spec = spec_from_plain(plain, device)
    own_arrays = from_plain(plain.get("own_arrays", {}), OwnArrays())
    for choices in own_arrays.choices:
        fits = spec.obs.get(choices.group) == TensorSpec((sum(choices.options),))
        if not fits or len(choices.start) != len(choices.options):
            raise ValueError(f"the choices of {choices.group} are malformed")
    interface = Interface.from_plain(plain["interface"]) if "interface" in plain else Interface()
    return replace(spec, own_arrays=own_arrays, interface=interface)


def _load_tensors(path: Path, module: nn.Module, tensors: dict[str, Tensor], device: str) -> None:
    """Load tensors into a module, after a check of names, dtypes, shapes and values."""
    needed = {name: (tensor.dtype, tensor.shape) for name, tensor in module.state_dict().items()}
    given = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    for name in {**needed, **given}:
        if needed.get(name) != given.get(name):
            raise PolicyFileCorrupt(path, f"tensor {name} is {given.get(name)}, its model needs {needed.get(name)}")
    if not all(tensor.isfinite().all() for tensor in tensors.values()):
        raise PolicyFileCorrupt(path, "it holds NaN or infinity")
    module.load_state_dict(tensors, assign=True)
    module.to(device)
