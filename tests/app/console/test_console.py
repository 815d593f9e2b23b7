"""Consoles: output during training."""

import io
import logging
import re
import sys
import time
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console
from screen import Screen

from canter.app.console.console import (
    LineConsole,
    QuietConsole,
    VerboseConsole,
    format_clock,
    format_long_run_average,
    format_number,
    format_percent,
    make_console,
)
from canter.app.console.dashboard import Dashboard, LiveConsole
from canter.config.presets import preset_for
from canter.core.plain import to_plain
from canter.runs.run_folder import CheckpointConfig
from canter.training.trainer import train

CONFIG = replace(preset_for("CartPole-v1"), total_steps=8 * 1024)


@pytest.fixture(scope="module")
def rows():
    """The rows of a real run of eight iterations."""
    reports = []
    train(CONFIG, reports.append)
    return [report.row() for report in reports]


class Terminal(io.StringIO):
    """Text that takes itself for a terminal."""

    def isatty(self):
        return True


def live_console(width=80, file=None):
    terminal = Console(file=file or Terminal(), width=width, height=30, force_terminal=True, color_system="standard")
    return LiveConsole(terminal, refresh_per_second=0.001)  # drawn only when a test says so


def drawn(rows, width, config=CONFIG):
    dashboard, text = Dashboard(to_plain(config)), io.StringIO()
    for row in rows:
        dashboard.add(row)
    Console(file=text, width=width, force_terminal=True, color_system=None).print(dashboard)
    return text.getvalue().splitlines()


def test_what_the_environment_reports_is_shown(rows, capsys):
    row = rows[-1] | {f"env/a_term_of_the_reward_{i}": i + 0.5 for i in range(6)}
    wide = "\n".join(drawn([row], width=120))
    assert "environment" in wide and "the_reward_3" in wide and "3.50" in wide and "so far" not in wide
    assert all(cell_len(line) <= 80 for line in drawn([row | {"env/x": None}], width=80))
    assert "environment" not in "\n".join(drawn(rows, width=120))
    VerboseConsole().write(row | {"env/none_yet": None})
    out = capsys.readouterr().out
    assert out.count("a_term_of_the_reward") == 6
    assert re.search(r"^  none_yet +-$", out, re.MULTILINE)


@pytest.mark.parametrize(("terminal", "term", "kind"), [(True, "xterm", LiveConsole), (True, "dumb", LineConsole)])
def test_auto_is_live_on_a_terminal_that_can_and_lines_elsewhere(terminal, term, kind, monkeypatch):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys, "stdout", Terminal() if terminal else io.StringIO())
    assert isinstance(make_console("auto"), kind)


def test_auto_is_lines_in_a_pipe(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert isinstance(make_console(), LineConsole)
    assert isinstance(make_console("verbose"), VerboseConsole)
    assert isinstance(make_console("quiet"), QuietConsole)


def test_lines_come_every_few_seconds_and_for_the_first_and_last_iteration(rows, capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    console = LineConsole(every=5.0)
    console.start(to_plain(CONFIG))
    for row in rows:
        console.write(row)
        now[0] += 2.0
    console.close()
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[0].replace(",", "")) for line in lines] == [1024, 4 * 1024, 7 * 1024, 8 * 1024]
    last = rows[-1]
    assert f"return {last['return']:.2f}  length {last['length']:.2f}  success 0%" in lines[-1]
    assert f"KL {last['policy/kl']:.4f}" in lines[-1]
    assert re.search(r"explained variance -?\d.*  [\d,]+ steps/s  0:00 left$", lines[-1])


def test_a_line_before_the_first_episode_has_ended_says_so(rows, capsys):
    console = LineConsole()
    console.start(to_plain(CONFIG))
    console.write({**rows[0], "return": None, "length": None, "success_rate": None})
    console.close()
    assert capsys.readouterr().out.count("no episode has ended yet") == 1


def test_a_verbose_block_has_exactly_three_parts_with_these_names(rows, capsys):
    console = VerboseConsole()
    console.start(to_plain(CONFIG))
    console.write(rows[-1])
    console.close()
    out = capsys.readouterr().out
    title, *lines = out.splitlines()
    assert "rollout 8" in title
    parts = {}
    for line in lines:
        if line.startswith("  "):
            name, value = line.split()
            parts[list(parts)[-1]][name] = value
        else:
            parts[line] = {}
    last = rows[-1]
    recent = f"recent {min(last['episodes'], 100)} episodes"
    assert {part: list(entries) for part, entries in parts.items()} == {
        "rollout statistics": [
            "mean_ep_len",
            "mean_ep_return",
            "mean_reward",
            "mean_clipped_ratio",
            "approx_kl",
            "rollout_len",
            "time_elapsed",
        ],
        recent: ["mean_ep_len", "mean_ep_return", "success_rate"],
        "trainer statistics": [
            "episodes_count",
            "timesteps_count",
            "rollouts_count",
            "total_timesteps",
            "clip_range",
        ],
    }
    assert parts["rollout statistics"]["mean_reward"] == "1.00"
    assert parts["rollout statistics"]["rollout_len"] == "1,024"
    assert parts[recent]["mean_ep_return"] == format_number(last["return"])
    assert parts["trainer statistics"] == {
        "episodes_count": f"{last['episodes']:,}",
        "timesteps_count": "8,192",
        "rollouts_count": "8",
        "total_timesteps": "8,192",
        "clip_range": "0.2000",
    }


@pytest.mark.parametrize("width", [8, 20, 40, 60, 80, 100, 120, 200])
def test_the_table_fills_the_width_of_any_terminal_up_to_120_columns(rows, width):
    lines = drawn(rows, width)
    assert {cell_len(line) for line in lines} == {min(width, 120)}


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_shows_how_far_how_well_and_where_the_time_goes(rows, width):
    text = "\n".join(drawn(rows[:4], width))
    for label in (
        *("return", "length", "success rate", "KL", "clip fraction", "entropy", "policy loss", "value loss"),
        *("explained var.", "learning rate", "steps/s", "50%", "4,096 of 8,192 steps", "left", "env ", "policy "),
        *("update ", "CartPole-v1 · seed 0"),
    ):
        assert label in text, label
    assert re.search(rf"return +{format_number(rows[3]['return'])}", text)
    assert re.search(rf"KL +{format_number(rows[3]['policy/kl'])}", text)
    assert "std" not in text  # categorical policies have none


def test_the_table_has_room_for_counters_on_a_wide_terminal(rows):
    text = "\n".join(drawn(rows, 120))
    for name in ("rollouts", "resets", "updates", "minibatch updates"):
        assert re.search(rf"{name} +{rows[-1][name.replace(' ', '_')]:,} ", text)


def test_the_curve_rises_from_the_lowest_to_the_highest_return_and_reaches_the_end(rows):
    rising = [{**row, "return": float(i)} for i, row in enumerate(rows)]
    chart = [line for line in drawn(rising, 80) if re.search("[▁-█]", line)]
    assert [line.split()[0] for line in chart] == ["7.00", "return", "0.0000"]
    columns = zip(*(line[12:78] for line in chart), strict=True)
    heights = [sum(" ▁▂▃▄▅▆▇█".index(block) for block in column) for column in columns]
    drawn_heights = [height for height in heights if height]
    assert drawn_heights == sorted(drawn_heights)
    assert (drawn_heights[0], heights[-1]) == (1, 24)


def test_the_shares_of_time_add_up(rows):
    row = rows[0] | {"time/env": 1.0, "time/policy": 2.0, "time/update": 1.0, "time/other": 0.0}
    bar, legend = drawn([row], 80)[-4:-2]
    assert bar.count("━") == 66
    assert re.findall(r"\w+ \d+%", legend) == ["env 25%", "policy 50%", "update 25%"]


def test_nothing_is_cut_off_where_it_is_narrow(rows):
    even = {f"time/{part}": 1.0 for part in ("env", "policy", "update", "other")}
    average = {"lta/mean": -1234.5, "lta/ci": 0.1234}
    config = replace(CONFIG, checkpoints=CheckpointConfig(best_by="lta"))
    for width in (100, 60, 44):
        text = [line.rstrip() for line in drawn([rows[0] | even | average], width, config)]
        assert sum(line.count("25%") for line in text) == 4
        assert any(line.endswith((" rollouts", "0.1234")) for line in text)


def test_a_live_table_is_drawn_in_place(rows):
    console = live_console()
    console.start(to_plain(CONFIG))
    for row in rows:
        console.write(row)
        console.live.refresh()
    console.close()
    screen = Screen(console.terminal.file.getvalue())
    (table,) = screen.tables()
    assert "8,192 of 8,192 steps" in table[3]
    assert screen.cursor_shown


def test_a_run_without_an_iteration_leaves_no_table():
    console = live_console()
    console.start(to_plain(CONFIG))
    assert len(Screen(console.terminal.file.getvalue()).tables()) == 1
    console.close()
    screen = Screen(console.terminal.file.getvalue())
    assert screen.tables() == []
    assert screen.cursor_shown


def test_printed_and_logged_text_appears_above_the_table(rows, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    early = logging.StreamHandler()  # takes hold of stderr before the table is there
    root = logging.getLogger()
    root.addHandler(early)
    try:
        console = live_console(file=terminal)
        console.start(to_plain(CONFIG))
        console.write(rows[0])
        console.live.refresh()
        print("a print")
        logging.getLogger("somewhere").warning("a log line")
        console.write(rows[1])
        console.live.refresh()
        console.close()
        assert early.stream is terminal
    finally:
        root.removeHandler(early)
    assert sys.stdout is terminal
    screen = Screen(terminal.getvalue())
    (table,) = screen.tables()
    above = "\n".join(screen.lines[: screen.lines.index(table[0])])
    for text in ("a print", "a log line"):
        assert above.count(text) == 1, text
        assert text not in "\n".join(table)


def test_errors_that_go_to_a_file_do_not_end_up_on_the_terminal(rows, monkeypatch):
    terminal, errors = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", errors)
    console = live_console(file=terminal)
    console.start(to_plain(CONFIG))
    print("an error", file=sys.stderr)
    console.close()
    assert errors.getvalue() == "an error\n"
    assert "an error" not in terminal.getvalue()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_the_terminal_is_restored_when_a_run_ends_early(error):
    console = live_console()

    def end(report):
        raise error

    before = sys.stdout, sys.stderr
    with pytest.raises(error):
        train(CONFIG, end, writers=[console])
    assert (sys.stdout, sys.stderr) == before
    screen = Screen(console.terminal.file.getvalue())
    assert screen.cursor_shown
    assert len(screen.tables()) == 1


def test_a_console_that_cannot_write_does_not_end_the_run(monkeypatch, caplog):
    class Broken(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

    reports = []
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Broken())
        train(replace(CONFIG, total_steps=2048), reports.append, writers=[LineConsole()])
    assert len(reports) == 2
    assert "LineConsole failed and is not used any more" in caplog.text


def test_where_the_long_run_average_counts_it_is_shown(rows, capsys):
    config = replace(CONFIG, checkpoints=CheckpointConfig(best_by="lta"))
    settings = to_plain(config)
    average = format_long_run_average(rows[-1])
    assert average == f"{format_number(rows[-1]['lta/mean'])} ± {format_number(rows[-1]['lta/ci'])}"
    for console in (LineConsole(every=0), VerboseConsole()):
        console.start(settings)
        console.write(rows[-1])
        console.close()
        assert average in capsys.readouterr().out
    for width in (40, 80, 120):
        lines = drawn(rows, width, config)
        assert {cell_len(line) for line in lines} == {width}
        assert "reward/t" in "\n".join(lines)
        assert f"reward per unit of time {average}"[: width - 4] in "\n".join(lines)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0.0000"),
        (-0.00214, "-0.0021"),
        (3e-5, "3.0e-05"),
        (1.5, "1.50"),
        (412.34, "412.3"),
        (-5064.2, "-5,064"),
        (float("nan"), "nan"),
    ],
)
def test_numbers_are_short(value, text):
    assert format_number(value) == text


def test_fractions_and_times_are_short():
    assert [format_percent(value) for value in (None, 0.0, 0.034, 0.5, 1.0)] == ["-", "0%", "3.4%", "50%", "100%"]
    assert [format_clock(seconds) for seconds in (0, 59.6, 61, 3725)] == ["0:00", "1:00", "1:01", "1:02:05"]


def test_an_algorithm_that_declares_nothing_has_its_first_metrics_shown(rows, capsys):
    own = {"search/best": 1.5, "search/tried": 3.0}
    row = {
        name: value for name, value in rows[-1].items() if "/" not in name or name.startswith(("time/", "lta/"))
    } | own
    settings = to_plain(CONFIG) | {"algorithm": {"kind": "nobody knows", "horizon": 8}}
    for console in (LineConsole(every=0), VerboseConsole()):
        console.start(settings)
        console.write(row)
        console.close()
        out = capsys.readouterr().out
        assert "search/best" in out and "1.50" in out
        assert "KL" not in out and "clip" not in out
    dashboard, text = Dashboard(settings), io.StringIO()
    dashboard.add(row)
    Console(file=text, width=100, force_terminal=True, color_system=None).print(dashboard)
    assert re.search(r"search/tried +3\.00", text.getvalue())
    assert {cell_len(line) for line in text.getvalue().splitlines()} == {100}


def test_a_run_of_unknown_length_has_no_time_left_and_one_of_iterations_has(rows, capsys):
    endless = to_plain(CONFIG) | {"total_steps": None, "until": {"iterations": None, "seconds": None}}
    counted = endless | {"until": {"iterations": 16, "seconds": None}}
    for settings, end in ((endless, "- left"), (counted, ":")):
        console = LineConsole(every=0)
        console.start(settings)
        console.write(rows[-1])
        assert end in capsys.readouterr().out.rpartition("steps/s")[2]
        dashboard = Dashboard(settings)
        dashboard.add(rows[-1])
        assert dashboard.tracker.progress(rows[-1]) == (0.5 if settings is counted else 0.0)
        assert "8,192 steps" in "".join(text for line in dashboard.lines(100) for text, _ in line)
