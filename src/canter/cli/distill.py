"""`canter distill`: a student learns what a teacher does."""

from __future__ import annotations

from pathlib import Path

from canter.cli.parser import UsageError
from canter.cli.train import train_command

USAGE = """\
usage: canter distill TEACHER ENV [--KEY VALUE ...]

A student learns what a teacher would do, where it goes itself. TEACHER is a policy file or a run folder; a checkpoint
of rl_games or RSL-RL becomes one by `canter import`. What the student sees is --algorithm.policy.obs-groups; where the
teacher's groups have other names in ENV: --algorithm.teacher-obs '{policy: critic}'. All flags of `canter train` work
besides. Then PPO goes on: canter train ENV --start STUDENT"""


def distill_command(argv: list[str]) -> None:
    """Train a student to do what a teacher does that sees more."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return
    teacher, *rest = argv
    if teacher.startswith("-"):
        raise UsageError(f"the teacher comes first, before {teacher}; see `canter distill --help`")
    if Path(teacher).suffix in (".pt", ".pth"):
        raise UsageError(
            f"{teacher} is a checkpoint of another library: canter import {teacher} --config SETTINGS --env ENV "
            "--output RUN makes a run of it, then canter distill RUN ENV"
        )
    if not Path(teacher).exists():
        raise UsageError(f"there is no policy file and no run {teacher!r}")
    given = ["--algorithm", "distillation", "--algorithm.teacher", str(Path(teacher).absolute())]
    train_command([*rest, *given])
