"""Masks x memory x multi-discrete x asymmetric x Dict x agents: every combination, held to exact invariants."""

from dataclasses import replace

import pytest
import torch

from canter.algorithms.ppo import PPOConfig
from canter.core.specs import ACTION_MASK, Continuous, MultiDiscrete, TensorSpec
from canter.core.struct import tree_map
from canter.envs.tensor.base import Outcome, TensorEnv
from canter.envs.tensor.games import ALIVE, REWARD, FoldAgents
from canter.nn.actor_critic import ModelConfig
from canter.nn.network import NetworkConfig
from canter.nn.rnn import RNNConfig
from canter.training.collector import Collector
from covering import pairwise

AXES = ("masks", "memory", "multi_discrete", "asymmetric", "dict_obs")
HORIZON, SEQUENCE, EPOCHS, MINIBATCHES, WORLDS = 12, 4, 2, 3, 6


class Chaos(TensorEnv):
    """Worlds where everything is drawn at random; the first number that an agent sees is never seen again."""

    def __init__(self, agents, masks, multi_discrete, asymmetric, dict_obs):
        heads = (3, 2) if multi_discrete else (4,)
        self.agents, self.heads, self.calls = agents, heads, 0
        groups = {"eyes": 3, "ears": 2} if dict_obs else {"policy": 4}
        groups |= {"critic": 5} if asymmetric else {}
        obs = {name: TensorSpec((agents, width)) for name, width in groups.items()}
        if masks:
            obs[ACTION_MASK] = TensorSpec((agents, sum(heads)), torch.bool)
        action = MultiDiscrete(heads * agents)
        if not (masks or multi_discrete):
            action = Continuous((-1.0,) * 2 * agents, (1.0,) * 2 * agents)
        super().__init__("tensor:chaos", WORLDS, "cpu", obs, action, max_episode_steps=7)

    def _sample_state(self):
        return {"alive": torch.ones(WORLDS, self.agents, dtype=torch.bool)}

    def _advance(self, state, action):
        alive = state["alive"] & (self._uniform(0, 1, self.agents) > 0.15)
        reward = self._uniform(-10, 50, self.agents)
        return Outcome({"alive": alive}, reward.sum(1), ~alive.any(1), info={REWARD: reward, ALIVE: alive})

    def _observe(self, state):
        rows = WORLDS * self.agents
        self.calls += 1
        obs = {name: self._uniform(-5, 20, *spec.shape) for name, spec in self.spec.obs.items() if name != ACTION_MASK}
        tag = self.calls * rows + torch.arange(rows, dtype=torch.float32)
        obs[next(iter(obs))][..., 0] = tag.view(WORLDS, self.agents)
        if ACTION_MASK in self.spec.obs:
            mask = self._uniform(0, 1, self.agents, sum(self.heads)) < 0.5
            mask[..., [sum(self.heads[:i]) for i in range(len(self.heads))]] = True
            obs[ACTION_MASK] = mask
        return obs


class WithFillers:
    """The other convention: the last observation is the next row's own, and the row after an end only resets."""

    def __init__(self, env):
        self.env, self.spec = env, replace(env.spec, final_obs="in_place")
        self.pending = torch.zeros(env.spec.num_envs, dtype=torch.bool)

    def reset(self, seed=None):
        return self.env.reset(seed)

    def step(self, action):
        step, filler = self.env.step(action), self.pending
        done = (step.terminated | step.truncated) & ~filler
        self.pending = done
        last = tree_map(lambda x, end: torch.where(done.view(-1, 1), end, x), step.obs, step.final_obs)
        return replace(
            step,
            obs=last,
            reward=step.reward.masked_fill(filler, 0.0),
            terminated=step.terminated & ~filler,
            truncated=step.truncated & ~filler,
            valid=~filler,
            final_obs=None,
        )

    def close(self):
        pass


def build(agents, masks, memory, multi_discrete, asymmetric, dict_obs):
    env = FoldAgents(Chaos(agents, masks, multi_discrete, asymmetric, dict_obs), agents)
    # Rows that are not valid come in two kinds: dead agents, and with one agent those that only reset.
    env = WithFillers(env) if agents == 1 else env
    network = NetworkConfig(hidden=(8,), rnn=RNNConfig(hidden=5) if memory else None)
    config = PPOConfig(
        horizon=HORIZON,
        sequence_length=SEQUENCE,
        epochs=EPOCHS,
        num_minibatches=MINIBATCHES,
        model=ModelConfig(policy=network),
    )
    algorithm = config.build(env.spec, seed=0)
    return algorithm, Collector(env, algorithm, seed=0)


def tags(obs):
    return next(iter(obs.values()))[..., 0]


def check_ratio(algorithm, batch):
    """Before any step the probabilities are those that acted, to rounding."""
    with torch.no_grad():
        states = [tree_map(lambda x: x[0], state) for state in (batch.policy_state, batch.critic_state)]
        params, _ = algorithm.model(batch.obs, *states, batch.reset)
        ratio = torch.exp(algorithm.distribution.log_prob(params, batch.action) - batch.log_prob)
    assert (ratio - 1).abs().max() < 1e-5


def check_accounting(seen, rollout):
    """Every valid row exactly once per epoch, and no other row counts."""
    expected = tags(rollout.obs)[:-1][rollout.valid].sort().values
    for epoch in range(EPOCHS):
        minibatches = seen[epoch * MINIBATCHES : (epoch + 1) * MINIBATCHES]
        used = torch.cat([tags(batch.obs)[batch.valid] for batch in minibatches])
        assert torch.equal(used.sort().values, expected)
        assert sum(batch.valid.numel() for batch in minibatches) == rollout.valid.numel()


def gradients(algorithm, batch):
    algorithm.model.zero_grad(set_to_none=True)
    algorithm.engine.evaluate(batch, algorithm.coefs).loss.backward()
    return [parameter.grad.clone() for parameter in algorithm.model.parameters()]


def check_masked_rows(algorithm, batch):
    """Check that invalid samples have no gradient, and that their content changes no gradient by a bit."""
    spoiled = {name: spoil(getattr(batch, name), batch.valid) for name in ("value", "return_", "advantage", "log_prob")}
    observed = {name: x if name == ACTION_MASK else spoil(x, batch.valid) for name, x in batch.obs.items()}
    # Filler rows are read by a memory that has seen them before the reset; what they show must not matter either.
    clean, dirty = gradients(algorithm, batch), gradients(algorithm, replace(batch, obs=observed, **spoiled))
    assert any(gradient.abs().max() > 0 for gradient in clean)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
    leaves = {name: x if name == ACTION_MASK else x.clone().requires_grad_() for name, x in batch.obs.items()}
    algorithm.engine.evaluate(replace(batch, obs=leaves), algorithm.coefs).loss.backward()
    for leaf in leaves.values():
        if leaf.requires_grad and leaf.grad is not None:
            assert (leaf.grad[~batch.valid] == 0).all()


def spoil(x, valid):
    rows = valid.view(*valid.shape, *[1] * (x.ndim - valid.ndim))
    return torch.where(rows, x, x + 3.0)


@pytest.mark.parametrize(("agents", *AXES), pairwise((1, 2), *[(False, True)] * len(AXES)))
def test_every_combination_learns_exactly_from_its_valid_samples(
    agents, masks, memory, multi_discrete, asymmetric, dict_obs
):
    algorithm, collector = build(agents, masks, memory, multi_discrete, asymmetric, dict_obs)
    algorithm.use_engine("autograd")
    seen, total = [], 0
    learn = algorithm.engine.evaluate

    def watched(minibatch, coefs):
        if not seen:
            check_ratio(algorithm, minibatch)
        seen.append(minibatch)
        return learn(minibatch, coefs)

    algorithm.engine.evaluate = watched
    for _ in range(3):
        rollout = collector.collect()
        assert (~rollout.valid).any() and rollout.terminated.any()
        check_masked_rows(algorithm, algorithm.batch(rollout, algorithm.estimator(rollout)))
        seen.clear()
        metrics = algorithm.update(rollout)
        check_accounting(seen, rollout)
        assert all(torch.isfinite(value) for value in metrics.values())
        assert metrics["optim/minibatch_updates"] == EPOCHS * MINIBATCHES
        total += int(rollout.valid.sum())
        assert collector.read_episodes().env_steps == rollout.valid.sum()
        for statistics in (algorithm.model.actor.network.normalizers[0], algorithm.model.critic.head.normalizer):
            assert statistics.count == total
        if ACTION_MASK in rollout.obs:
            assert allowed(rollout, collector.env.spec.action).all()


def allowed(rollout, action):
    heads = action.nvec if isinstance(action, MultiDiscrete) else (action.n,)
    taken = rollout.record.action.view(*rollout.valid.shape, len(heads))
    parts = rollout.obs[ACTION_MASK][:-1].split(heads, dim=-1)
    return torch.cat([part.gather(-1, taken[..., i : i + 1]) for i, part in enumerate(parts)], -1)
