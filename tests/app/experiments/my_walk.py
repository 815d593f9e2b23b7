"""An environment of a user's own."""

import gymnasium
import numpy as np


class Walk(gymnasium.Env):
    """Going right pays; nine steps."""

    observation_space = gymnasium.spaces.Box(-10.0, 10.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, pay=1.0):
        self.pay, self.x, self.t = pay, 0, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.x, self.t = self.x + 2 * int(action) - 1, self.t + 1
        return np.array([self.x], np.float32), self.pay * int(action), False, self.t == 9, {}


def make_walk():
    return Walk()
