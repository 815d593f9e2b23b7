"""Run the code blocks of the documentation and parse its commands."""

import contextlib
import inspect
import io
import re
import shlex
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

import canter
from canter.app import cli
from canter.app.cli.commands import COMMANDS
from canter.app.cli.parser import Parser
from canter.envs.robots import mjlab

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


RSL_RL = {
    "num_steps_per_env": 24,
    "max_iterations": 1500,
    "policy": {"actor_hidden_dims": [64], "critic_hidden_dims": [64], "activation": "elu", "init_noise_std": 1.0},
    "algorithm": {"class_name": "PPO", "num_learning_epochs": 5, "num_mini_batches": 4},
}
"""Stand-in for the settings of an mjlab task if mjlab is not installed."""


class Parsed(Exception):
    """Raised when the arguments of a command were accepted."""


def blocks(page, *languages):
    return [body for language, body in BLOCK.findall(page.read_text()) if language in languages]


def commands(page, program):
    lines = [line for body in blocks(page, "", "console", "sh") for line in body.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith(f"{program} ")]


def pages_with(condition):
    return pytest.mark.parametrize("page", [page for page in PAGES if condition(page)], ids=lambda page: page.stem)


@pytest.fixture
def small_budgets(monkeypatch):
    train = canter.train
    evaluate = canter.evaluate
    average = canter.long_run_average

    def train_briefly(first=None, /, *args, **kwargs):
        if isinstance(first, canter.TrainConfig):
            first = replace(first, total_steps=1, algorithm=replace(first.algorithm, epochs=1))
        else:
            kwargs |= {"total_steps": 1, "algorithm": {**kwargs.get("algorithm", {}), "epochs": 1}}
        return train(first, *args, **kwargs, final_evaluation=False)

    def evaluate_briefly(policy, env=None, episodes=100, seed=0):
        return evaluate(policy, env, min(episodes, 2), seed)

    def average_briefly(policy, env, *, steps, warm_up, seed):
        return average(policy, env, steps=20, warm_up=5, seed=seed)

    monkeypatch.setattr(canter, "train", train_briefly)
    monkeypatch.setattr(canter, "evaluate", evaluate_briefly)
    monkeypatch.setattr(canter, "long_run_average", average_briefly)


@pages_with(lambda page: blocks(page, "python"))
def test_python_blocks_run_in_order(page, tmp_path, monkeypatch, small_budgets, restored_registries):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": page.stem}
    for number, body in enumerate(blocks(page, "python")):
        exec(compile(body, f"{page.name}, Python block {number}", "exec"), names)


@pages_with(lambda page: commands(page, "canter"))
def test_commands_are_accepted(page, tmp_path, monkeypatch, restored_registries):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    # The module must not train when it is imported.
    defined = [
        re.split(r"^.*canter\.train\(", body, maxsplit=1, flags=re.MULTILINE)[0] for body in blocks(page, "python")
    ]
    (tmp_path / "my_parts.py").write_text("\n".join(defined))
    for body in blocks(page, "yaml"):
        (tmp_path / body.partition("\n")[0].removeprefix("# ")).write_text(body)
    parse = Parser.parse
    if find_spec("mjlab") is None:
        monkeypatch.setattr(mjlab, "rl_settings", lambda task: RSL_RL)

    def parse_and_stop(self, argv):
        parse(self, argv)
        raise Parsed

    for argv in commands(page, "canter"):
        if argv[0] in ("train", "check"):
            # Beyond the flags, the resulting settings must be in range and consistent.
            settings = [flag for flag in argv[1:] if flag != "--threads"]  # a flag of `check` only
            with contextlib.redirect_stdout(io.StringIO()):
                cli.dispatch(["train", *settings, "--print-config"])
        with monkeypatch.context() as patch, pytest.raises(Parsed):
            patch.setattr(Parser, "parse", parse_and_stop)
            cli.dispatch(argv)


def test_every_page_is_in_the_file_for_language_models():
    text = (ROOT / "docs" / "llms.txt").read_text()
    listed = re.findall(r"\]\(_sources/([\w/]+\.md)\.txt\)", text)
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert len(listed) == len(set(listed)) == text.count("](")
    assert set(listed) == pages - {"index.md"}


def test_the_cheat_sheet_has_every_command():
    sheet = commands(ROOT / "docs" / "commands.md", "canter")
    assert {argv[0] for argv in sheet} == set(COMMANDS)


@pages_with(lambda page: commands(page, "make"))
def test_the_makefile_has_the_named_targets(page):
    makefile = (ROOT / "Makefile").read_text()
    for target, *_ in commands(page, "make"):
        assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), target


def test_every_public_name_is_in_the_reference():
    text = (ROOT / "docs" / "api.md").read_text()
    assert set(re.findall(r"^\.\. auto\w+:: canter\.(\w+)$", text, re.MULTILINE)) == set(canter.__all__)


@pytest.mark.parametrize("name", canter.__all__)
def test_public_signatures_have_no_lambdas(name):
    shown = getattr(canter, name)
    if not inspect.isclass(shown):
        functions = [shown] if inspect.isroutine(shown) else []
    else:
        functions = [value for key, value in vars(shown).items() if key == "__init__" or not key.startswith("_")]
    for function in filter(inspect.isfunction, functions):
        assert "<lambda>" not in str(inspect.signature(function))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_to_files_of_the_repository_exist(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target
