"""A toy whose transitions can be read off its observations, and the list of those that a learner would see."""

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

MODES = ["next_step", "same_step", "disabled"]


class Counter(gymnasium.Env):
    """Observation 100 * episode + t, reward the observation reached; episodes of given lengths, in turn."""

    def __init__(self, lengths=(3, 5), ends="truncated", scribble=False, mask=None):
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
        self.action_space = spaces.Discrete(4)
        self.lengths, self.ends, self.mask = lengths, ends, mask
        self.episode, self.t, self.taken = 0, 0, -1
        self.memory = np.zeros(2) if scribble else None

    def _obs(self):
        value = [100 * self.episode + self.t, self.taken]
        if self.memory is None:
            return np.array(value, dtype=np.float64)
        self.memory[:] = value
        return self.memory

    def _info(self):
        info = {"clock": float(self.t)}
        if self.mask is not None:
            info["action_mask"] = np.arange(4) <= self.t if self.mask == "growing" else self.mask(self)
        return info

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.episode = 0
        self.episode, self.t, self.taken = self.episode + 1, 0, -1
        return self._obs(), self._info()

    def step(self, action):
        self.t, self.taken = self.t + 1, int(action)
        end = self.t >= self.lengths[self.episode % len(self.lengths)]
        flags = {"truncated": (False, end), "terminated": (end, False), "both": (end, end)}[self.ends]
        return self._obs(), float(100 * self.episode + self.t), *flags, self._info()


def counters(mode, schedules=((3, 5), (4,)), vector=SyncVectorEnv, **kwargs):
    makers = [lambda lengths=lengths: Counter(lengths, **kwargs) for lengths in schedules]
    return vector(makers, autoreset_mode=AutoresetMode[mode.upper()])


def real_rows(env, steps):
    """Per environment, every transition that a learner would see, with the true next observation."""
    rows = [[] for _ in range(env.spec.num_envs)]
    obs = {key: value.clone() for key, value in env.reset(seed=1).items()}
    taken = 0
    counts = np.zeros(env.spec.num_envs, dtype=int)
    while counts.min() < steps:
        # The action depends on the row's own past alone, so filler rows do not shift it.
        action = torch.tensor(counts % 4)
        step = env.step(action)
        taken += 1
        for i in range(env.spec.num_envs):
            if not step.valid[i]:
                assert step.reward[i] == 0 and not step.terminated[i] and not step.truncated[i]
                continue
            done = bool(step.terminated[i] | step.truncated[i])
            separate = done and env.spec.final_obs == "separate"
            following = (step.final_obs if separate else step.obs)["policy"][i].tolist()
            flags = bool(step.terminated[i]), bool(step.truncated[i])
            rows[i].append((obs["policy"][i].tolist(), int(action[i]), float(step.reward[i]), flags, following))
            counts[i] += 1
        assert (step.final_obs is not None) == (
            env.spec.final_obs == "separate" and bool((step.terminated | step.truncated).any())
        )
        obs = {key: value.clone() for key, value in step.obs.items()}
    return [row[:steps] for row in rows], taken
