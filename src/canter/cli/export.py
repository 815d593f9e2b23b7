"""`canter export`: a policy as a file that runs without Canter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from canter.cli.parser import Parser, UsageError
from canter.cli.trained import Trained, count, open_trained, trained_parser
from canter.envs.robots import mjlab
from canter.play.export import SUFFIXES, Format, collect_inputs, export_policy

OBSERVATIONS = 1000
NUM_ENVS = 8


def export_command(argv: list[str]) -> None:
    """Write a policy as ONNX and torch.export files that run without Canter."""
    arguments = export_parser(argv).parse(argv)
    output = None if arguments.output is None else Path(arguments.output)
    if output is not None and output.suffix not in SUFFIXES.values():
        raise UsageError(f"--output {output}: must end in {' or '.join(SUFFIXES.values())}")
    with open_trained(arguments, lambda env: replace(env, num_envs=min(env.num_envs, NUM_ENVS))) as trained:
        print(f"Exporting {trained.source}, tried in {trained.where}")
        inputs = collect_inputs(trained.policy, trained.env, arguments.observations, trained.stream)
        metadata = mjlab.onnx_metadata(trained.env, str(trained.run or trained.source))
    for format, path in targets(trained, output).items():
        result = export_policy(trained.policy, path, format, *inputs)
        print(
            f"{path}: the same actions on {result.observations:,} observations, "
            f"largest difference {result.max_difference:.1e}"
        )
        if metadata and format == "onnx":
            mjlab.attach_metadata(str(path), metadata)
            print(f"{path}: mjlab's metadata was added ({', '.join(metadata)})")


def export_parser(argv: list[str]) -> Parser:
    """The arguments of `canter export`."""
    parser = trained_parser(
        "export",
        argv,
        usage="[--output FILE] [--observations N] [--policy NAME] [--env ID]",
        description="Write a policy as ONNX and torch.export files that run without Canter. Each file is run on real "
        "observations and kept only if it gives the policy's actions.",
    )
    parser.flag(
        "--output",
        metavar="FILE",
        help="one new file, .onnx or .pt2; by default one of each in the run's exports folder",
    )
    parser.flag(
        "--observations",
        metavar="N",
        type=count,
        default=OBSERVATIONS,
        help=f"real observations to compare on (default {OBSERVATIONS})",
    )
    return parser


def targets(trained: Trained, output: Path | None) -> dict[Format, Path]:
    """The files to write; without a name one of each format, in the run's folder or beside the policy."""
    if output is not None:
        return {format: output for format, suffix in SUFFIXES.items() if suffix == output.suffix}
    folder = trained.source.parent if trained.run is None else trained.run / "exports"
    return {format: folder / f"{trained.source.stem}{suffix}" for format, suffix in SUFFIXES.items()}
