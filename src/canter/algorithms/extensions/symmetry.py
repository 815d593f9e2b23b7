"""Robots look the same in a mirror: what was learned on one side holds on the other.

Two ways that can be combined. Augmentation: every sequence is learned from once more as its mirror images. Mirror loss:
the action in a mirrored state is drawn towards the mirrored action. T steps, N environments, L sequence length, B
sequences in a minibatch, V mirror images besides the original.
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
    """A symmetry of an environment that does not declare it itself."""

    name: str
    """What it is called."""
    obs: dict[str, Any]
    """For each observation group the signs of its components, and their order where it changes:
    `{sign: [...], order: [...]}`."""
    action: dict[str, Any]
    """The same of the action."""

    def build(self) -> Symmetry:
        """The symmetry; raises ValueError where a part is no signed permutation."""
        obs = {group: _mirror(group, given) for group, given in self.obs.items()}
        return Symmetry(self.name, obs, _mirror("action", self.action))


def _mirror(of: str, given: Any) -> Mirror:
    if not isinstance(given, dict) or "sign" not in given or set(given) - {"sign", "order"}:
        raise UserError(f"mirrors: {of} needs a mapping with sign and, where it changes, order; not {given!r}")
    try:
        return Mirror(tuple(given["sign"]), tuple(given.get("order", ())))
    except ValueError as error:
        raise UserError(f"mirrors: {of}: {error}") from error


@extensions.register("symmetry")
@dataclass(frozen=True, kw_only=True)
class SymmetryConfig:
    """Learn from mirror images too."""

    augment: bool = True
    """Learn from every sequence and from all its mirror images."""
    mirror_loss: float = 0.0
    """Weight of the squared difference between the action in a mirrored state and the mirrored action."""
    use: tuple[str, ...] | None = None
    """Symmetries to use, by name; None takes all that are declared. With several, one after the other is one more."""
    old_log_prob: Literal["evaluated", "repeated"] = "evaluated"
    """What the ratio of a mirrored row is measured from: what the policy that acted gives the mirrored action, or, as
    RSL-RL has it, what it gave the action itself, which is the same for a symmetric policy only."""
    mirrors: tuple[MirrorConfig, ...] = ()
    """Symmetries that the environment does not declare."""

    def __post_init__(self) -> None:
        """Refuse values outside their range, and an extension that does nothing."""
        check_range(self, "must not be negative", "mirror_loss")
        if not self.augment and self.mirror_loss == 0:
            raise UserError("augment=false and mirror_loss=0.0 leave nothing to do: set one of them")

    def symmetries(self, spec: EnvSpec) -> tuple[Symmetry, ...]:
        """Those to use in an environment, by its declaration and these settings."""
        declared = {symmetry.name: symmetry for symmetry in spec.symmetries}
        declared |= {mirror.name: mirror.build() for mirror in self.mirrors}
        if not declared:
            raise UserError(
                f"symmetry: {spec.env_id or 'this environment'} declares none; give algorithm.extensions[].mirrors, or "
                "EnvSpec.symmetries in the environment"
            )
        for name in self.use or ():
            if name not in declared:
                raise UserError(f"symmetry: use names {name!r}: {nearest(name, declared)}")
        return tuple(symmetry for name, symmetry in declared.items() if self.use is None or name in self.use)

    def build(self, spec: EnvSpec, model: ActorCritic, generator: torch.Generator) -> Symmetries:
        """The extension, once the declaration has been found to fit; raises ValueError where it does not."""
        return Symmetries(self, self.symmetries(spec), spec, model)


Transform = Callable[[Tensor], Tensor]


def _on_device(mirror: AnyMirror, device: torch.device) -> Transform:
    """A mirror of vectors `[..., D]` of any dtype, with its constants on the device."""
    if not isinstance(mirror, Mirror):
        return mirror
    order, sign = torch.tensor(mirror.order, device=device), torch.tensor(mirror.sign, device=device)
    if all(one == 1 for one in mirror.sign):
        return lambda x: x.index_select(-1, order)
    return lambda x: x.index_select(-1, order) * sign.to(x.dtype)


def _chain(mirrors: Iterable[AnyMirror], device: torch.device) -> Transform:
    """Several mirrors as one, the first one first."""
    steps = [_on_device(mirror, device) for mirror in mirrors]
    return lambda x: reduce(lambda seen, mirror: mirror(seen), steps, x)


class Image:
    """One mirror image: one symmetry, or several one after the other."""

    def __init__(self, symmetries: Sequence[Symmetry], spec: EnvSpec, groups: Sequence[str]) -> None:
        self.name = " and ".join(symmetry.name for symmetry in symmetries)
        self.on_obs = {name: _chain([symmetry.obs[name] for symmetry in symmetries], spec.device) for name in groups}
        self.on_action = _chain([symmetry.action for symmetry in symmetries], spec.device)
        self.single = isinstance(spec.action, Discrete)
        self.nvec = () if isinstance(spec.action, Continuous) else spec.action.nvec

    def obs(self, obs: Obs) -> Obs:
        """Mirrored observations; groups that no network reads stay as they are."""
        return obs | {name: mirror(obs[name]) for name, mirror in self.on_obs.items()}

    def action(self, action: Tensor) -> Tensor:
        """Mirrored actions, in the form in which they are stored."""
        if not self.nvec:
            return self.on_action(action)
        heads = action.unsqueeze(-1) if self.single else action
        # Compared, for `one_hot` asks the host whether all are in range.
        hot = [heads[..., k, None] == torch.arange(n, device=action.device) for k, n in enumerate(self.nvec)]
        chosen = [head.int().argmax(-1) for head in self.on_action(torch.cat(hot, -1)).split(self.nvec, -1)]
        return chosen[0] if self.single else torch.stack(chosen, -1)


class Symmetries(Extension):
    """Mirrors minibatches by `augment`, and compares actions with mirrored ones by `loss`."""

    def __init__(
        self, config: SymmetryConfig, symmetries: Sequence[Symmetry], spec: EnvSpec, model: ActorCritic
    ) -> None:
        super().__init__()
        self.config, self.distribution = config, model.policy.distribution
        self.model = [model]  # in a list, or its parameters would be saved as this module's
        groups = sorted({*model.policy.reads, *model.critic.network.groups})
        for symmetry in symmetries:
            check_symmetry(symmetry, spec, groups)
        several = chain(*(combinations(symmetries, count) for count in range(1, len(symmetries) + 1)))
        self.each = [Image(chosen, spec, groups) for chosen in several]
        """The images, those by one symmetry first."""
        for image in self.each[: len(symmetries)]:
            self._check_actions(image, spec)
        # The memory that the networks would have, had they seen the mirror image; buffers, as it outlives a rollout.
        self.memory = [
            tuple(network.initial_state(spec.num_envs) for network in (model.actor.network, model.critic.network))
            for _ in self.each
        ]
        for number, tensor in enumerate(tree_leaves(tuple(self.memory))):
            self.register_buffer(f"memory_{number}", tensor)

    def _check_actions(self, image: Image, spec: EnvSpec) -> None:
        """Refuse a mirror that the way from a sample to the environment's action does not keep."""
        if not isinstance(spec.action, Continuous):
            return
        drawn = torch.rand((64, spec.action.dim), generator=torch.Generator().manual_seed(0), device="cpu")
        sample, to_env = drawn.to(spec.device), self.distribution.to_env
        wrong = (to_env(image.action(sample)) - image.action(to_env(sample))).abs().amax(0) > 1e-4
        if wrong.any():
            i = int(wrong.int().argmax())
            bounds = f"{spec.action.low[i]}..{spec.action.high[i]}"
            raise UserError(
                f"symmetry {image.name!r}: action component {i} has bounds {bounds} that are not its mirror's, or "
                f"{type(self.distribution).__name__} cannot be mirrored"
            )

    def carry(self, rollout: Rollout[Any]) -> dict[str, Any]:
        """For each image: what the networks make of it before the update, and their memory before each row."""
        evaluates = self.config.augment and self.config.old_log_prob == "evaluated"
        if not evaluates and not tree_leaves(tuple(self.memory)):
            return {}
        images = zip(self.each, self.memory, strict=True)
        return {f"symmetry/{image.name}": self._carry(image, memory, rollout) for image, memory in images}

    @torch.no_grad()
    def _carry(self, image: Image, memory: tuple[State, State], rollout: Rollout[Any]) -> dict[str, Any]:
        (model,), reset = self.model, rollout.reset[:-1]
        obs = image.obs(tree_map(lambda x: x[:-1], rollout.obs))
        features, states = model.actor.network.unroll(obs, memory[0], reset)
        params = model.actor.read(features, obs)
        judged, critic_states = features, states
        if not model.shared_trunk:
            judged, critic_states = model.critic.network.unroll(obs, memory[1], reset)
        found = {"policy_state": _before(memory[0], states), "critic_state": _before(memory[1], critic_states)}
        tree_copy_(memory, tree_map(lambda rows: rows[-1], (states, critic_states)))
        if self.config.old_log_prob == "repeated":
            return found
        log_prob = self.distribution.log_prob(params, image.action(rollout.record.action))
        return found | {"log_prob": log_prob, "dist_params": params, "value": model.critic.head(judged)}

    def augment(self, batch: PPOBatch) -> PPOBatch:
        """The minibatch and its images, `[L, (1 + V) B, ...]`, originals first."""
        if not self.config.augment:
            return batch
        original = torch.ones_like(batch.valid) if batch.original is None else batch.original
        added = [replace(self._mirrored(batch, image), original=torch.zeros_like(original)) for image in self.each]
        return tree_map(lambda *x: torch.cat(x, 1), replace(batch, original=original), *added)

    def _mirrored(self, batch: PPOBatch, image: Image) -> PPOBatch:
        """An image of a minibatch; values, returns and advantages are those of the original."""
        carried = batch.carried.get(f"symmetry/{image.name}", {})
        memory = {name: tree_map(lambda x: x[:1], carried[name]) for name in carried if name.endswith("_state")}
        return replace(batch, obs=image.obs(batch.obs), action=image.action(batch.action), **carried | memory)

    def loss(self, batch: PPOBatch, output: ModelOutput) -> Metrics:
        """How far the policy is from being symmetric, `[L, B]`: reported, and with a weight a term of the loss."""
        assert output.dist_params is not None
        if self.config.augment:
            first, *images = output.dist_params.chunk(1 + len(self.each), 1)
        else:
            (model,), first, images = self.model, output.dist_params, []
            for mirrored in (self._mirrored(batch, image) for image in self.each):
                state = tree_map(lambda x: x[0], mirrored.policy_state)
                images.append(model.actor(mirrored.obs, state, batch.reset)[0])
        wanted = self.choice(first).detach()
        errors = [
            (self.choice(params) - image.on_action(wanted)).square().mean(-1)
            for params, image in zip(images, self.each, strict=True)
        ]
        error = torch.stack(errors).mean(0)
        if self.config.augment:  # every row has the error of its original, so that the mean stays the same
            error = error.repeat(1, 1 + len(self.each))
        reported = {"policy/asymmetry": error.detach()}
        return reported | {"loss/mirror": self.config.mirror_loss * error} if self.config.mirror_loss else reported

    def choice(self, params: Tensor) -> Tensor:
        """What a policy does `[..., D]`, as a mirror takes it: its mean, or the probabilities of all choices."""
        if not (nvec := self.each[0].nvec):
            return self.distribution.mode(params)
        return torch.cat([logits.softmax(-1) for logits in params.split(nvec, -1)], -1)


def _before(first: State, after: State) -> State:
    """Memory `[T, N, ...]` before each row, from that before the first one and that after each."""
    return tree_map(lambda x, rows: torch.cat([x.unsqueeze(0), rows[:-1]]), first, after)


def check_symmetry(symmetry: Symmetry, spec: EnvSpec, groups: Sequence[str]) -> None:
    """Refuse a declaration of the wrong shape, or one that does not undo itself, by the component that is wrong."""
    named, nvec = f"symmetry {symmetry.name!r}", () if isinstance(spec.action, Continuous) else spec.action.nvec
    mirrors = {"the action": (symmetry.action, spec.action.dim if isinstance(spec.action, Continuous) else sum(nvec))}
    for name in groups:
        what = f"observation group {name!r}"
        if name not in symmetry.obs:
            raise UserError(f"{named} says nothing of {what}, which a network reads")
        mirrors[what] = symmetry.obs[name], spec.obs[name].shape[-1] if spec.obs[name].shape else 1
    for what, (mirror, size) in mirrors.items():
        signs = mirror.sign if isinstance(mirror, Mirror) else (1,) * size
        if len(signs) != size:
            raise UserError(f"{named}: {what} has {size} components, its mirror {len(signs)}")
        if what == "the action" and nvec and -1 in signs:
            raise UserError(f"{named}: choice {signs.index(-1)} of the action cannot have the sign -1")
        probe = torch.rand((8, size), generator=torch.Generator().manual_seed(0), device="cpu") + 0.5
        twice = mirror(mirror(probe))
        if twice.shape != probe.shape:
            raise UserError(f"{named}: {what} changes its shape, {tuple(twice.shape)}")
        wrong = ((twice - probe).abs() > 1e-5).any(0)
        if wrong.any():
            raise UserError(f"{named}: mirroring {what} twice does not give component {int(wrong.int().argmax())} back")
