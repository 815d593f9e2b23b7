"""Your own Gymnasium environment: one class, one call, and every command supports it.

    python examples/own_environment.py
    canter runs

The run stores where the class is, so `canter play`, `eval`, `export` and `resume` need only the run.
"""

import gymnasium
import numpy as np
from gymnasium import spaces

import canter


class Thermostat(gymnasium.Env):
    """Heat a room, or do not, so that it stays at 20 degrees while it cools."""

    observation_space = spaces.Box(-20.0, 20.0, (1,), np.float32)  # degrees from the goal
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.error = self.np_random.uniform(-5.0, 5.0)
        return self.observation(), {}

    def step(self, action):
        self.error += (1.0 if action == 1 else 0.0) - 0.4
        return self.observation(), -abs(self.error), abs(self.error) > 15.0, False, {}

    def observation(self):
        return np.array([self.error], np.float32)


if __name__ == "__main__":  # other commands import this file to find the class
    env = {"num_envs": 8, "reset_steps": 40}  # the time limit is a cut, not an end: it is no part of the class
    result = canter.train(Thermostat, env=env, algorithm={"horizon": 64, "gamma": 0.9}, total_steps=12_000)
    print(f"{-result.score.mean / 40:.2f} degrees off on average; the run is {result.path}")
