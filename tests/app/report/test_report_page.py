import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from run_folders import make_run, rising, row

from canter.app.report import write_report
from canter.app.report.differences import comparison_lines

EVIL = "<script>alert(1)</script>"
METRICS = {
    "length": 20.0,
    "loss/policy": -0.1,
    "policy/kl": 0.01,
    "optim/learning_rate/policy": 1e-3,
    "optim/learning_rate/critic": 2e-3,
    "time/env": 0.5,
    "time/policy": 0.5,
    "time/update": 1.0,
    "my/own": 3.0,
    "always_zero": 0.0,
}
RECORD = {
    "status": "finished",
    "started": "2026-01-02T03:04:05+00:00",
    "command": ["/somewhere/bin/canter", "train", EVIL],
    "machine": {"cpu": "Example 3000", "gpus": []},
    "versions": {"torch": "9.9"},
}


class Page(HTMLParser):
    """Reads a page, refuses what is not well formed, and keeps texts and attributes."""

    def __init__(self, text):
        super().__init__()
        self.stack, self.tags, self.texts, self.attributes = [], [], [], []
        self.feed(text.replace("<wbr/>", ""))  # where a name may be broken
        self.close()
        assert not self.stack

    def handle_starttag(self, tag, attrs):
        self.stack.append(tag)
        self.tags.append(tag)
        self.attributes += attrs

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return " ".join(self.texts)


@pytest.fixture
def page_of(tmp_path):
    """The report of some runs, read."""

    def write(*paths, **options):
        return Page(write_report(list(paths), tmp_path / "out.html", **options).read_text())

    return write


def test_the_report_of_one_run_is_complete(tmp_path, page_of):
    path = make_run(tmp_path, "mine", seed=3, rows=rising(10.0, 50.0, 40.0, **METRICS), record=RECORD, gamma=0.9)
    page = page_of(path, threshold=45.0)
    for part in ("mine", "seed 3", "finished", "Example 3000", "2026-01-02 03:04 UTC", "Stepping environments"):
        assert part in page.text, part
    assert "canter train" in page.text and "/somewhere" not in page.text
    titles = [title for title in ("Episode length", "Policy loss", "KL divergence", "my/own") if title in page.text]
    assert len(titles) == 4
    for absent in ("always_zero", "Clip fraction", "nan"):
        assert absent not in page.text
    # The learning rates of both optimisers are in one chart, with their names.
    assert page.text.count("Learning rate") == 1
    assert page.texts.count("critic") == 1
    # Which settings differ from the preset.
    raw = (tmp_path / "out.html").read_text().replace("<wbr/>", "")
    changed = re.findall(r'<tr class="changed"><td>([\w.]+)</td><td>([^<]+)<span class="was">was ([^<]+)', raw)
    assert ("algorithm.gamma", "0.9", "0.98") in changed
    assert "env.id" not in [key for key, _, _ in changed] and "seed" not in [key for key, _, _ in changed]
    tiles = re.findall(r"<dt>([^<]+)</dt><dd>([^<]+)</dd>", raw)
    assert dict(tiles) | {"Return": "40", "Best": "50", "Env steps": "300", "Time": "6.0 s"} == dict(tiles)
    assert dict(tiles)["Steps to 45"] == "200"


def test_several_runs_are_compared_by_group(tmp_path, page_of):
    fast = [make_run(tmp_path, f"fast-{k}", seed=k, rows=rising(0.0, 80.0 + k, 100.0)) for k in (1, 2, 3)]
    slow = [make_run(tmp_path, f"slow-{k}", seed=k, rows=rising(0.0, 10.0, 20.0 + k), gamma=0.5) for k in (1, 2, 3)]
    page = page_of(*fast, *slow)
    assert "6 runs on CartPole-v1" in page.text
    assert "fewer than five seeds" in page.text
    assert "The threshold 90 is 90 % of the way" in page.text
    cells = re.findall(r"<td>(.*?)</td>", (tmp_path / "out.html").read_text())
    fast_row, slow_row = (cells.index(next(cell for cell in cells if f"<b>{g}</b>" in cell)) for g in GAMMAS)
    no_score = "\N{EN DASH}"
    assert cells[fast_row + 1 : fast_row + 7] == ["3", no_score, "100<small>100 to 100</small>", "100", "300", "6.0 s"]
    assert cells[slow_row + 5] == "not reached<small>0 of 3 reached it</small>"
    assert page.texts.count("algorithm.gamma") == 2  # among those that differ, and as the one that was changed
    page = page_of(*fast, *slow, threshold=82.0)
    assert "The threshold 82 is the requested return" in page.text
    # Two of three have 82 in their second row, so the median seed takes 200 steps.
    assert "200" in re.findall(r"<td>(.*?)</td>", (tmp_path / "out.html").read_text())


GAMMAS = ("gamma 0.99", "gamma 0.5")


def test_environments_are_compared_apart(tmp_path, page_of):
    paths = [make_run(tmp_path, f"on-{env}", env_id=env, rows=rising(1.0, 2.0)) for env in ("A-v1", "B-v1")]
    page = page_of(*paths)
    assert "2 runs" in page.text and page.text.count("Comparison") == 2


def test_the_file_needs_nothing_else_and_runs_nothing(tmp_path, page_of):
    make_run(tmp_path, "a", rows=rising(1.0, 2.0, **METRICS), record=RECORD)
    make_run(tmp_path, "b", rows=rising(1.0, 3.0, **METRICS), record=RECORD, gamma=0.5)
    for paths in (["a"], ["a", "b"]):
        page = page_of(*(tmp_path / name for name in paths))
        assert not {"script", "link", "img", "iframe", "object", "base", "a", "use", "image"} & set(page.tags)
        assert not [name for name, _ in page.attributes if name.startswith(("on", "href", "src", "xlink"))]
        raw = (tmp_path / "out.html").read_text()
        assert not re.search(r"(?i)https?:|//\w|url\(|@import|javascript:", raw)


def test_names_settings_and_errors_cannot_smuggle_markup(tmp_path, page_of):
    record = RECORD | {"error": EVIL, "versions": {EVIL: EVIL}, "host": EVIL}
    rows = rising(1.0, 2.0, **{f"loss/{EVIL}": 1.0, f"{EVIL}": 2.0})
    name = EVIL.replace("/", "_")
    one = make_run(tmp_path, name, env_id=f"{EVIL}-v0", rows=rows, record=record, surrogate=EVIL)
    other = make_run(tmp_path, "other", env_id=f"{EVIL}-v0", rows=rows, surrogate="x")
    twin = make_run(tmp_path, "twin", env_id=f"{EVIL}-v0", rows=rows, seed=1, surrogate=EVIL)
    for paths in ([one], [one, other, twin]):
        page = page_of(*paths)
        assert "script" not in page.tags
        assert EVIL in page.text


@pytest.mark.parametrize(
    "rows",
    [
        [row(1, None)],
        [row(1, 5.0)],
        [{"env_steps": 0}],
        [{"env_steps": 10, "return": 1e300}, {"env_steps": 20, "return": -1e299}],
        rising(*np.full(5, 7.0)),
    ],
)
def test_strange_runs_still_have_a_page(tmp_path, page_of, rows):
    one = make_run(tmp_path, "strange", rows=rows, record={"machine": "no dict", "command": 5, "error": None})
    (one / "config.yaml").write_text("- no settings")
    other = make_run(tmp_path, "healthy", rows=rising(1.0, 2.0))
    assert "cannot be read" in page_of(one).text
    assert "2 runs" in page_of(one, other).text


def test_a_file_is_only_overwritten_by_its_own_kind(tmp_path, monkeypatch):
    path = make_run(tmp_path, "mine", rows=rising(1.0, 2.0))
    assert write_report([path]) == path / "report.html"
    first = (path / "report.html").read_text()
    write_report([path], threshold=1.5)
    assert (path / "report.html").read_text() != first
    notes = tmp_path / "notes.html"
    notes.write_text("my own words")
    with pytest.raises(
        ValueError, match=r"notes.html exists and is not a report of canter; choose another file with --out"
    ):
        write_report([path], notes)
    assert notes.read_text() == "my own words"
    monkeypatch.chdir(tmp_path)
    other = make_run(tmp_path, "other", rows=rising(1.0))
    assert write_report([path, other]).resolve() == tmp_path / "report.html"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "notes.html", "other", "report.html"]


def test_a_run_named_twice_is_one_run(tmp_path):
    path = make_run(tmp_path, "mine", rows=rising(1.0, 2.0))
    assert write_report([path, path]) == path / "report.html"
    with pytest.raises(ValueError, match="at least one run"):
        write_report([])


def scored_run(parent, name, score, **algorithm):
    """A run whose final policy has this score."""
    return make_run(parent, name, rows=rising(1, 2), record=RECORD | {"score": {"mean": score}}, **algorithm)


def test_a_table_shows_what_each_changed_setting_did(tmp_path, page_of):
    plain = [scored_run(tmp_path, f"plain{seed}", score) for seed, score in enumerate((10.0, 20.0))]
    changed = [scored_run(tmp_path, "short", 5.0, gamma=0.9), scored_run(tmp_path, "narrow", 16.0, clip_ratio=0.1)]
    both = scored_run(tmp_path, "both", 99.0, gamma=0.9, clip_ratio=0.1)
    texts = page_of(*plain, *changed, both).texts
    table = texts[texts.index("Differences") : texts.index("Settings that differ")]
    for cells in (["unchanged", "2", "15"], ["algorithm.gamma", "0.9"], ["algorithm.clip_ratio", "0.1"]):
        place = table.index(cells[0])
        assert table[place : place + len(cells)] == cells
    assert {"-10", "+1", "+84", "2 settings", "one run is no sample"} <= set(table)
    assert table.index("both") > table.index("algorithm.clip_ratio")


def test_a_difference_has_its_interval_and_a_test(tmp_path, page_of):
    """Means 2 and 6 with variance 1 each: 4 +- 2.776 sqrt(2/3), and p from Student's t with 4 degrees of freedom."""
    runs = [scored_run(tmp_path, f"plain{score}", score, seed=k) for k, score in enumerate((1.0, 2.0, 3.0))]
    runs += [scored_run(tmp_path, f"new{score}", score, seed=k, gamma=0.9) for k, score in enumerate((5.0, 6.0, 7.0))]
    texts = page_of(*runs).texts
    table = texts[texts.index("Differences") : texts.index("Settings that differ")]
    assert {"+4", "+1.733 to +6.267", "0.008"} <= set(table)
    assert "final score, mean over seeds" in " ".join(table)
    assert comparison_lines(runs) == [
        "CartPole-v1, final score: mean over seeds (95 % interval)",
        "  gamma 0.99: 2.00 (-0.4841 to 4.48), 3 runs",
        "  gamma 0.9: 6.00 (3.52 to 8.48), 3 runs; +4 from gamma 0.99 (+1.733 to +6.267), p 0.008",
        "  Differences by Welch's t-test, p by Holm for all of them; seeds are not paired.",
    ]


def test_without_final_scores_the_last_returns_are_compared(tmp_path, page_of):
    runs = [make_run(tmp_path, f"a{seed}", seed=seed, rows=rising(1.0, 2.0 + seed)) for seed in (1, 2)]
    runs += [make_run(tmp_path, f"b{seed}", seed=seed, rows=rising(1.0, 3.0 + seed), gamma=0.9) for seed in (1, 2)]
    page = page_of(*runs)
    assert "last return of training, mean over seeds" in page.text and "+1" in page.texts


def test_the_returns_of_each_rollout_are_drawn_in_front_of_the_mean_that_lags(tmp_path):
    rows = [row(number, float(number), rollout_return=10.0 * number) for number in range(1, 6)]
    text = write_report([make_run(tmp_path, "run", rows=rows)]).read_text()
    assert "Thin: mean of the last 100 episodes, which lags" in text
    assert re.search(r"from 10(\.0)? to 50", text)  # what a line that is not faint is described by


def test_pictures_of_the_newest_video_and_an_average_are_on_top(tmp_path):
    record = RECORD | {"score": {"reward_per_step": -3.0, "long_run_average": -2.5, "ci": 0.25}}
    path = make_run(tmp_path, "run", rows=rising(1, 2), record=record)
    (path / "videos").mkdir()
    (path / "videos" / "step-000000001.png").write_bytes(b"\x89PNG\r\n\x1a\nold")
    (path / "videos" / "step-000000002.png").write_bytes(b"\x89PNG\r\n\x1a\nnew")
    text = write_report([path]).read_text()
    assert text.count("data:image/png;base64,iVBORw0KGgpuZXc=") == 1 and text.count("data:image/png") == 1
    assert "Long-run average" in text and "\N{MINUS SIGN}2.5" in text
    strange = {"mean": 3.0, "low": "x", "high": [1], "ci": {}}
    (path / "run.json").write_text(json.dumps(RECORD | {"score": strange}))
    (path / "videos" / "step-000000002.png").write_bytes(b"<svg onload=alert(1)>")
    assert "data:image" not in write_report([path]).read_text()
