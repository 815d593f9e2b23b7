"""Soft actor-critic."""

from canter.algorithms.sac.config import SACConfig, TemperatureConfig
from canter.algorithms.sac.sac import SAC

__all__ = ["SAC", "SACConfig", "TemperatureConfig"]
