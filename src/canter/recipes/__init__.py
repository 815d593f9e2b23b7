"""Known-good settings, found by environment id."""

from __future__ import annotations

from dataclasses import replace

from canter.config import TrainConfig
from canter.recipes.agents import rendezvous, rock_paper_scissors
from canter.recipes.classic import acrobot, cartpole, mountain_car_continuous, pendulum
from canter.recipes.memory import cartpole_positions
from canter.recipes.mujoco import ant, half_cheetah, hopper, humanoid, inverted_double_pendulum, swimmer, walker2d
from canter.recipes.quadrotor import quadrotor_central_value
from canter.recipes.queue import queue_average_reward, queue_discounted
from canter.registry import Registry

presets: Registry[TrainConfig] = Registry("preset")
"""Settings by environment id without version and simulator: `HalfCheetah` serves `HalfCheetah-v5` and EnvPool's."""

for _name, _preset in {
    "CartPole": cartpole(),
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
    "quadrotor-central-value": quadrotor_central_value(),
    "queue-average-reward": queue_average_reward(),
    "queue-discounted": queue_discounted(),
}.items():
    presets.register(_name)(_preset)


def preset_for(env_id: str) -> TrainConfig | None:
    """The settings known to work for an environment, with its id filled in; None where there are none."""
    name = env_id.rpartition(":")[2].rpartition("-v")[0] or env_id.rpartition(":")[2]
    matches = [known for known in presets if known.lower() == name.lower()]
    if not matches:
        return None
    preset = presets[matches[0]]
    return replace(preset, env=replace(preset.env, id=env_id))
