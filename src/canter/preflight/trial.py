"""A short trial of an environment with random actions, kept on the host to be looked at.

T steps, N environments.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from canter.envs.contract import check_obs, check_step
from canter.envs.watchdog import watched
from canter.specs import ACTION_MASK, Continuous, Discrete, Env, EnvSpec
from canter.struct import Obs

MAX_ROWS = 4
"""A trial looks at so many environments, however many are stepped."""
MAX_BYTES = 64 << 20
"""A trial of large observations ends when it holds this much."""
ENOUGH_STEPS = 32
"""A trial of a slow environment ends when its time is up, but not before."""


@dataclass(frozen=True)
class Trial:
    """What the first N environments gave in T steps, on the CPU."""

    spec: EnvSpec
    """Theirs, for N of them."""
    obs: Obs
    """`[T+1, N, ...]`; row 0 is the reset's."""
    reward: Tensor
    """`[T, N]`."""
    terminated: Tensor
    truncated: Tensor
    valid: Tensor
    final_obs: Obs
    """True last observations `[T, N, ...]` where the spec says "separate", arbitrary in rows that did not end."""
    seconds: float
    """How long a step of all environments took, by the median."""

    @property
    def done(self) -> Tensor:
        """`[T, N]` bool: an episode ended, either way."""
        return self.terminated | self.truncated

    def episodes(self) -> list[tuple[float, int, bool]]:
        """Return, length and whether it terminated, for each episode that began and ended within the trial."""
        found: list[tuple[float, int, bool]] = []
        reward, valid, done = self.reward.double().tolist(), self.valid.tolist(), self.done.tolist()
        for row in range(self.spec.num_envs):
            total, length = 0.0, 0
            for t in range(len(reward)):
                if valid[t][row]:
                    total, length = total + reward[t][row], length + 1
                if done[t][row]:
                    found.append((total, length, bool(self.terminated[t, row])))
                    total, length = 0.0, 0
        return found


@torch.no_grad()
def run_trial(env: Env, seed: int, *, steps: int, seconds: float) -> Trial:
    """Reset `env` by `seed` and take random actions, the same ones for the same seed and observations.

    It ends after `steps`, or earlier when `seconds` are over (though not before `ENOUGH_STEPS`) or memory is.
    """
    spec, generator = env.spec, torch.Generator().manual_seed(0)
    with watched() as watchdog:
        obs = env.reset(seed)
        check_obs(obs, spec, "reset()")
        rows = min(spec.num_envs, MAX_ROWS)
        seen, taken, last, times = [to_host(obs, rows)], [], [], []
        room = MAX_BYTES // max(1, sum(group.nbytes for group in seen[0].values()))
        start = time.perf_counter()
        while len(taken) < min(steps, max(room, 2)):
            if time.perf_counter() - start > seconds and len(taken) >= ENOUGH_STEPS:
                break
            watchdog.begin()
            action, begin = random_actions(spec, obs, generator).to(spec.device), time.perf_counter()
            step = env.step(action)
            times.append(time.perf_counter() - begin)
            check_step(step, spec)
            columns = (step.reward, step.terminated, step.truncated, step.valid)
            taken.append([column[:rows].to("cpu", copy=True) for column in columns])
            obs = step.obs
            seen.append(to_host(obs, rows))
            last.append(seen[-1] if step.final_obs is None else to_host(step.final_obs, rows))
    groups = {name: torch.stack([row[name] for row in seen]) for name in spec.obs}
    separate = spec.obs if spec.final_obs == "separate" else ()
    final_obs = {name: torch.stack([row[name] for row in last]) for name in separate}
    reward, terminated, truncated, valid = (torch.stack(column) for column in zip(*taken, strict=True))
    about = replace(spec, num_envs=rows)
    return Trial(about, groups, reward, terminated, truncated, valid, final_obs, statistics.median(times))


def random_actions(spec: EnvSpec, obs: Obs, generator: torch.Generator) -> Tensor:
    """Actions for observations `[N, ...]`: uniform within finite bounds, normal without, uniform among the allowed."""
    action, rows = spec.action, spec.num_envs
    if isinstance(action, Continuous):
        low, high = torch.tensor(action.low), torch.tensor(action.high)
        spread = torch.rand((rows, action.dim), generator=generator)
        free = torch.randn((rows, action.dim), generator=generator).clamp(low, high)
        bounded = low.isfinite() & high.isfinite()
        return torch.where(bounded, torch.lerp(low.nan_to_num(), high.nan_to_num(), spread), free)
    allowed = obs.get(ACTION_MASK, torch.ones((rows, sum(action.nvec)))).to("cpu", torch.float32)
    picks = [torch.multinomial(part, 1, generator=generator) for part in allowed.split(action.nvec, dim=1)]
    return picks[0].squeeze(1) if isinstance(action, Discrete) else torch.cat(picks, dim=1)


def to_host(obs: Obs, rows: int) -> Obs:
    """A copy of the first rows that the environment's next step cannot overwrite."""
    return {name: group[:rows].detach().to("cpu", copy=True) for name, group in obs.items()}
