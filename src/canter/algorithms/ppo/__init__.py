"""Proximal policy optimisation."""

from canter.algorithms.ppo.central_value import CentralValueConfig
from canter.algorithms.ppo.judge import BonusValueConfig
from canter.algorithms.ppo.ppo import PPO, PPOConfig

__all__ = ["PPO", "BonusValueConfig", "CentralValueConfig", "PPOConfig"]
