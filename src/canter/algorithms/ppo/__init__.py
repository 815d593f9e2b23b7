"""Proximal policy optimisation."""

from canter.algorithms.ppo.judge import BonusValueConfig
from canter.algorithms.ppo.ppo import PPO, PPOConfig
from canter.algorithms.ppo.settings import CentralValueConfig

__all__ = ["PPO", "BonusValueConfig", "CentralValueConfig", "PPOConfig"]
