"""Canter trains control policies with PPO and its relatives."""

from canter.algorithms.ppo import PPO, PPOConfig
from canter.config import TrainConfig
from canter.envs import EnvConfig
from canter.nn.actor_critic import ModelConfig, Policy
from canter.nn.heads import StdConfig
from canter.nn.network import NetworkConfig
from canter.optim import OptimizerConfig
from canter.recipes import preset_for, presets
from canter.runtime.evaluation import Evaluation, evaluate
from canter.runtime.trainer import Report, train
from canter.schedules import AdaptiveKL, Constant, Linear
from canter.specs import Continuous, Discrete, Env, EnvSpec, MultiDiscrete, Step, TensorSpec

__version__ = "0.1.0"

__all__ = [
    "PPO",
    "AdaptiveKL",
    "Constant",
    "Continuous",
    "Discrete",
    "Env",
    "EnvConfig",
    "EnvSpec",
    "Evaluation",
    "Linear",
    "ModelConfig",
    "MultiDiscrete",
    "NetworkConfig",
    "OptimizerConfig",
    "PPOConfig",
    "Policy",
    "Report",
    "StdConfig",
    "Step",
    "TensorSpec",
    "TrainConfig",
    "evaluate",
    "preset_for",
    "presets",
    "train",
]
