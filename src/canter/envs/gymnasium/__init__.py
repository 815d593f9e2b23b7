"""Gymnasium environments: one or many, in this process or in others, and any vector environment of a user."""

from canter.envs.gymnasium.adapter import GymnasiumEnv, env_seeds
from canter.envs.gymnasium.make import make_gymnasium

__all__ = ["GymnasiumEnv", "env_seeds", "make_gymnasium"]
