"""An error of one rank made known to all, where they meet anyway, so that they save together what was before it."""

from __future__ import annotations

import json
import traceback
from typing import Any

from canter import distributed
from canter.envs.gymnasium_contract import place_of, text_of
from canter.specs import EnvFailed
from canter.training.episodes import NonFinite, NonFiniteElsewhere, NonFiniteUpdate


class RankFailed(RuntimeError):
    """What failed on one rank, as all ranks are told it; `trace` is that rank's traceback."""

    def __init__(self, rank: int, what: str, trace: str) -> None:
        super().__init__(what)
        self.rank, self.trace, self.where = rank, trace, f"on rank {rank}"


class RankNonFinite(RankFailed, NonFinite):
    """The same, of NaN or infinity."""


def agree(error: Exception | None) -> RankFailed:
    """The error of the first rank that has one; all ranks must call it, at least one with an error of its own.

    One that an environment began comes before what other ranks have learned from it meanwhile.
    """
    parts = distributed.gather_bytes(json.dumps(_told(error)).encode())
    found = [(rank, told) for rank, told in enumerate(map(json.loads, parts)) if told]
    rank, told = min(found, key=lambda item: (item[1]["learned"], item[0]))
    kind = RankFailed if told["before"] is None else RankNonFinite
    failed = kind(rank, told["what"], told["trace"])
    if isinstance(failed, NonFinite):
        failed.before = told["before"]
    return failed


def _told(error: Exception | None) -> dict[str, Any]:
    """What other ranks need to know of an error; nothing where it is another's."""
    if error is None or isinstance(error, NonFiniteElsewhere):
        return {}
    what = text_of(error)
    if not isinstance(error, EnvFailed | NonFinite):  # which say so themselves
        what = f"{type(error).__name__}: {what} ({place_of(error)})"
    inner = [text for text in (getattr(link, "trace", "") for link in _chain(error)) if text]
    trace = "\n".join(["".join(traceback.format_exception(error)), *inner])
    before = error.before if isinstance(error, NonFinite) else None
    return {"what": what, "trace": trace, "before": before, "learned": isinstance(error, NonFiniteUpdate)}


def _chain(error: BaseException | None) -> list[BaseException]:
    """An error and what it came from."""
    links: list[BaseException] = []
    while error is not None:
        links.append(error)
        error = error.__cause__
    return links
