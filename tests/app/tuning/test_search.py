"""The order of the runs of a search, with scores that are made up; no run is started."""

import json
import os
import random
import signal
import sys
import threading
import time
from bisect import bisect_left, bisect_right

import pytest

import canter
from canter.algorithms.ppo import PPOConfig
from canter.app.cli import main
from canter.app.experiments.plans import claim
from canter.app.experiments.settings import with_overrides
from canter.app.report.tuning import write_search_report
from canter.app.tuning.outcome import (
    corrected_mean,
    outcome_lines,
    outcome_of,
    pareto_front,
    progress_of,
    seconds_left,
    write_winner,
)
from canter.app.tuning.plan import UNREACHED, format_score
from canter.app.tuning.search import FRESH, Search, TuneConfig, seconds_score
from canter.app.tuning.space import plain_values
from canter.app.tuning.study import PED_ANOVA, RANKS
from canter.app.tuning.tune import create_plan, finish, open_plan
from canter.config import TrainConfig
from canter.config.files import read_config
from canter.core.registry import UserError
from canter.core.storage.lock import folder_mutex
from canter.envs import EnvConfig
from canter.runs.metrics import read_last_row

BASE = TrainConfig(env=EnvConfig(id="tensor:cartpole"), algorithm=PPOConfig(gamma=0.9), total_steps=9000)
OBJECTIVES = "expected return, auc, seconds-to:GOAL or return-in:SECONDS"
SPACE = {"algorithm.gamma": "0.5..0.999:log1m", "algorithm.epochs": "1..10"}


def new_search(folder, base=BASE, **plan):
    pytest.importorskip("optuna")
    folder.mkdir()
    plan = Search.check(TuneConfig(**{"trials": 12, "space": SPACE, **plan}), base)
    return create_plan(folder, plan, base)


def made_up(search, job):
    """The closer gamma is to 0.98 the better; noise of the seed is a hundredth of that."""
    gamma = float(search.settings(job.candidate).get("algorithm.gamma", 0.9))
    return 100 - 100 * abs(gamma - 0.98) * job.steps / 9000 + random.Random(job.key).random() / 100


def run_all(search, score=made_up, reopen=False):
    """Do all runs; with `reopen` the search is killed now and then, and they end in another order."""
    kill = random.Random(0)
    while jobs := search.next_runs():
        for job in reversed(jobs) if reopen else jobs:
            search.note_result(job, score(search, job), 1.0)
            if reopen and kill.random() < 0.2:
                search = open_plan(search.folder)
    return search


def counts(search):
    """The number of results at each rung on the first seed."""
    return [len(search.rung_scores(steps)) for steps in search.rungs]


def test_a_third_of_the_trials_goes_on_to_each_rung(tmp_path):
    search = run_all(new_search(tmp_path / "a"))
    assert search.rungs == [1000, 3000, 9000]
    assert counts(search) == [12, 4, 2]
    best = sorted(search.rung_scores(1000).items(), key=lambda item: -item[1])[:4]
    assert {number for number, _ in best} == set(search.rung_scores(3000))


def test_a_search_that_is_killed_has_the_same_trials_and_the_same_winner(tmp_path):
    first = run_all(new_search(tmp_path / "a", trials=26))
    second = run_all(new_search(tmp_path / "b", trials=26), reopen=True)
    assert first.study.trials == second.study.trials and len(first.study.trials) == 26
    assert {k: v for k, v in first.study.notes.items() if "@" in k} == {
        k: v for k, v in second.study.notes.items() if "@" in k
    }
    assert outcome_of(first) == outcome_of(second)
    gammas = [float(texts["algorithm.gamma"]) for texts in first.study.trials]
    early = sum(abs(gamma - 0.98) for gamma in gammas[:12]) / 12
    assert sum(abs(gamma - 0.98) for gamma in gammas[12:]) / 14 < early  # TPE has learned where it is good


def test_a_search_whose_process_is_killed_20_times_loses_no_trial(tmp_path):
    whole = run_all(new_search(tmp_path / "a", trials=26))
    folder = new_search(tmp_path / "b", trials=26).folder
    moments = random.Random(0)
    killed = 0
    for _ in range(20):
        child = os.fork()
        if child == 0:
            run_all(open_plan(folder))
            os._exit(0)
        time.sleep(moments.uniform(0.0, 0.1))
        os.kill(child, signal.SIGKILL)
        killed += os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert killed >= 3  # the search may be done before the others
    again = run_all(open_plan(folder))
    assert again.study.trials == whole.study.trials and outcome_of(again) == outcome_of(whole)


def test_two_processes_share_the_trials_of_a_folder(tmp_path):
    alone = run_all(new_search(tmp_path / "a", trials=14))
    first = new_search(tmp_path / "b", trials=14)
    second = open_plan(first.folder)
    turn = random.Random(1)
    while True:
        search = turn.choice([first, second])
        search.refresh()
        jobs = search.next_runs()
        if not jobs:
            break
        job = turn.choice(jobs)
        search.note_result(job, made_up(search, job), 1.0)
        search.add_time(search.spent + 1)
    assert search.study.trials == alone.study.trials
    assert outcome_of(search) == outcome_of(alone)
    assert open_plan(first.folder).spent == len([key for key in search.study.notes if "@" in key])


def test_a_process_claims_a_run_that_no_other_one_has(tmp_path):
    held = claim(tmp_path, "trial-000-seed0")
    assert held is not None
    assert claim(tmp_path, "trial-000-seed0") is None
    os.close(held)
    again = claim(tmp_path, "trial-000-seed0")
    assert again is not None
    os.close(again)


def test_seconds_to_a_goal_are_a_score(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    rows = [(1, None, 0.5), (2, 3.0, 1.0), (3, 8.0, 2.5)]
    metrics.write_text(
        "".join(json.dumps(dict(zip(("env_steps", "return", "seconds"), row, strict=True))) + "\n" for row in rows)
    )
    assert seconds_score(metrics, 5.0) == -2.5
    missed = [seconds_score(metrics, goal) for goal in (10.0, 20.0)]
    assert missed == [-UNREACHED - 2, -UNREACHED - 12]
    assert format_score(missed[0]) == "the goal was not reached" and format_score(-2.5) == "-2.5"
    assert TuneConfig(trials=4, objective="seconds-to:475").goal == 475


def test_the_pareto_front_has_the_best_returns_for_their_time(tmp_path):
    search = new_search(tmp_path / "a")
    jobs = search.next_runs()
    for job, return_, seconds in zip(jobs, [5, 9, 9, 7, 1], [3.0, 8.0, 6.0, 7.0, 1.0], strict=False):
        search.note_result(job, return_, seconds, return_)
    assert [name for name, _ in pareto_front(search)] == ["trial-002@1000", "trial-000@1000", "trial-004@1000"]
    assert "9.00 in 6.0 s (trial-002@1000), 5.00 in 3.0 s" in progress_of(search)["front"]


def test_a_line_that_was_cut_off_by_a_kill_is_no_harm(tmp_path):
    search = new_search(tmp_path / "a")
    search.next_runs()
    with (search.folder / "study.journal").open("ab") as file:
        file.write(b'{"op_code": 2, "wor')
    again = open_plan(search.folder)
    assert again.study.trials == search.study.trials
    again.study.note("later", 1)
    assert open_plan(search.folder).study.notes["later"] == 1


def test_trials_get_more_seeds_only_where_they_overlap(tmp_path):
    def noisy(search, job):
        return random.Random(job.key).random()

    clear = run_all(new_search(tmp_path / "clear"))
    assert {len(clear.search_scores(name)) for name in clear.leaders()} == {2}  # apart, once a spread is known
    close = run_all(new_search(tmp_path / "close"), noisy)
    assert {len(close.search_scores(name)) for name in close.leaders()} == {3}


def test_finalists_meet_the_base_settings_on_fresh_seeds(tmp_path):
    search = new_search(tmp_path / "a", finalists=1, final_seeds=2)
    seen = []
    while jobs := search.next_runs():
        seen += jobs
        for job in jobs:
            search.note_result(job, made_up(search, job), 1.0, job.seed)
    fresh = [job for job in seen if job.seed >= FRESH]
    assert [(job.candidate == "base", job.seed) for job in fresh] == [
        (True, FRESH),
        (False, FRESH),
        (True, FRESH + 1),
        (False, FRESH + 1),
    ]
    outcome = outcome_of(search)
    assert outcome.winner == fresh[1].candidate and outcome.optimistic is not None
    best = read_config(write_winner(search, outcome)).over(TrainConfig())
    assert best.algorithm.gamma == float(outcome.settings["algorithm.gamma"])
    assert (best.algorithm.epochs, best.total_steps) == (int(outcome.settings["algorithm.epochs"]), 9000)
    assert f"Winner: {outcome.winner} (gamma " in "\n".join(outcome_lines(search, outcome))


def test_the_winner_trains_by_its_file(tmp_path, capsys):
    algorithm = PPOConfig(horizon=16, num_minibatches=2, gamma=0.9)
    env = EnvConfig(id="tensor:cartpole", num_envs=2)
    search = run_all(new_search(tmp_path / "a", TrainConfig(env=env, algorithm=algorithm, total_steps=64)))
    outcome = outcome_of(search)
    best = str(write_winner(search, outcome))
    main(["train", "tensor:cartpole", "--config", best, "--run-dir", str(tmp_path), "--name", "run"])
    assert "Final score" in capsys.readouterr().out
    trained = read_config(tmp_path / "run" / "config.yaml").over(TrainConfig())
    expected = with_overrides(search.config, plain_values(outcome.settings))
    assert outcome.winner != "base" and trained == expected
    assert read_last_row(tmp_path / "run" / "metrics.jsonl")["env_steps"] == 64


def test_the_base_settings_may_win(tmp_path):
    search = run_all(new_search(tmp_path / "a"), lambda search, job: 1.0 if job.candidate == "base" else 0.0)
    outcome = outcome_of(search)
    assert (outcome.winner, outcome.settings) == ("base", {})
    assert read_config(write_winner(search, outcome)).over(TrainConfig()) == BASE
    assert outcome_lines(search, outcome)[-1] == "No trial is better than the base settings."


def test_the_corrected_mean_scores_each_seed_with_the_choice_of_the_others():
    # a is chosen without seed 0 (2 against 1.5), b without the others (2.5 and 3 against 1.5 and 1.5).
    scores = {"a": [1.0, 2.0, 2.0], "b": [4.0, 2.0, 1.0]}
    assert corrected_mean(scores) == pytest.approx((1.0 + 2.0 + 1.0) / 3)
    assert corrected_mean({"a": [1.0], "b": [2.0]}) == 2.0


def test_trials_that_fail_are_the_worst_and_a_search_without_any_other_says_so(tmp_path):
    def fails_often(search, job):
        return None if job.candidate != "base" and int(job.candidate[-3:]) % 2 else made_up(search, job)

    search = run_all(new_search(tmp_path / "a", trials=24), fails_often)
    assert all(number % 2 == 0 for number in search.rung_scores(1000))
    with pytest.raises(UserError, match=r"all 12 trials failed; see the files \*.log in .*b"):
        run_all(new_search(tmp_path / "b"), lambda search, job: None)


def test_a_budget_ends_the_generations_and_limits_the_fresh_seeds(tmp_path):
    search = new_search(tmp_path / "a", trials=None, budget=100.0)
    while jobs := search.next_runs():
        for job in jobs:
            search.note_result(job, made_up(search, job), 1.0, job.seed)
            search.spent += 1.0
    assert len(search.study.trials) == 36  # 18 runs for 12 trials: a fourth generation would pass the 60th second
    assert 2 <= search.study.notes["final_seeds"] < 5
    assert seconds_left(search) == 0


def test_trials_can_be_added_to_a_search(tmp_path):
    search = run_all(new_search(tmp_path / "a"))
    longer = run_all(open_plan(search.folder, trials=18))
    assert longer.study.trials[:12] == search.study.trials and len(longer.study.trials) == 18


def test_a_search_goes_on_in_a_folder_with_another_name(tmp_path):
    search = run_all(new_search(tmp_path / "a"))
    moved = open_plan(search.folder.rename(tmp_path / "b"))
    assert moved.study.trials == search.study.trials and not moved.next_runs()


@pytest.mark.parametrize(
    "changes", [{"objective": "auc"}, {"population": 2}, {"total_steps": 90}, {"space": SPACE}, {"pbt": True}], ids=str
)
def test_what_a_search_has_decided_cannot_change_when_it_continues(changes, tmp_path):
    search = new_search(tmp_path / "a")
    before = (search.folder / "tune.json").read_text()
    message = f"{next(iter(changes))} cannot change when .*a continues; only trials, budget, jobs can"
    with pytest.raises(UserError, match=message):
        canter.tune("a", run_dir=tmp_path, **changes)
    assert (search.folder / "tune.json").read_text() == before


def test_processes_that_end_together_write_their_results_one_after_the_other(tmp_path):
    search = run_all(new_search(tmp_path / "a"))
    with folder_mutex(search.folder):
        writing = threading.Thread(target=finish, args=(open_plan(search.folder),))
        writing.start()
        writing.join(0.5)
        assert writing.is_alive() and not (search.folder / "best.yaml").exists()
    writing.join()
    assert (search.folder / "best.yaml").is_file() and (search.folder / "report.html").is_file()


def test_progress_names_the_best_and_the_time_left(tmp_path):
    search = new_search(tmp_path / "a")
    for job in search.next_runs():
        search.note_result(job, made_up(search, job), 1.0, job.seed)
    search.spent = 12.0
    state = progress_of(search)
    assert state["progress"] == "12 of 12 trials, search"
    number = max(search.rung_scores(1000), key=search.rung_scores(1000).__getitem__)
    assert state["best"].startswith(f"best so far trial-{number:03} with ")
    assert state["time left"].startswith("at most about ")


def test_the_report_is_one_file_without_network(tmp_path):
    search = run_all(new_search(tmp_path / "a"))
    page = write_search_report(search, outcome_of(search)).read_text()
    for title in ("Finalists", "Importance", "Settings and score", "Trials"):
        assert f"<h2>{title}</h2>" in page
    assert "http" not in page.replace("http-equiv", "")
    assert page.count("<title>trial-") == 12


def test_the_importance_of_few_trials_is_their_rank_correlation(tmp_path):
    search = new_search(tmp_path / "a")
    search.next_runs()
    gammas = [float(texts["algorithm.gamma"]) for texts in search.study.trials]
    some = sorted(range(12), key=gammas.__getitem__)[:5]
    scores = {number: float(place) ** 3 for place, number in enumerate(some)}  # as gamma, so its correlation is 1
    epochs = [int(search.study.trials[number]["algorithm.epochs"]) for number in some]
    other = abs(spearman(range(5), epochs))
    shares, measure = search.study.importances(scores)
    assert measure == RANKS
    assert shares == pytest.approx({"algorithm.gamma": 1 / (1 + other), "algorithm.epochs": other / (1 + other)})
    assert [*shares] == ["algorithm.gamma", "algorithm.epochs"]
    by_gamma = {number: gamma for number, gamma in enumerate(gammas)}
    shares, measure = search.study.importances(by_gamma)
    assert measure == PED_ANOVA and shares["algorithm.gamma"] > 0.5 and sum(shares.values()) == pytest.approx(1)
    assert search.study.importances(dict.fromkeys(some, 1.0)) == ({}, PED_ANOVA)


def spearman(left, right):
    """Pearson's correlation of ranks, written out."""
    ranks = [[(bisect_left(sorted(v), x) + bisect_right(sorted(v), x)) / 2 for x in v] for v in (left, right)]
    a, b = ([rank - sum(own) / len(own) for rank in own] for own in ranks)
    return sum(x * y for x, y in zip(a, b, strict=True)) / (sum(x * x for x in a) * sum(y * y for y in b)) ** 0.5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "a search needs an end: --trials N, --budget 2h, or both"),
        (
            ["--trials", "4", "--objective", "retrun"],
            f"objective='retrun': {OBJECTIVES}",
        ),
        (
            ["--trials", "4", "--objective", "seconds-to:soon"],
            OBJECTIVES,
        ),
        (["--trials", "4", "--budget", "soon"], "'soon' is not a time such as 90s, 30m, 2h or 1h30m"),
        (
            ["--trials", "4", "--total-steps", "null", "--until.iterations", "3"],
            "a search compares runs after equal steps",
        ),
        (["--trials", "4", "--space.algorithm.gama", "0.9..1"], "did you mean --space.algorithm.gamma"),
        (["runs/mine"], "'runs/mine' is neither the folder of a search nor an environment: unknown"),
    ],
)
def test_searches_that_cannot_work_are_refused_before_any_run(flags, message, tmp_path, monkeypatch, capsys):
    pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["tune", *([] if flags and not flags[0].startswith("--") else ["tensor:cartpole"]), *flags])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_without_optuna_one_line_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(SystemExit):
        main(["tune", "tensor:cartpole", "--trials", "4"])
    assert capsys.readouterr().err == 'canter: a search needs Optuna: pip install "canter[tune]"\n'
