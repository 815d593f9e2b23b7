"""Searches whose trials train side by side in one program: which runs share a program, and their settings."""

import json
import random

import pytest

from canter.algorithms.ppo import PPOConfig
from canter.app.cli import main
from canter.app.experiments.population import population_config
from canter.app.experiments.settings import with_overrides
from canter.app.report.tuning import write_search_report
from canter.app.tuning.outcome import outcome_of
from canter.app.tuning.plan import Job
from canter.app.tuning.population import PopulationSearch
from canter.app.tuning.search import TuneConfig
from canter.app.tuning.space import plain_values
from canter.app.tuning.tune import create_plan, open_plan
from canter.config import TrainConfig
from canter.config.files import read_config
from canter.envs import EnvConfig
from canter.nn.optimizer import OptimizerConfig
from canter.nn.schedules import Linear

ALGORITHM = PPOConfig(gamma=0.9, optimizer=OptimizerConfig(learning_rate=Linear(1e-3)))
BASE = TrainConfig(env=EnvConfig(id="tensor:cartpole", num_envs=2), algorithm=ALGORITHM, total_steps=9000)


def new_search(folder, **plan):
    pytest.importorskip("optuna")
    folder.mkdir()
    few = {"trials": 10, "population": 4, "seeds": 2, "finalists": 2, "final_seeds": 2}
    create_plan(folder, PopulationSearch.check(TuneConfig(**{**few, **plan}), BASE), BASE)
    return reopened(folder)


def reopened(folder):
    search = open_plan(folder)
    assert isinstance(search, PopulationSearch)
    return search


def run_all(search, reopen=False):
    """Do all programs with scores that are made up; with `reopen` the search is killed now and then."""
    kill = random.Random(0)
    sizes = []
    while jobs := search.next_runs():
        for job in reversed(jobs) if reopen else jobs:
            keys = search.programs[search.program_of(job)]
            sizes.append(len(keys))
            for key in keys:
                name, _, seed = key.partition("@")[0].rpartition("-seed")
                gamma = float(search.settings(name).get("algorithm.gamma", 0.9))
                score = 100 - 100 * abs(gamma - 0.98) + random.Random(key).random() / 100
                search.note_result(Job(name, int(seed), 9000), score, 1.0, score)
                if reopen and kill.random() < 0.2:
                    break  # the rest of the program's results is lost
            if reopen:
                search = reopened(search.folder)
    return search, sizes


def test_trials_share_programs_and_a_search_that_is_killed_runs_the_same_ones(tmp_path):
    first, sizes = run_all(new_search(tmp_path / "a"))
    assert sizes[:3] == [4, 4, 2] and max(sizes) == 4
    assert first.rungs == [9000] and len(first.rung_scores(9000)) == 10
    second, _ = run_all(new_search(tmp_path / "b"), reopen=True)
    assert second.programs == first.programs and second.study.trials == first.study.trials
    assert outcome_of(second) == outcome_of(first)
    page = write_search_report(first, outcome_of(first)).read_text()
    assert page.count("<title>trial-") == 10


def test_a_member_learns_with_the_settings_that_a_single_run_of_its_trial_has(tmp_path):
    search = new_search(tmp_path / "a")
    [*programs] = search.next_runs()
    assert [job.name for job in programs] == ["population-000-seed0"]
    arguments = search.arguments(programs[0])
    written = read_config(search.folder / "population-000.yaml", within=search.folder).over(TrainConfig())
    assert f"--config={search.folder}" not in arguments and str(search.folder / "population-000.yaml") in arguments
    assert written == population_config(BASE, search.members(0))
    for number, single in enumerate(written.single_runs()):
        assert single == with_overrides(BASE, plain_values(search.settings(f"trial-{number:03}")))
    assert search.path(Job("trial-002", 0, 9000)) == search.folder / "population-000-seed0" / "member-002"


def test_results_of_members_are_read_from_their_folders(tmp_path):
    search = new_search(tmp_path / "a", trials=4)
    [job] = search.next_runs()
    for number in range(4):
        path = search.path(Job(f"trial-{number:03}", 0, 9000))
        path.mkdir(parents=True)
        (path / "metrics.jsonl").write_text(json.dumps({"env_steps": 9000, "seconds": 8.0, "return": 1.0}) + "\n")
        (path / "run.json").write_text(json.dumps({"score": {"mean": 10.0 + number, "episodes": 100}}))
    assert search.record(job, failed=False) == "population-000-seed0, 4 members, 9,000 steps: best 13"
    assert search.rung_scores(9000) == {0: 10.0, 1: 11.0, 2: 12.0, 3: 13.0}
    assert search.result(Job("trial-003", 0, 9000)) == {"score": 13.0, "seconds": 2.0, "return": 13.0}


@pytest.mark.parametrize(
    ("task", "flags", "message"),
    [
        ("tensor:cartpole", ["--space.algorithm.epochs", "1..8"], "members of a population differ in algorithm.opt"),
        ("tensor:cartpole", ["--objective", "seconds-to:400"], "members of a population have no time of their own"),
        ("tensor:cartpole", ["--algorithm", "sac"], "a population learns by ppo"),
        ("CartPole-v1", [], "tensor environment"),
        ("tensor:cartpole", ["--pbt"], "--population is of a search"),
    ],
)
def test_what_cannot_train_side_by_side_is_refused_before_any_run(task, flags, message, tmp_path, monkeypatch, capsys):
    pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    search = ["--trials", "8"] if "--pbt" not in flags else []
    with pytest.raises(SystemExit):
        main(["tune", task, "--population", "4", *search, *flags])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
