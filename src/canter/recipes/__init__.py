"""Known-good settings, found by environment id."""

from __future__ import annotations

from dataclasses import replace

from canter.algorithms.base import algorithms
from canter.config import TrainConfig
from canter.recipes.agents import rendezvous, rock_paper_scissors
from canter.recipes.atari import atari
from canter.recipes.classic import acrobot, cartpole, mountain_car_continuous, pendulum
from canter.recipes.extensions import deep_sea, maze, swimmer_style
from canter.recipes.extensions import quadrotor as mirrored_quadrotor
from canter.recipes.extensions import swimmer as viscous_swimmer
from canter.recipes.memory import cartpole_distillation, cartpole_positions, distillation
from canter.recipes.mujoco import ant, half_cheetah, hopper, humanoid, inverted_double_pendulum, swimmer, walker2d
from canter.recipes.quadrotor import quadrotor_central_value
from canter.recipes.queue import queue_average_reward, queue_discounted
from canter.recipes.sac import sac_presets
from canter.registry import Registry

presets: Registry[TrainConfig] = Registry("preset")
"""Settings by environment id without version and simulator: `HalfCheetah` serves `HalfCheetah-v5` and EnvPool's. One by
a whole id serves that environment alone."""

for _name, _preset in {
    "CartPole": cartpole(),
    "Atari": atari(),
    "Acrobot": acrobot(),
    "Pendulum": pendulum(),
    "MountainCarContinuous": mountain_car_continuous(),
    "HalfCheetah": half_cheetah(),
    "Hopper": hopper(),
    "Walker2d": walker2d(),
    "Ant": ant(),
    "Humanoid": humanoid(),
    "Swimmer": swimmer(),
    "InvertedDoublePendulum": inverted_double_pendulum(),
    "Rendezvous": rendezvous(),
    "RPS": rock_paper_scissors(),
    "cartpole-positions-lstm": cartpole_positions("lstm"),
    "cartpole-positions-gru": cartpole_positions("gru"),
    "distillation": distillation(),
    "tensor:cartpole-distillation": cartpole_distillation(),
    "quadrotor-central-value": quadrotor_central_value(),
    "queue-average-reward": queue_average_reward(),
    "queue-discounted": queue_discounted(),
    "tensor:maze": maze(),
    "tensor:swimmer": viscous_swimmer(),
    "quadrotor-symmetry": mirrored_quadrotor(),
    "tensor:deep-sea": deep_sea(),
    "swimmer-wide": swimmer_style("wide"),
    "swimmer-narrow": swimmer_style("narrow"),
    **sac_presets(),
}.items():
    presets.register(_name)(_preset)


def preset_for(env_id: str, algorithm: str | None = None, device: str = "cpu") -> TrainConfig | None:
    """The settings known to work for an environment and an algorithm, with its id filled in; None if there are none."""
    name = name_for(env_id, algorithm, device)
    if name is None:
        return None
    preset = presets[name]
    return replace(preset, env=replace(preset.env, id=env_id))


def name_for(env_id: str, algorithm: str | None = None, device: str = "cpu") -> str | None:
    """Name of the preset for an environment and an algorithm, the large one on a GPU where there is one.

    An algorithm other than the default one may have one for any environment.
    """
    task = env_id.rpartition(":")[2].rpartition("-v")[0] or env_id.rpartition(":")[2]
    # The whole id first: a task of one simulator may have the name of another's.
    tasks = [env_id, task, *["Atari"] * env_id.startswith("ALE/")]
    if algorithm not in (None, algorithms.default):
        tasks = [*[f"{name}-{algorithm}" for name in tasks], algorithm]
    wanted = tasks
    if device.startswith("cuda"):
        wanted = [name for plain in wanted for name in (f"{plain}-large", plain)]
    known = {name.lower(): name for name in presets}
    return next((known[name.lower()] for name in wanted if name.lower() in known), None)
