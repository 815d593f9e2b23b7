"""Run a training script of each source library with the library and, with one changed import, Canter.

    python benchmarks/parity/scripts.py PARENTS_PYTHON

PARENTS_PYTHON is a Python with rsl-rl-lib 5.5.1 and rl_games 1.6.5; so must be the one that runs this, as scripts keep
what else they import from the parents.
Both runs of a script train in the
same environment, save, load and play; the files that they leave are compared, and each library's file is played by the
other: Canter's by the parent's script and the parent's by Canter's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROBOTS = """
import json, sys
import torch
from {runners} import DistillationRunner, OnPolicyRunner
from tensordict import TensorDict
torch.manual_seed(1)

class Env:
    num_envs, num_actions, max_episode_length, device, cfg = 64, 2, 40, "cpu", {{}}
    def __init__(self):
        self.unwrapped, self.place = self, torch.randn(64, 4)
        self.episode_length_buf = torch.zeros(64, dtype=torch.long)
    def get_observations(self):
        return TensorDict({{"policy": self.place.clone()}}, batch_size=[64])
    def step(self, action):
        self.place[:, :2] += 0.3 * action.clamp(-1, 1)
        reward = -self.place[:, :2].square().sum(-1)
        self.episode_length_buf += 1
        cut = self.episode_length_buf >= 40
        self.place[cut] = torch.randn(int(cut.sum()), 4)
        self.episode_length_buf[cut] = 0
        return self.get_observations(), reward, cut.long(), {{"time_outs": cut}}

model = {{"class_name": "MLPModel", "hidden_dims": [32, 32], "activation": "elu", "obs_normalization": True}}
gaussian = {{"class_name": "GaussianDistribution", "init_std": 1.0, "std_type": "scalar"}}
cfg = {{"num_steps_per_env": 24, "save_interval": 20, "obs_groups": {{"actor": ["policy"], "critic": ["policy"]}},
       "actor": model | {{"distribution_cfg": gaussian}}, "critic": model, "algorithm": {{"class_name": "PPO"}}}}
folder, other = sys.argv[1], sys.argv[2]

def play(player):
    torch.manual_seed(1)
    env, policy, total = Env(), player.get_inference_policy(device="cpu"), 0.0
    with torch.inference_mode():
        obs = env.get_observations()
        for _ in range(40):
            obs, reward, _, _ = env.step(policy(obs))
            total += reward.mean().item()
    print("RESULT", total)
"""
RSL_RL = (
    ROBOTS
    + """
runner = OnPolicyRunner(Env(), dict(cfg), log_dir=folder, device="cpu")
if other == "-":
    runner.learn(num_learning_iterations=60, init_at_random_ep_len=True)
    other = folder + "/model_59.pt"
player = OnPolicyRunner(Env(), dict(cfg), log_dir=None, device="cpu")
player.load(other)
play(player)
"""
)
STUDENT = (
    ROBOTS
    + """
student = {{key: cfg[key] for key in ("num_steps_per_env", "save_interval")}} | {{
    "obs_groups": {{"student": ["policy"], "teacher": ["policy"]}},
    "student": model | {{"hidden_dims": [16], "distribution_cfg": gaussian | {{"init_std": 0.1}}}},
    "teacher": model | {{"distribution_cfg": gaussian}},
    "algorithm": {{"class_name": "Distillation", "gradient_length": 6, "num_learning_epochs": 2}}}}
if other == "-":
    runner = OnPolicyRunner(Env(), dict(cfg), log_dir=folder, device="cpu")
    runner.learn(60)
    learner = DistillationRunner(Env(), dict(student), log_dir=folder + "/student", device="cpu")
    learner.load(folder + "/model_59.pt")
    learner.learn(60)
    other = folder + "/student/model_59.pt"
player = DistillationRunner(Env(), dict(student), log_dir=None, device="cpu")
player.load(other)
play(player)
"""
)
RL_GAMES = """
import json, os, sys
import gymnasium, torch
from {runners} import Runner
from rl_games.common import env_configurations, vecenv

class Points(vecenv.IVecEnv):
    def __init__(self, name="points", num_actors=64, **options):
        self.place, self.age = torch.randn(num_actors, 4), torch.zeros(num_actors)
    def get_env_info(self):
        box = gymnasium.spaces.Box
        return {{"observation_space": box(-9, 9, (4,)), "action_space": box(-1, 1, (2,)), "agents": 1}}
    def get_number_of_agents(self):
        return 1
    def reset(self):
        return self.place.clone()
    def step(self, action):
        self.place[:, :2] += 0.3 * action.clamp(-1, 1)
        reward = -self.place[:, :2].square().sum(-1)
        self.age += 1
        cut = self.age >= 40
        self.place[cut], self.age[cut] = torch.randn(int(cut.sum()), 4), 0.0
        return self.place.clone(), reward, cut, {{"time_outs": cut}}

vecenv.register("POINTS", lambda name, num_actors, **options: Points(name, num_actors))
env_configurations.register("points", {{"vecenv_type": "POINTS", "env_creator": lambda **options: None}})
folder, other = sys.argv[1], sys.argv[2]
params = json.loads(open(os.path.join(os.path.dirname(folder), "params.json")).read())
params["config"] |= {{"train_dir": os.path.dirname(folder), "full_experiment_name": os.path.basename(folder)}}
runner = Runner()
runner.load({{"params": params}})
if other == "-":
    runner.run({{"train": True, "play": False}})
    other = os.path.join(folder, "nn", "points.pth")
player = runner.create_player()
player.restore(other)
player.has_batch_dimension = True
torch.manual_seed(1)
env, total = Points(), 0.0
obs = env.reset()
with torch.no_grad():
    for _ in range(40):
        obs, reward, _, _ = env.step(player.get_action(obs, is_deterministic=True))
        total += reward.mean().item()
print("RESULT", total)
"""
PARAMS = {
    "seed": 7,
    "algo": {"name": "a2c_continuous"},
    "model": {"name": "continuous_a2c_logstd"},
    "network": {
        "name": "actor_critic",
        "separate": False,
        "space": {
            "continuous": {
                "mu_activation": "None",
                "sigma_activation": "None",
                "mu_init": {"name": "default"},
                "sigma_init": {"name": "const_initializer", "val": 0},
                "fixed_sigma": True,
            }
        },
        "mlp": {"units": [64, 64], "activation": "elu", "initializer": {"name": "default"}},
    },
    "config": {
        "name": "points",
        "env_name": "points",
        "player": {"use_vecenv": True},
        "device": "cpu",
        "device_name": "cpu",
        "torch_compile": False,
        "num_actors": 64,
        "reward_shaper": {"scale_value": 0.1},
        "normalize_input": True,
        "normalize_value": True,
        "normalize_advantage": True,
        "gamma": 0.95,
        "tau": 0.95,
        "learning_rate": 3e-4,
        "lr_schedule": "adaptive",
        "kl_threshold": 0.008,
        "e_clip": 0.2,
        "clip_value": True,
        "critic_coef": 2,
        "entropy_coef": 0.0,
        "bounds_loss_coef": 0.0001,
        "grad_norm": 1.0,
        "truncate_grads": True,
        "horizon_length": 24,
        "minibatch_size": 384,
        "mini_epochs": 8,
        "max_epochs": 60,
        "save_best_after": 5,
    },
}
SCRIPTS = {
    "rsl_rl": (RSL_RL, "rsl_rl.runners", "canter.compat.rsl_rl", "model_59.pt"),
    "student": (STUDENT, "rsl_rl.runners", "canter.compat.rsl_rl", "student/model_59.pt"),
    "rl_games": (RL_GAMES, "rl_games.torch_runner", "canter.compat.rl_games", "nn/points.pth"),
}


def run(python: str, text: str, folder: Path, other: str = "-") -> float:
    """What a script prints as its result."""
    script = folder.with_suffix(".py")
    script.write_text(text)
    done = subprocess.run([python, str(script), str(folder), other], capture_output=True, text=True, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    if not found:
        raise SystemExit(f"{script}: {done.stderr[-2000:]}")
    return float(found[-1].split()[1])


def main(python: str) -> None:
    """Run both scripts in all four ways."""
    root, results = Path(tempfile.mkdtemp()), {}
    (root / "params.json").write_text(json.dumps(PARAMS))
    for name, (text, theirs, ours, file) in SCRIPTS.items():
        parent, canter = root / f"{name}_parent", root / f"{name}_canter"
        for folder in (parent, canter):
            folder.mkdir()
        with_theirs, with_ours = text.format(runners=theirs), text.format(runners=ours)
        results[name] = {
            "parent trains and plays": run(python, with_theirs, parent),
            "canter trains and plays": run(sys.executable, with_ours, canter),
            "canter plays the parent's file": run(sys.executable, with_ours, canter, str(parent / file)),
            "parent plays canter's file": run(python, with_theirs, parent, str(canter / file)),
        }
        for what, value in results[name].items():
            print(f"{name:10} {what:32} {value:.4g}")
    (Path(__file__).parent / "scripts.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
