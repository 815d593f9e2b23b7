"""One policy or critic in one file that can be used alone.

A safetensors file: weights and normaliser statistics as tensors, and in its metadata, as JSON, the settings of the
model and the environment's observations and actions, from which the rest is built again. A hash covers all of it.
Reading takes nothing on trust and runs no code from the file.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from torch import Tensor, nn

from canter.core.machine import describe_versions
from canter.core.plain import ConfigError, from_plain, to_plain
from canter.core.registry import UserError
from canter.core.space_arrays import OwnArrays
from canter.core.specs import ACTION_MASK, EnvSpec, TensorSpec
from canter.core.storage.files import read_untrusted, replace_file
from canter.core.storage.tree import Malformed, parse_json, parse_tensors
from canter.core.storage.validity import check_finite, check_same, check_same_shape, spec_from_plain, spec_to_plain
from canter.core.struct import Obs, State, tree_map
from canter.nn.actor_critic import ActorCritic, Critic, ModelConfig, Policy

SCHEMA = 1
"""Version of the layout; readers refuse what they do not know."""
MAX_BYTES = 16 << 30
"""Larger files are refused unread."""
POLICIES = "policies"
"""Where a run folder has its policy files."""
BEST, FINAL_ACTOR, FINAL_CRITIC = "best.safetensors", "final_actor.safetensors", "final_critic.safetensors"


class PolicyFileCorrupt(UserError):
    """A file that is no policy, or not the one that was written: `path` is its place, `reason` what is wrong."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"policy {path} cannot be used: {reason}")
        self.path, self.reason = path, reason


class NoPolicy(UserError):
    """There is no policy where one was expected."""


@dataclass(frozen=True, kw_only=True)
class PolicyInfo:
    """What a policy file says of itself."""

    what: Literal["actor", "critic"]
    """Whether it acts or values."""
    env_steps: int
    """Transitions that it had learned from."""
    return_: float | None = None
    """Mean return of the last training episodes then; None if none had ended."""
    lta: float | None = None
    """Raw reward per unit of time in the last rollouts then; None if not known."""
    evaluation: float | None = None
    """Mean return of new episodes then; None if it was not evaluated."""
    canter: str
    """Version that wrote it."""
    model: dict[str, Any]
    """Settings of the model as plain data."""
    env: dict[str, Any]
    """The environment's observations and actions as plain data."""


class ValueFunction:
    """Inference view of a critic."""

    def __init__(self, critic: Critic, config: ModelConfig, spec: EnvSpec) -> None:
        self.critic, self.config, self.spec = critic, config, spec

    def initial_state(self, num_envs: int) -> State:
        """State at the start of an episode, `()` without memory."""
        return self.critic.network.initial_state(num_envs)

    @torch.no_grad()
    def value(self, obs: Obs, state: State = (), reset: Tensor | None = None) -> tuple[Tensor, State]:
        """Values `[N]` of observations `[N, ...]` in the units of the reward it learned from, and the next state."""
        row = None if reset is None else reset.unsqueeze(0)
        value, state = self.critic(tree_map(lambda group: group.unsqueeze(0), obs), state, row)
        return self.critic.head.normalizer.inverse(value).squeeze(0), state

    def save(self, path: str | Path, **about: Any) -> None:
        """Write it as one file, which `canter.load_critic` reads; `about` as for `canter.save_policy`."""
        save_critic(path, self, **about)


def load_policy(path: str | Path, *, env: EnvSpec | None = None, device: str = "cpu") -> Policy:
    """The policy in a file, or of a run folder: its best, else its final, else its newest numbered one.

        policy = canter.load_policy("runs/latest")
        action, state = policy.act({"policy": torch.as_tensor(observation)[None]})

    Observations are groups of `[N, ...]` tensors (`policy.spec.obs` says which), here one of a single environment;
    actions are `[N, ...]` as the environment takes them. Give `state` back to the next call: it is the memory of a
    recurrent policy, `()` for others.

    With the spec of an `env`, raises `Mismatch` if the policy was made for other observations or actions.
    """
    path = find_policy(Path(path))
    info, tensors = read_policy_file(path, "actor")
    policy = _build(path, info, torch.device(device)).policy
    _fill(path, policy.actor, tensors, device)
    if env is not None:
        check_fits(policy, env, f"policy {path}")
    return policy


def load_critic(path: str | Path, *, device: str = "cpu") -> ValueFunction:
    """The critic in a file, or the final one of a run folder; `value, _ = critic.value(obs)` in units of the reward."""
    path = Path(path)
    path = path / POLICIES / FINAL_CRITIC if path.is_dir() else path
    info, tensors = read_policy_file(path, "critic")
    model = _build(path, info, torch.device(device))
    _fill(path, model.critic, tensors, device)
    return ValueFunction(model.critic, model.policy.config, model.policy.spec)


def save_policy(
    path: str | Path,
    policy: Policy,
    *,
    env_steps: int = 0,
    return_: float | None = None,
    lta: float | None = None,
    evaluation: float | None = None,
) -> None:
    """Write a policy; if this raises, the file that was there before is there still."""
    info = describe(policy, env_steps=env_steps, return_=return_, lta=lta, evaluation=evaluation)
    write_policy_file(Path(path), info, policy.actor.state_dict())


Policy.write = save_policy


def save_critic(path: str | Path, critic: ValueFunction, **about: Any) -> None:
    """Write a critic, with the same keywords as a policy; if this raises, what was there before is there still."""
    write_policy_file(Path(path), describe(critic, **about), critic.critic.state_dict())


def begin_with(policy: Policy, path: str | Path) -> None:
    """Give a policy the weights and statistics of another, of the same networks, in place."""
    found = load_policy(path, env=policy.spec, device=str(policy.spec.device))
    check_same_shape(f"policy {path}", found.actor.state_dict(), policy.actor.state_dict())
    policy.actor.load_state_dict(found.actor.state_dict())


def find_policy(path: Path) -> Path:
    """The file that is meant by a file itself or by a run folder."""
    if not path.is_dir():
        return path
    numbered = sorted((path / POLICIES).glob("step-*.safetensors"), key=lambda file: (len(file.name), file.name))
    candidates = [path / POLICIES / BEST, path / POLICIES / FINAL_ACTOR, *reversed(numbered)]
    # Whatever is there is meant, and refused where it is no file: another policy must not take its place unnoticed.
    found = next((candidate for candidate in candidates if os.path.lexists(candidate)), None)
    if found is None:
        raise NoPolicy(
            f"{path} holds no policy: there is none in {path / POLICIES} (a run writes the first one when it ends "
            "or is stopped, or with a checkpoint after 100 episodes)"
        )
    return found


def check_fits(policy: Policy, env: EnvSpec, what: str) -> None:
    """Raise `Mismatch` unless an environment has the observations that a policy reads and the actions that it gives."""
    read = {*policy.actor.network.groups, *([ACTION_MASK] if policy.actor.masked else [])}

    def seen(spec: EnvSpec) -> dict[str, Any]:
        plain = spec_to_plain(replace(spec, obs={name: group for name, group in spec.obs.items() if name in read}))
        return {"obs": plain["obs"], "action": plain["action"]}

    check_same(what, seen(policy.spec), seen(env))


def describe(model: Policy | ValueFunction, *, env_steps: int = 0, **scores: float | None) -> PolicyInfo:
    """What to write beside the tensors; of the `scores` (`return_`, `lta`, `evaluation`) those that are finite."""
    return PolicyInfo(
        what="actor" if isinstance(model, Policy) else "critic",
        env_steps=env_steps,
        canter=describe_versions().get("canter", "unknown"),
        model=to_plain(model.config),
        env=spec_to_plain(model.spec) | {"own_arrays": to_plain(model.spec.own_arrays)},
        **{name: score for name, score in scores.items() if score is not None and math.isfinite(score)},
    )


def write_policy_file(path: Path, info: PolicyInfo, tensors: Mapping[str, Tensor]) -> None:
    """Put tensors and their description into one file, durably."""
    check_finite(tensors, f"policy {path}")
    # A copy each: parameters may be views of one block, and the format refuses tensors that share memory.
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    about = {"schema": SCHEMA, **asdict(info)}
    if info.evaluation is None:
        del about["evaluation"]  # as in files of before there were evaluations
    about["sha256"] = _digest(about, copies)
    # One entry: the library writes several in no fixed order.
    data = safetensors.torch.save(copies, {"canter": json.dumps(about, allow_nan=False)})
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, data)


def read_policy_file(path: Path, what: str | None = None) -> tuple[PolicyInfo, dict[str, Tensor]]:
    """Description and tensors of a file, every byte of which is as it was written; else `PolicyFileCorrupt`."""
    data = _read(path)
    try:
        tensors, metadata = parse_tensors(data)
        match metadata:
            case {"canter": str(text)} if len(metadata) == 1:
                about = parse_json(text.encode())
            case _:
                raise Malformed("it has no description: it was not written by canter")
        if not isinstance(about, dict) or about.pop("sha256", None) != _digest(about, tensors):
            raise Malformed("it has another sha256 than when it was written")
        if about.pop("schema", None) != SCHEMA:
            raise Malformed(f"its description is not of schema {SCHEMA}")
        info = from_plain(about, PolicyInfo)
    except ConfigError as error:
        raise PolicyFileCorrupt(path, f"its description is malformed: {error}") from error
    except (ValueError, RecursionError) as error:  # Malformed, no Unicode, or nested beyond reason
        raise PolicyFileCorrupt(path, str(error)) from error
    if what not in (None, info.what):
        raise PolicyFileCorrupt(path, f"it holds the {info.what}, not the {what}")
    return info, tensors


def _read(path: Path) -> bytes:
    # In a run's folder of policies it must lie there; elsewhere the user has named it.
    run = path.absolute().parent.parent if path.absolute().parent.name == POLICIES else None
    try:
        return read_untrusted(path, MAX_BYTES, within=run)
    except FileNotFoundError as error:
        raise NoPolicy(f"there is no policy {path}") from error
    except OSError as error:
        raise PolicyFileCorrupt(path, f"it cannot be read ({error})") from error


def _spec(plain: dict[str, Any], device: torch.device) -> EnvSpec:
    spec, own = spec_from_plain(plain, device), from_plain(plain.get("own_arrays", {}), OwnArrays())
    for choices in own.choices:
        fits = spec.obs.get(choices.group) == TensorSpec((sum(choices.options),))
        if not fits or len(choices.start) != len(choices.options):
            raise ValueError(f"the choices of {choices.group} are malformed")
    return replace(spec, own_arrays=own)


def _build(path: Path, info: PolicyInfo, device: torch.device) -> ActorCritic:
    """The model that a file describes, without memory for its tensors: the file may claim any size."""
    try:
        config, spec = from_plain(info.model, ModelConfig()), _spec(info.env, device)
        with torch.device("meta"):
            return config.build(spec)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise PolicyFileCorrupt(path, f"its model cannot be built: {error}") from error


def _fill(path: Path, module: nn.Module, tensors: dict[str, Tensor], device: str) -> None:
    """Give a module the tensors of a file, once they are the ones that it needs."""
    needed = {name: (tensor.dtype, tensor.shape) for name, tensor in module.state_dict().items()}
    given = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    for name in {**needed, **given}:
        if needed.get(name) != given.get(name):
            raise PolicyFileCorrupt(path, f"tensor {name} is {given.get(name)}, its model needs {needed.get(name)}")
    if not all(tensor.isfinite().all() for tensor in tensors.values()):
        raise PolicyFileCorrupt(path, "it holds NaN or infinity")
    module.load_state_dict(tensors, assign=True)
    module.to(device)


def _digest(about: dict[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """One hash over the description and the name, kind, shape and bytes of every tensor."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
