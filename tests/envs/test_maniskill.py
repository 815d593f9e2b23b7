"""`maniskill:TASK`: the real package on a CPU, where it is installed; several environments on a stand-in.

The real tasks ask for a Vulkan device, to make materials that are never drawn: without one, the tests
replace the materials. ManiSkill steps several environments on a GPU alone. `Points` has the members
and signatures of its `BaseEnv` (ManiSkill 3.0.1): a step restarts nothing, `reset` restarts the rows
of `env_idx`, and `elapsed_steps` may be written to.
"""

from importlib import import_module
from importlib.util import find_spec

import gymnasium
import pytest
import torch

from canter.core.registry import UserError
from canter.core.specs import TrainingProgress
from canter.envs import EnvConfig
from canter.envs.robots.adapter import ManagerEnv
from canter.envs.robots.maniskill import ManiSkillTask

REAL = pytest.mark.skipif(find_spec("mani_skill") is None, reason="needs pip install mani_skill")
START = TrainingProgress(iteration=0, env_steps=0, fraction=0.0)


class Points:
    """N points on a line, moved by their actions; success beyond 2, failure beyond -2."""

    single_action_space = gymnasium.spaces.Box(-1, 1, (1,))
    device = torch.device("cpu")
    control_freq = 20

    def __init__(self, num_envs):
        self.num_envs = num_envs
        self.elapsed_steps = torch.zeros(num_envs, dtype=torch.int32)
        self.place = torch.zeros(num_envs, 1)
        self.seeds = []

    def reset(self, seed=None, options=None):
        self.seeds.append(seed)
        rows = (options or {}).get("env_idx", torch.arange(self.num_envs))
        self.elapsed_steps[rows] = 0
        self.place[rows] = 0.0
        return self.place.clone(), {"reconfigure": False}

    def step(self, action):
        self.place += action.clamp(-1, 1)
        self.elapsed_steps += 1
        success = self.place[:, 0] >= 2
        fail = self.place[:, 0] <= -2
        info = {"elapsed_steps": self.elapsed_steps.clone(), "success": success, "fail": fail}
        never = torch.zeros(self.num_envs, dtype=torch.bool)
        return self.place.clone(), self.place[:, 0].double(), success | fail, never, info

    def close(self):
        pass


def make(num_envs=3, limit=3):
    return ManagerEnv(
        ManiSkillTask(Points(num_envs), limit), "maniskill:Points", resets_itself=False, final_obs="separate"
    )


def test_ends_and_last_observations_are_exact():
    env = make()
    env.reset(0)
    action = torch.tensor([[1.0], [-1.0], [0.0]])
    env.step(action)
    step = env.step(action)
    assert step.terminated.tolist() == [True, True, False] and not step.truncated.any()
    assert step.final_obs["policy"][:, 0].tolist() == [2, -2, 0] and step.obs["policy"][:, 0].tolist() == [0, 0, 0]
    assert step.reward.tolist() == [2, -2, 0] and step.reward.dtype == torch.float32
    assert {name: value.item() for name, value in step.metrics.items()} == {"success": 0.5, "fail": 0.5}
    step = env.step(action)
    assert step.truncated.tolist() == [False, False, True] and not step.terminated.any()
    assert step.final_obs["policy"][:, 0].tolist() == [1, -1, 0] and step.obs["policy"][:, 0].tolist() == [1, -1, 0]
    assert env.spec.final_obs == "separate" and env.spec.truncates


def test_a_success_at_the_time_limit_is_a_termination():
    env = make(limit=2)
    env.reset(0)
    env.step(torch.ones(3, 1))
    step = env.step(torch.ones(3, 1))
    assert step.terminated.all() and not step.truncated.any()


def test_episodes_of_a_training_begin_at_random_ages():
    env = make(num_envs=64, limit=50)
    env.reset(0)
    env.set_progress(START)
    assert len(env.env.episode_length_buf.unique()) > 5
    assert env.env.env.seeds == [0, 0] and env.env.step_dt == 0.05


def test_a_reset_leaves_torchs_generator_and_other_gpus_alone(monkeypatch):
    env = make()
    before = torch.get_rng_state()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 99)  # an error if the state of all is read
    monkeypatch.setattr(torch.random, "_fork_rng_warned_already", True)
    env.reset(1)
    assert torch.equal(torch.get_rng_state(), before)


class Material:
    """Takes the place of a material where nothing can draw it."""

    def __init__(self, *_, **settings):
        vars(self).update(settings)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None

    def __getitem__(self, index):
        return [1.0, 1.0, 1.0, 1.0][index]


@pytest.fixture
def drawn_or_not(monkeypatch):
    render = import_module("sapien.render")
    try:
        render.RenderMaterial()
    except RuntimeError:
        monkeypatch.setattr(render, "RenderMaterial", Material)
        monkeypatch.setattr(import_module("sapien.pysapien").render, "RenderMaterial", Material)


@REAL
@pytest.mark.filterwarnings("ignore")
def test_the_real_task_ends_as_its_own_loop_does(drawn_or_not):
    # Unless told so, ManiSkill draws new episodes from torch's own generator, which both loops would share.
    settings = {"sim_backend": "physx_cpu", "render_backend": "none", "enhanced_determinism": True}
    options = {"max_episode_steps": 7, **settings}
    env = EnvConfig(id="maniskill:PushCube-v1", num_envs=1, options=options).build("cpu")
    theirs = gymnasium.make("PushCube-v1", num_envs=1, obs_mode="state", **settings).unwrapped
    obs, _ = theirs.reset(seed=3)
    assert torch.equal(env.reset(3)["policy"], obs)
    generator = torch.Generator().manual_seed(0)
    ends = 0
    for _ in range(30):
        action = torch.rand(1, 8, generator=generator) * 2 - 1
        step = env.step(action)
        obs, reward, terminated, _, _ = theirs.step(action)
        truncated = (theirs.elapsed_steps >= 7) & ~terminated
        assert torch.equal(step.reward, reward.float())
        assert torch.equal(step.terminated, terminated) and torch.equal(step.truncated, truncated)
        if bool(terminated | truncated):
            assert torch.equal(step.final_obs["policy"], obs)
            obs, _ = theirs.reset(options={"env_idx": torch.tensor([0])})
            ends += 1
        assert torch.equal(step.obs["policy"], obs)
    assert ends >= 4
    env.close()
    theirs.close()


@REAL
@pytest.mark.filterwarnings("ignore")
def test_seeds_reproduce_all_episodes_of_the_real_task(drawn_or_not):
    env = EnvConfig(id="maniskill:PushCube-v1", num_envs=1, options={"max_episode_steps": 2}).build("cpu")
    runs = []
    for seed in (3, 3, 4):
        env.reset(seed)
        runs.append(torch.cat([env.step(torch.zeros(1, 8)).obs["policy"] for _ in range(6)]))
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    env.close()


@REAL
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("task", "num_envs", "message"),
    [
        ("PickCub-v1", 1, "unknown ManiSkill task 'PickCub-v1': did you mean PickCube-v1"),
        ("PickCube-v1", 2, "env.num_envs=2: on a CPU ManiSkill steps one environment"),
    ],
)
def test_bad_input(task, num_envs, message):
    with pytest.raises(UserError, match=message):
        EnvConfig(id=f"maniskill:{task}", num_envs=num_envs).build("cpu")


@pytest.mark.skipif(find_spec("mani_skill") is not None, reason="it is installed")
def test_maniskill_that_is_not_installed():
    with pytest.raises(ImportError, match="maniskill:PickCube-v1 needs ManiSkill: pip install mani_skill"):
        EnvConfig(id="maniskill:PickCube-v1", num_envs=1).build("cpu")
