"""Batched environments in torch, for any device: ids `tensor:<name>`."""

from __future__ import annotations

from collections.abc import Callable

from canter.core.registry import Registry
from canter.core.specs import Env
from canter.envs.tensor.base import EnvState, Outcome, TensorEnv
from canter.envs.tensor.classic import CartPole, Null, Pendulum
from canter.envs.tensor.games import Rendezvous, RockPaperScissors, folded
from canter.envs.tensor.maze import Maze
from canter.envs.tensor.quadrotor import Quadrotor
from canter.envs.tensor.queue import QueueNetwork
from canter.envs.tensor.swimmer import Swimmer

__all__ = [
    "CartPole",
    "EnvState",
    "Maze",
    "Null",
    "Outcome",
    "Pendulum",
    "Quadrotor",
    "QueueNetwork",
    "Rendezvous",
    "RockPaperScissors",
    "Swimmer",
    "TensorEnv",
    "tensor_envs",
]

tensor_envs: Registry[Callable[..., Env]] = Registry("environment")
"""Environments by their id after `tensor:`; call one with `(num_envs, device, **options)`."""

tensor_envs.register("cartpole")(CartPole)
tensor_envs.register("maze")(Maze)
tensor_envs.register("null")(Null)
tensor_envs.register("pendulum")(Pendulum)
tensor_envs.register("quadrotor")(Quadrotor)
tensor_envs.register("queue")(QueueNetwork)
tensor_envs.register("rendezvous")(folded(Rendezvous))
tensor_envs.register("rps")(folded(RockPaperScissors))
tensor_envs.register("swimmer")(Swimmer)
