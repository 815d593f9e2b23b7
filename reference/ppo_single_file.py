"""Proximal policy optimisation on one page, from the equations, to be read top to bottom.

    python reference/ppo_single_file.py --env-id CartPole-v1

One iteration: act for `horizon` steps in `num_envs` environments (`collect`), estimate how much better each action was
than expected (`targets`), then make good actions likelier and bad ones rarer, but only by a little (`update`).
PPO is Schulman et al. 2017, arXiv 1707.06347; GAE is Schulman et al. 2016, arXiv 1506.02438.
Shapes: T steps (`horizon`), N environments, B = T * N, D observation entries, A action entries, K discrete actions.
"""

import argparse
import dataclasses
import math
import time
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Generator, Tensor, nn
from torch.optim import AdamW


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run. The defaults solve CartPole-v1."""

    env_id: str = "CartPole-v1"  # any Gymnasium id with flat Box observations and Discrete or flat Box actions
    seed: int = 0  # equal seeds give equal runs
    total_steps: int = 100_000  # environment steps, all environments together; the last iteration is not cut short
    num_envs: int = 8  # N, environments stepped together
    horizon: int = 125  # T, steps per environment and iteration
    epochs: int = 10  # passes over each rollout
    num_minibatches: int = 4  # gradient steps per pass; must divide T * N
    learning_rate: float = 1e-3  # of AdamW
    anneal: bool = True  # shrink the learning rate linearly, to 0 at total_steps
    gamma: float = 0.98  # discount: the policy looks about 1 / (1 - gamma) steps ahead
    gae_lambda: float = 0.95  # 0: trust the critic (biased); 1: trust the sampled rewards (noisy)
    clip_ratio: float = 0.2  # how far a probability ratio may move from 1 before its gradient is cut
    value_coef: float = 0.5  # weight of the value loss
    entropy_coef: float = 0.0  # weight of the entropy bonus, which slows the loss of exploration
    max_grad_norm: float = 0.5  # bound on the norm of the gradient of all parameters together
    normalize_obs: bool = False  # whiten observations with running statistics
    hidden: tuple[int, ...] = (64, 64)  # widths of the hidden layers of both networks


PRESETS = {
    "CartPole-v1": Config(),
    # Returns of -100 make long value gradients: clip them later. Torque acts soon: looking 20 steps ahead will do.
    "Pendulum-v1": Config(env_id="Pendulum-v1", total_steps=200_000, horizon=500, num_minibatches=32, gamma=0.95,
                          max_grad_norm=10.0, normalize_obs=True),
}  # fmt: skip


def mlp(sizes: list[int], output_gain: float, rng: Generator) -> nn.Sequential:
    """Return a tanh network with orthogonal weights of gain sqrt(2), `output_gain` at the end, and zero biases."""
    layers, gains = [], [math.sqrt(2)] * (len(sizes) - 2) + [output_gain]
    for fan_in, fan_out, gain in zip(sizes[:-1], sizes[1:], gains, strict=True):
        linear = nn.Linear(fan_in, fan_out)
        nn.init.orthogonal_(linear.weight, gain, generator=rng)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])  # no tanh at the end


class Agent(nn.Module):
    """A policy that acts (the actor) and a value function that evaluates (the critic): two separate networks.

    `params` is the output of the policy network for an observation: logits [..., K] for Discrete actions, the mean
    [..., A] of a Gaussian for Box actions, whose standard deviation is learnt but the same in every state (`log_std`).
    """

    LOG_STD_MID, LOG_STD_HALF = (math.log(10.0) + math.log(0.01)) / 2, (math.log(10.0) - math.log(0.01)) / 2

    def __init__(self, obs_space: gym.Space, action_space: gym.Space, config: Config, rng: Generator) -> None:
        super().__init__()
        size = gym.spaces.flatdim(obs_space)
        if isinstance(action_space, gym.spaces.Discrete):
            self.discrete, outputs, self.start = True, int(action_space.n), int(action_space.start)
        elif isinstance(action_space, gym.spaces.Box) and len(action_space.shape) == 1 and action_space.is_bounded():
            self.discrete, outputs = False, action_space.shape[0]
            low, high = torch.tensor(action_space.low), torch.tensor(action_space.high)
            self.center, self.half_range = (high + low) / 2, (high - low) / 2
            y = -self.LOG_STD_MID / self.LOG_STD_HALF  # `log_std` solved for raw_std at log_std = 0: begin with std 1
            self.raw_std = nn.Parameter(torch.full((outputs,), self.LOG_STD_HALF * y / math.sqrt(1 - y * y)))
        else:
            raise ValueError(f"actions must be Discrete or a flat, bounded Box, not {action_space}")
        # The tiny output gain makes the first policy nearly the same in all states: it explores and prejudges nothing.
        self.policy_net = mlp([size, *config.hidden, outputs], 0.01, rng)
        self.value_net = mlp([size, *config.hidden, 1], 1.0, rng)
        # A policy is worthless without its statistics, so they are buffers: state_dict() saves them with the weights.
        self.normalize_obs, self.obs_count = config.normalize_obs, nn.Buffer(torch.zeros(()).double())
        self.obs_mean, self.obs_var = nn.Buffer(torch.zeros(size).double()), nn.Buffer(torch.ones(size).double())

    def normalize(self, obs: Tensor) -> Tensor:
        """Return observations in units of their running standard deviation, if config.normalize_obs."""
        mean, scale = self.obs_mean.float(), (1 / torch.sqrt(self.obs_var + 1e-8)).float()
        return ((obs - mean) * scale).clamp(-10, 10) if self.normalize_obs else obs

    def update_statistics_(self, obs: Tensor) -> None:
        """Merge in the mean and population variance of obs [T, N, D] (Chan et al. 1979), in float64."""
        rows = obs.flatten(0, 1).double()
        var, mean = torch.var_mean(rows, dim=0, correction=0)
        self.obs_count += len(rows)
        weight, delta = len(rows) / self.obs_count, mean - self.obs_mean
        self.obs_var.copy_((1 - weight) * self.obs_var + weight * var + weight * (1 - weight) * delta**2)
        self.obs_mean += weight * delta

    def policy(self, obs: Tensor) -> Tensor:
        """Return the distribution parameters `params` for obs [..., D]."""
        return self.policy_net(self.normalize(obs))

    def value(self, obs: Tensor) -> Tensor:
        """Return the expected discounted return from obs [..., D], as [...]."""
        return self.value_net(self.normalize(obs)).squeeze(-1)

    def log_std(self) -> Tensor:
        """Return the log standard deviation [A], smoothly kept between log 0.01 and log 10."""
        # Beyond a hard clamp there is no gradient and no return; this curve's slope, (1 + x^2)^(-3/2), is never 0.
        x = self.raw_std / self.LOG_STD_HALF
        return self.LOG_STD_MID + self.LOG_STD_HALF * x / torch.sqrt(1 + x * x)

    def sample(self, params: Tensor, rng: Generator) -> Tensor:
        """Draw actions; the Gumbel-max trick: argmax(logits + Gumbel noise) is distributed as softmax(logits)."""
        if self.discrete:
            u = torch.rand(params.shape, generator=rng).clamp(torch.finfo(torch.float32).tiny, 1 - 2**-24)
            return torch.argmax(params - torch.log(-torch.log(u)), dim=-1)
        return params + self.log_std().exp() * torch.randn(params.shape, generator=rng)

    def evaluate(self, params: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probability of sampled actions and entropy -E[log-probability]; entries of an action add up."""
        if self.discrete:
            log_prob = torch.log_softmax(params, dim=-1)
            return log_prob.gather(-1, action.unsqueeze(-1)).squeeze(-1), -(log_prob.exp() * log_prob).sum(-1)
        log_std, half_log_2pi = self.log_std(), 0.5 * math.log(2 * math.pi)
        z = (action - params) * torch.exp(-log_std)
        return (-0.5 * z * z - log_std - half_log_2pi).sum(-1), (0.5 + half_log_2pi + log_std).sum(-1)

    def to_env(self, action: Tensor) -> np.ndarray:
        """Return the actions for the environment: a clipped copy, with [-1, 1] mapped to [low, high]."""
        return (action + self.start if self.discrete else self.center + self.half_range * action.clamp(-1, 1)).numpy()


class Rollout(NamedTuple):
    """A rollout: row t holds s_t, a_t and the environment's answer to a_t."""

    obs: Tensor  # [T+1, N, D]; obs[t+1] begins a new episode where row t ended one
    action: Tensor  # [T, N, A] or [T, N], unclipped: log_prob must score what was drawn, not what the env was given
    log_prob: Tensor  # [T, N], under the policy that acted
    reward: Tensor  # [T, N]
    terminated: Tensor  # [T, N], the task ended: no reward can follow
    truncated: Tensor  # [T, N], only the clock ran out
    final_obs: Tensor  # [T, N, D], where a_t really led, also at the end of an episode


@torch.no_grad()
def collect(envs: VectorEnv, agent: Agent, obs: Tensor, horizon: int, policy_rng: Generator) -> Rollout:
    """Act for `horizon` steps from obs [N, D] and return the rollout."""
    all_obs, rows = [obs], []
    for _ in range(horizon):
        params = agent.policy(obs)
        action = agent.sample(params, policy_rng)
        next_obs, reward, terminated, truncated, info = envs.step(agent.to_env(action))
        obs, reward = torch.tensor(next_obs, dtype=torch.float32), torch.tensor(reward, dtype=torch.float32)  # copies
        final_obs = obs.clone()
        for n in np.flatnonzero(terminated | truncated):  # here next_obs is already the first one of the next episode
            final_obs[n] = torch.tensor(info["final_obs"][n])
        ends = torch.tensor(terminated), torch.tensor(truncated & ~terminated)  # a real end wins over the clock
        rows.append((action, agent.evaluate(params, action)[0], reward, *ends, final_obs))
        all_obs.append(obs)
    return Rollout(torch.stack(all_obs), *(torch.stack(column) for column in zip(*rows, strict=True)))


@torch.no_grad()
def targets(agent: Agent, rollout: Rollout, config: Config) -> tuple[Tensor, Tensor]:
    """Return advantages for the policy and returns for the critic, [T, N], by GAE (arXiv 1506.02438, eq. 16).

        delta_t = r_t + gamma * V(s_t+1) - V(s_t)      A_t = delta_t + gamma * lambda * A_t+1

    After a termination nothing can be earned, so V(s_t+1) counts as 0. After a truncation the world would have gone
    on, so V(s_t+1) stands in for the rewards that the clock cut off; with 0 the critic would learn that good states
    are sometimes worthless. In both cases row t+1 belongs to another episode, so both cut the chain of A.
    """
    done = rollout.terminated | rollout.truncated
    value = agent.value(rollout.obs)  # [T+1, N], only now: the critic does not act, and one large batch is cheaper
    next_value = torch.where(done, agent.value(rollout.final_obs), value[1:])
    delta = rollout.reward + config.gamma * ~rollout.terminated * next_value - value[:-1]
    advantage, running = torch.zeros_like(delta), torch.zeros_like(delta[0])
    for t in reversed(range(len(delta))):
        advantage[t] = running = delta[t] + config.gamma * config.gae_lambda * ~done[t] * running
    return advantage, advantage + value[:-1]


def update(
    agent: Agent, optimizer: AdamW, rollout: Rollout, advantage: Tensor, return_: Tensor, config: Config, rng: Generator
) -> dict[str, float]:
    """Improve the agent on one rollout; every sample (number t * N + n) is used once per epoch.

    The ratio says how much likelier an action became since it was taken. Once it moved by more than clip_ratio the
    way its advantage asks for, the clipped term is the larger loss and has no gradient: data this old supports no
    more. If it moved the other way, the unclipped term is larger and pulls it back (arXiv 1707.06347, eq. 7 and 9).
    """
    exact = advantage.double()  # normalised over the rollout, so an action weighs the same in whichever minibatch
    advantage = ((exact - exact.mean()) / (exact.std(correction=0) + 1e-8)).float()
    columns = [x.flatten(0, 1) for x in (rollout.obs[:-1], rollout.action, rollout.log_prob, advantage, return_)]
    ratios, entropy = [], torch.zeros(())
    for _ in range(config.epochs):
        for index in torch.randperm(len(columns[0]), generator=rng).chunk(config.num_minibatches):
            obs, action, old_log_prob, adv, ret = (column[index] for column in columns)
            log_prob, entropy = agent.evaluate(agent.policy(obs), action)
            ratio = torch.exp(log_prob - old_log_prob)
            clipped = ratio.clamp(1 - config.clip_ratio, 1 + config.clip_ratio)
            policy_loss = torch.maximum(-adv * ratio, -adv * clipped).mean()
            value_loss = (0.5 * (agent.value(obs) - ret) ** 2).mean()
            loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy.mean()
            optimizer.zero_grad()
            loss.backward()
            grads = [p.grad for p in agent.parameters() if p.grad is not None]
            excess = nn.utils.get_total_norm(grads) / config.max_grad_norm
            for grad in grads:  # shorten the joint gradient if it is too long, keep its direction
                grad.div_(excess.clamp(min=1.0))
            optimizer.step()
            ratios.append(ratio.detach())
    last = torch.cat(ratios[-config.num_minibatches :])
    return {
        "kl": (last - 1 - last.log()).mean().item(),  # KL(old || new) by an unbiased estimator that is never negative
        "entropy": entropy.mean().item(),
        "first_ratio_error": (ratios[0] - 1).abs().max().item(),  # nothing learnt yet: only rounding, or there is a bug
    }


def make_rngs(seed: int) -> list[Generator]:
    """Return independent generators [init, policy, shuffle]: drawing from one never shifts another."""
    return [Generator().manual_seed(int(s.generate_state(1)[0])) for s in np.random.SeedSequence(seed).spawn(3)]


def train(config: Config, envs: VectorEnv | None = None, agent: Agent | None = None) -> tuple[Agent, list[float]]:
    """Train, and return the agent with the returns of all finished episodes, oldest first."""
    batch = config.num_envs * config.horizon
    if batch % config.num_minibatches:
        raise ValueError(f"num_minibatches={config.num_minibatches} does not divide num_envs * horizon = {batch}")
    if envs is None:  # SAME_STEP: an episode that ends restarts at once, and info["final_obs"] keeps where it ended
        mode = {"autoreset_mode": AutoresetMode.SAME_STEP}
        envs = gym.make_vec(config.env_id, config.num_envs, vectorization_mode="sync", vector_kwargs=mode)
    init_rng, policy_rng, shuffle_rng = make_rngs(config.seed)
    agent = Agent(envs.single_observation_space, envs.single_action_space, config, init_rng) if agent is None else agent
    optimizer = AdamW(agent.parameters(), config.learning_rate, (0.9, 0.999), eps=1e-5, weight_decay=0.0)
    env_seeds = np.random.SeedSequence(config.seed).generate_state(config.num_envs).tolist()
    obs, start = torch.tensor(envs.reset(seed=env_seeds)[0], dtype=torch.float32), time.perf_counter()
    returns, running = [], torch.zeros(config.num_envs, dtype=torch.float64)
    for steps in range(0, config.total_steps, batch):  # `steps` have been taken before this iteration
        if config.anneal:
            optimizer.param_groups[0]["lr"] = config.learning_rate * (1 - steps / config.total_steps)
        rollout = collect(envs, agent, obs, config.horizon, policy_rng)
        metrics = update(agent, optimizer, rollout, *targets(agent, rollout, config), config, shuffle_rng)
        # Statistics move only now: had they moved before the update, an observation would look different when learning
        # than it did when acting, and ratios would differ from 1 although no parameter had changed.
        agent.update_statistics_(rollout.obs[:-1])
        obs = rollout.obs[-1]
        for reward, done in zip(rollout.reward, rollout.terminated | rollout.truncated, strict=True):
            running += reward
            returns += running[done].tolist()
            running[done] = 0.0
        if steps // batch % 10 == 9:
            log = {"return": float(np.mean(returns[-100:] or [math.nan])), **metrics}
            log["steps/s"] = (steps + batch) / (time.perf_counter() - start)
            print(f"steps {steps + batch:8}", *(f"{name} {value:8.4g}" for name, value in log.items()), sep="  ")
    return agent, returns


if __name__ == "__main__":
    torch.set_num_threads(1)  # networks this small are slower on many threads
    parser = argparse.ArgumentParser(description="PPO on one page.", argument_default=argparse.SUPPRESS)
    special = {bool: {"action": argparse.BooleanOptionalAction}, tuple: {"type": int, "nargs": "+"}}
    for field in dataclasses.fields(Config):
        kind = type(field.default)
        parser.add_argument("--" + field.name.replace("_", "-"), **special.get(kind, {"type": kind}))
    given = vars(parser.parse_args())  # only the flags that were given; the preset of the environment has the rest
    train(dataclasses.replace(PRESETS.get(given.get("env_id", Config.env_id), Config()), **given))
