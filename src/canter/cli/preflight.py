"""The look before a run, as the commands show it."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from canter.algorithms.ppo import PPOConfig
from canter.cli.parser import UsageError
from canter.config import TrainConfig
from canter.preflight.checks import preflight
from canter.preflight.plan import Finding, Plan

MAX_ENVS = 4
"""A look needs no more environments than this, however many the run has."""
STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}


def plan_of(config: TrainConfig) -> Plan:
    """The numbers of a run."""
    ppo, common = config.algorithm, {"total_steps": config.total_steps, "num_envs": config.env.num_envs}
    if not isinstance(ppo, PPOConfig):
        return Plan(horizon=ppo.horizon, **common)
    return Plan(
        **common,
        horizon=ppo.horizon,
        epochs=ppo.epochs,
        num_minibatches=ppo.num_minibatches,
        gamma=1.0 if ppo.objective == "average" else ppo.gamma,
        gae_lambda=ppo.gae_lambda,
    )


def look(config: TrainConfig) -> list[Finding]:
    """What a short look at a few of the environments and at the settings finds."""
    env = replace(config.env, num_envs=min(config.env.num_envs, MAX_ENVS))
    return preflight(replace(config, env=env), plan_of(config))


def look_before(config: TrainConfig) -> None:
    """Print what matters before a run begins; an error ends it here, before any work is lost."""
    findings = look(config)
    errors = [finding.text for finding in findings if finding.level == "error"]
    if errors:
        raise UsageError(f"{'; '.join(errors)} (nothing was trained; `canter check` looks closer)")
    for finding in findings:
        if finding.subject == "arithmetic":
            print(finding.text)
    show(finding for finding in findings if finding.level == "warning")


def show(findings: Iterable[Finding]) -> None:
    """Print findings, one paragraph each, within the width of the terminal."""
    console = Console(file=sys.stdout, highlight=False)
    for finding in findings:
        head = f"{finding.level:<9}{finding.subject:<14}"
        lines = [finding.text]
        if console.is_terminal:
            lines = textwrap.wrap(finding.text, max(40, console.width - len(head) - 1), break_on_hyphens=False)
        body = f"\n{' ' * len(head)}".join(lines)
        console.print(Text.assemble((head[:9], STYLES[finding.level]), head[9:], body), soft_wrap=True)
