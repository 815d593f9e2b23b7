"""RSL-RL: settings, checkpoints and runners.

from canter.compat.rsl_rl import OnPolicyRunner
"""

from canter.compat.rsl_rl.distillation import DistillationRunner
from canter.compat.rsl_rl.env import RslRlEnv
from canter.compat.rsl_rl.runner import OnPolicyRunner

__all__ = ["DistillationRunner", "OnPolicyRunner", "RslRlEnv"]
