"""Settings, checkpoints and scripts of rl_games and RSL-RL."""

import warnings

from canter.compat.runs import export_run, import_run
from canter.compat.settings.importing import Imported, import_config, is_foreign, task_settings
from canter.compat.settings.section import Entry, ImportRefused, ImportReport

__all__ = [
    "Entry",
    "ImportRefused",
    "ImportReport",
    "Imported",
    "export_run",
    "import_config",
    "import_run",
    "is_foreign",
    "task_settings",
]


def __getattr__(name: str) -> type:
    """Return the class behind a former name, with a warning."""
    if name == "Deviations":
        warnings.warn("canter.compat.Deviations is now ImportReport", DeprecationWarning, stacklevel=2)
        return ImportReport
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
