"""Proximal policy optimisation."""

from canter.algorithms.ppo.advantages import BonusValueConfig, CentralValueConfig
from canter.algorithms.ppo.config import PPOConfig
from canter.algorithms.ppo.members import MemberConfig
from canter.algorithms.ppo.population import PopulationConfig, PopulationPPO
from canter.algorithms.ppo.ppo import PPO

__all__ = [
    "PPO",
    "BonusValueConfig",
    "CentralValueConfig",
    "MemberConfig",
    "PPOConfig",
    "PopulationConfig",
    "PopulationPPO",
]
