import json

import numpy as np
import pytest
from run_folders import make_run, rising, row

from canter.app.report.data import read_run
from canter.runs import metrics
from canter.runs.metrics import parse_row, read_last_row, read_rows
from canter.runs.records import flatten, read_settings


def test_a_run_is_read_with_settings_record_and_metrics(tmp_path):
    rows = [row(1, None), row(2, 5.0, **{"loss/value": 0.25}), row(3, 7.0)]
    run = read_run(make_run(tmp_path, "mine", seed=4, rows=rows, record={"status": "failed", "error": "boom"}))
    assert (run.name, run.env_id, run.seed, len(run.column("env_steps")), run.status) == (
        "mine",
        "CartPole-v1",
        "4",
        3,
        "failed",
    )
    assert run.settings["algorithm.gamma"] == 0.99
    assert run.column("env_steps").tolist() == [100, 200, 300]
    assert [x.tolist() for x in run.points("return")] == [[200, 300], [5, 7]]
    assert [x.tolist() for x in run.points("return", "seconds")] == [[4, 6], [5, 7]]
    assert (run.last("loss/value"), run.last("nothing")) == (0.25, None)
    assert np.isnan(run.column("nothing")).all()
    assert run.speed == 50


def test_torn_and_foreign_lines_are_passed_over(tmp_path):
    path = make_run(tmp_path, "torn", rows=rising(1.0, 2.0))
    lines = [b"\xff\xfe\x00 no text", b"[1, 2]", b"[" * 100_000, b"{}", b'{"env_steps": "many"}', b"", b"NaN"]
    with (path / "metrics.jsonl").open("ab") as file:
        file.write(b"\n".join([*lines, json.dumps(row(3, 3.0)).encode(), b'{"env_steps": 400, "ret']))
    assert read_run(path).points("return")[1].tolist() == [1, 2, 3]


def test_numbers_that_are_none_are_left_out():
    line = b'{"env_steps": 1, "a": NaN, "b": Infinity, "c": null, "d": true, "e": 1%s, "f": "x", "g": 2}' % (b"0" * 400)
    assert parse_row(line) == {"env_steps": 1.0, "g": 2.0}


def test_repeated_steps_count_once_and_the_later_ones_win(tmp_path):
    rows = [*rising(1.0, 2.0, 3.0), row(2, 20.0), row(3, 30.0), row(4, 40.0)]
    run = read_run(make_run(tmp_path, "resumed", rows=rows))
    assert [x.tolist() for x in run.points("return")] == [[100, 200, 300, 400], [1, 20, 30, 40]]


@pytest.mark.parametrize("content", ["", "no line of JSON\n" * 3, None])
def test_a_run_without_metrics_is_refused_with_its_name(tmp_path, content):
    path = make_run(tmp_path, "empty")
    if content is None:
        (path / "metrics.jsonl").unlink()
    else:
        (path / "metrics.jsonl").write_text(content)
    with pytest.raises(ValueError, match="empty: no metrics to report"):
        read_run(path)


def test_long_files_are_thinned_out_and_the_last_row_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "MAX_ROWS", 50)
    path = make_run(tmp_path, "long", rows=rising(*np.arange(1003.0)))
    steps = [found["env_steps"] for found in read_rows(path / "metrics.jsonl")]
    assert 40 <= len(steps) <= 60
    assert (steps[0], steps[-1]) == (100, 100_300)
    assert len(set(np.diff(steps[:-1]))) == 1


def test_the_last_row_is_found_without_reading_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "TAIL", 500)
    path = make_run(tmp_path, "long", rows=rising(*range(100))) / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"env_steps": 999')
    assert read_last_row(path)["env_steps"] == 10_000
    assert read_last_row(tmp_path / "nowhere") == {}


@pytest.mark.parametrize(
    "content",
    [b"a: [", b"\xff\xfe", b"!!python/object:os.system x", b"- 1", b"3", b"a: " + b"[" * 1500, b"x: !!timestamp y"],
)
def test_settings_that_cannot_be_read_are_none(tmp_path, content):
    (tmp_path / "config.yaml").write_bytes(content)
    assert read_settings(tmp_path / "config.yaml") == {}
    assert read_settings(tmp_path / "nowhere.yaml") == {}


def test_settings_that_repeat_themselves_without_end_are_not_read(tmp_path):
    laughs = ["a0: &a0 {x: 1, y: 2}"]
    laughs += [f"a{i}: &a{i} {{{', '.join(f'k{j}: *a{i - 1}' for j in range(9))}}}" for i in range(1, 15)]
    (tmp_path / "config.yaml").write_text("\n".join(laughs))
    assert read_settings(tmp_path / "config.yaml") == {}


def test_settings_are_flattened_to_their_paths():
    assert dict(flatten({"a": {"b": 1, "c": {}}, "d": [1, 2]})) == {"a.b": 1, "a.c": {}, "d": [1, 2]}


def test_the_time_split_is_scaled_to_the_whole_run(tmp_path):
    times = {"time/env": 0.2, "time/policy": 0.1, "time/update": 0.7, "time/other": 0.0, "time/steps_per_second": 50}
    run = read_run(make_run(tmp_path, "timed", rows=rising(1.0, 2.0, **times)))
    assert run.time_split == pytest.approx({"env": 0.8, "policy": 0.4, "update": 2.8})
