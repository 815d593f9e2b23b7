"""The metrics and policies of the members of a population, each in a folder like that of a single run."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from canter.core.storage.files import replace_file
from canter.nn.actor_critic import Policy
from canter.nn.policy_file import FINAL_ACTOR, POLICIES, save_policy
from canter.runs.metrics import METRICS, MetricsLog, read_rows
from canter.runs.records import CONFIG
from canter.training.progress import Report


class Population(Protocol):
    """An algorithm whose members learn side by side."""

    views: Sequence[Policy]
    """Policy of each member."""
    leader: int
    """The member whose policy stands for the run."""

    def member_rows(self) -> dict[str, list[float]]:
        """Return numbers of each member by name, with `episode_returns` and `episodes` so far."""
        ...


def member_name(member: int) -> str:
    """Return the name of a member's folder in that of its population."""
    return f"member-{member:03}"


class MemberLogs:
    """Writes a row for each member with every row of the log, and the policies at checkpoints.

        member-003/config.yaml      the settings of a single run that learns as this member does
        member-003/metrics.jsonl    rows with the columns of a single run
        member-003/policies/        its policy, usable alone

    `settings` are the texts of `config.yaml`. The return is the mean of at least the last 100 episodes,
    or of all while there are fewer.
    """

    def __init__(self, folder: Path, settings: Sequence[str], recent_episodes: int) -> None:
        self.folders = [folder / member_name(member) for member in range(len(settings))]
        self.settings = settings
        self.recent_episodes = recent_episodes
        self.logs = [MetricsLog(path / METRICS) for path in self.folders]
        self.totals: deque[tuple[list[float], list[float]]] = deque()
        """Sums and numbers of returns at earlier rows, the oldest first."""
        self.started = False

    def __call__(self, trainer: Any, report: Report) -> dict[str, float]:
        """Write the rows of all members; return the best and the worst mean return."""
        if not self.started:
            self._begin(report.iteration)
        population: Population = trainer.algorithm
        rows = population.member_rows()
        returns = self._recent_returns(rows["episode_returns"], rows["episodes"])
        shared: dict[str, float] = {"iteration": report.iteration, "env_steps": report.env_steps // len(self.logs)}
        shared["seconds"] = report.seconds
        for member, log in enumerate(self.logs):
            own = {name: values[member] for name, values in rows.items()}
            log.append({**shared, "return": returns[member], **own})
        known = [value for value in returns if value is not None]
        if known:
            population.leader = returns.index(max(known))
        if trainer.folder.saves_at(report.iteration) or trainer.done:
            self._save(population, report, returns)
        return {"members/best_return": max(known), "members/worst_return": min(known)} if known else {}

    def _begin(self, iteration: int) -> None:
        """Write the settings, and remove rows that are about to be repeated."""
        self.started = True
        for path, text, log in zip(self.folders, self.settings, self.logs, strict=True):
            path.mkdir(parents=True, exist_ok=True)
            replace_file(path / CONFIG, text.encode())
            log.truncate_after(iteration - 1)
        for rows in zip(*(read_rows(log.path) for log in self.logs), strict=False):
            self._recent_returns([row["episode_returns"] for row in rows], [row["episodes"] for row in rows])

    def _recent_returns(self, sums: list[float], counts: list[float]) -> list[float | None]:
        """Return the mean of the last returns of each member, None before an episode has ended."""
        self.totals.append((sums, counts))
        while len(self.totals) > 2 and self._episodes_since(1, counts) >= self.recent_episodes:
            self.totals.popleft()
        full = self._episodes_since(0, counts) >= self.recent_episodes
        first = self.totals[0] if full else ([0.0] * len(sums), [0.0] * len(sums))
        before = zip(*first, strict=True)
        pairs = zip(sums, counts, before, strict=True)
        return [(total - a) / (count - b) if count > b else None for total, count, (a, b) in pairs]

    def _episodes_since(self, row: int, counts: list[float]) -> float:
        """Return the least number of episodes that a member has ended since a row."""
        return min(now - then for now, then in zip(counts, self.totals[row][1], strict=True))

    def _save(self, population: Population, report: Report, returns: Sequence[float | None]) -> None:
        steps = report.env_steps // len(self.folders)
        for path, policy, mean in zip(self.folders, population.views, returns, strict=True):
            save_policy(path / POLICIES / FINAL_ACTOR, policy, env_steps=steps, return_=mean)

    def close(self) -> None:
        """Do nothing: every row closes its files."""
