"""A FAKE of Isaac Lab, which needs an NVIDIA GPU and its own application: the same names, another world.

It keeps of the real one what an adapter, a wrapper or a script can notice: the application must run
before anything is imported; the order is physics, terminations, rewards, resets, commands,
observations; an end can be both a failure and a time-out; `extras` is one object whose `log` is
replaced only if something was reset; noise is drawn again for every observation; the next step
overwrites buffers; `close()` of the application ends the process. The world is points on a plane
that are rewarded for being at the origin.

`install()` puts it where Python looks for Isaac Lab. Nothing here is Isaac Lab's code.
"""

import dataclasses
import importlib
import importlib.machinery
import inspect
import json
import os
import re
import sys
import types
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import torch

MISSING = dataclasses.MISSING
GROUPS = {"policy": 3, "critic": 4, "feet": 2}
LAUNCHED = []
"""Applications that were started."""


def configclass(cls=None, **options):
    """Make a dataclass whose defaults may be lists and other configs, or missing."""
    if cls is None:
        return lambda cls: configclass(cls, **options)
    notes = inspect.get_annotations(cls)
    functions = (types.FunctionType, property, classmethod, staticmethod, type)
    members = {name: value for name, value in vars(cls).items() if not name.startswith("__")}
    open_ = {name: type(value) for name, value in members.items() if not isinstance(value, functions)}
    notes = {**open_, **notes}
    cls.__annotations__ = notes
    for name in notes:
        default = vars(cls).get(name, MISSING)
        if not isinstance(default, dataclasses.Field):
            setattr(cls, name, dataclasses.field(default_factory=lambda default=default: deepcopy(default)))
    cls = dataclasses.dataclass(cls)
    cls.to_dict = to_dict
    cls.replace = lambda self, **changes: dataclasses.replace(self, **changes)
    cls.copy = lambda self, **changes: dataclasses.replace(deepcopy(self), **changes)
    cls.validate = lambda self: None
    return cls


def to_dict(self):
    """Return plain data: {} for missing values, "module:name" for functions."""

    def plain(value):
        if value is MISSING:
            return {}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {name: plain(item) for name, item in vars(value).items()}  # some are deleted on the way
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return f"{value.__module__}:{value.__name__}" if callable(value) else value

    return plain(self)


@configclass
class SceneCfg:
    num_envs: int = 64


@configclass
class SimCfg:
    device: str = "cuda:0"
    dt: float = 0.005


@configclass
class ManagerBasedRLEnvCfg:
    scene: SceneCfg = SceneCfg()
    sim: SimCfg = SimCfg()
    seed: int | None = None
    decimation: int = 4
    episode_length_s: float = 0.4
    is_finite_horizon: bool = False
    log_dir: str | None = None
    reach: float = 3.0
    """Distance beyond which a point has failed."""
    noise: float = 0.01
    joined: bool = False
    """Join the terms of `feet` to one tensor, as wrappers for rl_games need it."""


@configclass
class EnvCfgOf3(ManagerBasedRLEnvCfg):
    compute_final_obs: bool = False


class ManagerBasedRLEnv(gymnasium.Env):
    """N points; see the module."""

    metadata = {"render_modes": [None, "human", "rgb_array"]}  # noqa: RUF012

    def __init__(self, cfg, render_mode=None, **kwargs):
        assert LAUNCHED, "the real one cannot be imported before AppLauncher has run"
        self.cfg, self.render_mode, self.num_envs = cfg, render_mode, cfg.scene.num_envs
        self.device, self.is_closed, self.nan_row = cfg.sim.device, False, None
        self.random = torch.Generator().manual_seed(cfg.seed or 0)
        rows = self.num_envs
        self.common_step_counter, self.extras = 0, {}
        self.episode_length_buf = torch.zeros(rows, dtype=torch.long)
        self.reward_buf, self.reset_buf = torch.zeros(rows), torch.zeros(rows, dtype=torch.bool)
        self.reset_terminated, self.reset_time_outs = self.reset_buf.clone(), self.reset_buf.clone()
        self.place, self.command, self.sums = torch.zeros(rows, 2), torch.zeros(rows, 1), torch.zeros(rows)
        levels = torch.zeros(rows, dtype=torch.long)
        origins = torch.arange(5.0).reshape(5, 1, 1).expand(5, 1, 3).clone()
        self.scene = SimpleNamespace(
            terrain=SimpleNamespace(
                terrain_levels=levels,
                terrain_types=torch.zeros_like(levels),
                terrain_origins=origins,
                env_origins=torch.zeros(rows, 3),
            )
        )
        self.curriculum_manager = SimpleNamespace(compute=self._move_levels)
        self.action_manager = SimpleNamespace(total_action_dim=2)
        self.observation_manager = SimpleNamespace(compute=self._observe, active_terms={"policy": ["place", "command"]})
        self.single_action_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,))
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, rows)
        self.observation_space = gymnasium.spaces.Dict()
        self.single_observation_space = gymnasium.spaces.Dict(
            {name: gymnasium.spaces.Box(-np.inf, np.inf, (size,)) for name, size in GROUPS.items()}
        )

    @property
    def step_dt(self):
        return self.cfg.sim.dt * self.cfg.decimation

    @property
    def max_episode_length(self):
        return int(np.ceil(self.cfg.episode_length_s / self.step_dt))

    def seed(self, seed=-1):
        self.random.manual_seed(seed)
        return seed

    def reset(self, seed=None, env_ids=None, options=None):
        if seed is not None:
            self.seed(seed)
        self._reset_rows(torch.arange(self.num_envs) if env_ids is None else env_ids)
        return self._observe(), self.extras

    def step(self, action):
        assert action.shape == (self.num_envs, 2) and not action.requires_grad
        self.place += 0.2 * action.clamp(-1, 1)
        if self.nan_row is not None:
            self.place[self.nan_row] = torch.nan
        self.episode_length_buf += 1
        self.common_step_counter += 1
        self.reset_time_outs[:] = self.episode_length_buf >= self.max_episode_length
        self.reset_terminated[:] = self.place.abs().amax(-1) > self.cfg.reach
        self.reset_buf[:] = self.reset_time_outs | self.reset_terminated
        self.reward_buf[:] = -self.place.square().sum(-1)
        self.sums += self.reward_buf
        rows = self.reset_buf.nonzero().squeeze(-1)
        if len(rows):
            if getattr(self.cfg, "compute_final_obs", False):
                self.extras["final_obs"] = self._observe()
            self._reset_rows(rows)
        self.command += 0.01
        return self._observe(), self.reward_buf, self.reset_terminated, self.reset_time_outs, self.extras

    def _reset_rows(self, rows):
        self.curriculum_manager.compute(env_ids=rows)
        self.extras["log"] = {
            "Episode_Reward/stand": self.sums[rows].mean(),
            "Episode_Termination/time_out": int(self.reset_time_outs[rows].sum()),
            "Curriculum/level": self.scene.terrain.terrain_levels.float().mean(),
        }
        self.place[rows] = torch.randn(len(rows), 2, generator=self.random)
        self.command[rows], self.sums[rows], self.episode_length_buf[rows] = 0.0, 0.0, 0

    def _move_levels(self, env_ids=None):
        self.scene.terrain.terrain_levels[env_ids] = (self.scene.terrain.terrain_levels[env_ids] + 1) % 5

    def _observe(self, update_history=False):
        noise = self.cfg.noise * torch.randn(self.num_envs, 2, generator=self.random)
        feet = {"left": self.place[:, :1].clone(), "right": self.place[:, 1:].clone()}
        return {
            "policy": torch.cat([self.place + noise, self.command], 1),
            "critic": torch.cat([self.place, self.command, self.episode_length_buf.unsqueeze(1) * 0.01], 1),
            "feet": torch.cat(list(feet.values()), 1) if self.cfg.joined else feet,
        }

    def render(self, recompute=False):
        return np.zeros((8, 8, 3), np.uint8) if self.render_mode == "rgb_array" else None

    def close(self):
        assert not self.is_closed
        self.is_closed = True


class DirectRLEnv(gymnasium.Env): ...


class DirectMARLEnv(gymnasium.Env): ...


class AppLauncher:
    """Starts the application, which reports `steps` times that it is still running."""

    local_rank = global_rank = 0

    def __init__(self, launcher_args=None, **options):
        LAUNCHED.append(self)
        self.left = int(os.environ.get("FAKE_ISAACLAB_STEPS", "5"))
        self.app = SimpleNamespace(is_running=self._is_running, close=self._close)

    @staticmethod
    def add_app_launcher_args(parser):
        parser.add_argument("--headless", action="store_true")
        parser.add_argument("--enable_cameras", action="store_true")
        parser.add_argument("--device", default="cpu")

    def _is_running(self):
        self.left -= 1
        return self.left >= 0

    @staticmethod
    def _close():
        sys.stdout.flush()
        os._exit(0)  # as the real one: nothing after it runs


def load_cfg_from_registry(task, entry):
    found = gymnasium.spec(task).kwargs[entry]
    if isinstance(found, str):
        module, _, name = found.partition(":")
        found = getattr(importlib.import_module(module), name)
    return found()


def parse_env_cfg(task, device="cuda:0", num_envs=None, use_fabric=None):
    cfg = load_cfg_from_registry(task, "env_cfg_entry_point")
    cfg.sim.device = device
    cfg.scene.num_envs = cfg.scene.num_envs if num_envs is None else num_envs
    return cfg


def get_checkpoint_path(log_path, run_dir=".*", checkpoint=".*", other_dirs=None, sort_alphabetical=True):
    runs = sorted(path for path in Path(log_path).iterdir() if re.match(run_dir, path.name))
    files = [path for path in runs[-1].joinpath(*other_dirs or ()).iterdir() if re.match(checkpoint, path.name)]
    return str(max(files, key=lambda path: f"{path.name:0>15}"))


def hydra_task_config(task, agent):
    def decorate(main):
        return lambda: main(load_cfg_from_registry(task, "env_cfg_entry_point"), load_cfg_from_registry(task, agent))

    return decorate


def dump_yaml(path, cfg, sort_keys=False):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(cfg if isinstance(cfg, dict) else cfg.to_dict(), default=str))


def modules():
    """Return the modules by name, with their contents."""
    return {
        "isaaclab": {},
        "isaaclab.app": {"AppLauncher": AppLauncher},
        "isaaclab.envs": {
            "ManagerBasedRLEnv": ManagerBasedRLEnv,
            "DirectRLEnv": DirectRLEnv,
            "DirectMARLEnv": DirectMARLEnv,
            "ManagerBasedRLEnvCfg": ManagerBasedRLEnvCfg,
            "DirectRLEnvCfg": type("DirectRLEnvCfg", (), {}),
            "DirectMARLEnvCfg": type("DirectMARLEnvCfg", (), {}),
            "VecEnvObs": dict,
            "multi_agent_to_single_agent": lambda env: env,
        },
        "isaaclab.utils": {"configclass": configclass},
        "isaaclab.utils.dict": {"print_dict": lambda *given, **options: None},
        "isaaclab.utils.io": {"dump_yaml": dump_yaml},
        "isaaclab.utils.assets": {"retrieve_file_path": lambda path: path, "ISAACLAB_NUCLEUS_DIR": ""},
        "isaaclab_tasks": {},
        "isaaclab_tasks.utils": {
            "get_checkpoint_path": get_checkpoint_path,
            "load_cfg_from_registry": load_cfg_from_registry,
            "parse_env_cfg": parse_env_cfg,
        },
        "isaaclab_tasks.utils.parse_cfg": {"load_cfg_from_registry": load_cfg_from_registry},
        "isaaclab_tasks.utils.hydra": {"hydra_task_config": hydra_task_config},
        "carb": {},
        "carb.settings": {"get_settings": lambda: SimpleNamespace(get=lambda key: "")},
    }


def install(into=sys.modules):
    """Put the fake where Python looks for Isaac Lab; return the names of its modules."""
    for name, content in modules().items():
        module = types.ModuleType(name)
        module.__path__, module.__spec__ = [], importlib.machinery.ModuleSpec(name, None, is_package=True)
        vars(module).update(content)
        into[name] = module
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(into[parent], own, module)
    return list(modules())


def register(task, env_cfg, **entry_points):
    """Register a task with Gymnasium as Isaac Lab does."""
    gymnasium.registry.pop(task, None)
    given = {"env_cfg_entry_point": env_cfg, **entry_points}
    gymnasium.register(task, entry_point=ManagerBasedRLEnv, disable_env_checker=True, kwargs=given)
