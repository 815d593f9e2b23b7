"""Proximal policy optimisation."""

from canter.algorithms.ppo.advantages import BonusValueConfig
from canter.algorithms.ppo.config import CentralValueConfig
from canter.algorithms.ppo.ppo import PPO, PPOConfig

__all__ = ["PPO", "BonusValueConfig", "CentralValueConfig", "PPOConfig"]
