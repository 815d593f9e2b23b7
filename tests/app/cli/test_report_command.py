import json
import webbrowser

import pytest

from canter.app.cli import main


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two runs of two iterations in `runs`, here."""
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        path = tmp_path / "runs" / name
        path.mkdir(parents=True)
        (path / "config.yaml").write_text(f"env: {{id: CartPole-v1}}\nname: {name}\n")
        rows = [{"env_steps": 100 * i, "seconds": i, "return": 10.0 * i} for i in (1, 2)]
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "runs"


def test_one_run_gets_a_report_in_its_folder_and_several_one_here(runs, capsys):
    main(["report", "one"])
    assert capsys.readouterr().out == "The report is in runs/one/report.html\n"
    main(["report", "one", "two", "--threshold", "15"])
    assert capsys.readouterr().out == "The report is in report.html\n"
    assert "The threshold 15 is the requested return" in (runs.parent / "report.html").read_text()


def test_the_file_can_be_chosen_and_shown(runs, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    main(["report", "two", "--out", "mine.html", "--open"])
    assert opened == [(runs.parent / "mine.html").as_uri()]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["thre"], "no run 'thre' here or under runs"),
        ([], "the following arguments are required: RUN"),
        (["one", "--threshold", "high"], "--threshold: invalid float value: 'high'"),
        (["one", "--out", "notes.txt"], "notes.txt exists and is not a report of canter"),
        (["one", "--out", "nowhere/x.html"], "nowhere is not a folder"),
        (["one", "--treshold", "1"], "did you mean --threshold"),
    ],
)
def test_bad_input_gets_one_clear_line(runs, capsys, arguments, message):
    (runs.parent / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit) as leaving:
        main(["report", *arguments])
    assert leaving.value.code == 2
    assert message in capsys.readouterr().err
    assert (runs.parent / "notes.txt").read_text() == "mine"
