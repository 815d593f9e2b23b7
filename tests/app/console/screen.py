"""A minimal terminal that shows the final content of its screen."""

import re

_TOKENS = re.compile(r"\x1b\[([\d;?]*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n]+)")


class Screen:
    """Lines of text after all cursor movements; it never scrolls, so what was drawn twice is there twice."""

    def __init__(self, output: str) -> None:
        self.lines, self.row, self.column, self.cursor_shown = [""], 0, 0, True
        for parameter, command, carriage, newline, text in _TOKENS.findall(output):
            if carriage:
                self.column = 0
            elif newline:
                self.row, self.column = self.row + 1, 0
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif text:
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + text + line[self.column + len(text) :]
                self.column += len(text)
            elif command == "A":
                self.row -= int(parameter or 1)
                assert self.row >= 0, "the cursor left the screen"
            elif command == "K":
                assert parameter == "2"
                self.lines[self.row] = ""
            elif parameter == "?25":
                self.cursor_shown = command == "h"
            else:
                assert command == "m", f"unknown control sequence {parameter}{command}"

    def tables(self) -> list[list[str]]:
        """The live tables that are seen, each as its lines."""
        starts = [i for i, line in enumerate(self.lines) if line.startswith("── Canter")]
        ends = [i for i, line in enumerate(self.lines) if line.startswith("─────")]
        return [self.lines[start : end + 1] for start, end in zip(starts, ends, strict=True)]
