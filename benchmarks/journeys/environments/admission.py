"""Admission to a queue in continuous time, as a researcher would write it."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

ARRIVALS, SERVICES, ROOM = 0.9, 1.0, 20


class Admission(gymnasium.Env):
    """Admit an arriving customer for a fee of 5, or not; every customer costs 1 per unit of time."""

    observation_space = spaces.Box(0.0, ROOM, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Empty the queue."""
        super().reset(seed=seed)
        self.customers = 0
        return self._observe(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, float]]:
        """Go on to the next arrival or end of service."""
        rate = ARRIVALS + SERVICES * (self.customers > 0)
        duration = self.np_random.exponential(1 / rate)
        reward = -self.customers * duration
        if self.np_random.random() * rate >= ARRIVALS:
            self.customers -= 1
        elif action == 1 and self.customers < ROOM:
            self.customers += 1
            reward += 5.0
        return self._observe(), reward, False, False, {"duration": duration}

    def _observe(self) -> np.ndarray:
        return np.array([self.customers], np.float32)
