"""Policy files: one policy or critic in one file that can be used alone.

A safetensors file: weights and normaliser statistics as tensors, and in its metadata, as JSON, the
settings of the model and the observations and actions of the environment, with the names, units and
scaling that it declares. A hash covers all of it.
Reading validates everything and runs no code from the file. `canter.nn.policy_loading` builds the
policy of a file.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import safetensors.torch
import torch
from torch import Tensor

from canter.core.machine import describe_versions
from canter.core.plain import ConfigError, from_plain, to_plain
from canter.core.registry import UserError
from canter.core.storage.files import Corrupt, Malformed, parse_json, read_untrusted, replace_file
from canter.core.storage.tree import parse_tensors
from canter.core.storage.validity import check_finite, spec_to_plain

if TYPE_CHECKING:
    from canter.nn.actor_critic import Policy, ValueFunction

SCHEMA = 1
"""Version of the layout; other versions are refused."""
MAX_BYTES = 16 << 30
"""Larger files are refused unread."""
POLICIES = "policies"
"""Folder of the policy files in a run folder."""
BEST = "best.safetensors"
FINAL_ACTOR = "final_actor.safetensors"
FINAL_CRITIC = "final_critic.safetensors"


class PolicyFileCorrupt(Corrupt):
    """Raised for a file at `path` that is no policy or was changed; `reason` is the error."""

    kind = "policy"


class NoPolicy(UserError):
    """Raised if there is no policy at a path."""


@dataclass(frozen=True, kw_only=True)
class PolicyInfo:
    """Metadata of a policy file."""

    what: Literal["actor", "critic"]
    """Kind of the model."""
    env_steps: int
    """Transitions that the model was trained on."""
    return_: float | None = None
    """Mean return of the last training episodes at that time; None if none had ended."""
    lta: float | None = None
    """Raw reward per unit of time in the last rollouts at that time; None if not known."""
    evaluation: float | None = None
    """Mean return of evaluation episodes at that time; None if it was not evaluated."""
    canter: str
    """Version of Canter that wrote the file."""
    model: dict[str, Any]
    """Settings of the model as plain data."""
    env: dict[str, Any]
    """Observations and actions of the environment as plain data."""


# Writing


def save_policy(
    path: str | Path,
    policy: Policy,
    *,
    env_steps: int = 0,
    return_: float | None = None,
    lta: float | None = None,
    evaluation: float | None = None,
) -> None:
    """Write a policy to a file; if this raises, an existing file is unchanged."""
    info = policy_info(policy, env_steps=env_steps, return_=return_, lta=lta, evaluation=evaluation)
    write_policy_file(Path(path), info, policy.actor.state_dict())


def save_critic(path: str | Path, critic: ValueFunction, **about: Any) -> None:
    """Write a critic, with the keywords of `save_policy`; if this raises, the file is unchanged."""
    write_policy_file(Path(path), policy_info(critic, what="critic", **about), critic.critic.state_dict())


def policy_info(
    model: Policy | ValueFunction,
    *,
    what: Literal["actor", "critic"] = "actor",
    env_steps: int = 0,
    **scores: float | None,
) -> PolicyInfo:
    """Return the metadata of a model, with the finite ones of `return_`, `lta` and `evaluation`."""
    return PolicyInfo(
        what=what,
        env_steps=env_steps,
        canter=describe_versions().get("canter", "unknown"),
        model=to_plain(model.config),
        env=spec_to_plain(model.spec)
        | {"own_arrays": to_plain(model.spec.own_arrays), "interface": model.spec.interface.to_plain()},
        **{name: score for name, score in scores.items() if score is not None and math.isfinite(score)},
    )


def write_policy_file(path: Path, info: PolicyInfo, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors and their metadata to one file, durably."""
    check_finite(tensors, f"policy {path}")
    # Cloned: parameters may be views of one block, and the format refuses tensors that share
    # memory.
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    about = {"schema": SCHEMA, **asdict(info)}
    if info.evaluation is None:
        del about["evaluation"]  # as in files from before evaluations existed
    about["sha256"] = _digest(about, copies)
    # One entry: the library writes several in no fixed order.
    data = safetensors.torch.save(copies, {"canter": json.dumps(about, allow_nan=False)})
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, data)


# Reading


def find_policy(path: Path) -> Path:
    """Return the policy file of a run folder: best, else final, else newest; a file as it is."""
    if not path.is_dir():
        return path
    numbered = sorted((path / POLICIES).glob("step-*.safetensors"), key=lambda file: (len(file.name), file.name))
    candidates = [path / POLICIES / BEST, path / POLICIES / FINAL_ACTOR, *reversed(numbered)]
    # The first that exists is taken, and refused later if it is not a regular file: another policy
    # must not replace it unnoticed.
    existing = next((candidate for candidate in candidates if os.path.lexists(candidate)), None)
    if existing is None:
        raise NoPolicy(
            f"{path} holds no policy: there is none in {path / POLICIES} (a run writes the first one when it ends "
            "or is stopped, or with a checkpoint after 100 episodes)"
        )
    return existing


def read_policy_file(path: Path, what: str | None = None) -> tuple[PolicyInfo, dict[str, Tensor]]:
    """Return metadata and tensors of a file; raise PolicyFileCorrupt if any byte was changed.

    `what` is the required kind, "actor" or "critic"; None accepts both.
    """
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
    except (ValueError, RecursionError) as error:  # malformed, not Unicode, or nested too deeply
        raise PolicyFileCorrupt(path, str(error)) from error
    if what not in (None, info.what):
        raise PolicyFileCorrupt(path, f"it holds the {info.what}, not the {what}")
    return info, tensors


def _read(path: Path) -> bytes:
    # A file of a run's policy folder must lie inside the run; any other path was named by the user.
    run = path.absolute().parent.parent if path.absolute().parent.name == POLICIES else None
    try:
        return read_untrusted(path, MAX_BYTES, within=run)
    except FileNotFoundError as error:
        raise NoPolicy(f"there is no policy {path}") from error
    except OSError as error:
        raise PolicyFileCorrupt(path, f"it cannot be read ({error})") from error


def _digest(about: dict[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Return one hash of the metadata and of the name, dtype, shape and bytes of every tensor."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
