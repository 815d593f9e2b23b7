"""Atari games as published: grey pictures of 84 x 84, four of them, every fourth frame, sticky actions."""

from __future__ import annotations

from canter.algorithms.ppo import PPOConfig
from canter.algorithms.ppo.rewards import RewardConfig
from canter.config import TrainConfig
from canter.envs import EnvConfig
from canter.nn.actor_critic import ModelConfig
from canter.nn.cnn import CNNConfig
from canter.nn.network import NetworkConfig
from canter.nn.optimizer import OptimizerConfig
from canter.nn.schedules import Constant, Linear


def atari(env_id: str = "ALE/Pong-v5") -> TrainConfig:
    """PPO's settings for Atari (Schulman et al., 2017) on what ALE recommends (Machado et al., 2018)."""
    network = NetworkConfig(hidden=(512,), activation="relu", cnn=CNNConfig(features=None, layout="channels_first"))
    return TrainConfig(
        env=EnvConfig(
            id=env_id,
            num_envs=8,
            options={"frameskip": 1, "repeat_action_probability": 0.25},
            wrappers={
                "AtariPreprocessing": {
                    "noop_max": 30,
                    "frame_skip": 4,
                    "screen_size": 84,
                    "terminal_on_life_loss": True,
                    "grayscale_obs": True,
                },
                "FrameStackObservation": {"stack_size": 4},
            },
        ),
        total_steps=10_000_000,
        algorithm=PPOConfig(
            horizon=128,
            epochs=4,
            num_minibatches=4,
            clip_ratio=0.1,
            value_coef=0.5,
            entropy_coef=Constant(0.01),
            reward=RewardConfig(minimum=-1.0, maximum=1.0),
            optimizer=OptimizerConfig(learning_rate=Linear(2.5e-4)),
            model=ModelConfig(policy=network, shared_trunk=True, normalize_value=False),
        ),
    )
