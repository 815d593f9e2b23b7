"""Known-good settings, found by environment id.

Each YAML file of this folder is a family of presets: names with their settings, as in a config
file. `extends: NAME` begins with the settings of a preset above instead of the defaults. A name
that begins with an underscore is shared by presets and is none itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from canter.algorithms.base import algorithms
from canter.config import TrainConfig
from canter.core.plain import from_plain
from canter.core.registry import Registry
from canter.core.storage.files import read_yaml


def register_presets(registry: Registry[TrainConfig]) -> None:
    """Enter the presets of all files."""
    for file in sorted(Path(__file__).parent.glob("*.yaml")):
        for name, preset in read_presets(file):
            registry.register(name)(preset)


def read_presets(file: Path) -> Iterator[tuple[str, TrainConfig]]:
    """Yield the names and settings of the presets in a YAML file."""
    families, _ = read_yaml(file)
    known: dict[str, TrainConfig] = {}
    for name, settings in families.items():
        base = settings.pop("extends", None)
        known[name] = from_plain(settings, TrainConfig() if base is None else known[base])
        if not name.startswith("_"):
            yield name, known[name]


presets: Registry[TrainConfig] = Registry("preset", fill=register_presets)
"""Settings by environment id without version and simulator: `HalfCheetah` serves `HalfCheetah-v5`
and EnvPool's. A preset named by a whole id serves that environment alone."""


def preset_for(env_id: str, algorithm: str | None = None, device: str = "cpu") -> TrainConfig | None:
    """Return the preset for an environment and an algorithm; None if there is none."""
    name = name_for(env_id, algorithm, device)
    if name is None:
        return None
    preset = presets[name]
    return replace(preset, env=replace(preset.env, id=env_id))


def name_for(env_id: str, algorithm: str | None = None, device: str = "cpu") -> str | None:
    """Return the name of the preset for an environment and an algorithm, the large one on a GPU.

    An algorithm other than the default may have a preset for any environment.
    """
    id_without_scheme = env_id.rpartition(":")[2]
    task = id_without_scheme.rpartition("-v")[0] or id_without_scheme
    # The whole id first: a task of one simulator may have the name of another's.
    candidates = [env_id, task]
    if env_id.startswith("ALE/"):
        candidates.append("Atari")
    if algorithm not in (None, algorithms.default):
        candidates = [*(f"{name}-{algorithm}" for name in candidates), algorithm]
    if device.startswith("cuda"):
        candidates = [name for plain in candidates for name in (f"{plain}-large", plain)]
    known = {name.lower(): name for name in presets}
    return next((known[name.lower()] for name in candidates if name.lower() in known), None)
