"""Known-good settings, found by environment id."""

from __future__ import annotations

from dataclasses import replace

from canter.algorithms.base import algorithms
from canter.config import TrainConfig
from canter.config.presets import agents, atari, classic, extensions, mujoco, sac
from canter.core.registry import Registry

presets: Registry[TrainConfig] = Registry("preset")
"""Settings by environment id without version and simulator: `HalfCheetah` serves `HalfCheetah-v5` and EnvPool's. One by
a whole id serves that environment alone."""

for _name, _preset in {
    "CartPole": classic.cartpole(),
    "Atari": atari.atari(),
    "Acrobot": classic.acrobot(),
    "Pendulum": classic.pendulum(),
    "MountainCarContinuous": classic.mountain_car_continuous(),
    **mujoco.PRESETS,
    "Rendezvous": agents.rendezvous(),
    "RPS": agents.rock_paper_scissors(),
    "cartpole-positions-lstm": classic.cartpole_positions("lstm"),
    "cartpole-positions-gru": classic.cartpole_positions("gru"),
    "distillation": classic.distillation(),
    "tensor:cartpole-distillation": classic.cartpole_distillation(),
    "quadrotor-central-value": extensions.quadrotor_central_value(),
    "queue-average-reward": extensions.queue_average_reward(),
    "queue-discounted": extensions.queue_discounted(),
    "tensor:maze": extensions.maze(),
    "tensor:swimmer": extensions.robot("tensor:swimmer"),
    "quadrotor-symmetry": extensions.robot("tensor:quadrotor"),
    "tensor:deep-sea": extensions.deep_sea(),
    "swimmer-wide": extensions.swimmer_style("wide"),
    "swimmer-narrow": extensions.swimmer_style("narrow"),
    **sac.PRESETS,
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
    if device.startswith("cuda"):
        tasks = [name for plain in tasks for name in (f"{plain}-large", plain)]
    known = {name.lower(): name for name in presets}
    return next((known[name.lower()] for name in tasks if name.lower() in known), None)
