"""The look before a run: what cannot work is refused before any work is lost."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from rich.console import Console
from rich.text import Text

from canter.algorithms.base import plan_of
from canter.app.check.checks import heard_warnings, preflight
from canter.app.check.plan import Finding, Plan, check_size
from canter.app.check.trial import MAX_ROWS
from canter.app.console.text import printable, terminal_stream
from canter.config import TrainConfig
from canter.core.plain import ConfigError
from canter.core.specs import Env, begins_anew
from canter.envs import closed_quietly

STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}


def plan_for(config: TrainConfig) -> Plan:
    """The numbers of a run."""
    learning = vars(plan_of(config.algorithm))
    steps, iterations = config.total_steps, config.until.iterations
    return Plan(**learning, total_steps=steps, iterations=iterations, num_envs=config.env.num_envs)


def look(config: TrainConfig) -> list[Finding]:
    """What a short look at a few of the environments and at the settings finds."""
    env = replace(config.env, num_envs=min(config.env.num_envs, MAX_ROWS))
    return preflight(replace(config, env=env), plan_for(config))


def check_device(device: str) -> None:
    """Refuse a device that torch does not know or cannot find."""
    try:
        kind = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device: {device!r} is no device; use cpu, cuda or cuda:N", "device") from error
    count = torch.cuda.device_count()
    if kind.type == "cuda" and (kind.index or 0) >= count:
        raise ConfigError(f"device: {device!r} is not there, torch finds {count} CUDA devices; use cpu", "device")


def check_machine(config: TrainConfig) -> None:
    """Refuse settings for a device that is not there, or of sizes that no memory here could hold."""
    check_device(config.device)
    check_size(plan_for(config), config)


@contextmanager
def environment_for(config: TrainConfig, *, quiet: bool = False) -> Iterator[Env | None]:
    """The environment of a run, once a look at it has found no error; prints what matters before the run begins.

    An error ends the command here, before any work is lost. None is given for an environment that may keep something
    of the look, so that the run would not be the same without it; the run then builds its own.
    """
    with heard_warnings() as heard:
        env = config.env.build(config.device)
    with closed_quietly(env):
        findings = preflight(config, plan_for(config), env) + heard
        errors = [finding.text for finding in findings if finding.level == "error"]
        if errors:
            raise ValueError(f"{'; '.join(errors)} (nothing was trained; `canter check` looks closer)")
        if not quiet:
            _announce(findings)
        if begins_anew(env):
            yield env
            return
    yield None


def _announce(findings: list[Finding]) -> None:
    """Print the arithmetic of the run, what computes it, and warnings."""
    for finding in findings:
        if finding.subject in ("arithmetic", "engine", "replay"):
            print(finding.text if finding.subject == "arithmetic" else f"{finding.subject}: {finding.text}")
    show(finding for finding in findings if finding.level == "warning")


def show(findings: Iterable[Finding]) -> None:
    """Print findings, one paragraph each, within the width of the terminal."""
    console = Console(file=terminal_stream(), highlight=False)
    for finding in findings:
        head = f"{finding.level:<9}{finding.subject:<14}"
        text = printable(finding.text)
        lines = [text]
        if console.is_terminal:
            lines = textwrap.wrap(text, max(40, console.width - len(head) - 1), break_on_hyphens=False)
        body = f"\n{' ' * len(head)}".join(lines)
        console.print(Text.assemble((head[:9], STYLES[finding.level]), head[9:], body), soft_wrap=True)
