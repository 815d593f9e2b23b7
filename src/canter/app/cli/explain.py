"""`canter explain`: what made NaN or infinity in a run."""

from __future__ import annotations

import sys
from dataclasses import replace

from canter.app.cli.parser import Parser, UsageError
from canter.app.experiments.sweep import stored_config
from canter.core.storage.checkpoint import load_checkpoint
from canter.envs import closed_quietly
from canter.runs.records import find_run
from canter.runs.run_folder import BLACK_BOX
from canter.training.black_box import explain


def explain_command(argv: list[str]) -> None:
    """Say what made the NaN or infinity of a run."""
    parser = Parser(
        "explain",
        "RUN [--run-dir DIR]",
        "Play the iteration in which a run met NaN or infinity again, eagerly on the CPU, and name the first\n"
        "operation and the environment that made it. The folder may come from another machine.",
    )
    parser.add_argument("run", metavar="RUN", help="folder of the run, `latest`, or the beginning of its name")
    parser.run_dir()
    arguments = parser.parse(argv)
    path = find_run(arguments.run, arguments.run_dir)
    if not (path / BLACK_BOX).is_dir():
        raise UsageError(f"{path} has no {BLACK_BOX}: nothing in this run was NaN or infinite")
    box, config = load_checkpoint(path / BLACK_BOX), replace(stored_config(path), device="cpu")
    ranks = int(box["about"].get("ranks", 1))  # it is of one of them
    config = replace(config, env=replace(config.env, num_envs=config.env.num_envs // ranks))
    try:
        env = config.env.build("cpu")
    except Exception as error:
        print(f"(its environment cannot be made here, so only the update is played again: {error})", file=sys.stderr)
        found = explain(config, box)
    else:
        with closed_quietly(env):
            found = explain(config, box, env)
    if box["about"]["what"] not in found.text:
        print(box["about"]["what"])
    print(found.text)
