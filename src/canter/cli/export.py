"""`canter export`: a policy as a file that runs without Canter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from canter.cli.parser import UsageError
from canter.cli.trained import Trained, count, open_trained, trained_parser
from canter.compat import export_run
from canter.compat.export_run import FORMS
from canter.envs.robots import mjlab
from canter.experiments.folders import stored_config
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
