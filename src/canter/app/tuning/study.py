"""The study of a search: Optuna samples the trials and keeps them in a journal.

A trial is written to the journal at once and whole. Its sample depends on the seed, its number and
the trials in the journal alone, so a search that is killed and continued has the same trials.
"""

from __future__ import annotations

import fcntl
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from canter.app.tuning.space import Dimension

JOURNAL = "study.journal"
STARTUP_TRIALS = 10
"""Trials that are sampled uniformly before TPE (tree-structured Parzen estimators) takes over."""
MIN_TRIALS = 8
"""Trials below which PED-ANOVA, which compares the best quarter with all, says nothing."""
PED_ANOVA = "in reaching the best quarter (PED-ANOVA)"
RANKS = "in the absolute rank correlations with the score, as PED-ANOVA is undefined for these trials"


def load_optuna() -> Any:
    """Return the module `optuna`; raise ImportError that says how to install it."""
    try:
        optuna = import_module("optuna")
    except ImportError as error:
        raise ImportError('a search needs Optuna: pip install "canter[tune]"', name="optuna") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


class FileLock:
    """Excludes other processes that write to the journal; the system releases it at their death."""

    def __init__(self, path: Path) -> None:
        self.file = path
        self.path = path.with_name(f".{path.name}.lock")
        self.fd = -1

    def acquire(self) -> bool:
        """Wait for the lock; repair the journal if a process was killed while it wrote."""
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        fcntl.flock(self.fd, fcntl.LOCK_EX)
        remove_partial_line(self.file)
        return True

    def release(self) -> None:
        """Release the lock."""
        os.close(self.fd)


class Study:
    """The trials of a search, and what was recorded about it."""

    def __init__(self, folder: Path, dimensions: Sequence[Dimension], seed: int) -> None:
        self.optuna = load_optuna()
        self.dimensions = {dimension.key: dimension for dimension in dimensions}
        self.distributions = {key: part.distribution(self.optuna) for key, part in self.dimensions.items()}
        self.seed = seed
        file = folder / JOURNAL
        journal = self.optuna.storages.journal
        lock = FileLock(file)
        lock.acquire()
        lock.release()
        self.storage = self.optuna.storages.JournalStorage(journal.JournalFileBackend(str(file), lock_obj=lock))
        # The name that the study was made with: the folder may have another one by now.
        name = next(iter(self.optuna.get_all_study_names(self.storage)), folder.name)
        self.study = self.optuna.create_study(
            storage=self.storage, study_name=name, direction="maximize", load_if_exists=True
        )
        self.study_id = self.storage.get_study_id_from_name(name)
        self.notes: dict[str, Any] = {}
        """Records by name."""
        self.trials: list[dict[str, str]] = []
        """Settings of all trials, as texts by key."""
        self.refresh()

    def refresh(self) -> None:
        """Read what this and other processes have written to the journal."""
        self.notes = dict(self.study.user_attrs)
        stored = self._stored()
        self.trials += [self._texts(trial.params) for trial in stored[len(self.trials) :]]

    def _stored(self) -> list[Any]:
        return self.study.get_trials(deepcopy=False)

    def _texts(self, params: Mapping[str, Any]) -> dict[str, str]:
        return {key: self.dimensions[key].text(params[key]) for key in self.dimensions}

    def is_finished(self, number: int) -> bool:
        """Return whether a trial has been closed."""
        return self._stored()[number].state.is_finished()

    def note(self, name: str, value: Any) -> None:
        """Record plain data under a name."""
        self.study.set_user_attr(name, value)
        self.notes[name] = value

    def ask(self) -> None:
        """Add a trial that TPE samples from the trials so far, unfinished ones included."""
        with quiet(self.optuna):
            seed = np.random.SeedSequence([self.seed, len(self.trials)]).generate_state(1)[0]
            sampler = self.optuna.samplers.TPESampler(
                seed=int(seed), multivariate=True, constant_liar=True, n_startup_trials=STARTUP_TRIALS
            )
            copy = self.optuna.create_study(direction="maximize", sampler=sampler)
            copy.add_trials(self._stored())
            sampled = copy.ask(self.distributions)
        running = self.optuna.trial.TrialState.RUNNING
        trial = self.optuna.trial.create_trial(
            state=running, params=sampled.params, distributions=sampled.distributions
        )
        self.study.add_trial(trial)
        self.trials.append(self._texts(sampled.params))

    def finish(self, number: int, scores: Mapping[int, float | None], *, complete: bool) -> None:
        """Close a trial, once, with its scores by steps; None for a run that failed.

        TPE ranks trials by their steps, then by their score; one that failed is the worst.
        """
        if self.is_finished(number):
            return
        states = self.optuna.trial.TrialState
        identity = self.storage.get_trial_id_from_study_id_trial_number(self.study_id, number)
        values = [score for score in scores.values() if score is not None]
        if len(values) < len(scores):
            self.storage.set_trial_state_values(identity, states.PRUNED)
            return
        for steps, score in scores.items():
            self.storage.set_trial_intermediate_value(identity, steps, score)
        self.storage.set_trial_state_values(identity, states.COMPLETE if complete else states.PRUNED, values[-1:])

    def importances(self, scores: Mapping[int, float]) -> tuple[dict[str, float], str]:
        """Return the share of each setting in these scores by trial, the largest first, and how it was measured.

        Optuna's PED-ANOVA needs some trials, and settings that tell the best ones from all; without
        that, shares are those of the absolute rank correlations. They are empty if all scores are equal.
        """
        if len(set(scores.values())) < 2:
            return {}, PED_ANOVA
        shares = self._ped_anova(scores) if len(scores) >= MIN_TRIALS else {}
        if shares:
            return shares, PED_ANOVA
        ranked = {key: self._rank_correlation(key, scores) for key in self.dimensions}
        total = sum(ranked.values()) or 1.0
        return dict(sorted(((key, size / total) for key, size in ranked.items()), key=lambda item: -item[1])), RANKS

    def _ped_anova(self, scores: Mapping[int, float]) -> dict[str, float]:
        """Return Optuna's shares in reaching the best quarter of the scores; empty if they are undefined."""
        states = self.optuna.trial.TrialState
        stored = self._stored()
        with quiet(self.optuna):
            copy = self.optuna.create_study(direction="maximize")
            for number, score in scores.items():
                sample = {"params": stored[number].params, "distributions": stored[number].distributions}
                copy.add_trial(self.optuna.trial.create_trial(state=states.COMPLETE, value=score, **sample))
            try:
                evaluator = self.optuna.importance.PedAnovaImportanceEvaluator(target_quantile=0.25)
                shares = self.optuna.importance.get_param_importances(copy, evaluator=evaluator)
            except (TypeError, ValueError, RuntimeError):  # also releases of Optuna with another signature
                return {}
        return shares if all(map(math.isfinite, shares.values())) and any(shares.values()) else {}

    def _rank_correlation(self, key: str, scores: Mapping[int, float]) -> float:
        """Return the size of Spearman's rank correlation of a setting with the scores."""
        places = [self.dimensions[key].position(self.trials[number][key]) for number in scores]
        ranks = [ranks_of(np.array(values)) for values in (places, [*scores.values()])]
        return 0.0 if any(np.ptp(each) == 0 for each in ranks) else abs(float(np.corrcoef(np.stack(ranks))[0, 1]))


def trial_name(number: int) -> str:
    """Return the name of a trial."""
    return f"trial-{number:03}"


def ranks_of(values: np.ndarray) -> np.ndarray:
    """Return the rank of each value; equal values share their mean rank."""
    below = (values[:, None] > values).sum(axis=1)
    return below + (values[:, None] == values).sum(axis=1) / 2


def remove_partial_line(file: Path) -> None:
    """Cut off a last line that was not written completely before a kill."""
    if not file.is_file():
        return
    content = file.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(file, whole)


@contextmanager
def quiet(optuna: Any) -> Iterator[None]:
    """Silence Optuna's notes about features that it calls experimental."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield
