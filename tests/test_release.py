"""Build what is released, as `python -m build` does, install it in a clean environment, and train with it."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import canter

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def build(kind, source, folder):
    """Build an archive by the project's build system; return its path."""
    command = [sys.executable, "-c", BUILD, f"build_{kind}", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def tracked():
    """Return the paths of the repository that are or may be committed."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("only a git checkout knows which files are part of the project")
    return sorted(name for name in listed.stdout.splitlines() if (ROOT / name).is_file())


@pytest.fixture(scope="module")
def sdist(tracked, tmp_path_factory):
    """Return a source distribution, built in a copy of the repository, and the folder that it was unpacked in."""
    copy = tmp_path_factory.mktemp("repository")
    for name in tracked:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    archive = build("sdist", copy, tmp_path_factory.mktemp("sdist"))
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(archive) as file:
        file.extractall(unpacked, filter="data")
    return archive, unpacked / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """Return a wheel, built from the source distribution alone."""
    _, unpacked = sdist
    return build("wheel", unpacked, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Return the programs of a clean environment that has the wheel, and torch and the rest from this one."""
    venv = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=300)
    python = venv / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, str(wheel)], check=True, timeout=300)
    (packages,) = (venv / "lib").glob("python*/site-packages")
    # The dependencies. A path file inside that folder, of an editable installation, is not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return venv / "bin"


def run(program, *arguments, folder):
    """Run an installed program in a folder, without this repository on its path."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [program, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_one_version_everywhere():
    assert PROJECT["version"] == canter.__version__
    assert f"\nversion: {canter.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    newest, *_ = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest == canter.__version__


def test_every_extra_is_in_the_documentation():
    page = (ROOT / "docs" / "quickstart.md").read_text()
    table = page.partition("| extra | for |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", table)) == set(PROJECT["optional-dependencies"])


def test_the_source_distribution_has_every_file(tracked, sdist):
    _, unpacked = sdist
    names = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    assert set(tracked) <= names, "name them in MANIFEST.in"
    generated = {name for name in names - set(tracked) if "egg-info" not in name}
    assert generated == {"PKG-INFO", "setup.cfg"}


@pytest.mark.long
def test_a_wheel_has_the_engine_in_c_and_every_file_that_the_package_reads(tracked, wheel):
    assert "-cp311-abi3-" in wheel.name  # one wheel for all versions of Python from 3.11 on
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    assert any(name.startswith("canter/engines/native/_native") for name in names)
    package = {name.removeprefix("src/") for name in tracked if name.startswith("src/")}
    assert {name for name in package if not name.endswith((".c", ".h"))} <= names
    # The template of exported headers and its harness; the file to copy to a robot, which needs NumPy alone.
    assert sorted(name for name in names if name.endswith((".c", ".h"))) == [
        "canter/play/policy_harness.c",
        "canter/play/policy_template.h",
    ]
    assert "canter/runtime.py" in names


@pytest.mark.long
def test_an_installed_wheel_trains(installed, tmp_path):
    where = "import canter, canter.engines.native as native; print(canter.__file__, native.AVAILABLE)"
    place, available = run(installed / "python", "-c", where, folder=tmp_path).split()
    assert Path(place).is_relative_to(installed.parent) and available == "True"
    assert run(installed / "canter", "--version", folder=tmp_path) == f"canter {canter.__version__}\n"
    assert "swimmer-wide" in run(installed / "canter", "presets", folder=tmp_path)
    run(installed / "canter", "train", "CartPole-v1", "--total-steps", "20000", "--name", "first", folder=tmp_path)
    folder = tmp_path / "runs" / "first"
    assert (folder / "report.html").is_file() and (folder / "policies").is_dir()
    assert '"native' in (folder / "run.json").read_text()
    run(installed / "canter", "export", "first", "--to", "c,numpy", folder=tmp_path)
    runtime = Path(place).with_name("runtime.py")
    assert "test vectors" in run(installed / "python", runtime, folder / "exports" / "best.npz", folder=tmp_path)
    demo = run(installed / "canter", "demo", "--seconds", "2", folder=tmp_path)
    assert "The report is in runs/demo/report.html" in demo


def steps(workflow):
    """Return all steps of a workflow."""
    return [step for job in WORKFLOWS[workflow]["jobs"].values() for step in job.get("steps", ())]


def run_step(name, folder, tag):
    """Run a step of the release as its shell would."""
    (script,) = [step["run"] for step in steps("release") if step.get("name") == name]
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
    return subprocess.run(
        command, cwd=folder, env=os.environ | {"GITHUB_REF_NAME": tag}, capture_output=True, text=True, timeout=60
    )


def test_the_workflows_test_what_the_documentation_promises():
    matrix = WORKFLOWS["tests"]["jobs"]["pytest"]["strategy"]["matrix"]
    versions = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert matrix["python"] == versions
    assert ", ".join(versions[:-1]) + f" and {versions[-1]}." in (ROOT / "docs" / "stability.md").read_text()
    assert matrix["os"] == WORKFLOWS["release"]["jobs"]["wheels"]["strategy"]["matrix"]["os"]
    assert {re.split("[-]", name)[0] for name in matrix["os"]} == {"ubuntu", "macos"}


def test_the_workflows_call_targets_that_exist():
    makefile = (ROOT / "Makefile").read_text()
    commands = [step.get("run", "") for workflow in WORKFLOWS for step in steps(workflow)]
    targets = [target for command in commands if command.startswith("make ") for target in command.split()[1:]]
    assert len(targets) >= 6
    for target in targets:
        assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), target


def test_a_release_needs_one_version_and_a_dated_changelog(tmp_path):
    version = PROJECT["version"]
    check = "Check that tag, version and changelog agree"
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    changelog = (ROOT / "CHANGELOG.md").read_text()
    (tmp_path / "CHANGELOG.md").write_text(re.sub(r"^(## \[.*?\]) - .*$", r"\1 - unreleased", changelog, flags=re.M))
    assert "has no section" in run_step(check, tmp_path, f"v{version}").stdout
    (tmp_path / "CHANGELOG.md").write_text(re.sub(r"^(## \[.*?\]) - .*$", r"\1 - 2026-01-31", changelog, flags=re.M))
    assert run_step(check, tmp_path, f"v{version}").returncode == 0
    assert "does not have the version" in run_step(check, tmp_path, "v9.9.9").stdout
    assert run_step("Take the notes from the changelog", tmp_path, f"v{version}").returncode == 0
    notes = (tmp_path / "notes.md").read_text()
    assert "### Added" in notes and "## [" not in notes
    assert run_step("Take the notes from the changelog", tmp_path, "v9.9.9").returncode == 1
