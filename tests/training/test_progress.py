"""Counters, recent episodes, successes and where the time goes."""

import time
from dataclasses import asdict, replace

import pytest
import torch

from canter.config.presets import preset_for
from canter.training.episodes import Episodes
from canter.training.progress import Counters, RunProgress, Stopwatch, SuccessConfig, UntilConfig
from canter.training.trainer import train


def episodes(returns=(), lengths=None, terminated=None, **others):
    lengths = [10] * len(returns) if lengths is None else lengths
    terminated = [True] * len(returns) if terminated is None else terminated
    counts = {"env_steps": 64, "resets": 0, "mean_reward": 0.5, "gain_and_time": [[[32.0], [64.0]]]}
    return Episodes(list(returns), lengths, terminated, **{**counts, **others})


def cartpole():
    preset = preset_for("CartPole-v1")
    assert preset is not None
    return preset


def new_run(success=None):
    return RunProgress(1000, success or SuccessConfig(), Stopwatch(), optimizer_steps="optim/minibatch_updates")


def count(run, metrics, ended):
    """Add an iteration with its own row."""
    run.add(metrics, torch.ones(8, 8, dtype=torch.bool))
    return run.report(ended)


METRICS = {"policy/kl": torch.tensor(0.25), "optim/minibatch_updates": torch.tensor(40)}


def test_everything_that_happens_is_counted_under_its_name():
    run = new_run()
    count(run, METRICS, episodes([1.0, 3.0], resets=8))
    report = count(run, METRICS, episodes([5.0], env_steps=60, resets=1))
    assert asdict(run.counters) == {
        "env_steps": 124,
        "train_steps": 16,
        "rollouts": 2,
        "episodes": 3,
        "resets": 9,
        "updates": 2,
        "minibatch_updates": 80,
    }
    assert run.fraction == run.progress().fraction == 0.124
    assert (report.return_, report.rollout_return, report.rollout_steps, report.rollout_reward) == (3.0, 5.0, 60, 0.5)


def test_environments_receive_the_fraction_of_the_budget_that_ends_first():
    run = RunProgress(1000, SuccessConfig(), Stopwatch(), UntilConfig(iterations=4), "optim/minibatch_updates")
    count(run, METRICS, episodes())
    progress = run.for_env()
    assert (progress.iteration, progress.env_steps, progress.fraction) == (1, 64, 0.25)
    run.add(METRICS, torch.ones(8, 8, dtype=torch.bool))  # not reported yet: every step may count
    progress = run.for_env()
    assert (progress.iteration, progress.env_steps, progress.fraction) == (2, 128, 0.5)


def test_a_run_ends_with_exactly_its_steps():
    run = RunProgress(128, SuccessConfig(), Stopwatch())
    count(run, METRICS, episodes(env_steps=127))
    assert run.ended_by is None
    count(run, METRICS, episodes(env_steps=1))
    assert run.ended_by == "total_steps"


def test_a_mean_return_ends_a_run_once_all_recent_episodes_are_over():
    run = RunProgress(None, SuccessConfig(), Stopwatch(), UntilConfig(mean_return=3.0))
    count(run, METRICS, episodes([5.0] * 99))
    assert run.recent_return is None and run.ended_by is None
    count(run, METRICS, episodes([5.0]))
    assert run.recent_return == 5.0 and run.ended_by == "until.mean_return"


def test_iterations_that_are_undone_are_no_longer_counted():
    run = new_run()
    count(run, METRICS, episodes())
    for _ in range(3):
        run.add(METRICS, torch.ones(8, 8, dtype=torch.bool))
    run.forget_after(1)
    counters = run.counters
    assert (counters.rollouts, counters.updates, counters.train_steps) == (2, 2, 16)
    assert len(run.unread) == 1
    assert run.metrics == {}


def test_the_seconds_before_a_stop_count():
    run = new_run()
    run.load_state_dict(run.state_dict() | {"seconds": 100.0})
    assert 100.0 <= count(run, METRICS, episodes()).seconds < 200.0


def test_a_row_is_the_whole_report_and_nothing_but_numbers():
    row = count(new_run(SuccessConfig(ending="any")), METRICS, episodes([1.0])).row()
    assert set(row) == {
        *("iteration", "env_steps", "train_steps", "rollouts", "episodes", "resets", "updates", "minibatch_updates"),
        "seconds",
        *("return", "length", "success_rate", "terminated_rate"),
        *("rollout_return", "rollout_length", "rollout_reward", "rollout_steps"),
        *("time/env", "time/policy", "time/update", "time/other", "time/steps_per_second"),
        *METRICS,
    }
    assert all(isinstance(value, int | float) for value in row.values())


def test_metrics_missing_in_a_rollout_have_no_value():
    reported = {"env/lift": torch.tensor(2.0), "env/fall": torch.tensor(torch.nan)}
    row = count(new_run(), METRICS | reported, episodes()).row()
    assert row["env/lift"] == 2.0 and row["env/fall"] is None


def test_only_the_last_hundred_episodes_count_as_recent():
    run = new_run()
    count(run, METRICS, episodes([0.0] * 70))
    report = count(run, METRICS, episodes([1.0] * 60, lengths=[20] * 60))
    assert report.return_ == 0.6
    assert report.length == 16.0
    assert (report.rollout_return, report.rollout_length) == (1.0, 20.0)


def test_without_an_episode_there_is_no_mean():
    report = count(new_run(), METRICS, episodes())
    assert (report.return_, report.length, report.success_rate, report.rollout_return) == (None,) * 4


@pytest.mark.parametrize(
    ("success", "rate"),
    [
        (SuccessConfig(), None),
        (SuccessConfig(ending="terminated"), 0.75),
        (SuccessConfig(ending="truncated"), 0.25),
        (SuccessConfig(ending="any"), 1.0),
        (SuccessConfig(min_return=2.0), 0.5),
        (SuccessConfig(ending="any", min_return=2.0), 0.75),
        (SuccessConfig(ending="truncated", min_return=9.0), 0.0),
    ],
)
def test_a_success_is_an_episode_that_ends_the_right_way_with_enough_return(success, rate):
    returns, terminated = [1.0, 2.0, 3.0, 4.0], [True, True, True, False]
    report = count(new_run(success), METRICS, episodes(returns, terminated=terminated))
    assert report.success_rate == rate
    assert report.row()["success_rate"] == rate
    assert report.terminated_rate == 0.75


def test_restored_progress_continues_counting():
    run = new_run(SuccessConfig(min_return=2.0))
    count(run, METRICS, episodes([1.0, 3.0], resets=8))
    other = new_run(SuccessConfig(min_return=2.0))
    other.load_state_dict(run.state_dict())
    following = episodes([4.0], resets=1)
    one, two = (count(account, METRICS, following).row() for account in (run, other))
    assert two["seconds"] == pytest.approx(one["seconds"], abs=0.1)
    timeless = [
        {key: value for key, value in row.items() if not key.startswith(("seconds", "time/"))} for row in (one, two)
    ]
    assert timeless[0] == timeless[1]
    assert run.counters == other.counters != Counters()


@pytest.mark.parametrize("autoreset", ["same_step", "next_step", "disabled"])
def test_every_episode_that_ended_was_followed_by_a_reset(autoreset):
    preset = cartpole()
    config = replace(preset, total_steps=4000, env=replace(preset.env, autoreset=autoreset))
    reports = []
    train(config, reports.append)
    num_envs, last = config.env.num_envs, reports[-1]
    # One for each environment at the start, and one after each end, unless the run stopped right there.
    assert last.episodes <= last.resets <= last.episodes + num_envs
    assert last.resets > num_envs + 20
    assert last.minibatch_updates == len(reports) * config.algorithm.epochs * config.algorithm.num_minibatches


def test_the_time_is_divided_without_loss():
    clock = Stopwatch()
    start = clock.last
    for part, pause in (("env", 0.02), ("policy", 0.01), ("env", 0.02), ("update", 0.03)):
        time.sleep(pause)
        clock.lap(part)
    seconds = clock.read()
    assert sum(seconds.values()) == pytest.approx(clock.last - start)
    assert seconds["env"] >= 0.04
    assert seconds["policy"] >= 0.01
    assert seconds["other"] == 0.0
    assert set(clock.read().values()) == {0.0}


def test_the_parts_of_every_iteration_add_up_to_the_time_of_the_run():
    reports = []
    train(replace(cartpole(), total_steps=3000), reports.append)
    spent = [sum(report.times.values()) for report in reports]
    assert sum(spent[1:]) == pytest.approx(reports[-1].seconds - reports[0].seconds, rel=0.02)
    assert all(seconds > 0 for report in reports for seconds in report.times.values())
    assert reports[1].row()["time/steps_per_second"] == pytest.approx(1024 / spent[1])


def test_the_long_run_average_is_raw_reward_per_unit_of_time_over_the_last_twenty_rollouts():
    run = new_run()
    reports = [count(run, METRICS, episodes(gain_and_time=[[[9.0], [1.0]]])) for _ in range(5)]
    assert "lta/mean" not in reports[-1].metrics  # too few to tell
    assert run.recent_lta is None
    reports = [count(run, METRICS, episodes(gain_and_time=[[[3.0 + k % 2], [2.0]]])) for k in range(20)]
    row = reports[-1].row()
    assert row["lta/mean"] == run.recent_lta == pytest.approx(1.75)
    assert row["lta/ci"] == pytest.approx(2.093 * 0.25 / 19**0.5)


def test_twenty_environments_have_a_long_run_average_at_once_and_a_recent_one_later():
    run = new_run()
    report = count(run, METRICS, episodes(gain_and_time=[[[float(n) for n in range(20)], [1.0] * 20]]))
    assert report.metrics["lta/mean"] == pytest.approx(9.5)
    assert run.recent_lta is None


def test_the_long_run_average_continues_after_a_restart():
    first, second = new_run(), new_run()
    for k in range(30):
        count(first, METRICS, episodes(gain_and_time=[[[float(k), 1.0], [1.0, 2.0]]]))
    second.load_state_dict(first.state_dict())
    more = episodes(gain_and_time=[[[4.0, 1.0], [1.0, 2.0]]])
    assert count(first, METRICS, more).metrics == count(second, METRICS, more).metrics
