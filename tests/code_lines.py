"""How long the source is: lines that hold code, without docstrings, comments and blanks."""

import ast
import io
import tokenize
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "canter"
LAYOUT = (
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
)


def code_lines(path):
    """How many lines of one file hold code."""
    return len(lines_of_code(path))


def lines_of_code(path):
    """Numbers of the lines of one file that hold code."""
    text = path.read_text()
    strings = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr) and _is_text(node.value)]
    docstrings = {line for node in strings for line in range(node.lineno, node.end_lineno + 1)}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {token.start[0] for token in tokens if token.type not in LAYOUT} - docstrings


def lines_under(path):
    """Lines of a file, or of all files in a folder, that hold code."""
    return sum(map(code_lines, sorted(path.rglob("*.py")) if path.is_dir() else [path]))


def _is_text(value):
    return isinstance(value, ast.Constant) and isinstance(value.value, str)
