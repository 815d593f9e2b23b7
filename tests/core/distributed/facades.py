"""The source libraries' runners as a rank: `torchrun facades.py FOLDER` writes their files and prints the result."""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "compat"))
from test_rl_games_runner import VecEnv
from test_rl_games_runner import settings as rl_games_settings
from test_rsl_rl_runner import Robots
from test_rsl_rl_runner import settings as rsl_rl_settings

from canter.compat.rl_games import AlgoObserver, Runner, env_configurations, vecenv
from canter.compat.rsl_rl import OnPolicyRunner
from canter.core import distributed

RANK = int(os.environ["RANK"])


def tell(what, algorithm, steps):
    weights = torch.cat([parameter.detach().flatten() for parameter in algorithm.model.parameters()])
    # In one write: what two ranks print must not mix.
    sys.stdout.write(f"{what} {RANK} {distributed.world_size()} {steps} {weights.double().norm().item()!r}\n")
    sys.stdout.flush()


class Tells(AlgoObserver):
    """Before training ends, and with it the ranks' connection."""

    def after_init(self, algo):
        self.algo = algo

    def after_print_stats(self, frame, epoch_num, total_time):
        if epoch_num == 3:
            tell("rl_games", self.algo.algorithm, frame)


folder = Path(sys.argv[1])
env = Robots()
env.place += RANK  # what ranks see differs
runner = OnPolicyRunner(env, rsl_rl_settings(seed=3 + RANK), log_dir=str(folder / "rsl_rl"), device="cpu")
runner.learn(3, init_at_random_ep_len=True)
assert runner.is_distributed and runner.gpu_global_rank == RANK
tell("rsl_rl", runner.alg.ppo, runner.trainer.progress.env_steps)
runner.close()

vecenv.register("POINTS", lambda name, num_actors, **options: VecEnv(num_actors, **options))
env_configurations.register("points", {"vecenv_type": "POINTS", "env_creator": None})
theirs = Runner(Tells())
changes = {"config__max_epochs": 3, "config__multi_gpu": True, "config__full_experiment_name": None}
theirs.load(rl_games_settings(folder, **changes))
theirs.run({"train": True})
theirs.agent.save(str(folder / "after"))
