"""Settings, checkpoints and scripts of rl_games and RSL-RL."""

from canter.compat.export_run import export_run
from canter.compat.import_run import import_run
from canter.compat.settings.deviations import Deviations, Entry
from canter.compat.settings.importing import Imported, import_config, is_foreign
from canter.compat.settings.translation import ImportRefused
from canter.compat.task_settings import task_settings

__all__ = [
    "Deviations",
    "Entry",
    "ImportRefused",
    "Imported",
    "export_run",
    "import_config",
    "import_run",
    "is_foreign",
    "task_settings",
]
