"""Reports of runs as one HTML file."""

from canter.app.report.page import write_report

__all__ = ["write_report"]
