"""The library against the page that explains it: same seeds, same parameters."""

import importlib.util
from pathlib import Path

import gymnasium
import pytest
import torch
from gymnasium.vector import AutoresetMode

from canter.algorithms.ppo import PPOConfig
from canter.envs.gymnasium import make_gymnasium
from canter.nn.actor_critic import ModelConfig
from canter.nn.network import NetworkConfig
from canter.nn.optimizer import OptimizerConfig
from canter.nn.schedules import Constant, Linear
from canter.training.collector import Collector

ITERATIONS = 10
# Episodes are cut early: truncations come often, and the pendulum, which is chaotic, gets no time to blow up the last
# bit in which two right programs may differ.
MAX_EPISODE_STEPS = 40


def load_reference():
    path = Path(__file__).parents[2] / "reference" / "ppo_single_file.py"
    spec = importlib.util.spec_from_file_location("ppo_single_file", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reference = load_reference()


def paired_parameters(agent, algorithm):
    """(name, the reference's tensor, the library's tensor) of everything that is learned."""
    model = algorithm.model
    library_layers = {
        "policy": [*model.actor.network.hidden, getattr(model.actor.head, "mean", None) or model.actor.head.linear],
        "value": [*model.critic.network.hidden, model.critic.head.linear],
    }
    for name, reference_net in (("policy", agent.policy_net), ("value", agent.value_net)):
        theirs = [layer for layer in reference_net if isinstance(layer, torch.nn.Linear)]
        ours = [layer for layer in library_layers[name] if isinstance(layer, torch.nn.Linear)]
        for depth, (their, our) in enumerate(zip(theirs, ours, strict=True)):
            yield f"{name} {depth} weight", their.weight, our.weight
            yield f"{name} {depth} bias", their.bias, our.bias
    if not agent.discrete:
        yield "raw_std", agent.raw_std, model.actor.head.raw_std


def library_config(config):
    learning_rate = Linear(config.learning_rate) if config.anneal else Constant(config.learning_rate)
    network = NetworkConfig(hidden=config.hidden, normalize_obs=config.normalize_obs)
    return PPOConfig(
        horizon=config.horizon,
        epochs=config.epochs,
        num_minibatches=config.num_minibatches,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
        clip_ratio=config.clip_ratio,
        value_coef=config.value_coef,
        entropy_coef=Constant(config.entropy_coef),
        optimizer=OptimizerConfig(learning_rate=learning_rate, max_grad_norm=config.max_grad_norm),
        model=ModelConfig(policy=network, normalize_value=False),
    )


@pytest.mark.parametrize(
    "config",
    [
        reference.Config(env_id="CartPole-v1", horizon=32, num_envs=4, entropy_coef=0.01, normalize_obs=True, seed=3),
        reference.Config(env_id="Pendulum-v1", horizon=64, num_envs=4, gamma=0.9, normalize_obs=True, seed=4),
        reference.Config(env_id="Pendulum-v1", horizon=64, num_envs=4, gamma=0.95, anneal=False, seed=5),
    ],
    ids=lambda config: f"{config.env_id}-{config.seed}",
)
def test_library_equals_the_single_file_reference_parameter_for_parameter(config):
    batch = config.num_envs * config.horizon
    schedule_length = 2 * ITERATIONS * batch
    config = reference.dataclasses.replace(config, total_steps=schedule_length)

    env = make_gymnasium(config.env_id, config.num_envs, max_episode_steps=MAX_EPISODE_STEPS)
    algorithm = library_config(config).build(env.spec, seed=0)
    _, policy_rng, shuffle_rng = reference.make_rngs(config.seed)
    algorithm.policy_rng.set_state(policy_rng.get_state())
    algorithm.shuffle_rng.set_state(shuffle_rng.get_state())

    mode = {"autoreset_mode": AutoresetMode.SAME_STEP}
    envs = gymnasium.make_vec(
        config.env_id,
        config.num_envs,
        vectorization_mode="sync",
        vector_kwargs=mode,
        max_episode_steps=MAX_EPISODE_STEPS,
    )
    agent = reference.Agent(
        envs.single_observation_space, envs.single_action_space, config, reference.make_rngs(config.seed)[0]
    )
    with torch.no_grad():
        for _, their, our in paired_parameters(agent, algorithm):
            our.copy_(their)

    # The reference derives its own generators and env seeds from config.seed; half of its schedule is run.
    optimizer = reference.AdamW(agent.parameters(), config.learning_rate, (0.9, 0.999), eps=1e-5, weight_decay=0.0)
    _, policy_rng, shuffle_rng = reference.make_rngs(config.seed)
    env_seeds = reference.np.random.SeedSequence(config.seed).generate_state(config.num_envs).tolist()
    obs = torch.tensor(envs.reset(seed=env_seeds)[0], dtype=torch.float32)
    collector = Collector(env, algorithm, config.seed)
    ended = 0
    for iteration in range(ITERATIONS):
        if config.anneal:
            progress = iteration * batch / schedule_length
            optimizer.param_groups[0]["lr"] = config.learning_rate * (1 - progress)
        rollout = reference.collect(envs, agent, obs, config.horizon, policy_rng)
        targets = reference.targets(agent, rollout, config)
        reference.update(agent, optimizer, rollout, *targets, config, shuffle_rng)
        agent.update_statistics_(rollout.obs[:-1])
        obs = rollout.obs[-1]

        algorithm.set_progress(iteration * batch / schedule_length)
        algorithm.update(collector.collect())
        ended += len(collector.read_episodes().return_)

    assert ended >= config.num_envs
    for name, their, our in paired_parameters(agent, algorithm):
        difference = (their - our).abs().max().item()
        assert difference <= 1e-5, f"{name} differs by {difference}"
    env.close()
    envs.close()
