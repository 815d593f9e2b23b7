"""Isaac Lab's way of using rl_games: `install_shim` before its scripts, and a wrapper with Isaac Lab's interface.

The scripts themselves run on a fake of the simulator in benchmarks/robots/isaaclab_scripts.py, from a checkout.
"""

import gymnasium
import pytest
import torch
from test_rsl_rl_runner import run_python, scalars
from theirs import rl_games

from canter.compat.rl_games import IsaacAlgoObserver, RlGamesEnv, Runner, env_configurations, vecenv
from canter.core.plain import ConfigError

N = 8
TAKE_OVER = """
{first}
import canter.compat.rl_games.install_shim
from rl_games.torch_runner import Runner
assert Runner.__module__ == "canter.compat.rl_games.runner", Runner.__module__
print("taken")
"""
STAND_IN = """
from rl_games.common import env_configurations, vecenv
from rl_games.common.algo_observer import AlgoObserver, IsaacAlgoObserver
from rl_games.common.player import BasePlayer
from rl_games.common.vecenv import IVecEnv
from rl_games.algos_torch.torch_ext import safe_filesystem_op, safe_save
vecenv.register("MINE", lambda name, num_actors, **options: (name, num_actors))
env_configurations.register("rlgpu", {"vecenv_type": "MINE", "env_creator": lambda **options: None})
from canter.compat.rl_games.env import create_vec_env
assert create_vec_env("rlgpu", 3) == ("rlgpu", 3)
print("all there")
"""


def test_install_shim_replaces_the_runner_or_stands_for_the_package(tmp_path):
    assert "all there" in run_python(TAKE_OVER.format(first="") + STAND_IN, tmp_path).stdout


@pytest.mark.long
def test_where_rl_games_is_installed_its_runner_is_replaced(tmp_path):
    (tmp_path / "rl_games").mkdir()
    (tmp_path / "rl_games" / "__init__.py").write_text("")
    (tmp_path / "rl_games" / "torch_runner.py").write_text("class Runner: pass\n")
    (tmp_path / "early.py").write_text("from rl_games.torch_runner import Runner\n")
    assert "taken" in run_python(TAKE_OVER.format(first=""), tmp_path).stdout
    late = run_python(TAKE_OVER.format(first="import early"), tmp_path)
    assert "early has imported rl_games' Runner already" in late.stderr


class Wrapper:
    """Like Isaac Lab's wrapper: groups joined or by name, states separate, one mapping of infos for ever."""

    def __init__(self, joined=True):
        self.joined, self.age, self.log = joined, torch.zeros(N, dtype=torch.long), {"Episode_Reward/stand": 0.0}

    def get_env_info(self):
        box = gymnasium.spaces.Box(-9, 9, (3,))
        return {"observation_space": box, "action_space": gymnasium.spaces.Box(-1, 1, (2,)), "state_space": box}

    def _look(self):
        parts = {"policy": self.place.clone(), "feet": -self.place[:, :1], "critic": self.age.float().unsqueeze(1)}
        groups = {"obs": ("policy", "feet"), "states": ("critic", "feet")}
        named = {name: {part: parts[part] for part in inside} for name, inside in groups.items()}
        return {name: torch.cat(list(part.values()), 1) for name, part in named.items()} if self.joined else named

    def reset(self):
        self.place = torch.randn(N, 2, generator=torch.Generator().manual_seed(0))
        return self._look()

    def step(self, action):
        self.place = self.place + 0.1 * action
        self.age += 1
        cut, failed = self.age >= 6, self.place.abs().amax(1) > 3
        ended = cut | failed
        self.age[ended], self.place[ended] = 0, 0.0
        if ended.any():
            self.log = {"Episode_Reward/stand": torch.tensor(1.5), "Episode_Termination/time_out": int(cut.sum())}
        return self._look(), -self.place.square().sum(1), ended, {"time_outs": cut, "episode": self.log}


def load(tmp_path, joined, **changes):
    vecenv.register("IsaacRlgWrapper", lambda name, num_actors, **options: Wrapper(joined))
    env_configurations.register("rlgpu", {"vecenv_type": "IsaacRlgWrapper", "env_creator": lambda **options: None})
    own = {"config__env_name": "rlgpu", "config__train_dir": str(tmp_path), "config__full_experiment_name": "exp"}
    groups = {"obs": ["policy", "feet"], "states": ["critic", "feet"]}
    env = {"clip_actions": 1.0, "obs_groups": groups, "concate_obs_groups": joined}
    own |= {"config__device": "cpu", "config__save_best_after": 1, "env": env}
    runner = Runner(IsaacAlgoObserver())
    runner.load(rl_games(**own | changes))
    return runner


def central():
    own = rl_games()["params"]
    learning = {"mini_epochs": 1, "minibatch_size": 32, "learning_rate": 1e-3, "clip_value": True}
    network = {"name": "actor_critic", "central_value": True, "mlp": own["network"]["mlp"]}
    return learning | {"normalize_input": True, "network": network}


@pytest.mark.parametrize("joined", [True, False])
def test_a_central_value_reads_states_whether_groups_are_joined_or_not(joined, tmp_path):
    runner = load(tmp_path, joined, config__central_value_config=central())
    runner.run({"train": True, "play": False, "sigma": None})
    ppo = runner.agent.algorithm
    read = [tuple(part.network.groups) for part in (ppo.policy.actor, ppo.critic.critic)]
    assert read == ([("policy",), ("critic",)] if joined else [("policy", "feet"), ("critic", "feet")])
    tags = scalars(tmp_path / "exp" / "summaries")
    assert tags["Episode/Episode_Reward/stand"][-1] == 1.5 and "Episode/Episode_Termination/time_out" in tags
    player = runner.create_player()
    player.restore(str(tmp_path / "exp" / "nn" / "small.pth"))
    obs = Wrapper(joined).reset()["obs"]
    assert player.get_batch_size(obs, 1) == N
    assert player.get_action(player.obs_to_torch(obs), is_deterministic=True).shape == (N, 2)


def test_states_without_a_central_value_are_not_read(tmp_path):
    runner = load(tmp_path, True, network__separate=True)
    runner.run({"train": True})
    assert set(runner.agent.vec_env.spec.obs) == {"policy"}


def test_population_based_training_is_refused():
    with pytest.raises(ConfigError, match=r"pbt\.enabled=True: .*set it to False .*canter tune ENV"):
        Runner().load({**rl_games(), "pbt": {"enabled": True, "directory": "."}})
    Runner().load({**rl_games(), "pbt": {"enabled": False}})


def test_time_outs_are_cut_off_and_failures_are_ends():
    env = RlGamesEnv(Wrapper(), None, N, "cpu", clip_actions=False, masks=False)
    env.reset()
    env.env.place[0] = 9.0
    steps = [env.step(torch.zeros(N, 2)) for _ in range(6)]
    assert steps[0].terminated.tolist() == [True] + [False] * 7 and not steps[0].truncated.any()
    assert steps[5].truncated.tolist() == [False] + [True] * 7 and not steps[5].terminated.any()
