"""Population-based training: rules by hand, decisions that repeat, copies of checkpoints; no run is started."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from canter.algorithms.ppo import PPOConfig
from canter.app.cli import main
from canter.app.report.population import write_population_report
from canter.app.tuning.exploit import PbtConfig, choose_by_threshold, choose_by_truncation, explore
from canter.app.tuning.pbt import PbtOutcome, Population, copy_learner
from canter.app.tuning.space import parse_dimension
from canter.app.tuning.tune import create_plan, open_plan
from canter.config import TrainConfig
from canter.core.plain import ConfigError
from canter.core.registry import UserError
from canter.core.storage.checkpoint import CheckpointStore
from canter.envs import EnvConfig
from canter.nn.optimizer import OptimizerConfig
from canter.nn.schedules import AdaptiveKL
from canter.runs.run_folder import RunFolder
from canter.training.trainer import Trainer

ENV = EnvConfig(id="tensor:cartpole", num_envs=4)
BASE = TrainConfig(env=ENV, algorithm=PPOConfig(gamma=0.9, horizon=64), total_steps=9000)
SPACE = {"algorithm.gamma": "0.5..0.999:log1m", "algorithm.epochs": "1..10"}


def rng():
    return np.random.default_rng(0)


def new_population(folder, **plan):
    folder.mkdir()
    plan = Population.check(PbtConfig(**{"members": 5, "interval": 1000, "space": SPACE, **plan}), BASE)
    return create_plan(folder, plan, BASE)


def made_up(population, job):
    """The closer gamma is to 0.98 the better; a little noise by seed and steps."""
    gamma = float(population.lineage.settings(population.member_of(job))["algorithm.gamma"])
    return -abs(gamma - 0.98) + random.Random(job.key).random() / 1000


def run_all(population, monkeypatch, reopen=False):
    """Do all runs without any; with `reopen` the work is killed now and then, and they end in another order."""
    copies = []
    monkeypatch.setattr("canter.app.tuning.pbt.copy_learner", lambda *arguments: copies.append(arguments))
    kill = random.Random(1)
    while jobs := population.next_runs():
        for job in reversed(jobs) if reopen else jobs:
            population.note_result(job, made_up(population, job), 1.0, 1.0)
            if reopen and kill.random() < 0.3:
                with population.lineage.file.open("ab") as file:
                    file.write(b'{"event": "sco')  # a line that the kill cuts off
                population = open_plan(population.folder)
    return population, copies


def test_truncation_lets_the_worst_fifth_copy_the_best_fifth():
    scores = [5.0, 1.0, 9.0, 3.0, None, 7.0, 8.0, 2.0, 4.0, 6.0]
    for seed in range(20):
        chosen = choose_by_truncation(scores, 0.2, np.random.default_rng(seed))
        assert chosen.keys() == {4, 1} and set(chosen.values()) <= {2, 6}
    assert len({choose_by_truncation(scores, 0.2, np.random.default_rng(seed))[1] for seed in range(20)}) == 2
    assert choose_by_truncation([1.0, 1.0], 0.2, rng()) == {}  # equal scores say nothing
    assert choose_by_truncation([None, None], 0.5, rng()) == {}


def test_the_threshold_is_the_larger_of_both_distances_and_only_losers_act():
    scores = [0.0, 1.0, 2.0, 3.0, 4.0]  # mean 2, std sqrt(2)
    assert choose_by_threshold(scores, 1.0, 0.05, rng()) == {0: 4}  # 2 +- 1.414
    assert choose_by_threshold(scores, 0.1, 0.5, rng()).keys() == {0, 1}  # 2 +- 0.5
    assert set(choose_by_threshold(scores, 0.1, 0.5, rng()).values()) <= {3, 4}
    assert choose_by_threshold(scores, 0.1, 2.5, rng()) == {}
    assert choose_by_threshold([0.0, 3.0, 3.0, 3.0], 0.1, 1.0, rng()) == {0: 0}  # mean 2.25: nobody is above 3.25
    assert choose_by_threshold([2.0, None, 2.0], 0.1, 0.05, rng()) == {1: 1}


def test_changed_settings_stay_within_their_ranges():
    rate = parse_dimension("rate", "1e-5..1e-1:log", 1e-3)
    discount = parse_dimension("gamma", "0.9..0.999:log1m", 0.99)
    epochs = parse_dimension("epochs", "1..8", 4, integer=True)
    word = parse_dimension("activation", "tanh,relu,elu", "tanh")
    plan = PbtConfig(resample=0.0)
    draws = [np.random.default_rng(seed) for seed in range(40)]
    assert {explore(plan, rate, "1e-3", draw) for draw in draws} == {"0.0008", "0.0012"}
    assert {explore(plan, discount, "0.99", draw) for draw in draws} == {"0.992", "0.988"}
    assert {explore(plan, epochs, "1", draw) for draw in draws} == {"1", "2"}
    assert {explore(plan, word, "relu", draw) for draw in draws} == {"tanh", "elu"}
    assert rate.scaled("0.09", 2.0) == "0.1" and discount.scaled("0.9985", 0.1) == "0.999"
    assert rate.scaled("None", 2.0) == "0.001"  # the middle of the range
    assert (rate.at(0.5), discount.at(0.5), epochs.at(1.0), word.at(0.5)) == ("0.001", "0.99", "8", "relu")
    sampled = {explore(PbtConfig(resample=1.0), rate, "1e-3", draw) for draw in draws}
    assert len(sampled) > 30 and all(1e-5 <= float(text) <= 1e-1 for text in sampled)


def test_the_rule_of_rl_games_changes_few_settings_by_a_factor_in_its_range():
    rate = parse_dimension("rate", "1e-9..1e3:log", 1.0)
    discount = parse_dimension("gamma", "0..0.99999:log1m", 0.99)
    plan = PbtConfig(rule="threshold", mutation_rate=0.25, change_range=(1.1, 2.0))
    draws = [np.random.default_rng(seed) for seed in range(400)]
    factors = np.array([float(explore(plan, rate, "1", draw)) for draw in draws])
    changed = factors[factors != 1]
    assert 60 <= len(changed) <= 140  # 100 expected, standard deviation 8.7
    sizes = np.exp(np.abs(np.log(changed)))
    assert sizes.min() >= 1.099 and sizes.max() <= 2.001
    assert 0.3 < np.mean(changed > 1) < 0.7
    distances = np.array([1 - float(explore(plan, discount, "0.99", draw)) for draw in draws]) / 0.01
    sizes = np.exp(np.abs(np.log(distances[np.abs(distances - 1) > 1e-6])))
    assert sizes.min() >= 1.099 and sizes.max() <= 1.201


def test_a_population_that_is_killed_takes_the_same_decisions(tmp_path, monkeypatch):
    first, copies = run_all(new_population(tmp_path / "a"), monkeypatch)
    second, _ = run_all(new_population(tmp_path / "b"), monkeypatch, reopen=True)
    assert first.lineage.rounds == second.lineage.rounds and len(first.lineage.rounds) == 8
    assert {key: e["score"] for key, e in first.lineage.scores.items()} == {
        key: e["score"] for key, e in second.lineage.scores.items()
    }
    changes = [change for _, changes in first.lineage.rounds for change in changes]
    assert len(copies) == len(changes) > 0
    early, late = (sum(score or 0.0 for score in first.scores(steps)) for steps in (1000, 9000))
    assert late > early  # the settings have become better


def test_decisions_are_on_the_disk_before_they_are_carried_out(tmp_path, monkeypatch):
    population = new_population(tmp_path / "a")
    for job in population.next_runs():
        population.note_result(job, made_up(population, job), 1.0, 1.0)
    done = []

    def killed(leader, member, number, factor):
        lines = population.lineage.file.read_text().splitlines()
        assert json.loads(lines[-1])["event"] == "round"
        done.append((leader, member))
        raise KeyboardInterrupt

    monkeypatch.setattr("canter.app.tuning.pbt.copy_learner", killed)
    with pytest.raises(KeyboardInterrupt):
        population.next_runs()
    again = open_plan(population.folder)
    with pytest.raises(KeyboardInterrupt):
        again.next_runs()
    assert len(done) == 2 and done[0] == done[1]
    monkeypatch.setattr("canter.app.tuning.pbt.copy_learner", lambda *arguments: None)
    assert {job.steps for job in again.next_runs()} == {2000}


def trained(folder, seed, **algorithm):
    """A run of one iteration and its newest checkpoint."""
    settings = {"horizon": 8, "num_minibatches": 2, "epochs": 2, **algorithm}
    config = TrainConfig(env=EnvConfig(id="tensor:cartpole", num_envs=2), algorithm=PPOConfig(**settings), seed=seed)
    with Trainer(config, folder=RunFolder(folder)) as trainer:
        trainer.learn(1 + seed)
    return config, CheckpointStore(folder / "checkpoints").load_latest()[1]


def test_a_copy_has_the_learner_of_the_leader_and_everything_else_of_the_member(tmp_path):
    _, leader = trained(tmp_path / "leader", 1)
    config, own = trained(tmp_path / "member", 0)
    copy_learner(tmp_path / "leader", tmp_path / "member", 3)
    step, copy = CheckpointStore(tmp_path / "member" / "checkpoints").load_latest()
    assert step == 1
    for part in ("model", "optimizers", "rewards", "entropy_coef"):
        assert equal(copy["algorithm"][part], leader["algorithm"][part]), part
    assert not equal(own["algorithm"]["model"], leader["algorithm"]["model"])
    for part in ("policy_rng", "shuffle_rng", "critic_state"):
        assert equal(copy["algorithm"][part], own["algorithm"][part]), part
    assert equal(copy["collector"], own["collector"]) and copy["run"]["counters"] == own["run"]["counters"]
    assert equal(CheckpointStore(tmp_path / "leader" / "checkpoints").load_latest()[1], leader)
    with Trainer(config, folder=RunFolder(tmp_path / "member")) as trainer:  # it fits and goes on
        trainer.learn(1)
        assert trainer.progress.iteration == 2


def test_a_copy_that_is_repeated_after_a_kill_changes_nothing(tmp_path):
    rate = AdaptiveKL(start=1e-3)
    trained(tmp_path / "member", 0, optimizer=OptimizerConfig(learning_rate=rate))
    store = CheckpointStore(tmp_path / "member" / "checkpoints")
    before = store.load_latest()[1]["algorithm"]["optimizers"]["policy"]
    for _ in range(2):
        copy_learner(tmp_path / "member", tmp_path / "member", 1, 2.0)  # its own leader: the rate doubles once
    after = store.load_latest()[1]["algorithm"]["optimizers"]["policy"]
    for group in before:
        torch.testing.assert_close(after[group]["learning_rate"], 2 * before[group]["learning_rate"])
        assert equal(after[group]["exp_avg"], before[group]["exp_avg"])


def equal(left, right):
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[name], right[name]) for name in left)
    return left.equal(right) if isinstance(left, torch.Tensor) else left == right


def test_ancestors_are_those_whose_weights_a_member_has(tmp_path, monkeypatch):
    population, _ = run_all(new_population(tmp_path / "a"), monkeypatch)
    for member in range(5):
        line = population.lineage.ancestors(member)
        assert line[-1] == member and len(line) == len(population.steps)
        for number, (_, changes) in enumerate(population.lineage.rounds):
            sources = {change.member: change.source for change in changes}
            assert line[number] == sources.get(line[number + 1], line[number + 1])


def test_the_report_draws_the_lineage_in_one_file_without_network(tmp_path, monkeypatch):
    population, _ = run_all(new_population(tmp_path / "a"), monkeypatch)
    scores = {population.member_path(member).name: score for member, score in enumerate(population.final_scores())}
    best = max(scores, key=lambda name: scores[name] or 0.0)
    outcome = PbtOutcome(best, population.lineage.settings(0), scores, 12.5)
    page = write_population_report(population, outcome).read_text()
    assert page.count("<title>") == 1 + 5 * 9  # a bar for each member and interval
    assert "http" not in page.replace("http-equiv", "")
    text = "\n".join(population.lines(outcome))
    assert outcome.winner in text and "12.50 in 100 further episodes" in text
    assert population.progress()["progress"] == "9 of 9 intervals, 5 members"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pbt", "--trials", "4"], "--trials is of a search, and --pbt trains one population"),
        (["--pbt.members", "1"], "pbt.members=1: a population has at least 2"),
        (["--pbt", "--pbt.rule", "treshold"], "unknown name 'treshold', did you mean threshold?"),
        (["--pbt", "--pbt.share", "0.7"], "pbt.share=0.7 must be above 0 and at most 0.5"),
        (["--pbt", "--total-steps", "null", "--until.iterations", "3"], "a population compares runs after equal steps"),
        (["--pbt", "--space.algorithm.model.policy.activation", "tanh,relu"], "cannot change when a run goes on"),
        (["--pbt.membres", "4"], "did you mean --pbt.members"),
    ],
)
def test_populations_that_cannot_train_are_refused_before_any_run(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["tune", "tensor:cartpole", *flags])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("interval", "total", "steps"),
    [
        (None, 51_200, [*range(2560, 51_200, 2560), 51_200]),
        (None, 4096, [*range(256, 4096, 256), 4096]),  # a twentieth would be 205 steps
        (100, 600, [256, 600]),  # no iteration would follow a comparison after 512 steps
        (1000, 100, [100]),
    ],
)
def test_every_member_trains_between_two_comparisons(interval, total, steps, tmp_path):
    population = Population(tmp_path, PbtConfig(interval=interval), replace(BASE, total_steps=total))
    assert population.steps == steps
    ends = [-(-end // 256) * 256 for end in steps]  # runs pause after whole iterations of 4 * 64 steps
    assert len({*ends}) == len(ends)


def test_only_the_main_rate_may_follow_the_kl(tmp_path):
    rate = AdaptiveKL(start=1e-3)
    algorithm = PPOConfig(critic_optimizer=OptimizerConfig(learning_rate=rate))
    config = TrainConfig(env=BASE.env, algorithm=algorithm, total_steps=9000)
    space = {"algorithm.critic_optimizer.learning_rate": "1e-4..1e-3:log"}
    with pytest.raises(ConfigError, match="starts a rate that follows the KL"):
        Population.check(PbtConfig(space=space), config)


def test_a_score_that_no_member_logs_ends_a_population_at_its_first_comparison(tmp_path):
    population = new_population(tmp_path / "a", score="env/sucess")
    for job in population.next_runs():
        population.path(job).mkdir()
        (population.path(job) / "metrics.jsonl").write_text('{"env_steps": 1024, "env/success": 0.5}\n')
        assert "1,000 steps: no score, see" in population.record(job, failed=False)
    with pytest.raises(UserError, match=r"score=env/sucess: no member logs such a metric, did you mean env/success"):
        population.next_runs()


def test_a_population_whose_members_all_fail_says_so(tmp_path, monkeypatch):
    population = new_population(tmp_path / "a")
    with pytest.raises(UserError, match=r"all 5 members failed; see .*member-000"):
        while jobs := population.next_runs():
            for job in jobs:
                population.note_result(job, None, 0.0)
