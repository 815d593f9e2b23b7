"""`canter check`, `canter import`, `canter doctor` and `canter explain`."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

from canter.algorithms.base import plan_of
from canter.app.check.before_run import check_machine, print_findings, run_checks
from canter.app.cli.parser import UsageError
from canter.app.cli.settings import import_settings, merged_config
from canter.app.console.text import format_count
from canter.app.doctor.diagnosis import diagnose, findings_json, format_findings, try_change
from canter.app.doctor.environment import diagnose_env
from canter.app.experiments.folders import stored_config
from canter.app.experiments.session import program
from canter.compat import ImportRefused, import_run
from canter.config import TrainConfig
from canter.core.distributed import cores
from canter.core.storage.checkpoint import load_checkpoint
from canter.core.storage.files import dump_plain, replace_file
from canter.envs import closed_quietly
from canter.runs.records import CONFIG, find_run
from canter.runs.run_folder import BLACK_BOX
from canter.training.black_box import explain
from canter.training.execution import time_updates
from canter.training.trainer import Trainer


def check_command(arguments: argparse.Namespace) -> None:
    """Check an environment and its settings before training."""
    config, source = merged_config(arguments)
    check_machine(config)
    print(f"{config.env.id} with {source}")
    if arguments.threads:
        print(fastest_threads(config))
        return
    findings = run_checks(config)
    print_findings(findings)
    count = Counter(finding.level for finding in findings)
    verdict = "This cannot work" if count["error"] else "Ready to train"
    print(f"{verdict}: {', '.join(format_count(count[level], level) for level in ('error', 'warning', 'note'))}")
    if count["error"]:
        sys.exit(1)


def fastest_threads(config: TrainConfig) -> str:
    """Measure the time of an update with each number of threads, on a temporary trainer."""
    if torch.device(config.device).type != "cpu":
        raise UsageError(f"--threads: threads learn on a CPU, and the device is {config.device}")
    powers_of_two = (2**k for k in range(cores().bit_length()))
    counts = sorted({*powers_of_two, cores()})
    with Trainer(replace(config, execution=replace(config.execution, threads=None))) as trainer:
        default = trainer.collector.threads
        seconds = time_updates(trainer.collector, counts, warmup=plan_of(config.algorithm).warmup_steps)
    lines = [f"{format_count(count, 'thread'):>11}: an update takes {spent:.3g} s" for count, spent in seconds.items()]
    best = min(seconds, key=seconds.__getitem__)
    return "\n".join([*lines, f"Without the setting it is {default}; the fastest here: --execution.threads {best}"])


def import_command(arguments: argparse.Namespace) -> None:
    """Convert a settings file of rl_games or RSL-RL."""
    if Path(arguments.file).suffix in (".pt", ".pth"):
        import_checkpoint(arguments)
        return
    try:
        imported = import_settings(arguments, arguments.file, arguments.env, arguments.num_envs)
    except ImportRefused as error:
        print(error.report.text(), file=sys.stderr)
        raise
    print(imported.report.text(), file=sys.stderr)
    text = dump_plain(imported.plain())
    output: Path | None = arguments.output
    if output is None:
        print(text, end="")
        return
    replace_file(output, text.encode())
    report = output.with_suffix(".report.json")
    replace_file(report, (json.dumps(imported.report.plain(), indent=1) + "\n").encode())
    named = "" if imported.names_env else " ENV"
    next_step = f"go on with: canter train{named} --config {output}"
    print(f"Settings are in {output}, the report in {report}; {next_step}", file=sys.stderr)


def import_checkpoint(arguments: argparse.Namespace) -> None:
    """Convert a checkpoint to a run folder; `--config` names the settings of its training."""
    for flag in ("config", "env", "output"):
        if getattr(arguments, flag) is None:
            raise UsageError(f"{arguments.file} is a checkpoint, which holds no settings: add --{flag}")
    arguments.parity = True  # weights that were trained with the library's exact numbers continue with them
    imported = import_settings(arguments, arguments.config, arguments.env, arguments.num_envs)
    print(imported.report.text(), file=sys.stderr)
    config = replace(imported.config, device=arguments.device or imported.config.device)
    run = arguments.output
    iteration = import_run(arguments.file, config, run)
    print(f"Iteration {iteration} is a run in {run}: canter play {run}, canter eval {run}, canter resume {run}")


def doctor_command(arguments: argparse.Namespace) -> None:
    """Say why a run does not learn, or what is wrong with an environment, and what to change."""
    has_settings = bool(arguments.settings or arguments.preset or arguments.config)
    if has_settings or names_env(arguments.run, arguments.run_dir):
        doctor_env(arguments)
        return
    path = find_run(arguments.run, arguments.run_dir)
    findings = diagnose(path)
    print(findings_json(findings, path) if arguments.json else format_findings(findings, path))
    iterations: int | None = vars(arguments)["try"]
    change = next((finding for finding in findings if finding.change), None)
    if iterations is not None and change is not None:
        print(f"\nTrying {try_change(path, change, iterations or None)}")
    elif iterations is not None:
        print("Nothing to try: no finding has a setting to change")


def names_env(text: str, runs: Path) -> bool:
    """Return True for an environment id, unless a run is called exactly so."""
    is_run = any((folder / text / CONFIG).is_file() for folder in (Path(), runs))
    return not is_run and re.search(r":|-v\d+$", text) is not None


def doctor_env(arguments: argparse.Namespace) -> None:
    """Print what random and constant actions earn in an environment, and what is wrong with it."""
    if vars(arguments)["try"] is not None:
        raise UsageError("--try continues a run, and nothing is trained here: canter doctor RUN --try")
    arguments.env = arguments.run
    config, source = merged_config(arguments)
    check_machine(config)
    diagnosis = diagnose_env(config)
    if arguments.json:
        print(diagnosis.json())
        return
    print(f"{config.env.id} with {source}\n{diagnosis.table()}\n")
    print(format_findings(diagnosis.findings))
    if diagnosis.flags:
        print(f"\nTrain with the changes: {program()} train {shlex.quote(config.env.id)} {diagnosis.flags}")


def explain_command(arguments: argparse.Namespace) -> None:
    """Find the cause of NaN or infinity in a run."""
    path = find_run(arguments.run, arguments.run_dir)
    if not (path / BLACK_BOX).is_dir():
        raise UsageError(f"{path} has no {BLACK_BOX}: nothing in this run was NaN or infinite")
    box = load_checkpoint(path / BLACK_BOX)
    ranks = int(box["about"].get("ranks", 1))  # the box was written by one of them
    config = replace(stored_config(path), device="cpu")
    config = replace(config, env=replace(config.env, num_envs=config.env.num_envs // ranks))
    try:
        env = config.env.build("cpu")
    except Exception as error:
        print(f"(its environment cannot be made here, so only the update is replayed: {error})", file=sys.stderr)
        found = explain(config, box)
    else:
        with closed_quietly(env):
            found = explain(config, box, env)
    if box["about"]["what"] not in found.text:
        print(box["about"]["what"])
    print(found.text)
