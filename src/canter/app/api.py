"""The public names of Canter, importable as `canter.NAME`."""

from canter.algorithms.base import Algorithm, Headline, ReportSpec, RolloutPlan
from canter.algorithms.distillation import Distillation, DistillationConfig
from canter.algorithms.doctor.findings import Finding
from canter.algorithms.extension import Extension
from canter.algorithms.extensions import AMPConfig, MirrorConfig, RNDConfig, SymmetryConfig
from canter.algorithms.phase import Phase
from canter.algorithms.ppo import PPO, BonusValueConfig, CentralValueConfig, MemberConfig, PopulationConfig, PPOConfig
from canter.algorithms.ppo.rewards import RewardConfig
from canter.algorithms.sac import SAC, SACConfig, TemperatureConfig
from canter.app.doctor.diagnosis import diagnose
from canter.app.doctor.environment import EnvDiagnosis, diagnose_env
from canter.app.experiments.population import MemberResult, PopulationResult, train_population
from canter.app.experiments.session import InitFrom, TrainingResult
from canter.app.experiments.train import evaluate, load, resume, train
from canter.app.tuning.tune import TuneResult, tune
from canter.config import TrainConfig
from canter.config.presets import preset_for, presets
from canter.core.data.replay import ReplayConfig
from canter.core.declarations import Mirror, MotionSpec, Symmetry
from canter.core.interface import Interface, Joint, Signal
from canter.core.registry import register
from canter.core.specs import Continuous, Discrete, Env, EnvSpec, MultiDiscrete, Step, TensorSpec
from canter.engines.autograd import LossGradients, LossOutput
from canter.engines.base import BoundLossConfig, ModelOutput
from canter.envs import EnvConfig
from canter.envs.imports import allow_import
from canter.nn.actor_critic import ModelConfig, Policy, ValueFunction
from canter.nn.heads import StdConfig
from canter.nn.network import ModuleConfig, NetworkConfig, network
from canter.nn.optimizer import OptimizerConfig
from canter.nn.policy_file import save_critic, save_policy
from canter.nn.policy_loading import load_critic, load_policy
from canter.nn.rnn import RNNConfig
from canter.nn.schedules import AdaptiveKL, Constant, Linear, StepAt
from canter.nn.stack import CriticConfig, StackNetworkConfig
from canter.play.callbacks import EvaluateConfig, VideoConfig
from canter.play.evaluation import EpisodesUnfinished, Evaluation, LongRunAverage, long_run_average
from canter.play.export import export_policy
from canter.play.player import Player
from canter.runs.run_folder import CheckpointConfig, RunFolder
from canter.runs.writers import MetricWriter
from canter.training.callbacks import STOP, Callback
from canter.training.execution import ExecutionConfig
from canter.training.progress import SuccessConfig, UntilConfig
from canter.training.self_play import SelfPlayConfig
from canter.training.trainer import Report, RunStopped, Trainer

__all__ = [
    "PPO",
    "SAC",
    "STOP",
    "AMPConfig",
    "AdaptiveKL",
    "Algorithm",
    "BonusValueConfig",
    "BoundLossConfig",
    "Callback",
    "CentralValueConfig",
    "CheckpointConfig",
    "Constant",
    "Continuous",
    "CriticConfig",
    "Discrete",
    "Distillation",
    "DistillationConfig",
    "Env",
    "EnvConfig",
    "EnvDiagnosis",
    "EnvSpec",
    "EpisodesUnfinished",
    "EvaluateConfig",
    "Evaluation",
    "ExecutionConfig",
    "Extension",
    "Finding",
    "Headline",
    "InitFrom",
    "Interface",
    "Joint",
    "Linear",
    "LongRunAverage",
    "LossGradients",
    "LossOutput",
    "MemberConfig",
    "MemberResult",
    "MetricWriter",
    "Mirror",
    "MirrorConfig",
    "ModelConfig",
    "ModelOutput",
    "ModuleConfig",
    "MotionSpec",
    "MultiDiscrete",
    "NetworkConfig",
    "OptimizerConfig",
    "PPOConfig",
    "Phase",
    "Player",
    "Policy",
    "PopulationConfig",
    "PopulationResult",
    "RNDConfig",
    "RNNConfig",
    "ReplayConfig",
    "Report",
    "ReportSpec",
    "RewardConfig",
    "RolloutPlan",
    "RunFolder",
    "RunStopped",
    "SACConfig",
    "SelfPlayConfig",
    "Signal",
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
    "TuneResult",
    "UntilConfig",
    "ValueFunction",
    "VideoConfig",
    "allow_import",
    "diagnose",
    "diagnose_env",
    "evaluate",
    "export_policy",
    "load",
    "load_critic",
    "load_policy",
    "long_run_average",
    "network",
    "preset_for",
    "presets",
    "register",
    "resume",
    "save_critic",
    "save_policy",
    "train",
    "train_population",
    "tune",
]
