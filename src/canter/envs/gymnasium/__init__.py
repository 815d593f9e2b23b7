"""Gymnasium environments: one or many, in one process or more, and any vector environment."""

from canter.envs.gymnasium.adapter import GymnasiumEnv, env_seeds
from canter.envs.gymnasium.make import make_gymnasium

__all__ = ["GymnasiumEnv", "env_seeds", "make_gymnasium"]
