"""Symmetry of robots: learn from mirror images of the samples too.

There are two ways, which can be combined. Augmentation adds the mirror images of every sequence to
the minibatch. The mirror loss pulls the action in a mirrored state towards the mirrored action.

T steps, N environments, L sequence length, B sequences in a minibatch, V mirror images without the
original.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain, combinations
from typing import Any, Literal

import torch
from torch import Tensor

from canter.algorithms.extension import Extension, extensions
from canter.core.data.rollout import Rollout
from canter.core.declarations import AnyMirror, Mirror, Symmetry
from canter.core.plain import check_range
from canter.core.registry import UserError, nearest
from canter.core.specs import Continuous, Discrete, EnvSpec
from canter.core.struct import Metrics, Obs, State, tree_copy_, tree_leaves, tree_map
from canter.engines.base import ModelOutput, PPOBatch
from canter.nn.actor_critic import ActorCritic


@dataclass(frozen=True, kw_only=True)
class MirrorConfig:
    """A symmetry that the environment does not declare itself."""

    name: str
    """Name of the symmetry."""
    obs: dict[str, Any]
    """Signs of the components of each observation group, and their order if it changes: `{sign:
    [...], order: [...]}`."""
    action: dict[str, Any]
    """Signs, and order, of the components of the action."""

    def build(self) -> Symmetry:
        """Return the symmetry; raise UserError if a part is no signed permutation."""
        obs = {group: _mirror(group, given) for group, given in self.obs.items()}
        return Symmetry(self.name, obs, _mirror("action", self.action))


def _mirror(part: str, given: Any) -> Mirror:
    if not isinstance(given, dict) or "sign" not in given or set(given) - {"sign", "order"}:
        raise UserError(f"mirrors: {part} needs a mapping with sign and, if it changes, order; not {given!r}")
    try:
        return Mirror(tuple(given["sign"]), tuple(given.get("order", ())))
    except ValueError as error:
        raise UserError(f"mirrors: {part}: {error}") from error


@extensions.register("symmetry")
@dataclass(frozen=True, kw_only=True)
class SymmetryConfig:
    """Settings of symmetry: learn from mirror images too."""

    augment: bool = True
    """Add the mirror images of every sequence to the minibatch."""
    mirror_loss: float = 0.0
    """Weight of the squared difference between action in the mirrored state and mirrored action."""
    use: tuple[str, ...] | None = None
    """Symmetries to use, by name; None takes all that are declared. Their combinations are used
    too."""
    old_log_prob: Literal["evaluated", "repeated"] = "evaluated"
    """Old log-probability of a mirrored sample: that of the mirrored action by the acting policy,
    or, as in RSL-RL, that of the original action, which is the same only for a symmetric policy."""
    mirrors: tuple[MirrorConfig, ...] = ()
    """Symmetries that the environment does not declare."""

    def __post_init__(self) -> None:
        """Refuse values out of range, and an extension that does nothing."""
        check_range(self, "must not be negative", "mirror_loss")
        if not self.augment and self.mirror_loss == 0:
            raise UserError("augment=false and mirror_loss=0.0 leave nothing to do: set one of them")

    def symmetries(self, spec: EnvSpec) -> tuple[Symmetry, ...]:
        """Return the symmetries to use, by the environment's declaration and these settings."""
        declared = {symmetry.name: symmetry for symmetry in spec.symmetries}
        declared |= {mirror.name: mirror.build() for mirror in self.mirrors}
        if not declared:
            raise UserError(
                f"symmetry: {spec.env_id or 'this environment'} declares none; set algorithm.extensions[].mirrors, or "
                "EnvSpec.symmetries in the environment"
            )
        for name in self.use or ():
            if name not in declared:
                raise UserError(f"symmetry: use names {name!r}: {nearest(name, declared)}")
        return tuple(symmetry for name, symmetry in declared.items() if self.use is None or name in self.use)

    def build(self, spec: EnvSpec, model: ActorCritic, generator: torch.Generator) -> Symmetries:
        """Return the extension; raise UserError if the declared symmetries do not fit."""
        return Symmetries(self, self.symmetries(spec), spec, model)


Transform = Callable[[Tensor], Tensor]


def _on_device(mirror: AnyMirror, device: torch.device) -> Transform:
    """Return a mirror of vectors `[..., D]` of any dtype, with its constants on the device."""
    if not isinstance(mirror, Mirror):
        return mirror
    order = torch.tensor(mirror.order, device=device)
    sign = torch.tensor(mirror.sign, device=device)
    if all(one == 1 for one in mirror.sign):
        return lambda x: x.index_select(-1, order)
    return lambda x: x.index_select(-1, order) * sign.to(x.dtype)


def _chain(mirrors: Iterable[AnyMirror], device: torch.device) -> Transform:
    """Return the composition of several mirrors, applied in order."""
    steps = [_on_device(mirror, device) for mirror in mirrors]
    return lambda x: reduce(lambda seen, mirror: mirror(seen), steps, x)


class Image:
    """A mirror image, by one symmetry or by several in order."""

    def __init__(self, symmetries: Sequence[Symmetry], spec: EnvSpec, groups: Sequence[str]) -> None:
        self.name = " and ".join(symmetry.name for symmetry in symmetries)
        self.on_obs = {name: _chain([symmetry.obs[name] for symmetry in symmetries], spec.device) for name in groups}
        self.on_action = _chain([symmetry.action for symmetry in symmetries], spec.device)
        self.single = isinstance(spec.action, Discrete)
        self.nvec = () if isinstance(spec.action, Continuous) else spec.action.nvec

    def obs(self, obs: Obs) -> Obs:
        """Return mirrored observations; groups that no network reads are unchanged."""
        return obs | {name: mirror(obs[name]) for name, mirror in self.on_obs.items()}

    def action(self, action: Tensor) -> Tensor:
        """Return mirrored actions, in the form in which they are stored."""
        if not self.nvec:
            return self.on_action(action)
        heads = action.unsqueeze(-1) if self.single else action
        # By comparison, since `one_hot` syncs with the host to check the range.
        hot = [heads[..., k, None] == torch.arange(n, device=action.device) for k, n in enumerate(self.nvec)]
        chosen = [head.int().argmax(-1) for head in self.on_action(torch.cat(hot, -1)).split(self.nvec, -1)]
        return chosen[0] if self.single else torch.stack(chosen, -1)


class Symmetries(Extension):
    """Mirrors minibatches in `augment` and compares actions with mirrored actions in `loss`."""

    def __init__(
        self, config: SymmetryConfig, symmetries: Sequence[Symmetry], spec: EnvSpec, model: ActorCritic
    ) -> None:
        super().__init__()
        self.config = config
        self.distribution = model.policy.distribution
        self.model = [model]  # in a list, or its parameters would be saved as this module's
        groups = sorted({*model.policy.reads, *model.critic.network.groups})
        for symmetry in symmetries:
            check_symmetry(symmetry, spec, groups)
        several = chain(*(combinations(symmetries, count) for count in range(1, len(symmetries) + 1)))
        self.each = [Image(chosen, spec, groups) for chosen in several]
        """Images, those by one symmetry first."""
        for image in self.each[: len(symmetries)]:
            self._check_actions(image, spec)
        # Recurrent states that the networks would have, had they seen the mirror images; buffers,
        # as they outlive a rollout, with names that are keys of checkpoints.
        self.states = [
            tuple(network.initial_state(spec.num_envs) for network in (model.actor.network, model.critic.network))
            for _ in self.each
        ]
        for number, tensor in enumerate(tree_leaves(tuple(self.states))):
            self.register_buffer(f"memory_{number}", tensor)

    def _check_actions(self, image: Image, spec: EnvSpec) -> None:
        """Refuse a mirror that does not commute with the map from samples to actions."""
        if not isinstance(spec.action, Continuous):
            return
        cpu_sample = torch.rand((64, spec.action.dim), generator=torch.Generator().manual_seed(0), device="cpu")
        sample = cpu_sample.to(spec.device)
        to_env = self.distribution.to_env
        wrong = (to_env(image.action(sample)) - image.action(to_env(sample))).abs().amax(0) > 1e-4
        if wrong.any():
            i = int(wrong.int().argmax())
            bounds = f"{spec.action.low[i]}..{spec.action.high[i]}"
            raise UserError(
                f"symmetry {image.name!r}: action component {i} has bounds {bounds} that are not its mirror's, or "
                f"{type(self.distribution).__name__} cannot be mirrored"
            )

    def carry(self, rollout: Rollout[Any]) -> dict[str, Any]:
        """Return the networks' outputs for each image before the update, and their states."""
        evaluates = self.config.augment and self.config.old_log_prob == "evaluated"
        if not evaluates and not tree_leaves(tuple(self.states)):
            return {}
        images = zip(self.each, self.states, strict=True)
        return {f"symmetry/{image.name}": self._evaluate(image, states, rollout) for image, states in images}

    @torch.no_grad()
    def _evaluate(self, image: Image, start: tuple[State, State], rollout: Rollout[Any]) -> dict[str, Any]:
        """Run the networks on the image of a rollout.

        `start`, their recurrent states, is updated for the next rollout.
        """
        (model,) = self.model
        reset = rollout.reset[:-1]
        policy_start, critic_start = start
        obs = image.obs(tree_map(lambda x: x[:-1], rollout.obs))
        features, policy_states = model.actor.network.unroll(obs, policy_start, reset)
        params = model.actor.read(features, obs)
        critic_features = features
        critic_states = policy_states
        if not model.shared_trunk:
            critic_features, critic_states = model.critic.network.unroll(obs, critic_start, reset)
        outputs = {
            "policy_state": _states_before(policy_start, policy_states),
            "critic_state": _states_before(critic_start, critic_states),
        }
        tree_copy_(start, tree_map(lambda states: states[-1], (policy_states, critic_states)))
        if self.config.old_log_prob == "repeated":
            return outputs
        log_prob = self.distribution.log_prob(params, image.action(rollout.record.action))
        return outputs | {"log_prob": log_prob, "dist_params": params, "value": model.critic.head(critic_features)}

    def augment(self, batch: PPOBatch) -> PPOBatch:
        """Return the minibatch and its images, `[L, (1 + V) B, ...]`, originals first."""
        if not self.config.augment:
            return batch
        original = torch.ones_like(batch.valid) if batch.original is None else batch.original
        added = [replace(self._mirrored(batch, image), original=torch.zeros_like(original)) for image in self.each]
        return tree_map(lambda *x: torch.cat(x, 1), replace(batch, original=original), *added)

    def _mirrored(self, batch: PPOBatch, image: Image) -> PPOBatch:
        """Return an image of a minibatch; returns and advantages are those of the original."""
        carried = batch.carried.get(f"symmetry/{image.name}", {})
        states = {name: tree_map(lambda x: x[:1], carried[name]) for name in carried if name.endswith("_state")}
        return replace(batch, obs=image.obs(batch.obs), action=image.action(batch.action), **carried | states)

    def loss(self, batch: PPOBatch, output: ModelOutput) -> Metrics:
        """Return the policy's asymmetry `[L, B]` for the log, and the mirror loss if weighted."""
        assert output.dist_params is not None
        if self.config.augment:
            first, *images = output.dist_params.chunk(1 + len(self.each), 1)
        else:
            (model,), first, images = self.model, output.dist_params, []
            for mirrored in (self._mirrored(batch, image) for image in self.each):
                state = tree_map(lambda x: x[0], mirrored.policy_state)
                images.append(model.actor(mirrored.obs, state, batch.reset)[0])
        action = self.action_vector(first).detach()
        errors = [
            (self.action_vector(params) - image.on_action(action)).square().mean(-1)
            for params, image in zip(images, self.each, strict=True)
        ]
        error = torch.stack(errors).mean(0)
        if self.config.augment:  # images get the error of their original, so that the mean is the same
            error = error.repeat(1, 1 + len(self.each))
        terms = {"policy/asymmetry": error.detach()}
        if self.config.mirror_loss:
            terms["loss/mirror"] = self.config.mirror_loss * error
        return terms

    def action_vector(self, params: Tensor) -> Tensor:
        """Return the policy's mean or discrete probabilities `[..., D]`, for a mirror."""
        nvec = self.each[0].nvec
        if not nvec:
            return self.distribution.mode(params)
        return torch.cat([logits.softmax(-1) for logits in params.split(nvec, -1)], -1)


def _states_before(first: State, after: State) -> State:
    """Return the recurrent states `[T, N, ...]` before each step."""
    return tree_map(lambda x, states: torch.cat([x.unsqueeze(0), states[:-1]]), first, after)


def check_symmetry(symmetry: Symmetry, spec: EnvSpec, groups: Sequence[str]) -> None:
    """Refuse a symmetry of the wrong shape or that is no involution; name the component."""
    named = f"symmetry {symmetry.name!r}"
    nvec = () if isinstance(spec.action, Continuous) else spec.action.nvec
    action_size = spec.action.dim if isinstance(spec.action, Continuous) else sum(nvec)
    mirrors = {"the action": (symmetry.action, action_size)}
    for name in groups:
        part = f"observation group {name!r}"
        if name not in symmetry.obs:
            raise UserError(f"{named} does not mirror {part}, which a network reads")
        mirrors[part] = (symmetry.obs[name], spec.obs[name].shape[-1] if spec.obs[name].shape else 1)
    for part, (mirror, size) in mirrors.items():
        signs = mirror.sign if isinstance(mirror, Mirror) else (1,) * size
        if len(signs) != size:
            raise UserError(f"{named}: {part} has {size} components, its mirror {len(signs)}")
        if part == "the action" and nvec and -1 in signs:
            raise UserError(f"{named}: discrete action {signs.index(-1)} cannot have the sign -1")
        probe = torch.rand((8, size), generator=torch.Generator().manual_seed(0), device="cpu") + 0.5
        twice = mirror(mirror(probe))
        if twice.shape != probe.shape:
            raise UserError(f"{named}: {part} changes its shape, {tuple(twice.shape)}")
        wrong = ((twice - probe).abs() > 1e-5).any(0)
        if wrong.any():
            raise UserError(
                f"{named}: mirroring {part} twice does not return component {int(wrong.int().argmax())} back"
            )
