"""Check docs/extending.md: its examples are short and work from the command line, as a module and as a plugin."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from canter.envs import imports

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
PARTS = "\n".join(BLOCKS)

ALL_AT_ONCE = [
    *("tensor:docking", "--env.num-envs", "8", "--total-steps", "2048", "--algorithm.horizon", "64"),
    *("--algorithm.kind", "spo", "--algorithm.optimizer.learning-rate.kind", "cosine"),
    *("--algorithm.optimizer.learning-rate.floor", "1e-5", "--algorithm.model.policy.kind", "residual"),
    *("--algorithm.model.policy.blocks", "1", "--algorithm.model.distribution", "laplace"),
    *("--algorithm.extensions", "curiosity"),
]


@pytest.fixture
def project(tmp_path):
    """A folder with all examples of the page as `my_parts.py`; the one that trains does not."""
    (tmp_path / "my_parts.py").write_text(PARTS.replace("\ncanter.train(", "\n0 and canter.train("))
    return tmp_path


@pytest.fixture
def in_folder(project, run_canter, monkeypatch, restored_registries):
    """Return a function that runs a command in the project's folder as if in its own process."""
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)

    def run(*argv):
        imports._allowed.clear()
        return run_canter(*argv)

    return run


def canter(folder, *argv, **environment):
    """Run the command in its own process, in `folder`."""
    call = [sys.executable, "-c", "from canter.app.cli import main; main()", *argv]
    if "PYTHONPATH" in environment:
        environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], os.environ.get("PYTHONPATH", "")])
    return subprocess.run(call, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=300)


def rows(folder):
    return [json.loads(line) for line in (folder / "runs/latest/metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.partition("class ")[2].partition("\n")[0])
def test_an_example_stays_short(block):
    code = [line for line in block.splitlines() if line.strip()]
    assert len(code) < 45


def test_registered_parts_train_resume_and_play_by_their_names(project, in_folder):
    trained = in_folder("train", *ALL_AT_ONCE, "--allow-import", "my_parts", "--console", "quiet")
    assert trained.code == 0, trained.err
    settings = (project / "runs/latest/config.yaml").read_text()
    for kind in ("spo", "cosine", "residual", "curiosity"):
        assert f"kind: {kind}" in settings
    assert {"loss/curiosity", "curiosity/learning_rate/predictor"} <= rows(project)[-1].keys()

    # Half of the run is done, so the cosine is half-way to 1e-5.
    assert rows(project)[2]["optim/learning_rate/model"] == pytest.approx((3e-4 + 1e-5) / 2, rel=1e-3)

    # The run stores which imports its user allowed.
    resumed = in_folder("resume", "latest", "--total-steps", "2560")
    assert resumed.code == 0, resumed.err
    assert rows(project)[-1]["env_steps"] == 2560

    played = in_folder("eval", "latest", "--episodes", "4", "--player", "noisy", "--allow-import", "my_parts")
    assert played.code == 0, played.err
    assert "return over 4 episodes" in played.out


@pytest.mark.parametrize(
    "network",
    [("kind", "averaging", "width", "8"), ("kind", "module", "module", "my_parts:Gated")],
    ids=["from nothing", "any module"],
)
def test_networks_of_ones_own_train_and_are_evaluated(network, in_folder):
    flags = [f"--algorithm.model.policy.{part}" if i % 2 == 0 else part for i, part in enumerate(network)]
    short = ["--total-steps", "1024", "--algorithm.horizon", "64", "--console", "quiet"]
    trained = in_folder("train", "CartPole-v1", *short, *flags, "--allow-import", "my_parts")
    assert trained.code == 0, trained.err
    played = in_folder("eval", "latest", "--episodes", "4")
    assert played.code == 0, played.err


def test_a_custom_simulator_trains_reports_and_resumes(project, in_folder, caplog):
    short = ["--env.num-envs", "8", "--algorithm.horizon", "64", "--console", "quiet", "--allow-import", "my_parts"]
    trained = in_folder("train", "mysim:storm", "--total-steps", "1024", *short)
    assert trained.code == 0, trained.err
    assert caplog.text.count("the simulator loses the last observation of an episode") == 1
    resumed = in_folder("resume", "latest", "--total-steps", "1536", "--allow-import", "my_parts")
    assert resumed.code == 0, resumed.err
    assert "all episodes restart: the environment saves only a part of its state" in caplog.text
    # The wind rises by 0.001 in each of 64 steps; its mean is that of the middle step.
    assert [row["env/wind"] for row in rows(project)] == pytest.approx([0.0325, 0.0965, 0.1605])
    checked = in_folder("check", "mysim:breeze", *short[:2], "--allow-import", "my_parts")
    assert "note     truncation    the simulator loses the last observation" in checked.out
    refused = in_folder("train", "mysim:breeze", "--env.options.rain", "1", "--allow-import", "my_parts")
    assert "env.options.rain=1: mysim:breeze takes no such option" in refused.err


def test_an_algorithm_unlike_ppo(project, in_folder):
    flags = ["--algorithm.kind", "random_search", "--total-steps", "32000", "--allow-import", "my_parts"]
    trained = in_folder("train", "CartPole-v1", *flags, "--console", "quiet")
    assert trained.code == 0, trained.err
    best = [row["search/best"] for row in rows(project)]
    assert best == sorted(best)
    assert best[-1] > best[0]


@pytest.fixture
def plugin(project):
    """The same as an installed package, whose entry-point group names the module, so that no flag is needed."""
    info = project / "my_parts-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-parts\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[canter.plugins]\nmy_parts = my_parts\n")
    return project


def test_a_plugin_needs_no_flag(plugin):
    trained = canter(plugin, "train", *ALL_AT_ONCE, "--dry-run", PYTHONPATH=str(plugin))
    assert trained.returncode == 0, trained.stderr
    listed = canter(plugin, "envs", PYTHONPATH=str(plugin))
    assert "tensor:docking" in listed.stdout
    assert "mysim:ID       Hold a point against the wind: mysim:breeze or mysim:storm." in listed.stdout


def test_a_plugin_that_fails_is_a_warning(plugin):
    (plugin / "my_parts.py").write_text("import canter\nimport no_such_module\n")
    trained = canter(plugin, "train", "CartPole-v1", "--dry-run", PYTHONPATH=str(plugin))
    assert trained.returncode == 0, trained.stderr
    text = "the plugin 'my_parts' of my-parts cannot be used: ModuleNotFoundError: No module named 'no_such_module'"
    assert text in trained.stderr
