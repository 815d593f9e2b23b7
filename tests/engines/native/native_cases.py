"""Models, batches and the plain definition that the native engine is held against."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch

from canter.core.specs import ACTION_MASK, Continuous, Discrete, EnvSpec, MultiDiscrete, TensorSpec
from canter.core.struct import tree_map
from canter.engines import base
from canter.engines.autograd import AutogradEngine
from canter.engines.base import PPOBatch, unsupported_reason
from canter.engines.native.engine import NativeEngine
from canter.nn.actor_critic import ModelConfig
from canter.nn.network import NetworkConfig
from canter.nn.optimizer import Optimizer

ACTIONS = {
    "gaussian": Continuous((-2.0, -1.0, -0.5), (2.0, 3.0, float("inf"))),
    "one_gaussian": Continuous((-1.0,), (1.0,)),
    "tanh_gaussian": Continuous((-2.0, -1.0, -0.5), (2.0, 3.0, 1.0)),
    "beta": Continuous((-2.0, -1.0), (2.0, 3.0)),
    "categorical": Discrete(5),
    "multi_categorical": MultiDiscrete((3, 2, 4)),
}
GROUPS = {"policy": TensorSpec((7,))}


@dataclass(frozen=True, kw_only=True)
class PPOLoss(base.PPOLoss):
    """With defaults, for tests."""

    surrogate: Any = "clipped"
    clip_ratio: float = 0.2
    value_loss: Any = "mse"
    value_clip: float = 0.2
    value_coef: float = 0.7
    advantage: Any = "given"


def engine_of(model, gradients, threads=1, loss=None, **settings):
    """The engine, and as many threads from now on."""
    torch.set_num_threads(threads)
    return NativeEngine(loss or PPOLoss(**settings), model, cast(Optimizer, SimpleNamespace(gradients=gradients)))


def refusal(loss, model):
    """Why the engine refuses a loss of a model; None where it does not."""
    return unsupported_reason(NativeEngine.capabilities, loss, model)


def means_of(result):
    """Metrics of a minibatch, with its KL where it has one."""
    return result.metrics | ({} if result.kl is None else {"policy/kl": result.kl})


def coefs(entropy, dtype=torch.float64):
    return base.Coefs(entropy=torch.tensor(entropy, dtype=dtype))


def build(action="gaussian", groups=GROUPS, network=None, critic=None, dtype=torch.float64, masked=False, **settings):
    """A model whose normalisers have seen something, with the gradients' views in one flat vector."""
    torch.manual_seed(0)
    action_spec = ACTIONS[action]
    if masked:
        choices = action_spec.n if isinstance(action_spec, Discrete) else sum(action_spec.nvec)
        groups = {**groups, ACTION_MASK: TensorSpec((choices,), torch.bool)}
    if action in ("tanh_gaussian", "beta"):
        settings |= {"distribution": action}
    config = ModelConfig(policy=network or NetworkConfig(hidden=(16, 9)), critic=critic, policy_gain=1.0, **settings)
    model = config.build(EnvSpec(groups, action_spec, 6)).to(dtype)
    rows = observations(groups, (40, 6), dtype, action_spec)
    model.update_statistics(rows, torch.ones(40, 6, dtype=torch.bool))
    with torch.no_grad():
        for parameter in model.parameters():  # biases and layer norms begin where half of the mistakes cannot be seen
            parameter.add_(0.1 * torch.randn_like(parameter))
    flat = torch.full((sum(p.numel() for p in model.parameters()),), torch.nan, dtype=dtype)
    views = flat.split([p.numel() for p in model.parameters()])
    return model, {p: view.view_as(p) for p, view in zip(model.parameters(), views, strict=True)}


def observations(groups, leading, dtype, action_spec: Any = None):
    """Random groups of leading shape; every choice of a mask has an allowed option."""
    obs = {n: (torch.randn(*leading, *s.shape, dtype=dtype) * 3 + 1) for n, s in groups.items() if n != ACTION_MASK}
    if ACTION_MASK in groups:
        mask = torch.rand(*leading, *groups[ACTION_MASK].shape) < 0.6
        first = 0
        for size in (action_spec.n,) if isinstance(action_spec, Discrete) else action_spec.nvec:
            mask[..., first] = True
            first += size
        obs[ACTION_MASK] = mask
    return obs


def make_batch(model, rows, dtype=torch.float64, valid="all"):
    """Rows of a policy that has moved since, some of them beyond the clips."""
    spec, distribution = model.policy.spec, model.policy.distribution
    obs = observations(spec.obs, (1, rows), dtype, spec.action)
    with torch.no_grad():
        params, value = model(obs, (), (), None)
        old = params + 0.1 * torch.randn_like(params)
        if model.actor.masked:
            old = torch.where(obs[ACTION_MASK], old, params)
        action = distribution.sample(old)
        log_prob = distribution.log_prob(old, action)
    keep = {"all": torch.ones(1, rows) > 0, "none": torch.ones(1, rows) < 0, "some": torch.rand(1, rows) < 0.6}[valid]
    value = value + 0.3 * torch.randn_like(value)
    batch = PPOBatch(
        obs=obs,
        action=action,
        log_prob=log_prob,
        dist_params=old,
        value=value,
        return_=value + torch.randn_like(value),
        advantage=torch.randn(1, rows, dtype=dtype) * 2 + 0.5,
        valid=keep,
        reset=torch.zeros(1, rows, dtype=torch.bool),
        policy_state=(),
        critic_state=(),
    )
    return batch


def recurrent_batch(model, length, sequences, dtype=torch.float64, valid="all"):
    """Sequences `[L, S]` from states within an episode, in which others begin; the policy has moved since."""
    spec, distribution = model.policy.spec, model.policy.distribution
    obs = observations(spec.obs, (length, sequences), dtype, spec.action)
    states = [
        tree_map(lambda x: torch.randn_like(x, dtype=dtype) * 0.5, network.initial_state(sequences))
        for network in (model.actor.network, model.critic.network)
    ]
    if model.shared_trunk:
        states[1] = states[0]
    reset = torch.rand(length, sequences) < 0.2
    with torch.no_grad():
        params, value = model(obs, *states, reset)
        old = params + 0.1 * torch.randn_like(params)
        action = distribution.sample(old)
        log_prob = distribution.log_prob(old, action)
    shape = (length, sequences)
    keep = {"all": torch.ones(shape) > 0, "none": torch.ones(shape) < 0, "some": torch.rand(shape) < 0.6}[valid]
    value = value + 0.3 * torch.randn_like(value)
    return PPOBatch(
        obs=obs,
        action=action,
        log_prob=log_prob,
        dist_params=old,
        value=value,
        return_=value + torch.randn_like(value),
        advantage=torch.randn(shape, dtype=dtype) * 2 + 0.5,
        valid=keep,
        reset=reset,
        policy_state=tree_map(lambda x: x.unsqueeze(0), states[0]),
        critic_state=tree_map(lambda x: x.unsqueeze(0), states[1]),
    )


def spoil(batch, row_is_bad):
    """The same batch with NaN, and actions that do not exist, in some rows `[1, S]`."""

    def nan(x):
        bad = row_is_bad.reshape(row_is_bad.shape + (1,) * (x.ndim - 2))
        if x.is_floating_point():
            return torch.where(bad, torch.nan, x)
        return torch.where(bad, 10**9, x) if x.dtype == torch.int64 else x

    valid = batch.valid
    batch = batch.map(nan)
    batch.valid = valid
    return batch


def definition_engine(model, loss=None):
    """The definition, without an optimizer."""
    return AutogradEngine(loss or PPOLoss(), model, cast(Optimizer, None))


def definition(loss, model, batch, entropy_coef):
    """Means over the valid rows and all gradients of their weighted sum, by the engine that is the definition."""
    dtype = next(model.parameters()).dtype
    output = definition_engine(model, loss).evaluate(batch, coefs(entropy_coef, dtype))
    gradients = torch.autograd.grad(output.loss, list(model.parameters()), materialize_grads=True)
    means = output.measured().metrics | ({} if output.kl is None else {"policy/kl": output.kl.detach()})
    return means, dict(zip(model.parameters(), gradients, strict=True))


def valid_rows(batch, index):
    """The batch of some rows, with what is not valid taken out before anything looks at it."""
    index = index[batch.valid[0, index]]
    return batch.map(lambda x: x[:, index])
