"""Soft actor-critic on one page: one environment, two critics, a squashed Gaussian policy and a learned temperature.

    python reference/sac_single_file.py

Everything that the algorithm is stands here once, in the order in which it happens: act, remember, draw, move the
critics, move the policy, move the temperature, move the target critics. Haarnoja et al. 2018, arXiv 1812.05905.
"""

import copy
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """Settings; the defaults solve Pendulum."""

    env_id: str = "Pendulum-v1"
    seed: int = 0
    total_steps: int = 15_000
    warmup_steps: int = 1_000
    capacity: int = 20_000
    batch_size: int = 256
    hidden: tuple[int, ...] = (64, 64)
    gamma: float = 0.99
    tau: float = 0.005
    learning_rate: float = 1e-3
    temperature_rate: float = 3e-4
    temperature: float = 1.0
    min_log_std: float = -5.0
    max_log_std: float = 2.0


class Batch(NamedTuple):
    """A minibatch of B transitions."""

    obs: Tensor
    action: Tensor
    reward: Tensor
    next_obs: Tensor
    terminated: Tensor


def mlp(inputs: int, hidden: tuple[int, ...], outputs: int) -> nn.Sequential:
    """Return linear layers with ReLU between them."""
    widths, layers = (inputs, *hidden), []
    for width, out in pairwise(widths):
        layers += [nn.Linear(width, out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], outputs))


class Agent(nn.Module):
    """Policy, critics, target critics, and the logarithm of the temperature."""

    def __init__(self, obs_dim: int, action_dim: int, config: Config) -> None:
        super().__init__()
        self.config, self.action_dim = config, action_dim
        self.policy = mlp(obs_dim, config.hidden, 2 * action_dim)
        self.critics = nn.ModuleList(mlp(obs_dim + action_dim, config.hidden, 1) for _ in range(2))
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_temperature = nn.Parameter(torch.tensor(math.log(config.temperature)))

    def log_std(self, raw: Tensor) -> Tensor:
        """Return a log std between its bounds, with slope one in the middle, and 0 where `raw` is 0."""
        low, high = self.config.min_log_std, self.config.max_log_std
        middle, half = (low + high) / 2, (high - low) / 2
        start = -middle / half
        x = raw / half + start / math.sqrt(1 - start**2)
        return middle + half * x / torch.sqrt(1 + x * x)

    def sample(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions in -1..1 by the given standard normal noise, and their log-density."""
        mean, raw = self.policy(obs).chunk(2, -1)
        log_std = self.log_std(raw)
        u = mean + log_std.exp() * noise
        density = torch.distributions.Normal(mean, log_std.exp()).log_prob(u)
        # d tanh(u) / du = 1 - tanh(u)^2, in a form that does not round to 0.
        return torch.tanh(u), (density - 2 * (math.log(2) - u - nn.functional.softplus(-2 * u))).sum(-1)

    def values(self, critics: nn.ModuleList, obs: Tensor, action: Tensor) -> Tensor:
        """Return the value by each critic, `[2, B]`."""
        return torch.stack([critic(torch.cat([obs, action], -1)).squeeze(-1) for critic in critics])


class Optimizers:
    """Return Adam for policy, critics and temperature."""

    def __init__(self, agent: Agent, config: Config) -> None:
        self.policy = torch.optim.Adam(agent.policy.parameters(), config.learning_rate)
        self.critics = torch.optim.Adam(agent.critics.parameters(), config.learning_rate)
        self.temperature = torch.optim.Adam([agent.log_temperature], config.temperature_rate)


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Take one step down the gradient of a loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def update(agent: Agent, optimizers: Optimizers, batch: Batch, noise: Tensor, config: Config) -> dict[str, float]:
    """Learn from one batch; `noise` `[2, B, A]` is for the next and for the current actions."""
    temperature = agent.log_temperature.detach().exp()
    with torch.no_grad():
        next_action, next_log_prob = agent.sample(batch.next_obs, noise[0])
        next_value = agent.values(agent.target_critics, batch.next_obs, next_action).min(0).values
        target = batch.reward + config.gamma * ~batch.terminated * (next_value - temperature * next_log_prob)
    critic_loss = (agent.values(agent.critics, batch.obs, batch.action) - target).square().mean(1).sum() / 2
    step(optimizers.critics, critic_loss)

    action, log_prob = agent.sample(batch.obs, noise[1])
    value = agent.values(agent.critics, batch.obs, action).min(0).values
    policy_loss = (temperature * log_prob - value).mean()
    step(optimizers.policy, policy_loss)

    target_entropy = -agent.action_dim
    temperature_loss = -(agent.log_temperature * (log_prob.detach() + target_entropy)).mean()
    step(optimizers.temperature, temperature_loss)

    with torch.no_grad():
        for target, online in zip(agent.target_critics.parameters(), agent.critics.parameters(), strict=True):
            target += config.tau * (online - target)
    return {"critic": critic_loss.item(), "policy": policy_loss.item(), "entropy": -log_prob.mean().item()}


class Memory:
    """The latest transitions, each with both of its observations."""

    def __init__(self, capacity: int, obs_dim: int, action_dim: int) -> None:
        self.rows = Batch(
            torch.zeros(capacity, obs_dim),
            torch.zeros(capacity, action_dim),
            torch.zeros(capacity),
            torch.zeros(capacity, obs_dim),
            torch.zeros(capacity, dtype=torch.bool),
        )
        self.capacity, self.written = capacity, 0

    def write(self, *row: Tensor | float | bool) -> None:
        """Overwrite the oldest transition with a new one."""
        for column, value in zip(self.rows, row, strict=True):
            column[self.written % self.capacity] = torch.as_tensor(value)
        self.written += 1

    def draw(self, size: int, rng: torch.Generator) -> Batch:
        """Return `size` transitions, each equally likely."""
        index = torch.randint(min(self.written, self.capacity), (size,), generator=rng)
        return Batch(*(column[index] for column in self.rows))


def train(config: Config) -> tuple[Agent, list[float]]:
    """Train in one environment; return the agent and the return of every episode."""
    env = gymnasium.make(config.env_id)
    space = env.action_space
    assert isinstance(space, gymnasium.spaces.Box) and env.observation_space.shape is not None
    low, high = torch.tensor(space.low), torch.tensor(space.high)
    rng = torch.Generator().manual_seed(config.seed)
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        agent = Agent(env.observation_space.shape[0], space.shape[0], config)
    optimizers = Optimizers(agent, config)
    memory = Memory(config.capacity, env.observation_space.shape[0], space.shape[0])
    obs, _ = env.reset(seed=config.seed)
    returns, total = [], 0.0
    for count in range(config.total_steps):
        seen = torch.as_tensor(obs, dtype=torch.float32)
        if count < config.warmup_steps:
            action = 2 * torch.rand(space.shape, generator=rng) - 1
        else:
            with torch.no_grad():
                action, _ = agent.sample(seen, torch.randn(space.shape, generator=rng))
        obs, reward, terminated, truncated, _ = env.step((low + (action + 1) / 2 * (high - low)).numpy())
        # A truncated episode is no end: what would have followed is still valued.
        memory.write(seen, action, float(reward), torch.as_tensor(obs, dtype=torch.float32), bool(terminated))
        total += float(reward)
        if terminated or truncated:
            returns.append(total)
            obs, total = env.reset()[0], 0.0
        if count + 1 >= config.warmup_steps:
            noise = torch.randn(2, config.batch_size, space.shape[0], generator=rng)
            update(agent, optimizers, memory.draw(config.batch_size, rng), noise, config)
    env.close()
    return agent, returns


if __name__ == "__main__":
    torch.set_num_threads(1)
    for number, episode in enumerate(train(Config())[1]):
        print(f"episode {number}: return {np.round(episode, 1)}")
