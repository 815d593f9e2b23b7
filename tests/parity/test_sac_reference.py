"""SAC of the library against the page that explains it: same weights, same rows, same noise."""

import importlib.util
import math
from pathlib import Path

import torch

from canter.algorithms.sac import SACConfig
from canter.core.data.replay import ReplayConfig
from canter.core.data.rollout import Rollout
from canter.core.specs import Continuous, EnvSpec, TensorSpec
from canter.nn.network import NetworkConfig
from canter.nn.optimizer import OptimizerConfig
from canter.nn.schedules import Constant
from canter.nn.stack import CriticConfig

UPDATES, BATCH, OBS, ACTION = 100, 32, 5, 2


def load_reference():
    path = Path(__file__).parents[2] / "reference" / "sac_single_file.py"
    spec = importlib.util.spec_from_file_location("sac_single_file", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reference = load_reference()
HIDDEN = (24, 16)


def library(config):
    adam = OptimizerConfig(learning_rate=Constant(config.learning_rate), eps=1e-8, max_grad_norm=math.inf)
    spec = EnvSpec(
        {"policy": TensorSpec((OBS,))}, Continuous((-2.0,) * ACTION, (2.0,) * ACTION), num_envs=3, truncates=True
    )
    settings = SACConfig(
        horizon=4,
        batch_size=BATCH,
        warmup_steps=0,
        gamma=config.gamma,
        tau=config.tau,
        policy=NetworkConfig(hidden=HIDDEN, activation="relu", init="default", normalize_obs=False),
        critic=CriticConfig(hidden=HIDDEN),
        optimizer=adam,
        replay=ReplayConfig(capacity=60),
    )
    return settings.build(spec, seed=0)


def pairs(agent, learner):
    """(name, the reference's tensor, the library's) of everything that is learned."""
    policy = [layer for layer in agent.policy if isinstance(layer, torch.nn.Linear)]
    head = learner.actor.head
    for number, (theirs, ours) in enumerate(zip(policy[:-1], [*learner.actor.network.hidden][::2], strict=True)):
        yield f"policy {number}", theirs.weight, ours.weight
        yield f"policy {number} bias", theirs.bias, ours.bias
    yield "mean", policy[-1].weight[:ACTION], head.mean.weight
    yield "mean bias", policy[-1].bias[:ACTION], head.mean.bias
    yield "std", policy[-1].weight[ACTION:], head.raw_std.weight
    for name, theirs, ours in (
        ("critic", agent.critics, learner.critics),
        ("target", agent.target_critics, learner.target_critics),
    ):
        stacked = [layer for layer in ours.stack.layers if hasattr(layer, "weight")] + [ours.head]
        for member, critic in enumerate(theirs):
            linears = [layer for layer in critic if isinstance(layer, torch.nn.Linear)]
            for depth, (their, our) in enumerate(zip(linears, stacked, strict=True)):
                yield f"{name} {member} {depth}", their.weight.T, our.weight[member]
                yield f"{name} {member} {depth} bias", their.bias, our.bias[member, 0]
    yield "temperature", agent.log_temperature.reshape(1), learner.temperature.log


def fill(algorithm, rollouts, seed):
    """Write random episodes to the replay buffer; return transitions (obs, action, reward, next_obs, terminated)."""
    rng, spec = torch.Generator().manual_seed(seed), algorithm.spec
    record = algorithm.empty_record()
    rollout = Rollout.allocate(4, {"policy": torch.zeros(3, OBS)}, record, spec)
    rollout.obs["policy"][4] = torch.randn(3, OBS, generator=rng)
    rows = {}
    for count in range(rollouts):
        rollout.begin()
        for t in range(4):
            ends = torch.rand(3, generator=rng)
            rollout.terminated[t], rollout.truncated[t] = ends < 0.1, (ends >= 0.1) & (ends < 0.2)
            rollout.valid[t], rollout.reward[t] = True, torch.randn(3, generator=rng)
            rollout.record.action[t] = torch.rand(3, ACTION, generator=rng) * 2 - 1
            rollout.obs["policy"][t + 1] = torch.randn(3, OBS, generator=rng)
            rollout.final_obs["policy"][t] = torch.randn(3, OBS, generator=rng)
            done = (rollout.terminated[t] | rollout.truncated[t]).unsqueeze(-1)
            after = torch.where(done, rollout.final_obs["policy"][t], rollout.obs["policy"][t + 1])
            for env in range(3):
                place = (count * 4 + t) % algorithm.replay.slots * 3 + env
                row = (
                    rollout.obs["policy"][t],
                    rollout.record.action[t],
                    rollout.reward[t],
                    after,
                    rollout.terminated[t],
                )
                rows[place] = tuple(column[env].clone() for column in row)
        rollout.mark_resets("separate")
        algorithm.replay.write(rollout, rollout.record.action)
    return rows


def test_library_equals_the_single_file_reference_after_a_hundred_updates():
    config = reference.Config(hidden=HIDDEN, batch_size=BATCH, learning_rate=1e-3)
    torch.manual_seed(0)
    agent = reference.Agent(OBS, ACTION, config)
    optimizers = reference.Optimizers(agent, config)
    algorithm = library(config)
    learner = algorithm.learner
    with torch.no_grad():
        for _, theirs, ours in pairs(agent, learner):
            ours.copy_(theirs)
        # The library begins with a bias where the page adds a constant.
        raw = learner.actor.head.raw_std
        raw.bias.copy_(agent.policy[-1].bias[ACTION:] + learner.actor.head.log_std.initial)
        offset = raw.bias - agent.policy[-1].bias[ACTION:]
    rows = fill(algorithm, 12, seed=1)
    rng = torch.Generator().manual_seed(2)
    started = {name: ours.detach().clone() for name, _, ours in pairs(agent, learner)}
    for _ in range(UPDATES):
        drawn = algorithm.replay.draw(BATCH, rng)
        noise = torch.randn(2, BATCH, ACTION, generator=rng)
        learner.update(algorithm.replay.gather(drawn, 1, config.gamma), noise, True)
        columns = (torch.stack(column) for column in zip(*(rows[place] for place in drawn.tolist()), strict=True))
        reference.update(agent, optimizers, reference.Batch(*columns), noise, config)
    for name, theirs, ours in pairs(agent, learner):
        assert (theirs - ours).abs().max() <= 1e-5, name
        assert (ours - started[name]).abs().max() > 1e-4, f"{name} did not move"
    assert (raw.bias - agent.policy[-1].bias[ACTION:] - offset).abs().max() <= 1e-5


def test_the_page_runs_and_equal_seeds_make_equal_weights():
    def weights(seed):
        config = reference.Config(seed=seed, total_steps=260, warmup_steps=230, hidden=(8,), batch_size=16)
        agent, returns = reference.train(config)
        assert len(returns) == 1  # an episode of Pendulum has 200 steps
        return torch.cat([x.flatten() for x in agent.state_dict().values()])

    first = weights(0)
    torch.manual_seed(123)  # the global generator has no say
    assert torch.isfinite(first).all() and torch.equal(first, weights(0)) and not torch.equal(first, weights(1))
