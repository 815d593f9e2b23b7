"""Draw `docs/_static/console.svg`: the live table at 70 % of a real run of `canter train`.

python docs/pictures/console.py
"""

from __future__ import annotations

import io
from pathlib import Path

import torch
from rich.console import Console

import canter
from canter.app.console.dashboard import Dashboard
from canter.core.plain import to_plain
from canter.training.trainer import train

PICTURE = Path(__file__).parents[1] / "_static" / "console.svg"
WIDTH = 100


def main() -> None:
    torch.set_num_threads(1)
    config = canter.preset_for("CartPole-v1")
    assert config is not None
    dashboard = Dashboard(to_plain(config))

    def follow(report: canter.Report) -> None:
        due = not PICTURE.exists() and report.env_steps >= 0.7 * config.total_steps
        dashboard.add(report.row())
        if due:
            terminal = Console(record=True, width=WIDTH, file=io.StringIO(), color_system="truecolor")
            terminal.print(dashboard)
            PICTURE.write_text(terminal.export_svg(title="canter train"))

    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.unlink(missing_ok=True)
    train(config, follow)


if __name__ == "__main__":
    main()
