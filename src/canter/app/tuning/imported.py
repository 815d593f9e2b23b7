"""Population-based training of rl_games and Isaac Lab as settings of `canter tune --pbt`."""

from __future__ import annotations

from typing import Any

from canter.app.tuning.copying import follows_kl
from canter.compat.settings.rl_games_population import Population
from canter.config import TrainConfig
from canter.core.plain import to_plain
from canter.core.registry import UserError
from canter.core.storage.validity import flatten

RANGES = {
    "mutate_float": "1e-4x..1e4x:log",
    "mutate_float_min_1": "1..1e4:log",
    "mutate_discount": "1e-3x..1e3x:log1m",
    "mutate_eps_clip": "0.01..0.3:log",
    "mutate_mini_epochs": "1..8",
}
"""Ranges by mutation; those of rl_games have ends only where it has."""


def imported_pbt(population: Population, config: TrainConfig) -> dict[str, Any]:
    """Return the settings of `PbtConfig` that a population of rl_games or Isaac Lab means.

    All members begin with the settings of the file. A setting that is 0 there stays 0, as there.
    """
    plain = flatten(to_plain(config))
    space = {key: RANGES[function] for key, function in population.mutations.items() if plain.get(key) not in (0, None)}
    for key in space:
        if follows_kl(config, key):
            schedule = key.removesuffix(".start")
            space[key] = f"{plain[f'{schedule}.minimum']:g}..{plain[f'{schedule}.maximum']:g}:log"
    if not space:
        raise UserError("pbt.mutation: no mutated key of the file is a setting here: add --space.KEY LOW..HIGH")
    address = population.objective.partition(".")[2] or population.objective
    return {
        "members": population.members,
        "interval": population.interval_steps,
        "rule": "threshold",
        "threshold_std": population.threshold_std,
        "threshold_abs": population.threshold_abs,
        "mutation_rate": population.mutation_rate,
        "change_range": population.change_range,
        "spread": False,
        "score": f"env/{address}" if address else "return",
        "space": space,
    }
