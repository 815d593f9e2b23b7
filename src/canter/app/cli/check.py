"""`canter check`: what there is to say about an environment and settings before training."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace

import torch

from canter.algorithms.base import plan_of
from canter.app.check.before_run import check_machine, look, show
from canter.app.check.plan import counted
from canter.app.cli.parser import Parser, UsageError
from canter.app.cli.train import EPILOG, add_settings_flags, merged_config
from canter.config import TrainConfig
from canter.core.distributed import cores
from canter.training.execution import time_updates
from canter.training.trainer import Trainer


def check_command(argv: list[str]) -> None:
    """Look at an environment and the settings for it before training."""
    parser = Parser(
        "check",
        "[ENV] [--preset NAME] [--config FILE] [--KEY VALUE ...] [--threads]",
        "Look at an environment and the settings for it before training: spaces, endings, rewards and seeds in a\n"
        "few random steps, and the arithmetic of the run. The exit code is 1 if something cannot work.",
        EPILOG,
    )
    parser.add_argument("env", metavar="ENV", nargs="?", help="environment id; by default CartPole-v1")
    add_settings_flags(parser, argv)
    parser.switch("--threads", "only measure with how many threads an update is fastest here")
    arguments = parser.parse(argv)
    config, source = merged_config(arguments)
    check_machine(config)
    print(f"{config.env.id} with {source}")
    if arguments.threads:
        print(fastest_threads(config))
        return
    findings = look(config)
    show(findings)
    count = Counter(finding.level for finding in findings)
    verdict = "This cannot work" if count["error"] else "Ready to train"
    print(f"{verdict}: {', '.join(counted(count[level], level) for level in ('error', 'warning', 'note'))}")
    if count["error"]:
        sys.exit(1)


def fastest_threads(config: TrainConfig) -> str:
    """How long an update takes with each number of threads, tried on parts that are thrown away."""
    if torch.device(config.device).type != "cpu":
        raise UsageError(f"--threads: threads learn on a CPU, and the device is {config.device}")
    counts = sorted({*(2**k for k in range(cores().bit_length())), cores()})
    with Trainer(replace(config, execution=replace(config.execution, threads=None))) as trainer:
        chosen = trainer.collector.threads
        seconds = time_updates(trainer.collector, counts, warmup=plan_of(config.algorithm).warmup_steps)
    lines = [f"{counted(count, 'thread'):>11}: an update takes {spent:.3g} s" for count, spent in seconds.items()]
    best = min(seconds, key=seconds.__getitem__)
    return "\n".join([*lines, f"Without the setting it is {chosen}; the fastest here: --execution.threads {best}"])
