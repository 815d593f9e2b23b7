"""A live table on the terminal."""

from __future__ import annotations

import logging
import sys
from typing import Any

from rich.console import Console as Terminal
from rich.live import Live

from canter.console.dashboard import Dashboard
from canter.console.printable import PrintableStream, terminal_stream


class LiveConsole:
    """One table that is drawn anew in place; whatever is printed or logged meanwhile appears above it."""

    def __init__(self, terminal: Terminal | None = None, refresh_per_second: float = 4) -> None:
        self.terminal = terminal or Terminal(file=terminal_stream())
        self.refresh_per_second = refresh_per_second
        self.dashboard, self.live = Dashboard({}), None
        self.redirected: dict[logging.StreamHandler[Any], Any] = {}

    def start(self, settings: dict[str, Any]) -> None:
        """Take over the lower end of the terminal."""
        self.dashboard = Dashboard(settings)
        streams = (sys.stdout, sys.stderr)
        self.live = Live(
            self.dashboard,
            console=self.terminal,
            refresh_per_second=self.refresh_per_second,
            redirect_stderr=sys.stderr.isatty(),  # errors that go to a file still should
            vertical_overflow="crop",
        )
        self.live.start(refresh=True)
        if sys.stdout is not streams[0]:
            sys.stdout = PrintableStream(sys.stdout)  # until the table gives the terminal back
        if sys.stderr is not streams[1]:
            sys.stderr = PrintableStream(sys.stderr)
        # These hold the stream from before it was redirected, and would write into the table.
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream in streams:
                self.redirected[handler] = handler.stream
                handler.setStream(sys.stderr if handler.stream is streams[1] else sys.stdout)

    def write(self, row: dict[str, Any]) -> None:
        """Show these numbers from the next drawing on."""
        self.dashboard.add(row)

    def close(self) -> None:
        """Draw a last time and give the terminal back; a table with something in it stays to be read."""
        for handler, stream in self.redirected.items():
            handler.setStream(stream)
        if self.live is not None:
            self.dashboard.running = False
            self.live.transient = not self.dashboard.pace.rows
            self.live.stop()
