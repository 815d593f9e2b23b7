"""Importing this puts Canter's runners in the place of RSL-RL's, for scripts that name `rsl_rl.runners` themselves.

import canter.compat.rsl_rl.install_shim  # before whatever imports rsl_rl.runners, such as mjlab
"""

from canter.compat.drop_in import replace_classes
from canter.compat.rsl_rl.distillation import DistillationRunner
from canter.compat.rsl_rl.runner import OnPolicyRunner

RUNNERS = {"OnPolicyRunner": OnPolicyRunner, "DistillationRunner": DistillationRunner}

replace_classes("rsl_rl", "rsl_rl.runners", {"rsl_rl": {}, "rsl_rl.runners": RUNNERS})
