"""Classes with RSL-RL's VecEnv interface as environments: `my_module:make`, as users of Genesis write them.

`Points` has the members and signatures of Genesis's example `Go2Env`: it restarts ended environments
within a step, and marks time limits as float numbers in `extras["time_outs"]`. The last test drives
the real simulator, if it is installed.
"""

from importlib.util import find_spec

import pytest
import torch

from canter.algorithms.ppo import PPOConfig
from canter.config import TrainConfig
from canter.core.registry import UserError
from canter.core.specs import TrainingProgress
from canter.envs import EnvConfig
from canter.envs.imports import allow_import
from canter.envs.robots.adapter import ManagerEnv
from canter.training.trainer import Trainer

LIMIT = 5


class Points:
    """N points on a line, moved by their actions; beyond 2 an episode fails."""

    num_actions = 1
    max_episode_length = LIMIT

    def __init__(self, num_envs, device="cpu", *, generation=5, keeps_final_obs=False):
        self.num_envs = num_envs
        self.device = torch.device(device)
        self.generation = generation
        self.keeps_final_obs = keeps_final_obs
        self.place = torch.zeros(num_envs, 1)
        self.episode_length_buf = torch.zeros(num_envs, dtype=torch.int32)
        self.extras = {}
        self.reset()

    def get_observations(self):
        if self.generation == 1:
            return self.place.clone()
        if self.generation == 2:
            return self.place.clone(), {"observations": {"critic": 2 * self.place}}
        return {"policy": self.place.clone(), "critic": 2 * self.place}

    def get_privileged_observations(self):
        return 2 * self.place

    def reset(self):
        self._restart(torch.ones(self.num_envs, dtype=torch.bool))
        return self.get_observations()

    def _restart(self, rows):
        self.place = torch.where(rows[:, None], torch.rand(self.num_envs, 1), self.place)
        self.episode_length_buf[rows] = 0

    def step(self, actions):
        self.place = self.place + actions
        self.episode_length_buf += 1
        late = self.episode_length_buf >= LIMIT
        done = late | (self.place[:, 0] > 2)
        reward = self.place[:, 0].double()
        self.extras["time_outs"] = (late & (self.place[:, 0] <= 2)).float()
        if self.keeps_final_obs:
            self.extras["final_obs"] = self.get_observations()
        self.extras["episode"] = {"rew_place": reward.mean()}
        self._restart(done)
        if self.generation == 1:
            return self.place.clone(), 2 * self.place, reward, done.long(), self.extras
        if self.generation == 2:
            obs, more = self.get_observations()
            return obs, reward, done.long(), self.extras | more
        return self.get_observations(), reward, done, self.extras


def too_few(num_envs, device):
    return Points(num_envs - 1, device)


def elsewhere(num_envs, device):
    env = Points(num_envs)
    env.device = torch.device("meta")
    return env


def make(name="Points", num_envs=3, **options):
    allow_import(__name__)
    return EnvConfig(id=f"{__name__}:{name}", num_envs=num_envs, options=options).build("cpu")


@pytest.mark.parametrize("generation", [1, 2, 5])
def test_time_limits_are_truncations_and_failures_terminations(generation):
    env = make(generation=generation)
    assert isinstance(env, ManagerEnv) and env.spec.env_id == f"{__name__}:Points" and env.spec.action.dim == 1
    obs = env.reset(seed=0)
    assert torch.equal(obs["critic"], 2 * obs["policy"])
    for _ in range(LIMIT - 1):
        step = env.step(torch.tensor([[0.0], [-1.0], [0.0]]))
        assert not (step.terminated | step.truncated).any()
    step = env.step(torch.tensor([[0.0], [0.0], [3.0]]))
    assert step.truncated.tolist() == [True, True, False] and step.terminated.tolist() == [False, False, True]
    assert step.reward.dtype == torch.float32 and torch.equal(step.obs["critic"], 2 * step.obs["policy"])
    assert step.metrics["rew_place"] == pytest.approx(float(step.reward.mean()))


def test_final_observations_are_exact_if_the_class_keeps_them_and_unknown_if_not():
    env = make()
    assert env.spec.final_obs == "unknown"
    env.reset(seed=0)
    assert env.step(torch.zeros(3, 1)).final_obs is None
    env = make(keeps_final_obs=True)
    assert env.spec.final_obs == "separate"
    last = env.reset(seed=0)["policy"]
    for _ in range(LIMIT):
        step = env.step(torch.full((3, 1), 0.1))
        last = last + 0.1
    assert step.truncated.all() and torch.allclose(step.final_obs["policy"], last)
    assert torch.equal(step.final_obs["critic"], 2 * step.final_obs["policy"])
    assert not torch.allclose(step.obs["policy"], last)


def test_a_seed_reproduces_all_episodes():
    def play(seed):
        env = make()
        first = env.reset(seed=seed)["policy"]
        return torch.stack([first, *(env.step(torch.zeros(3, 1)).obs["policy"] for _ in range(12))])

    assert torch.equal(play(3), play(3)) and not torch.equal(play(3), play(4))


def test_it_trains_from_random_ages_and_saves_them():
    allow_import(__name__)
    env = EnvConfig(id=f"{__name__}:Points", num_envs=64)
    with Trainer(TrainConfig(env=env, algorithm=PPOConfig(horizon=4), total_steps=64 * 4)) as trainer:
        trainer.learn()
        ages = trainer.env.state_dict()["episode_length"]
    fresh = EnvConfig(id=f"{__name__}:Points", num_envs=64).build("cpu")
    fresh.reset(seed=0)
    fresh.set_progress(TrainingProgress(iteration=0, env_steps=0, fraction=0.0))
    assert len(fresh.env.episode_length_buf.unique()) > 1 and len(ages.unique()) > 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("too_few", "too_few made 2 environments, not the 3 of env.num_envs: pass it on"),
        ("elsewhere", "elsewhere is on meta, the run on cpu: set --device meta, or make it on cpu"),
    ],
)
def test_bad_factories(name, message):
    with pytest.raises(UserError, match=message):
        make(name)


class Ball:
    """N balls of Genesis that forces move along x; beyond 0.2 m an episode fails."""

    num_actions = 1
    max_episode_length = LIMIT

    def __init__(self, num_envs, device):
        import genesis as gs  # pyright: ignore[reportMissingImports]

        if not gs._initialized:
            gs.init(backend=gs.cpu, logging_level="error")
        self.num_envs = num_envs
        self.device = gs.device
        self.scene = gs.Scene(sim_options=gs.options.SimOptions(dt=0.02, gravity=(0, 0, 0)), show_viewer=False)
        self.ball = self.scene.add_entity(gs.morphs.Sphere(radius=0.1, pos=(0, 0, 1)))
        self.scene.build(n_envs=num_envs)
        self.start = self.ball.get_qpos().clone()
        self.episode_length_buf = torch.zeros(num_envs, dtype=torch.int32)
        self.extras = {}

    def get_observations(self):
        x = torch.cat([self.ball.get_pos()[:, :1], self.ball.get_vel()[:, :1]], -1)
        return {"policy": x.clone()}

    def reset(self):
        self._restart(torch.arange(self.num_envs))
        return self.get_observations()

    def _restart(self, rows):
        if len(rows):
            self.ball.set_qpos(self.start[rows], envs_idx=rows, zero_velocity=True)
            self.episode_length_buf[rows] = 0

    def step(self, actions):
        self.ball.control_dofs_force(1000 * actions, [0])
        self.scene.step()
        self.episode_length_buf += 1
        obs = self.get_observations()
        late = self.episode_length_buf >= LIMIT
        failed = obs["policy"][:, 0] > 0.2
        self.extras = {"time_outs": late & ~failed, "final_obs": obs}
        self._restart((late | failed).nonzero().squeeze(-1))
        return self.get_observations(), -obs["policy"][:, 0], late | failed, self.extras


@pytest.mark.skipif(find_spec("genesis") is None, reason="needs pip install genesis-world")
@pytest.mark.filterwarnings("ignore")
def test_a_scene_of_genesis_ends_exactly():
    env = make("Ball")
    assert env.spec.final_obs == "separate" and env.spec.obs["policy"].shape == (2,)
    first = env.reset(seed=0)["policy"].clone()
    force = torch.tensor([[0.0], [1.0], [-1.0]])
    ends = []
    for _ in range(LIMIT):
        step = env.step(force)
        ends.append((step.terminated | step.truncated).tolist())
        ended = step.terminated | step.truncated
        assert torch.allclose(step.obs["policy"][ended], first[ended]), "a new episode"
        assert torch.allclose(step.reward, -step.final_obs["policy"][:, 0])
    assert ends[-1][0] and ends[-1][2] and any(row[1] for row in ends[:-1]), ends
    assert step.truncated[0] and step.truncated[2] and step.final_obs["policy"][2, 0] < 0
