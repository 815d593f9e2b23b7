"""Soft actor-critic."""

from canter.algorithms.sac.config import TemperatureConfig
from canter.algorithms.sac.sac import SAC, SACConfig

__all__ = ["SAC", "SACConfig", "TemperatureConfig"]
