"""Measure how many planted mistakes the tests find.

    python benchmarks/mutation/run.py                  plant all of them, one after the other
    python benchmarks/mutation/run.py --only gae-no-bootstrap
    python benchmarks/mutation/run.py --near           run only the tests that mirror the changed package
    python benchmarks/mutation/run.py --first OLD      try the tests that found the mistakes in the results OLD first
    python benchmarks/mutation/run.py --check          apply and compile all of them, run nothing
    python benchmarks/mutation/run.py --table          print the results as Markdown

Each mistake is planted in a copy of the package. The tests of `make test` run on the copy, those that mirror the
changed package first, until one fails. A test that fails without the mistake too does not count. A test that makes no
progress for `--limit` seconds counts as one that found the mistake. `--resume` keeps the results of an interrupted run.
`--leave-out FILE` names tests that are known to fail on this machine, one per line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from mutations import HERE, NATIVE, ROOT, SOURCE, Mutation, check, extension, load, sources_of
from near import test_groups

RESULTS = HERE / "results.json"
COPIED = ("docs", "examples", "reference", "tests", "benchmarks", "src")
"""Folders that the tests read, besides the files in the root."""
EXTENSION = "_native.abi3.so"


class Copy:
    """A copy of the repository in which one mistake at a time is planted."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        ignore = shutil.ignore_patterns("__pycache__")
        for name in COPIED:
            shutil.copytree(ROOT / name, folder / name, ignore=ignore)
        for path in ROOT.iterdir():
            if path.is_file() and not path.name.startswith(".git"):
                shutil.copy(path, folder)
        (folder / ".venv").symlink_to(ROOT / ".venv")
        self.package = folder / "src" / "canter"
        self.objects: dict[Path, Path] = {}

    def plant(self, mutation: Mutation) -> None:
        """Write the mistake, and rebuild the extension if the file is C."""
        path = Path(mutation.file)
        self._write(path, mutation.apply((SOURCE / path).read_text()))
        if mutation.is_native:
            self._build(sources_of(path))

    def restore(self, mutation: Mutation) -> None:
        """Write the file, and the extension, as they are in the repository."""
        path = Path(mutation.file)
        self._write(path, (SOURCE / path).read_text())
        if mutation.is_native:
            shutil.copy(SOURCE / NATIVE / EXTENSION, self.package / NATIVE)

    def _write(self, path: Path, text: str) -> None:
        (self.package / path).write_text(text)
        # A file of the same size, changed within a second, would be taken for the one that was compiled before.
        for compiled in (self.package / path).parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            compiled.unlink()

    def _build(self, changed: list[Path]) -> None:
        sources, flags, link = extension()
        if not self.objects:
            unchanged = [source for source in sources if source not in changed]
            self.objects = {source: self._compile(source, flags, SOURCE) for source in unchanged}
        for source in sources:
            if source not in self.objects and source not in changed:
                self.objects[source] = self._compile(source, flags, SOURCE)
        objects = [self._compile(source, flags, self.package) for source in changed]
        objects += [self.objects[source] for source in sources if source not in changed]
        library = self.package / NATIVE / EXTENSION
        library.unlink(missing_ok=True)
        _run(["gcc", "-shared", *map(str, objects), *link, "-lm", "-o", str(library)])

    def _compile(self, source: Path, flags: list[str], package: Path) -> Path:
        kind = "clean" if package == SOURCE else "mutated"
        target = self.root / f"{source.stem}-{kind}.o"
        _run(["gcc", "-c", *flags, str(package / source), "-o", str(target)])
        return target

    def test(self, arguments: Iterable[str], limit: float) -> tuple[str | None, str]:
        """Run pytest until a test fails; return the test, None if all pass, and how it failed."""
        command = [sys.executable, "-m", "pytest", "-x", "-vv", "-p", "no:cacheprovider", "--tb=no", "-rfE", *arguments]
        path = os.pathsep.join(filter(None, [str(self.root / "src"), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": path, "COLUMNS": "400"}
        process = subprocess.Popen(
            command,
            cwd=self.root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        output = Output(process)
        while process.poll() is None:
            time.sleep(0.1)
            if time.monotonic() - output.last > limit:
                _kill(process)
                output.thread.join(5)
                return output.running_test(), f"no progress for {limit:g} s"
        _kill(process)  # what its tests may have left
        output.thread.join(5)
        if process.returncode in (0, 5):
            return None, "passed"
        return output.failed_test(), f"exit status {process.returncode}"


class Output:
    """The output of a process, read while it runs."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.text = ""
        self.last = time.monotonic()
        """When something was last written."""
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        while chunk := os.read(self.process.stdout.fileno(), 1 << 16):
            self.text += chunk.decode(errors="replace")
            self.last = time.monotonic()

    def failed_test(self) -> str:
        """Return the test that failed, or the last one that began if the process died in it."""
        found = re.findall(r"^(?:FAILED|ERROR) (tests/\S+?\.py(?:::.*?)?)(?: - .*)?$", self.text, re.MULTILINE)
        return found[-1] if found else self.running_test()

    def running_test(self) -> str:
        """Return the last test that began."""
        found = re.findall(r"^(tests/\S+?::\S+)", self.text, re.MULTILINE)
        return found[-1] if found else self.text.strip().rpartition("\n")[2][:200]


class Bench:
    """Plants mistakes in several copies at a time and writes the results."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, results: dict[str, Any]) -> None:
        self.arguments = arguments
        self.results = results
        self.lock = threading.Lock()
        self.clean = Copy(_made(folder / "clean"))
        self.copies: queue.Queue[Copy] = queue.Queue()
        for number in range(arguments.jobs):
            self.copies.put(Copy(_made(folder / f"job-{number}")))
        self.sound: dict[str, bool] = dict.fromkeys(_lines(arguments.leave_out), False)
        """Tests that were run without any mistake: they passed."""
        self.finders: dict[str, Any] = _read(arguments.first).get("mutations", {})
        """Earlier results, whose tests are tried first."""

    def measure(self, mutation: Mutation) -> None:
        """Plant one mistake, run the tests, and add the result."""
        copy = self.copies.get()
        begin = time.monotonic()
        try:
            copy.plant(mutation)
            test, how = self._first_test_that_finds(copy, mutation)
        finally:
            copy.restore(mutation)
            self.copies.put(copy)
        result = {
            "found": test is not None,
            "by": test,
            "how": how,
            "seconds": round(time.monotonic() - begin, 1),
            "near_only": self.arguments.near,
        }
        print(f"{mutation.id}: {'found by ' + test if test else 'SURVIVED'} ({result['seconds']} s)", flush=True)
        with self.lock:
            self.results["mutations"][mutation.id] = result
            self.write()

    def _first_test_that_finds(self, copy: Copy, mutation: Mutation) -> tuple[str | None, str]:
        finder = self.finders.get(mutation.id, {}).get("by")
        if finder is not None and self.sound.get(finder, True) and _exists(finder):
            test, how = copy.test([finder], self.arguments.limit)
            if test is not None and self._passes_without(finder):
                return test, how
        for files in test_groups(mutation.file, self.arguments.near):
            test, how = self._first_in(copy, files)
            if test is not None:
                return test, how
        return None, "passed"

    def _first_in(self, copy: Copy, files: list[str]) -> tuple[str | None, str]:
        """Return the first test in these files that fails because of the mistake, and how."""
        while True:
            unsound = [f"--deselect={test}" for test, passes in self.sound.items() if not passes]
            ignored = [f"--ignore={test}" for test, passes in self.sound.items() if not passes and "::" not in test]
            test, how = copy.test([*files, *unsound, *ignored], self.arguments.limit)
            if test is None or self._passes_without(test if test.startswith("tests/") else files[0]):
                return test, how
            if not test.startswith("tests/"):
                raise RuntimeError(f"{files[0]} fails without a mistake, and pytest did not even begin: {test}")

    def _passes_without(self, test: str) -> bool:
        """Return whether a test passes without any mistake."""
        if test not in self.sound:  # two threads may ask at once: both find the same
            failed, _ = self.clean.test([test], self.arguments.limit)
            self.sound[test] = failed is None
            if failed is not None:
                print(f"{test} fails without a mistake: left out", flush=True)
        return self.sound[test]

    def write(self) -> None:
        """Write results.json with totals and commit."""
        results = self.results
        counts = Counter(result["found"] for result in results["mutations"].values())
        results["totals"] = {"planted": counts.total(), "found": counts[True], "survived": counts[False]}
        results["left_out"] = sorted(test for test, passes in self.sound.items() if not passes)
        self.arguments.results.write_text(json.dumps(results, indent=1) + "\n")


def table(planted: list[Mutation], results: dict[str, Any]) -> str:
    """Return the results as a Markdown table of kinds and packages, and the survivors."""
    kinds = list(dict.fromkeys(mutation.kind for mutation in planted))
    packages = list(dict.fromkeys(mutation.package for mutation in planted))
    measured = [mutation for mutation in planted if mutation.id in results["mutations"]]

    def cell(chosen: list[Mutation]) -> str:
        found = sum(results["mutations"][mutation.id]["found"] for mutation in chosen)
        return f"{found}/{len(chosen)}" if chosen else ""

    lines = [f"| mistake | {' | '.join(packages)} | all |", "| --- |" + " --- |" * (len(packages) + 1)]
    for kind in kinds:
        row = [m for m in measured if m.kind == kind]
        cells = [cell([m for m in row if m.package == package]) for package in packages]
        lines.append(f"| {kind} | {' | '.join(cells)} | {cell(row)} |")
    cells = [cell([m for m in measured if m.package == package]) for package in packages]
    lines.append(f"| all | {' | '.join(cells)} | {cell(measured)} |")
    survivors = [mutation for mutation in measured if not results["mutations"][mutation.id]["found"]]
    lines += ["", "Not found:" if survivors else "Every mistake was found.", ""]
    lines += [f"- `{m.id}` ({m.file}, `{m.function}`): {m.wrong}." for m in survivors]
    return "\n".join(lines).rstrip()


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _lines(path: Path | None) -> list[str]:
    return [] if path is None else path.read_text().split("\n")[:-1]


def _read(path: Path | None) -> dict[str, Any]:
    return {} if path is None else json.loads(path.read_text())


def _exists(test: str) -> bool:
    """Return whether the function of a test is still there, so that pytest would not refuse its name."""
    file, _, rest = test.partition("::")
    name = rest.rpartition("::")[2].partition("[")[0]
    return (ROOT / file).is_file() and f"def {name}(" in (ROOT / file).read_text()


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "src", "tests")
        return git("rev-parse", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown: not a git checkout"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="ID", help="plant only these")
    parser.add_argument("--package", nargs="+", help="plant only in files whose path starts with one of these")
    parser.add_argument("--jobs", type=int, default=1, help="mistakes at a time")
    parser.add_argument("--near", action="store_true", help="run only the tests that mirror the changed package")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds without progress that count as a hang")
    parser.add_argument("--first", type=Path, metavar="OLD", help="results whose tests are tried first")
    parser.add_argument("--leave-out", type=Path, metavar="FILE", help="tests that fail here, one per line")
    parser.add_argument("--resume", action="store_true", help="keep the results of an interrupted run")
    parser.add_argument("--check", action="store_true", help="apply and compile all, run nothing")
    parser.add_argument("--table", action="store_true", help="print the results as Markdown")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of the results")
    arguments = parser.parse_args()
    planted = load()
    if arguments.table:
        print(table(planted, json.loads(arguments.results.read_text())))
        return
    chosen = [m for m in planted if not arguments.only or m.id in arguments.only]
    chosen = [m for m in chosen if not arguments.package or m.file.startswith(tuple(arguments.package))]
    unknown = set(arguments.only or ()) - {m.id for m in planted}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    problems = check(chosen)
    if problems:
        sys.exit("\n".join(problems))
    if arguments.check:
        print(f"{len(chosen)} mistakes apply and compile")
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in the background; tests need it
    results: dict[str, Any] = {"commit": _commit(), "mutations": {}}
    if arguments.resume and arguments.results.exists():
        results = json.loads(arguments.results.read_text())
    rest = [m for m in chosen if m.id not in results["mutations"]]
    with tempfile.TemporaryDirectory(prefix="canter-mutation-") as folder:
        bench = Bench(arguments, Path(folder), results)
        with ThreadPoolExecutor(arguments.jobs) as pool:
            list(pool.map(bench.measure, rest))
    print(json.dumps(results["totals"]))


if __name__ == "__main__":
    main()
