"""Installs Canter's runners in place of RSL-RL's when imported.

For scripts that import `rsl_rl.runners` themselves, such as mjlab's; import it before them:

    import canter.compat.rsl_rl.install_shim
"""

from canter.compat.drop_in import replace_classes
from canter.compat.rsl_rl.distillation import DistillationRunner
from canter.compat.rsl_rl.runner import OnPolicyRunner

RUNNERS = {"OnPolicyRunner": OnPolicyRunner, "DistillationRunner": DistillationRunner}
MODULES = {"rsl_rl": {}, "rsl_rl.runners": RUNNERS, "rsl_rl.runners.on_policy_runner": RUNNERS}
"""Modules added if RSL-RL is not installed."""

replace_classes("rsl_rl", "rsl_rl.runners", MODULES)
