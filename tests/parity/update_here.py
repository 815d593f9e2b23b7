"""The updates of `update_cases.py` by Canter."""

import numpy as np
import torch
from update_cases import ACTIONS, CHOICES, ITERATIONS, OBS, STATES, N, T, first_value, order, rollouts

import canter
from canter.core.data.rollout import Rollout
from canter.core.plain import from_plain, nest
from canter.core.specs import ACTION_MASK
from canter.engines.base import PPORecord
from canter.functional import optimization as functional_order
from canter.nn.distributions import Beta
from canter.nn.normalizer import Normalizer


def learn(case, engine, monkeypatch):
    """Return parameters, statistics and the learning rate after the iterations, named as in `parents.py`."""
    data, spec = rollouts(case), spec_of(case)
    algorithm = from_plain(nest(dict(case["here"]), {}), canter.PPOConfig()).build(spec, 0)
    algorithm.use_engine(engine)
    parameters = named(algorithm.model) | curious(algorithm)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(first_value(name, tuple(parameter.shape))))
    state, rollout = algorithm.policy.initial_state(N), None
    curiosity = {"rnd_loss": [], "rnd_bonus": []} if algorithm.config.extensions else {}
    for iteration in range(ITERATIONS):
        rollout, state = collect(algorithm, data, iteration, state, rollout)
        monkeypatch.setattr(functional_order, "permutation", drawn(iteration, algorithm.config.num_minibatches))
        metrics = algorithm.update(rollout)
        for name, numbers in curiosity.items():
            numbers.append(metrics[name.replace("rnd_loss", "loss/rnd").replace("rnd_bonus", "rnd/bonus")].item())
    rate = algorithm.optimizers["policy"].groups
    found = {name: p.detach().double().flatten().numpy() for name, p in parameters.items()}
    found |= statistics(algorithm.model) | {"learning_rate": next(iter(rate.values())).learning_rate.view(1).numpy()}
    return found | curiosity


def curious(algorithm):
    """Parameters of the curiosity's networks, by the same names."""
    networks = [(f"rnd_{n}", getattr(e, n)) for e in algorithm.extensions for n in ("predictor", "target")]
    layers = [(name, [m for m in net.modules() if isinstance(m, torch.nn.Linear)]) for name, net in networks]
    return {
        f"{n}.{i}.{part}": getattr(layer, part) for n, row in layers for i, layer in enumerate(row) for part in PARTS
    }


def spec_of(case):
    groups = {"policy": canter.TensorSpec((OBS,))}
    if any(key.startswith("model.critic") for key in case["here"]):
        groups["critic"] = canter.TensorSpec((STATES,))
    choices = CHOICES.get(case["action"])
    if case["theirs"].get("use_action_masks"):
        groups[ACTION_MASK] = canter.TensorSpec((sum(choices),), torch.bool)
    action = canter.Continuous((-1.0,) * ACTIONS, (1.0,) * ACTIONS)
    if choices:
        action = canter.MultiDiscrete(tuple(choices)) if len(choices) > 1 else canter.Discrete(choices[0])
    agents = case["theirs"].get("agents", 1)
    return canter.EnvSpec(groups, action, N, final_obs="unknown", truncates=True, num_agents=agents)


def collect(algorithm, data, iteration, state, before):
    """A rollout of what was recorded, with samples that the policy would have drawn from the recorded noise."""
    here = slice(iteration * T, (iteration + 1) * T)
    obs = {
        "policy": data["obs"],
        "critic": data["states"],
        ACTION_MASK: np.concatenate([data["mask"], data["mask"][:1]]),
    }
    obs = {name: torch.from_numpy(obs[name][here.start : here.stop + 1]) for name in algorithm.spec.obs}
    record = algorithm.empty_record()
    first = {name: rows[0] for name, rows in obs.items()}
    length = algorithm.sequence_length
    rollout = Rollout.allocate(T, first, record, algorithm.spec, state, length)
    for name, rows in obs.items():
        rollout.obs[name].copy_(rows)
    for name in ("reward", "terminated", "truncated"):
        getattr(rollout, name).copy_(torch.from_numpy(data[name][here]))
    rollout.valid.fill_(True)
    if before is not None:
        rollout.reset[0].copy_(before.reset[T])
    rollout.mark_resets("unknown")
    for t in range(T):
        rollout.store_state(t, state, length)
        params, state = algorithm.policy.params(rollout.obs_at(t), state, rollout.reset[t])
        action = torch.from_numpy(data["choices"][here][t]).squeeze(-1)
        if isinstance(algorithm.policy.distribution, Beta):
            action = torch.sigmoid(torch.from_numpy(data["noise"][here][t]))
        elif case_is_continuous(algorithm):
            mean, log_std = params.chunk(2, -1)
            action = mean + torch.exp(log_std) * torch.from_numpy(data["noise"][here][t])
        step = PPORecord(action.detach(), params.detach())
        rollout.record.action[t].copy_(step.action)
        rollout.record.dist_params[t].copy_(step.dist_params)
    return rollout, tuple(tuple(part.detach() for part in layer) for layer in state)


def case_is_continuous(algorithm):
    return isinstance(algorithm.spec.action, canter.Continuous)


def drawn(iteration, num_minibatches):
    """The recorded order of those rows that make whole minibatches, and behind them the others."""

    def permutation(count, generator):
        used = count // num_minibatches * num_minibatches
        return torch.from_numpy(np.concatenate([order(iteration, used), np.arange(used, count)]))

    return permutation


def named(model):
    """Parameters by the names that all libraries share."""
    networks = {"policy": model.actor.network} | ({} if model.shared_trunk else {"critic": model.critic.network})
    found = {}
    for name, network in networks.items():
        layers = [layer for layer in network.hidden if isinstance(layer, torch.nn.Linear)]
        found |= {f"{name}.{i}.{part}": getattr(layer, part) for i, layer in enumerate(layers) for part in PARTS}
        found |= {f"{name}.rnn.{n.removeprefix('cells.')}": p for n, p in network.memory.named_parameters()}
    head = model.actor.head
    heads = {"head": getattr(head, "mean", None) or head.linear, "value": model.critic.head.linear}
    heads |= {"trunk_value": model.trunk_value.linear} if model.trunk_value is not None else {}
    std = getattr(head, "raw_std", None)
    heads |= {"std_head": std} if isinstance(std, torch.nn.Linear) else {}
    found |= {f"{name}.{part}": getattr(layer, part) for name, layer in heads.items() for part in PARTS}
    return found | ({"std": std} if isinstance(std, torch.Tensor) else {})


PARTS = ("weight", "bias")


def statistics(model):
    networks = {"policy": model.actor.network} | ({} if model.shared_trunk else {"critic": model.critic.network})
    found = {}
    for name, network in networks.items():
        (normalizer,) = network.normalizers
        if isinstance(normalizer, Normalizer):
            found[f"{name}.obs_mean"] = normalizer.mean.numpy()
            found[f"{name}.obs_variance"] = (normalizer.m2 / normalizer.count).numpy()
    normalizer = model.critic.head.normalizer
    if isinstance(normalizer, Normalizer):
        found["value_mean"] = normalizer.mean.view(1).numpy()
        found["value_variance"] = (normalizer.m2 / normalizer.count).view(1).numpy()
    return found
