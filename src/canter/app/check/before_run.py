"""The environment check before a run: errors end the command before any work is lost."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from rich.console import Console
from rich.text import Text

from canter.app.check.checks import collect_warnings, preflight
from canter.app.check.plan import Finding, check_size, plan_for
from canter.app.check.random_rollout import MAX_ENVS
from canter.app.console.text import printable, terminal_stream
from canter.config import TrainConfig
from canter.core.plain import ConfigError
from canter.core.registry import UserError
from canter.core.specs import Env, reset_is_clean
from canter.envs import closed_quietly

STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}


@contextmanager
def environment_for(config: TrainConfig, *, quiet: bool = False) -> Iterator[Env | None]:
    """Check the environment of a run and yield it; print the findings that matter before the run.

    Raises UserError if the check finds an error. Yields None for an environment that may keep a
    trace of the check, so that the run would not be the same without it; the run then builds its
    own.
    """
    with collect_warnings() as warned:
        env = config.env.build(config.device)
    with closed_quietly(env):
        findings = preflight(config, plan_for(config), env) + warned
        errors = [finding.text for finding in findings if finding.level == "error"]
        if errors:
            raise UserError(f"{'; '.join(errors)} (nothing was trained; `canter check` shows all findings)")
        if not quiet:
            _print_summary(findings)
        if reset_is_clean(env):
            yield env
            return
    yield None


def run_checks(config: TrainConfig) -> list[Finding]:
    """Check the settings and a few of the environments; return everything that was found."""
    env = replace(config.env, num_envs=min(config.env.num_envs, MAX_ENVS))
    return preflight(replace(config, env=env), plan_for(config))


def check_machine(config: TrainConfig) -> None:
    """Raise ConfigError for a missing device, or for sizes that cannot fit into memory here."""
    check_device(config.device)
    check_size(config)


def check_device(device: str) -> None:
    """Raise ConfigError for a device that torch does not support or cannot find."""
    try:
        kind = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device: {device!r} is no device; use cpu, cuda or cuda:N", "device") from error
    count = torch.cuda.device_count()
    if kind.type == "cuda" and (kind.index or 0) >= count:
        raise ConfigError(f"device: {device!r} is missing: torch finds {count} CUDA devices; use cpu", "device")


def print_findings(findings: Iterable[Finding]) -> None:
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


def _print_summary(findings: list[Finding]) -> None:
    """Print the arithmetic of the run, its engine, and warnings."""
    for finding in findings:
        if finding.subject == "arithmetic":
            print(finding.text)
        elif finding.subject in ("engine", "replay", "process"):
            print(f"{finding.subject}: {finding.text}")
    print_findings(finding for finding in findings if finding.level == "warning")
