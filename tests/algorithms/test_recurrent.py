"""Recurrent PPO: what memory adds, exactly."""

from dataclasses import replace

import pytest
import torch

from canter.algorithms.ppo import CentralValueConfig, PPOConfig
from canter.core.struct import tree_leaves, tree_map
from canter.engines.autograd import AutogradEngine
from canter.envs.gymnasium import make_gymnasium
from canter.envs.tensor import tensor_envs
from canter.nn.actor_critic import ModelConfig
from canter.nn.distributions import Categorical
from canter.nn.network import NetworkConfig
from canter.nn.rnn import RNNConfig
from canter.training.collector import Collector

LSTM = NetworkConfig(hidden=(8,), rnn=RNNConfig(hidden=6))
GRU = NetworkConfig(hidden=(8,), rnn=RNNConfig(cell="gru", hidden=5, position="after_mlp"))
PLAIN = NetworkConfig(hidden=(8,))

MODELS = {
    "both": ModelConfig(policy=LSTM, critic=GRU),
    "policy only": ModelConfig(policy=GRU, critic=PLAIN),
    "critic only": ModelConfig(policy=PLAIN, critic=LSTM),
    "shared trunk": ModelConfig(policy=LSTM, shared_trunk=True),
}


def build(model, *, horizon=16, num_envs=6, env=None, **settings):
    env = env or tensor_envs["probe-recall"](num_envs)
    config = PPOConfig(**{"horizon": horizon, "sequence_length": 4, "num_minibatches": 3, "model": model} | settings)
    algorithm = config.build(env.spec, seed=0)
    return env, algorithm, Collector(env, algorithm, seed=0)


def perturb(algorithm):
    """Move the weights away from their start, where a small last layer hides errors."""
    generator = torch.Generator().manual_seed(3)
    for parameter in algorithm.model.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("name", MODELS)
def test_the_first_ratio_is_one_and_values_are_those_of_the_estimator(name):
    _, algorithm, collector = build(MODELS[name], advantage_normalization="none")
    perturb(algorithm)
    for _ in range(3):  # memory runs on from one rollout to the next
        rollout = collector.collect()
        batch, targets = algorithm.prepare_batch(rollout)
        states = [tree_map(lambda x: x[0], state) for state in (batch.policy_state, batch.critic_state)]
        params, value = algorithm.model(batch.obs, *states, batch.reset)
        log_prob = algorithm.distribution.log_prob(params, batch.action)
        assert (torch.exp(log_prob - batch.log_prob) - 1).abs().max() < 2e-6
        assert (value - batch.value).abs().max() < 2e-5
        algorithm.estimator.advance(targets)


@pytest.mark.parametrize("name", MODELS)
def test_two_rollouts_are_one_of_twice_the_length_with_the_same_weights(name):
    _, short, short_collector = build(MODELS[name], horizon=8)
    _, long, long_collector = build(MODELS[name], horizon=16)
    perturb(short)
    perturb(long)
    values, states = [], []
    for _ in range(2):
        rollout = short_collector.collect()
        targets = short.estimator(rollout)
        short.estimator.advance(targets)
        values.append(targets.value)
        states.append(tree_map(lambda x: x.clone(), (rollout.state, targets.state)))
    rollout = long_collector.collect()
    targets = long.estimator(rollout)
    torch.testing.assert_close(torch.cat(values), targets.value, atol=1e-6, rtol=0)
    joined = tree_map(lambda *parts: torch.cat(parts), *states)
    tree_map(lambda a, b: torch.testing.assert_close(a, b, atol=1e-6, rtol=0), joined, (rollout.state, targets.state))


def test_an_update_carries_the_critics_state_to_the_next_rollout():
    _, algorithm, collector = build(MODELS["critic only"])
    for _ in range(2):
        rollout = collector.collect()
        expected = algorithm.estimator(rollout).last_state
        assert all(leaf.abs().min() > 0 for leaf in tree_leaves(expected))
        algorithm.update(rollout)
        tree_map(torch.testing.assert_close, algorithm.estimator.state, expected)


def test_judging_twice_changes_nothing():
    _, algorithm, collector = build(MODELS["both"])
    rollout = collector.collect()
    first, second = algorithm.estimator(rollout), algorithm.estimator(rollout)
    tree_map(lambda a, b: torch.testing.assert_close(a, b, atol=0, rtol=0), first, second)


def test_a_truncated_episode_is_bootstrapped_with_its_recurrent_state():
    """Row by row by hand: the final observation is read after the episode's own rows, and leaves no trace."""
    env = tensor_envs["cartpole"](4, max_episode_steps=5)
    _, algorithm, collector = build(MODELS["both"], env=env, num_minibatches=4, gamma=0.9, gae_lambda=0.0)
    perturb(algorithm)
    rollout = collector.collect()
    targets = algorithm.estimator(rollout)
    assert rollout.truncated.any()
    critic = algorithm.model.critic
    for n in range(4):
        state = critic.network.initial_state(1)
        for t in range(rollout.horizon):
            if rollout.reset[t, n]:
                state = critic.network.initial_state(1)
            _, state = critic({"policy": rollout.obs["policy"][t, n].view(1, 1, -1)}, state, None)
            following = rollout.final_obs if rollout.done[t, n] else tree_map(lambda x: x[1:], rollout.obs)
            assert following is not None
            normalised, _ = critic({"policy": following["policy"][t, n].view(1, 1, -1)}, state, None)
            bootstrap = 0.0 if rollout.terminated[t, n] else critic.head.normalizer.inverse(normalised).item()
            target = rollout.reward[t, n].item() + 0.9 * bootstrap
            assert targets.return_[t, n].item() == pytest.approx(target, abs=1e-5)


def test_recurrent_state_is_alike_in_both_autoreset_modes(monkeypatch):
    """SAME_STEP returns the final observation with the step, NEXT_STEP as the next; states are equal."""
    # Without noise: the modes differ in how many random numbers they use.
    monkeypatch.setattr(Categorical, "sample", lambda self, params, generator: self.mode(params))
    values = {}
    for mode in ("same_step", "next_step"):
        env = make_gymnasium("CartPole-v1", 1, autoreset=mode, max_episode_steps=7)
        _, algorithm, collector = build(MODELS["both"], env=env, horizon=32, num_minibatches=1)
        algorithm.use_engine("autograd")  # C draws its actions itself
        perturb(algorithm)
        rollout = collector.collect()
        targets = algorithm.estimator(rollout)
        real = rollout.valid[:, 0]
        values[mode] = (rollout.record.dist_params[real][:, 0], targets.value[real][:, 0], targets.return_[real][:, 0])
        env.close()
    rows = min(len(part[0]) for part in values.values())
    finished = rows - rows % 7  # later rows are bootstrapped from where the shorter rollout ended
    for a, b in zip(values["same_step"][:2], values["next_step"][:2], strict=True):
        torch.testing.assert_close(a[:rows], b[:rows], atol=1e-6, rtol=0)
    a, b = values["same_step"][2], values["next_step"][2]
    torch.testing.assert_close(a[:finished], b[:finished], atol=1e-5, rtol=0)


def test_a_central_value_network_is_trained_apart_from_the_policy():
    central = CentralValueConfig(epochs=3, num_minibatches=2)
    _, algorithm, collector = build(MODELS["both"], epochs=2, central_value=central)
    metrics = algorithm.update(collector.collect())
    assert metrics["optim/minibatch_updates"].item() == 2 * 3
    assert metrics["central_value/minibatch_updates"].item() == 3 * 2
    trained = {
        name: {id(p) for group in phase.optimizer.groups.values() for p in group.parameters}
        for name, phase in algorithm.phases.items()
    }
    assert trained["policy"] == {id(p) for p in algorithm.model.actor.parameters()}
    assert trained["central_value"] == {id(p) for p in algorithm.model.critic.parameters()}


def test_the_phases_of_a_central_value_have_no_gradient_for_each_other():
    _, algorithm, collector = build(MODELS["both"], central_value=CentralValueConfig())
    algorithm.use_engine("autograd")
    batch, _ = algorithm.prepare_batch(collector.collect())
    for engine, own, other in (
        (algorithm.engine, algorithm.model.actor, algorithm.model.critic),
        (algorithm.estimator.engine, algorithm.model.critic, algorithm.model.actor),
    ):
        algorithm.model.zero_grad(set_to_none=True)
        assert isinstance(engine, AutogradEngine)
        engine.evaluate(batch, algorithm.coefs).loss.backward()
        assert all(p.grad is not None for p in own.parameters())
        assert all(p.grad is None for p in other.parameters())


def test_a_central_value_learns_exactly_what_a_joint_critic_would():
    """With one pass in the same minibatches, and clipping out of the way, both see the same rows and losses."""
    settings = {"epochs": 1, "num_minibatches": 1, "gradient_clipping": "per_network"}
    _, joint, collector = build(MODELS["both"], value_coef=1.0, **settings)
    rollout = collector.collect()
    central = replace(CentralValueConfig(), epochs=1, num_minibatches=1)
    _, apart, _ = build(MODELS["both"], central_value=central, **settings)
    joint.update(rollout)
    apart.update(rollout)
    for a, b in zip(joint.model.parameters(), apart.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_a_sequence_length_that_does_not_divide_the_horizon_offers_the_nearest():
    with pytest.raises(
        ValueError, match=r"sequence_length=5 does not divide horizon=16; use sequence_length=4, or hori"
    ):
        build(MODELS["both"], sequence_length=5)
    build(ModelConfig(policy=PLAIN), sequence_length=5)  # has no effect without memory


def test_minibatches_are_counted_in_sequences():
    with pytest.raises(
        ValueError, match=r"num_minibatches=5 does not divide .* 16 \* 6 / 4 = 24; use num_minibatches=4 or"
    ):
        build(MODELS["both"], num_minibatches=5)
    with pytest.raises(ValueError, match="use num_minibatches=24, or"):
        build(MODELS["both"], num_minibatches=25)
    with pytest.raises(ValueError, match=r"central_value\.num_minibatches=7 does not divide"):
        build(MODELS["both"], central_value=CentralValueConfig(num_minibatches=7))


def test_a_central_value_leaves_no_room_for_a_second_owner_of_the_critic():
    with pytest.raises(ValueError, match=r"central_value .* excludes model\.shared_trunk"):
        PPOConfig(central_value=CentralValueConfig(), model=ModelConfig(shared_trunk=True))
