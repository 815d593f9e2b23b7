import numpy as np
import pytest
from run_folders import make_run, rising, row

from canter.app.report.data import (
    GRID,
    aggregate_curve,
    default_threshold,
    differing_settings,
    final_score,
    format_value,
    group_runs,
    read_run,
    time_to_threshold,
)


@pytest.fixture
def run_of(tmp_path):
    """Makes a run and reads it."""
    return lambda name, *returns, rows=None, **more: read_run(
        make_run(tmp_path, name, rows=rows or rising(*returns), **more)
    )


def test_runs_are_grouped_by_everything_but_their_seed(run_of):
    runs = [
        run_of("a", 1.0, seed=1),
        run_of("b", 1.0, seed=1, gamma=0.9),
        run_of("c", 1.0, seed=2),
        run_of("d", 1.0, seed=2, gamma=0.9),
        run_of("e", 1.0, seed=1, env_id="Acrobot-v1"),
    ]
    groups = group_runs(runs)
    assert [[run.name for run in group.runs] for group in groups] == [["a", "c"], ["b", "d"], ["e"]]
    assert [group.label for group in groups] == ["gamma 0.99", "gamma 0.9", "e"]
    assert differing_settings(groups[:2]) == {"algorithm.gamma": [0.99, 0.9]}


def test_settings_unknown_to_an_older_version_are_the_default(run_of, tmp_path):
    new, old = run_of("new", 1.0, seed=1), make_run(tmp_path, "old", seed=2, rows=rising(1.0))
    text = (old / "config.yaml").read_text()
    assert "  clip_ratio: 0.2\n" in text
    (old / "config.yaml").write_text(text.replace("  clip_ratio: 0.2\n", ""))
    assert len(group_runs([new, read_run(old)])) == 1
    (old / "config.yaml").write_text(text.replace("  clip_ratio: 0.2\n", "  clip_ratio: {kind: linear, start: 0.2}\n"))
    differing = differing_settings(group_runs([new, read_run(old)]))
    assert differing == {
        "algorithm.clip_ratio": [0.2, None],
        "algorithm.clip_ratio.kind": [None, "linear"],
        "algorithm.clip_ratio.start": [None, 0.2],
    }


def test_a_renamed_setting_of_an_older_version_is_the_same_setting(run_of, tmp_path):
    new, old = run_of("new", 1.0, seed=1), make_run(tmp_path, "old", seed=2, rows=rising(1.0))
    text = (old / "config.yaml").read_text()
    assert "      rnn: null\n" in text
    (old / "config.yaml").write_text(text.replace("      rnn: null\n", "      memory: null\n"))
    assert len(group_runs([new, read_run(old)])) == 1


def test_groups_that_nothing_tells_apart_get_different_labels(run_of, tmp_path):
    (tmp_path / "x").mkdir()
    one = run_of("same", 1.0, gamma=0.5)
    other = read_run(make_run(tmp_path / "x", "same", rows=rising(1.0), gamma=0.6))
    assert [group.label for group in group_runs([one, other])] == ["same (1)", "same (2)"]
    assert [group.label for group in group_runs([run_of("p", 1.0, seed=1), run_of("q", 1.0, seed=2)])] == ["2 seeds"]


def test_runs_without_settings_are_never_taken_for_one(run_of, tmp_path):
    for name in ("a", "b"):
        make_run(tmp_path, name, rows=rising(1.0))
        (tmp_path / name / "config.yaml").unlink()
    assert len(group_runs([read_run(tmp_path / "a"), read_run(tmp_path / "b")])) == 2


def test_a_curve_is_the_middle_of_the_seeds_on_a_common_grid(run_of):
    # Four seeds that rise at 1, 2, 3 and 100 per row; the middle half is 2 and 3.
    (group,) = group_runs([run_of(f"s{k}", *(k * np.arange(1.0, 6.0)), seed=k) for k in (1, 2, 3, 100)])
    found = aggregate_curve(group, "return")
    assert len(found.x) == GRID and (found.x[0], found.x[-1]) == (100, 500)
    assert found.y == pytest.approx(2.5 * found.x / 100)
    # Of four draws the slowest seed is taken three times or more with probability 13/256, which is above 2.5 %, and
    # then it is the middle half; so is the fastest.
    assert found.low == pytest.approx(found.x / 100)
    assert found.high == pytest.approx(found.x)


def test_the_curve_starts_where_all_seeds_are_and_ends_with_the_last(run_of):
    late = [row(1, None), row(2, None), *(row(number, 4.0) for number in range(3, 7))]
    (group,) = group_runs([run_of("short", 2.0, 2.0, 2.0, 2.0, seed=1), run_of("late", rows=late, seed=2)])
    found = aggregate_curve(group, "return")
    assert (found.x[0], found.x[-1]) == (300, 600)
    assert found.y.tolist() == [3.0 if step <= 400 else 4.0 for step in found.x]
    assert len(found.x) == GRID
    by_time = aggregate_curve(group, "return", "seconds")
    assert (by_time.x[0], by_time.x[-1]) == (6, 12)
    assert set(by_time.y.tolist()) == {3.0}  # the short one keeps its last value


def test_one_run_is_its_own_curve_and_none_is_none(run_of):
    (group,) = group_runs([run_of("one", 1.0, 5.0)])
    found = aggregate_curve(group, "return")
    assert (found.y.tolist(), found.low) == ([1, 5], None)
    assert aggregate_curve(group, "nothing") is None
    (group,) = group_runs([run_of("x", 1.0, seed=1), run_of("y", rows=[row(7, 2.0)], seed=2)])
    assert aggregate_curve(group, "return") is None  # no steps in common


def test_the_final_score_is_the_middle_of_the_last_values(run_of):
    (group,) = group_runs([run_of(f"s{k}", 0.0, k, seed=int(k)) for k in (1.0, 2.0, 4.0, 90.0)])
    center, (low, high) = final_score(group)
    assert center == 3.0
    assert 1.0 <= low < 3.0 < high <= 90.0
    assert final_score(group) == final_score(group)
    (single,) = group_runs([run_of("one", 7.0)])
    assert final_score(single) == (7.0, None)
    assert final_score(single, "nothing") == (None, None)


def test_time_to_threshold_is_the_first_row_that_reaches_it(run_of):
    run = run_of("a", 1.0, 5.0, 3.0, 8.0)
    reached = time_to_threshold(run, 5.0)
    assert (reached.steps, reached.seconds) == (200, 4.0)
    assert time_to_threshold(run, 5.1).steps == 400
    assert time_to_threshold(run, 9.0) is None


def test_the_default_threshold_is_most_of_the_way(run_of):
    runs = [run_of("a", -1000.0, -500.0), run_of("b", -800.0, -100.0)]
    assert default_threshold(runs) == pytest.approx(-190.0)
    assert default_threshold([run_of("flat", 5.0, 5.0)]) is None
    assert default_threshold([run_of("none", rows=[row(1, None)])]) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "none"),
        (True, "yes"),
        (0.001, "0.001"),
        (100_000, "100,000"),
        ([], "none"),
        ({}, "none"),
        ([[32, 8], [64, 4]], "(32, 8), (64, 4)"),
        ("x", "x"),
    ],
)
def test_settings_are_shown_as_people_write_them(value, text):
    assert format_value(value) == text
