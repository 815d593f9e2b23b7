"""`canter export`: a policy as a file that runs without Canter.

`canter import`: a file of rl_games or RSL-RL as settings, and what became of each of its keys.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from canter.app.cli.parser import Parser, UsageError
from canter.app.cli.trained import Trained, count, open_trained, trained_parser
from canter.app.experiments.sweep import stored_config
from canter.compat import Imported, ImportRefused, export_run, import_config, import_run
from canter.compat.export_run import FORMS
from canter.config.files import dump_plain
from canter.core.storage.files import replace_file
from canter.core.storage.strict import parse_value
from canter.envs.robots import mjlab
from canter.play.export import SUFFIXES, Format, collect_inputs, export_policy

OBSERVATIONS = 1000
NUM_ENVS = 8


def export_command(argv: list[str]) -> None:
    """Write a policy as ONNX and torch.export files that run without Canter."""
    parser = trained_parser(
        "export",
        argv,
        "[--output FILE] [--observations N] [--policy NAME] [--env ID]",
        "Write a policy as ONNX and torch.export files that run without Canter. Each file is run on real "
        "observations and kept only if it gives the policy's actions.",
    )
    where = (
        "one new file, .onnx or .pt2, by default one of each in the run's exports folder; or .pt for scripts of "
        "RSL-RL, .pth for those of rl_games"
    )
    parser.flag("--output", "FILE", where, type=Path)
    compared = f"real observations to compare on (default {OBSERVATIONS})"
    parser.flag("--observations", "N", compared, type=count, default=OBSERVATIONS)
    arguments = parser.parse(argv)
    output: Path | None = arguments.output
    known = (*SUFFIXES.values(), *FORMS)
    if output is not None and output.suffix not in known:
        raise UsageError(f"--output {output}: must end in {' or '.join(known)}")
    with open_trained(arguments, lambda env: replace(env, num_envs=min(env.num_envs, NUM_ENVS))) as trained:
        if output is not None and output.suffix in FORMS:
            export_for_parent(trained, output)
            return
        print(f"Exporting {trained.source}, tried in {trained.where}")
        inputs = collect_inputs(trained.policy, trained.env, arguments.observations, trained.stream)
        metadata = mjlab.onnx_metadata(trained.env, str(trained.run or trained.source))
    for format, path in targets(trained, output).items():
        result = export_policy(trained.policy, path, format, *inputs)
        tried = f"{result.observations:,} observations, largest difference {result.max_difference:.1e}"
        print(f"{path}: the same actions on {tried}")
        if metadata and format == "onnx":
            mjlab.attach_metadata(str(path), metadata)
            print(f"{path}: mjlab's metadata was added ({', '.join(metadata)})")


def export_for_parent(trained: Trained, output: Path) -> None:
    """Write a file that scripts of RSL-RL or rl_games load; it holds the critic and the optimiser too."""
    if trained.run is None:
        raise UsageError(f"--output {output}: give the run's folder, as the file has more than the policy")
    iteration = export_run(trained.run, stored_config(trained.run), trained.policy, output)
    print(f"{output}: {trained.source} of iteration {iteration}, in the layout of {FORMS[output.suffix]}")


def targets(trained: Trained, output: Path | None) -> dict[Format, Path]:
    """The files to write; without a name one of each format, in the run's folder or beside the policy."""
    if output is not None:
        return {format: output for format, suffix in SUFFIXES.items() if suffix == output.suffix}
    folder = trained.source.parent if trained.run is None else trained.run / "exports"
    return {format: folder / f"{trained.source.stem}{suffix}" for format, suffix in SUFFIXES.items()}


DESCRIPTION = """\
Read a settings file of rl_games (YAML with `params`) or RSL-RL (YAML, or Python as in Isaac Lab and mjlab, which is
read and never run) and write it as Canter's settings. Every key of the file is in the report: mapped, mapped with a
difference, without effect in the parent, or refused with the reason.

A checkpoint (.pt, .pth) becomes a run folder that can be played, evaluated, exported and trained further; --config is
the settings file that it was trained with. Nothing in it is run."""


def import_command(argv: list[str]) -> None:
    """Turn a settings file of rl_games or RSL-RL into one of Canter's."""
    usage = "FILE|CHECKPOINT [--parity] [--config FILE] [--env ID] [--num-envs N] [--set KEY=VALUE] [--output FILE]"
    parser = Parser("import", usage, DESCRIPTION)
    parser.add_argument("file", metavar="FILE", help="the file; FILE.py:NAME for one class or function of several")
    parser.flag("--output", "FILE", "where to write the settings, and the report beside them", type=Path)
    parser.flag("--config", "FILE", "for a checkpoint: the settings that it was trained with")
    parser.flag("--device", "NAME", "for a checkpoint: where the networks live")
    parser.flag("--env", "ID", "the environment, where the file does not name one that is known here")
    parser.flag("--num-envs", "N", "environments, where the file leaves them to a script", type=int)
    add_import_flags(parser)
    arguments = parser.parse(argv)
    if Path(arguments.file).suffix in (".pt", ".pth"):
        import_checkpoint(arguments)
        return
    try:
        imported = import_with(arguments, arguments.file)
    except ImportRefused as error:
        print(error.deviations.text(), file=sys.stderr)
        raise
    print(imported.deviations.text(), file=sys.stderr)
    text = dump_plain(imported.plain())
    if arguments.output is None:
        print(text, end="")
        return
    output: Path = arguments.output
    replace_file(output, text.encode())
    report = output.with_suffix(".deviations.json")
    replace_file(report, (json.dumps(imported.deviations.plain(), indent=1) + "\n").encode())
    next_step = f"go on with: canter train --config {output}"
    print(f"Settings are in {output}, the report in {report}; {next_step}", file=sys.stderr)


def import_checkpoint(arguments: argparse.Namespace) -> None:
    """A checkpoint becomes a run folder; the settings that it was trained with are those of --config."""
    for flag in ("config", "env", "output"):
        if getattr(arguments, flag) is None:
            raise UsageError(f"{arguments.file} is a checkpoint, which holds no settings: give --{flag} too")
    arguments.parity = True  # what was learned with the parent's numbers goes on with them
    imported = import_with(arguments, arguments.config)
    print(imported.deviations.text(), file=sys.stderr)
    config = replace(imported.config, device=arguments.device or imported.config.device)
    iteration = import_run(arguments.file, config, arguments.output)
    run = arguments.output
    print(f"Iteration {iteration} is a run in {run}: canter play {run}, canter eval {run}, canter resume {run}")


def import_with(arguments: argparse.Namespace, source: str) -> Imported:
    """The settings of a parent's file, by the flags of `add_import_flags`."""
    return import_config(
        source,
        parity=arguments.parity,
        env=arguments.env,
        num_envs=arguments.num_envs,
        agents=arguments.agents,
        given=dict(map(assignment, arguments.set)),
        without=tuple(arguments.without),
    )


def assignment(text: str) -> tuple[str, object]:
    """`KEY=VALUE` as the key and the value that it means."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UsageError(f"--set {text}: expected KEY=VALUE, such as task.env.numEnvs=4096")
    return key, parse_value(value)


def add_import_flags(parser: Parser) -> None:
    """What else an import may need to know."""
    parser.switch("--parity", "the parent's numbers instead of Canter's own forms")
    parser.flag("--agents", "N", "agents in each environment (default 1)", type=int, default=1)
    parser.flag("--set", "KEY=VALUE", "what ${KEY} in the file stands for", action="append", default=[])
    parser.flag("--without", "KEY", "leave out a key that would be refused", action="append", default=[])
