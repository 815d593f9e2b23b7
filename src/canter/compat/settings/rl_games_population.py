"""Population-based training in files of rl_games and Isaac Lab: the section `pbt` beside `params`."""

from __future__ import annotations

from dataclasses import dataclass, field

from canter.compat.settings import readers as read
from canter.compat.settings.section import Section
from canter.core.registry import nearest

FUNCTIONS = ("mutate_float", "mutate_discount", "mutate_eps_clip", "mutate_mini_epochs", "mutate_float_min_1")
"""Mutations that a release of rl_games or IsaacGymEnvs knows."""
COMMAND = "canter tune --pbt"


@dataclass(frozen=True)
class Population:
    """A population as rl_games and Isaac Lab describe it, with Canter's names of the settings.

    A member is a leader above max(mean + k std, mean + a) of the scores and an underperformer below
    the mirrored bound, with k the `threshold_std` and a the `threshold_abs`. An underperformer copies
    a random leader, or itself without one, and mutates.
    """

    enabled: bool
    """The file trains a population unless its script says otherwise."""
    members: int
    objective: str
    """Dotted address of the score in the infos of a step; empty if the file names none."""
    interval_steps: int
    """Environment steps of a member between two comparisons."""
    threshold_std: float
    threshold_abs: float
    mutation_rate: float
    """Probability that a setting of an underperformer mutates."""
    change_range: tuple[float, float]
    """Range of the factor that `mutate_float` multiplies or divides by."""
    mutations: dict[str, str] = field(default_factory=dict)
    """Mutation function by setting: `mutate_float` changes the value, `mutate_discount` the distance
    from 1 by a factor of 1.1 to 1.2."""
    fixed: tuple[str, ...] = ()
    """Mutated addresses of the file that are no setting here, such as weights of rewards."""


def read_pbt(s: Section) -> Population | None:
    """Return the population that the section `pbt` describes, and report its keys; None without one.

    Call it after the rest of the file was read: it looks up the settings of each mutated key.
    """
    if not s.has_section(""):
        return None
    mutations = read_mutations(s)
    population = Population(
        enabled=read.flag(s, "enabled", False),
        members=read.count(s, "num_policies", 8),
        objective=read.word(s, "objective", ""),
        interval_steps=read.count(s, "interval_steps", 100_000),
        threshold_std=read.finite(s, "threshold_std", 0.1),
        threshold_abs=read.finite(s, "threshold_abs", 0.05),
        mutation_rate=read.finite(s, "mutation_rate", 0.25),
        change_range=read.pair(s, "change_range", "two factors, such as [1.1, 2.0]", default=(1.1, 2.0)),
        mutations={setting: function for function, settings in mutations.values() for setting in settings},
        fixed=tuple(address for address, (_, settings) in mutations.items() if not settings),
    )
    if not population.enabled:
        s.run.root.no_effect(s.at, f"enabled is off; {COMMAND} reads this section")
        return population
    s.changed("enabled", f"this file trains one run here; {COMMAND} trains the population of {population.members}")
    s.mapped("policy_idx directory workspace launcher", f"{COMMAND} starts all members itself")
    s.mapped("num_policies objective interval_steps threshold_std threshold_abs mutation_rate change_range", COMMAND)
    for address, (function, settings) in mutations.items():
        key = s.key(f"mutation.{address}")
        s.run.reported.add(key)
        if settings:
            s.run.report.add(key, function, "mapped", f"{COMMAND}: {', '.join(settings)}")
        else:
            s.run.report.add(key, function, "changed", why="no setting here: it keeps its value in all members")
    return population


def read_mutations(s: Section) -> dict[str, tuple[str, list[str]]]:
    """Return the function and the settings here of each mutated address."""
    mutations: dict[str, tuple[str, list[str]]] = {}
    for address, function in (s.raw("mutation") if s.has_section("mutation") else {}).items():
        if function not in FUNCTIONS:
            expected = f"mutations by {', '.join(FUNCTIONS)}"
            raise s.error("mutation", expected, f"{address}: {function!r}, {nearest(str(function), FUNCTIONS)}")
        key = str(address).partition(".")[2]  # scripts put `agent.` or `train.` before the file's keys
        mutations[address] = (function, [setting for setting, source in s.run.origin.items() if source == key])
    return mutations
