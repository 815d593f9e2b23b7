"""How good a policy is, without learning."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from canter.nn.actor_critic import Policy
from canter.runtime.collector import EpisodeTracker
from canter.specs import Env


@dataclass(frozen=True)
class Evaluation:
    """Returns and lengths of whole episodes, each from its own start."""

    return_: list[float]
    length: list[int]

    @property
    def mean(self) -> float:
        """Mean return."""
        return sum(self.return_) / len(self.return_)


@torch.no_grad()
def evaluate(
    policy: Policy, env: Env, episodes: int, seed: int, *, deterministic: bool = True, max_steps: int = 1_000_000
) -> Evaluation:
    """Run `episodes` episodes; normaliser statistics stay as they are.

    Every environment contributes its first `episodes / N` episodes (rounded up for the first ones). Taking the first
    `episodes` to finish anywhere would favour short ones.
    """
    num_envs = env.spec.num_envs
    quota = [episodes // num_envs + (i < episodes % num_envs) for i in range(num_envs)]
    generator = torch.Generator(env.spec.device).manual_seed(seed)
    obs, state = env.reset(seed), policy.initial_state(num_envs)
    tracker = EpisodeTracker(1, num_envs, env.spec.device)
    finished: list[list[tuple[float, int]]] = [[] for _ in range(num_envs)]
    for _ in range(max_steps):
        action, state = policy.act(obs, state, deterministic=deterministic, generator=generator)
        step = env.step(action)
        tracker.add(0, step)
        for i in (step.terminated | step.truncated).nonzero().flatten().tolist():
            finished[i].append((float(tracker.return_[0, i]), int(tracker.length[0, i])))
        obs = step.obs
        if all(len(ended) >= wanted for ended, wanted in zip(finished, quota, strict=True)):
            break
    else:
        raise RuntimeError(f"after {max_steps} steps only {sum(map(len, finished))} of {episodes} episodes had ended")
    counted = [episode for ended, wanted in zip(finished, quota, strict=True) for episode in ended[:wanted]]
    return Evaluation([return_ for return_, _ in counted], [length for _, length in counted])
