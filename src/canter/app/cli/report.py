"""`canter report`: what runs have come to, as one HTML file."""

from __future__ import annotations

import webbrowser
from pathlib import Path

from canter.app.cli.parser import Parser
from canter.app.report import write_report
from canter.runs.records import find_all


def report_command(argv: list[str]) -> None:
    """Write a page about one run, or one that compares several."""
    parser = Parser(
        "report",
        "RUN... [--out FILE] [--threshold X] [--open] [--run-dir DIR]",
        "Write one HTML file that needs no network: curves, losses, time, settings and machine of a run, or a\n"
        "comparison of several. Runs that differ only in their seed are shown as one curve with its uncertainty.",
    )
    which = "folder of a run or of runs, `latest`, or the beginning of names"
    parser.add_argument("runs", metavar="RUN", nargs="+", help=which)
    where = "where to write; by default report.html in the run's folder, or here for several"
    parser.flag("--out", "FILE", where, type=Path)
    parser.flag("--threshold", "X", "the return whose reaching is timed", type=float)
    parser.switch("--open", "show it in the browser")
    parser.run_dir()
    arguments = parser.parse(argv)
    paths = [path for text in arguments.runs for path in find_all(text, arguments.run_dir)]
    written = write_report(paths, arguments.out, threshold=arguments.threshold)
    print(f"The report is in {written}")
    if arguments.open:
        webbrowser.open(written.resolve().as_uri())
