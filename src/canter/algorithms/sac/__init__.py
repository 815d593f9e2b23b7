"""Soft actor-critic."""

from canter.algorithms.sac.sac import SAC, SACConfig
from canter.algorithms.sac.settings import TemperatureConfig

__all__ = ["SAC", "SACConfig", "TemperatureConfig"]
