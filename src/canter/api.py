"""Every public name of Canter: what `canter.NAME` means."""

from canter.algorithms.base import Algorithm, Declared, Headline, RolloutPlan
from canter.algorithms.distillation import Distillation, DistillationConfig
from canter.algorithms.extension import Extension
from canter.algorithms.phase import Phase
from canter.algorithms.ppo import PPO, BonusValueConfig, CentralValueConfig, PPOConfig
from canter.algorithms.ppo.rewards import RewardConfig
from canter.algorithms.sac import SAC, SACConfig, TemperatureConfig
from canter.config import TrainConfig
from canter.data.replay import ReplayConfig
from canter.engines.autograd import LossGradients, LossOutput
from canter.engines.batch import ModelOutput
from canter.engines.bound import BoundLossConfig
from canter.envs import EnvConfig
from canter.envs.imports import allow_import
from canter.experiments.init_from import InitFrom
from canter.experiments.session import TrainingResult
from canter.experiments.train import evaluate, load, train
from canter.extensions import AMPConfig, MirrorConfig, RNDConfig, SymmetryConfig
from canter.nn.actor_critic import ModelConfig, Policy
from canter.nn.critics import CriticConfig
from canter.nn.heads import StdConfig
from canter.nn.network import NetworkConfig
from canter.nn.rnn import RNNConfig
from canter.nn.stack import StackNetworkConfig
from canter.optim import OptimizerConfig
from canter.play.evaluation import EpisodesUnfinished, Evaluation
from canter.play.export import export_policy
from canter.play.lta import LongRunAverage, long_run_average
from canter.play.player import Player
from canter.play.watching import EvaluateConfig, VideoConfig
from canter.recipes import preset_for, presets
from canter.registry import register
from canter.runs.run_folder import CheckpointConfig, RunFolder
from canter.schedules import AdaptiveKL, Constant, Linear, StepAt
from canter.self_play.self_play import SelfPlayConfig
from canter.specs import (
    Continuous,
    Discrete,
    Env,
    EnvSpec,
    Mirror,
    MotionSpec,
    MultiDiscrete,
    Step,
    Symmetry,
    TensorSpec,
)
from canter.storage.policy_file import ValueFunction, load_critic, load_policy, save_critic, save_policy
from canter.training.execution import ExecutionConfig
from canter.training.progress import SuccessConfig, UntilConfig
from canter.training.trainer import STOP, Report, RunStopped, Trainer

__all__ = [
    "PPO",
    "SAC",
    "STOP",
    "AMPConfig",
    "AdaptiveKL",
    "Algorithm",
    "BonusValueConfig",
    "BoundLossConfig",
    "CentralValueConfig",
    "CheckpointConfig",
    "Constant",
    "Continuous",
    "CriticConfig",
    "Declared",
    "Discrete",
    "Distillation",
    "DistillationConfig",
    "Env",
    "EnvConfig",
    "EnvSpec",
    "EpisodesUnfinished",
    "EvaluateConfig",
    "Evaluation",
    "ExecutionConfig",
    "Extension",
    "Headline",
    "InitFrom",
    "Linear",
    "LongRunAverage",
    "LossGradients",
    "LossOutput",
    "Mirror",
    "MirrorConfig",
    "ModelConfig",
    "ModelOutput",
    "MotionSpec",
    "MultiDiscrete",
    "NetworkConfig",
    "OptimizerConfig",
    "PPOConfig",
    "Phase",
    "Player",
    "Policy",
    "RNDConfig",
    "RNNConfig",
    "ReplayConfig",
    "Report",
    "RewardConfig",
    "RolloutPlan",
    "RunFolder",
    "RunStopped",
    "SACConfig",
    "SelfPlayConfig",
    "StackNetworkConfig",
    "StdConfig",
    "Step",
    "StepAt",
    "SuccessConfig",
    "Symmetry",
    "SymmetryConfig",
    "TemperatureConfig",
    "TensorSpec",
    "TrainConfig",
    "Trainer",
    "TrainingResult",
    "UntilConfig",
    "ValueFunction",
    "VideoConfig",
    "allow_import",
    "evaluate",
    "export_policy",
    "load",
    "load_critic",
    "load_policy",
    "long_run_average",
    "preset_for",
    "presets",
    "register",
    "save_critic",
    "save_policy",
    "train",
]
