"""Planted mistakes: where each belongs, how to apply it, and whether all of them still apply.

The mistakes are data, in `planted/*.toml`. Each replaces one piece of text in one function (or macro, or class) of one
file of `src/canter`. The function anchors it: other changes of the file do not matter, and the text must occur exactly
once in the function.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sysconfig
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCE = ROOT / "src" / "canter"
NATIVE = Path("engines/native")


class DoesNotApply(ValueError):
    """A mutation whose function or text is not there exactly once; the message says what to change."""


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One planted mistake."""

    id: str
    """Name on the command line and in results."""
    file: str
    """Path below `src/canter`."""
    function: str
    """Qualified name of the Python function or class, or name of the C function or macro, that holds the text."""
    kind: str
    """Kind of mistake: operator, sign, off by one, mask, axis, arguments, skipped, constant, comparison or gradient."""
    wrong: str
    """One line that says what the mistake does."""
    old: str
    """Text to replace; occurs exactly once in the function."""
    new: str
    """Text that replaces it."""

    @property
    def package(self) -> str:
        """Package of the file, as in tables: `core` and `engines` are split."""
        first, second, *_ = Path(self.file).parts
        if first == "engines":
            return "engines (native)" if second == "native" else "engines (autograd)"
        return f"core.{second}" if first == "core" else first

    @property
    def is_native(self) -> bool:
        """The file is C, so the extension must be rebuilt."""
        return Path(self.file).suffix in (".c", ".h")

    def apply(self, text: str) -> str:
        """Return the text of the file with the mistake in it."""
        start, stop = (_c_span if self.is_native else _python_span)(text, self.function, self.id)
        count = text.count(self.old, start, stop)
        if count != 1:
            raise DoesNotApply(f"{self.old!r} occurs {count} times in {self.function} of {self.file}, not once")
        place = text.index(self.old, start, stop)
        return text[:place] + self.new + text[place + len(self.old) :]


def load() -> list[Mutation]:
    """Return all planted mistakes, package by package."""
    planted: list[Mutation] = []
    for path in sorted((HERE / "planted").glob("*.toml")):
        planted += [Mutation(**entry) for entry in tomllib.loads(path.read_text())["mutation"]]
    names = [mutation.id for mutation in planted]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"planted twice: {', '.join(twice)}")
    return planted


def check(planted: list[Mutation]) -> list[str]:
    """Return a line for each mutation that does not apply, or with which the file is no program."""
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        native = copytree(SOURCE / NATIVE, Path(folder) / "native")
        for mutation in planted:
            original = (SOURCE / mutation.file).read_text()
            try:
                mutated = mutation.apply(original)
                if not mutation.is_native:
                    compile(mutated, mutation.file, "exec")
            except (DoesNotApply, SyntaxError, OSError) as error:
                problems.append(f"{mutation.id}: {error}")
                continue
            if mutation.is_native:
                path = native / Path(mutation.file).name
                path.write_text(mutated)
                problems += [f"{mutation.id}: {line}" for line in _compiler_errors(native, path)]
                path.write_text(original)
    return problems


def extension() -> tuple[list[Path], list[str], list[str]]:
    """Return sources, compiler flags and linker flags of the extension, from pyproject.toml."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (module,) = settings["tool"]["setuptools"]["ext-modules"]
    sources = [Path(source).relative_to("src/canter") for source in module["sources"]]
    include = f"-I{sysconfig.get_paths()['include']}"
    return sources, [*module["extra-compile-args"], "-fPIC", include], module["extra-link-args"]


def sources_of(file: Path) -> list[Path]:
    """Return the sources to compile again after a change of `file`: a header belongs to the arithmetic of each type."""
    sources, _, _ = extension()
    if file.suffix == ".c":
        return [source for source in sources if source.name == file.name]
    return [source for source in sources if source.stem.startswith(("float", "double"))]


def _compiler_errors(native: Path, changed: Path) -> list[str]:
    """Return the compiler's errors; one number type is enough to parse a header."""
    _, flags, _ = extension()
    source = changed if changed.suffix == ".c" else native / "float.c"
    command = ["gcc", "-fsyntax-only", *flags, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return [line for line in done.stderr.splitlines() if "error:" in line][:3]


def _python_span(text: str, function: str, name: str) -> tuple[int, int]:
    """Return the place of a function or class, by its qualified name."""
    body: list[ast.stmt] = ast.parse(text).body
    node: ast.stmt | None = None
    for part in function.split("."):
        named = [
            child
            for child in body
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and child.name == part
        ]
        if len(named) != 1:
            raise DoesNotApply(f"there are {len(named)} definitions of {function}, not one")
        node = named[0]
        body = named[0].body
    assert node is not None and node.end_lineno is not None
    lines = text.splitlines(keepends=True)
    return sum(map(len, lines[: node.lineno - 1])), sum(map(len, lines[: node.end_lineno]))


def _c_span(text: str, function: str, name: str) -> tuple[int, int]:
    """Return the place of a function, which ends with the first brace at the start of a line, or of a macro."""
    escaped = re.escape(function)
    macro = rf"^#define {escaped}\((?:.*\\\n)*.*$"
    defined = rf"^[A-Za-z][^\n;{{}}#]*\b{escaped}\([^;{{]*\)\n\{{\n(?:.*\n)*?\}}"
    found = [match.span() for pattern in (macro, defined) for match in re.finditer(pattern, text, re.MULTILINE)]
    if len(found) != 1:
        raise DoesNotApply(f"there are {len(found)} definitions of {function}, not one")
    return found[0]
