"""`canter report`: what runs have come to, as one HTML file."""

from __future__ import annotations

import webbrowser
from pathlib import Path

from canter.cli.parser import Parser
from canter.report import write_report
from canter.runs.finding import RUNS, find_all


def report_command(argv: list[str]) -> None:
    """Write a page about one run, or one that compares several."""
    arguments = report_parser().parse(argv)
    paths = [path for text in arguments.runs for path in find_all(text, Path(arguments.run_dir))]
    out = None if arguments.out is None else Path(arguments.out)
    written = write_report(paths, out, threshold=arguments.threshold)
    print(f"The report is in {written}")
    if arguments.open:
        webbrowser.open(written.resolve().as_uri())


def report_parser() -> Parser:
    """The arguments of `canter report`."""
    parser = Parser(
        "report",
        usage="RUN... [--out FILE] [--threshold X] [--open] [--run-dir DIR]",
        description=(
            "Write one HTML file that needs no network: curves, losses, time, settings and machine of a run, or a\n"
            "comparison of several. Runs that differ only in their seed are shown as one curve with its uncertainty."
        ),
    )
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="folder of a run or of runs, `latest`, or the beginning of names"
    )
    parser.flag(
        "--out", metavar="FILE", help="where to write; by default report.html in the run's folder, or here for several"
    )
    parser.flag("--threshold", metavar="X", type=float, help="the return whose reaching is timed")
    parser.flag("--open", action="store_true", help="show it in the browser")
    parser.flag("--run-dir", metavar="DIR", default=str(RUNS), help=f"where runs are looked for (default {RUNS})")
    return parser
