"""rl_games: settings, checkpoints, runner and players.

from canter.compat.rl_games import Runner
"""

from canter.compat.rl_games.agent import Agent
from canter.compat.rl_games.env import RlGamesEnv, env_configurations, model_builder, vecenv
from canter.compat.rl_games.hooks import AlgoObserver, DefaultAlgoObserver, IsaacAlgoObserver
from canter.compat.rl_games.player import PpoPlayer
from canter.compat.rl_games.runner import Runner

__all__ = [
    "Agent",
    "AlgoObserver",
    "DefaultAlgoObserver",
    "IsaacAlgoObserver",
    "PpoPlayer",
    "RlGamesEnv",
    "Runner",
    "env_configurations",
    "model_builder",
    "vecenv",
]
