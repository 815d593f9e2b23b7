"""Train, resume and play by scripts of unitree_rl_lab, whole_body_tracking and legged_gym, on fakes of the simulator.

    python benchmarks/robots/third_party_scripts.py FOLDER ISAACLAB [--only legged_gym] [--out FILE]

FOLDER has checkouts of the three (`benchmarks/parity/repositories.json` has their commits), ISAACLAB is a clone of
Isaac Lab, from which `isaaclab_rl` of version 2.1.1 is taken. No line of a script is changed:
`canter.compat.rsl_rl.install_shim` is imported before it. Isaac Lab is the fake of `tests/envs/fake_isaaclab.py`;
Isaac Gym, the robot and wandb are fakes below. Agents are the repositories' own classes. Needs `rsl-rl-lib` (a script
asks for its version), `tensordict`, `packaging`, `onnx` and `onnxscript`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from isaaclab_scripts import unpack

ROOT = Path(__file__).parents[2]
ISAACLAB = "v2.1.1"
STEPS = ("train", "resume", "play")

FIRST = """
import runpy, sys, types
from pathlib import Path
from types import SimpleNamespace
sys.path[:0] = {paths!r}
repository = Path({repository!r})

def module(name, path=None, **content):
    made = sys.modules[name] = types.ModuleType(name)
    made.__path__ = [str(path)] if path else []
    vars(made).update(content)
    parent, _, own = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], own, made)
    return made

import canter.compat.rsl_rl.install_shim
"""
LAST = """
sys.argv = {argv!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
ISAACLAB_FAKE = """
import fake_isaaclab
fake_isaaclab.install()
import isaaclab.utils.io
isaaclab.utils.io.dump_pickle = lambda path, cfg: Path(path).write_bytes(b"")
build = fake_isaaclab.ManagerBasedRLEnv.__init__

def build_with_sizes(self, *given, **options):
    build(self, *given, **options)
    self.observation_manager.group_obs_dim = {"policy": (3,), "critic": (4,)}

fake_isaaclab.ManagerBasedRLEnv.__init__ = build_with_sizes
on_cpu = lambda agent: lambda: vars(made := agent()).update(device="cpu") or made
module("isaaclab.utils.pretrained_checkpoint", get_published_pretrained_checkpoint=lambda *names: None)
"""
UNITREE = (
    ISAACLAB_FAKE
    + """
package = repository / "source/unitree_rl_lab/unitree_rl_lab"
module("unitree_rl_lab", package)
module("unitree_rl_lab.tasks", package / "tasks")
module("unitree_rl_lab.tasks.locomotion", package / "tasks/locomotion")
module("unitree_rl_lab.utils", package / "utils")
module("unitree_rl_lab.utils.export_deploy_cfg", export_deploy_cfg=lambda env, folder: None)
from unitree_rl_lab.tasks.locomotion.agents.rsl_rl_ppo_cfg import BasePPORunnerCfg
agent = on_cpu(BasePPORunnerCfg)
fake_isaaclab.register("Unitree-G1-29dof-Velocity", fake_isaaclab.ManagerBasedRLEnvCfg, rsl_rl_cfg_entry_point=agent)
"""
)
TRACKING = (
    ISAACLAB_FAKE
    + """
import torch
package = repository / "source/whole_body_tracking/whole_body_tracking"
module("whole_body_tracking", package)
module("whole_body_tracking.tasks", package / "tasks")
for name in ("tracking", "tracking.config", "tracking.config.g1"):
    module(f"whole_body_tracking.tasks.{name}", package / "tasks" / name.replace(".", "/"))
module("whole_body_tracking.tasks.tracking.mdp", MotionCommand=object)
run = SimpleNamespace(name="walk", use_artifact=lambda name: print("USED", name), summary={}, config={})
artifact = SimpleNamespace(download=lambda: ".")
settings = SimpleNamespace(Settings=lambda **options: None)
ignore = lambda *given, **options: None
wandb = module(
    "wandb", run=run, init=lambda **options: run, login=lambda **options: True, log=ignore, finish=ignore, save=ignore,
    config=SimpleNamespace(update=ignore), Settings=dict, Api=lambda: SimpleNamespace(artifact=lambda name: artifact),
)
run.log, run.save = wandb.log, wandb.save
run.finish = wandb.finish
run.config = wandb.config

class Tracking(fake_isaaclab.ManagerBasedRLEnv):
    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        rows = {name: torch.zeros(7, 2) for name in ("joint_pos", "joint_vel")}
        rows |= {f"body_{name}_w": torch.zeros(7, 3, 3) for name in ("pos", "quat", "lin_vel", "ang_vel")}
        motion = SimpleNamespace(
            motion=SimpleNamespace(**rows), cfg=SimpleNamespace(anchor_body_name="torso", body_names=["torso", "foot"])
        )
        self.command_manager = SimpleNamespace(get_term=lambda name: motion, active_terms=["motion"])
        self.observation_manager.cfg = SimpleNamespace(policy=SimpleNamespace(history_length=1))
        self.action_manager.get_term = lambda name: SimpleNamespace(_scale=torch.ones(1, 2))
        data = SimpleNamespace(
            joint_names=["a", "b"], joint_stiffness=torch.ones(1, 2), joint_damping=torch.ones(1, 2),
            default_joint_pos_nominal=torch.zeros(2),
        )
        self.scene = type("Scene", (SimpleNamespace,), {"__getitem__": lambda self, name: self.robot})(
            robot=SimpleNamespace(data=data), **vars(self.scene)
        )

@fake_isaaclab.configclass
class TrackingCfg(fake_isaaclab.ManagerBasedRLEnvCfg):
    sim: object = fake_isaaclab.SimCfg(device="cpu")
    commands: object = SimpleNamespace(motion=SimpleNamespace(motion_file=""))

    def to_dict(self):
        return {}

fake_isaaclab.ManagerBasedRLEnv = Tracking
from whole_body_tracking.tasks.tracking.config.g1.agents.rsl_rl_ppo_cfg import G1FlatPPORunnerCfg
agent = on_cpu(G1FlatPPORunnerCfg)
fake_isaaclab.register("Tracking-Flat-G1-v0", TrackingCfg, rsl_rl_cfg_entry_point=agent)
"""
)
LEGGED_GYM = """
import argparse
import numpy as np
import torch
np.float = float

def parse_arguments(description, custom_parameters):
    parser = argparse.ArgumentParser(description=description)
    for given in custom_parameters:
        options = {key: value for key, value in given.items() if key != "name"}
        parser.add_argument(given["name"], **options)
    found = parser.parse_args()
    vars(found).update(compute_device_id=0, sim_device_type="cpu", physics_engine=1, use_gpu=False, subscenes=0)
    vars(found).update(use_gpu_pipeline=False, num_threads=0, device="cpu")
    return found

sim = lambda: SimpleNamespace(physx=SimpleNamespace())
module("isaacgym")
module("isaacgym.gymapi", SimParams=sim, SIM_FLEX=0, SIM_PHYSX=1)
module("isaacgym.gymutil", parse_arguments=parse_arguments, parse_sim_config=lambda *given: None)
names = ("quat_apply", "normalize")
module("isaacgym.torch_utils", **{name: None for name in names}, Tuple=tuple)
module("isaacgym.terrain_utils")

class Robot:
    def __init__(self, cfg, sim_params, physics_engine, sim_device, headless):
        self.cfg, self.device, self.dt, self.max_episode_length = cfg, "cpu", 0.02, 8
        self.num_envs, self.num_obs, self.num_actions = cfg.env.num_envs, cfg.env.num_observations, cfg.env.num_actions
        self.num_privileged_obs = None
        self.place = torch.randn(self.num_envs, self.num_obs)
        self.episode_length_buf = torch.zeros(self.num_envs, dtype=torch.long)
        self.reset_buf = torch.zeros(self.num_envs, dtype=torch.long)
        self.dof_pos = self.dof_vel = self.torques = torch.zeros(self.num_envs, self.num_actions)
        self.commands = self.base_lin_vel = self.base_ang_vel = torch.zeros(self.num_envs, 3)
        self.contact_forces, self.feet_indices = torch.zeros(self.num_envs, 4, 3), torch.arange(4)
        self.extras = {"episode": {}}

    def get_observations(self):
        return self.place.clone()

    def get_privileged_observations(self):
        return None

    def reset(self):
        return self.place.clone(), None

    def step(self, actions):
        assert actions.shape == (self.num_envs, self.num_actions)
        self.place[:, : self.num_actions] += 0.1 * actions.clamp(-1, 1)
        reward = -self.place[:, : self.num_actions].square().mean(-1)
        self.episode_length_buf += 1
        cut = self.episode_length_buf >= self.max_episode_length
        self.place[cut] = torch.randn(int(cut.sum()), self.num_obs)
        self.episode_length_buf[cut] = 0
        self.reset_buf = cut.long()
        self.extras = {"time_outs": cut, "episode": {"rew_tracking": reward.mean()}}
        return self.place.clone(), None, reward, self.reset_buf, self.extras

module("legged_gym", repository / "legged_gym", LEGGED_GYM_ROOT_DIR=str(Path.cwd()), LEGGED_GYM_ENVS_DIR="")
module("legged_gym.envs", repository / "legged_gym/envs")
import legged_gym.envs
from legged_gym.envs.anymal_c.mixed_terrains import anymal_c_rough_config as rough
vars(legged_gym.envs).update(AnymalCRoughCfg=rough.AnymalCRoughCfg, AnymalCRoughCfgPPO=rough.AnymalCRoughCfgPPO)
from legged_gym.envs.anymal_c.flat.anymal_c_flat_config import AnymalCFlatCfg, AnymalCFlatCfgPPO
from legged_gym.utils.task_registry import task_registry
task_registry.register("anymal_c_flat", Robot, AnymalCFlatCfg(), AnymalCFlatCfgPPO())
"""
ISAAC_ARGUMENTS = ("--num_envs", "16", "--headless", "--device", "cpu")
TRAIN = ("--max_iterations", "3")
PROJECTS: dict[str, dict[str, Any]] = {
    "unitree_rl_lab": {
        "code": UNITREE,
        "scripts": "scripts/rsl_rl",
        "all": ("--task", "Unitree-G1-29dof-Velocity", *ISAAC_ARGUMENTS),
        "resume": ("--resume",),
        "play": (),
        "files": {"train": "model_0.pt", "resume": "model_4.pt", "play": "policy.onnx"},
    },
    "whole_body_tracking": {
        "code": TRACKING,
        "scripts": "scripts/rsl_rl",
        "all": ("--task", "Tracking-Flat-G1-v0", *ISAAC_ARGUMENTS),
        "train": ("--registry_name", "motions/walk", "--logger", "wandb"),
        "resume": ("--registry_name", "motions/walk", "--logger", "wandb", "--resume", "True"),
        "play": (),
        "files": {"train": "model_2.pt", "resume": "model_4.pt", "play": "policy.onnx"},
    },
    "legged_gym": {
        "code": LEGGED_GYM,
        "scripts": "legged_gym/scripts",
        "all": ("--task", "anymal_c_flat", "--num_envs", "16", "--headless", "--rl_device", "cpu"),
        "resume": ("--resume",),
        "play": (),
        "files": {"train": "model_2.pt", "resume": "model_4.pt", "play": "policy_1.pt"},
    },
}


def run(project: str, step: str, repository: Path, folder: Path) -> dict[str, Any]:
    """Run the script of one step in a new process, in a working folder that all steps share."""
    settings = PROJECTS[project]
    script = repository / settings["scripts"] / f"{'play' if step == 'play' else 'train'}.py"
    paths = [str(script.parent), str(folder / "source/isaaclab_rl"), str(ROOT / "tests/envs"), str(ROOT / "src")]
    argv = [str(script), *settings["all"], *settings.get(step, ()), *(() if step == "play" else TRAIN)]
    work = folder / project
    work.mkdir(exist_ok=True)
    before = set(work.rglob("*"))
    start = time.perf_counter()
    code = FIRST.format(paths=paths, repository=str(repository)) + settings["code"] + LAST.format(argv=argv)
    (folder / "launch.py").write_text(code)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(folder / "launch.py")], cwd=work, capture_output=True, text=True, env=environment
    )
    files = sorted(str(file.relative_to(work)) for file in set(work.rglob("*")) - before if file.is_file())
    kept = [Path(file).name for file in files if file.endswith((".pt", ".onnx"))]
    found = {"exit_code": done.returncode, "seconds": round(time.perf_counter() - start, 1), "files": kept}
    return found if done.returncode == 0 else found | {"error": done.stderr[-3000:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("isaaclab", type=Path)
    parser.add_argument("--only", nargs="*", choices=PROJECTS, default=list(PROJECTS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/third_party_scripts.json")
    options = parser.parse_args()
    listed = json.loads((ROOT / "benchmarks/parity/repositories.json").read_text())["third party"]
    commits = {name.partition("/")[2]: commit for name, commit in listed.items()}
    found: dict[str, Any] = {}
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as place:
        isaaclab = unpack(options.isaaclab, ISAACLAB, Path(place))
        for project in options.only:
            found[project] = {"commit": commits[project]}
            for step in STEPS:
                result = run(project, step, (options.folder / project).resolve(), Path(place))
                found[project][step] = result
                wanted = PROJECTS[project]["files"][step]
                wrong += [f"{project} {step}: {result['error']}"] if result["exit_code"] else []
                wrong += [] if wanted in result["files"] else [f"{project} {step} left no {wanted}"]
    print(json.dumps(found, indent=1))
    if wrong:
        sys.exit("\n".join(wrong))
    kept = {"simulator": "a fake", "isaaclab_rl": isaaclab, "projects": found}
    options.out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
