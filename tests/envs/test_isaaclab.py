"""`isaaclab:TASK` on a FAKE of Isaac Lab (fake_isaaclab.py): the real one needs a GPU and its own application."""

import sys
from dataclasses import replace

import fake_isaaclab
import gymnasium
import pytest
import torch

from canter.algorithms.ppo import PPOConfig
from canter.compat import task_settings
from canter.config import TrainConfig
from canter.core.specs import TrainingProgress, reset_is_clean
from canter.envs import EnvConfig
from canter.envs.robots import isaaclab
from canter.envs.wrappers import FiniteHorizon
from canter.training.guard import RunFailed
from canter.training.trainer import Trainer

START = TrainingProgress(iteration=0, env_steps=0, fraction=0.0)


@fake_isaaclab.configclass
class RunnerCfg:
    """As Isaac Lab 2.3 writes one."""

    seed: int = 42
    device: str = "cpu"
    num_steps_per_env: int = 8
    max_iterations: int = 2
    empirical_normalization = None
    obs_groups: dict = {"policy": ["policy", "feet/left"], "critic": ["critic"]}  # noqa: RUF012
    clip_actions: float | None = 0.5
    save_interval: int = 50
    experiment_name: str = "points"
    policy: dict = {  # noqa: RUF012
        "class_name": "ActorCritic",
        "init_noise_std": 1.0,
        "actor_hidden_dims": [16],
        "critic_hidden_dims": [16],
        "activation": "elu",
    }
    algorithm: dict = {  # noqa: RUF012
        "class_name": "PPO",
        "value_loss_coef": 1.0,
        "num_learning_epochs": 2,
        "num_mini_batches": 2,
        "learning_rate": 1e-3,
        "schedule": "adaptive",
        "gamma": 0.99,
        "lam": 0.95,
        "entropy_coef": 0.01,
        "desired_kl": 0.01,
        "max_grad_norm": 1.0,
    }


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    before = dict(sys.modules)
    fake_isaaclab.install()
    monkeypatch.setattr(isaaclab, "_app", None)
    fake_isaaclab.register("Isaac-Points-v0", fake_isaaclab.ManagerBasedRLEnvCfg, rsl_rl_cfg_entry_point=RunnerCfg)
    fake_isaaclab.register("Isaac-Points-Final-v0", fake_isaaclab.EnvCfgOf3, rsl_rl_cfg_entry_point=RunnerCfg)
    yield
    for name in fake_isaaclab.modules():
        sys.modules.pop(name, None)
        if name in before:
            sys.modules[name] = before[name]
    for task in ("Isaac-Points-v0", "Isaac-Points-Final-v0"):
        gymnasium.registry.pop(task, None)


def build(task="Isaac-Points-v0", num_envs=6, **options):
    return EnvConfig(id=f"isaaclab:{task}", num_envs=num_envs, options=options).build("cpu")


def step_until_end(env, action=1.0):
    for _ in range(100):
        before = env.env.place.clone()
        step = env.step(torch.full((env.spec.num_envs, 2), action))
        if bool((step.terminated | step.truncated).any()):
            return before, step
    raise AssertionError("no episode ended")


def test_groups_by_name_and_terms_of_a_group_that_is_not_joined():
    env = build()
    assert {name: part.shape for name, part in env.spec.obs.items()} == {
        "policy": (3,),
        "critic": (4,),
        "feet/left": (1,),
        "feet/right": (1,),
    }
    assert env.spec.action.dim == 2 and not env.spec.action.bounded
    assert env.env.cfg.scene.num_envs == 6 and env.env.cfg.sim.device == "cpu"


def test_a_seed_reproduces_the_episodes():
    one, other = build(), build()
    assert torch.equal(one.reset(seed=7)["policy"], other.reset(seed=7)["policy"])
    assert not torch.equal(one.reset(seed=8)["policy"], other.reset(seed=7)["policy"])


def test_without_last_observations_the_spec_says_so():
    env = build()
    env.reset(seed=0)
    _, step = step_until_end(env)
    assert env.spec.final_obs == "unknown" and step.final_obs is None


def test_last_observations_of_isaac_lab_3_are_exact():
    env = build("Isaac-Points-Final-v0")
    assert env.spec.final_obs == "separate"
    env.reset(seed=0)
    before, step = step_until_end(env)
    ended = step.terminated | step.truncated
    # actions are cut off at 0.5, the task's own limit, and a step is a fifth of them
    assert torch.allclose(step.final_obs["critic"][ended, :2], before[ended] + 0.1)
    assert not torch.allclose(step.obs["critic"][ended, :2], before[ended] + 0.1)
    assert build("Isaac-Points-Final-v0", final_obs="approximate").spec.final_obs == "unknown"


def test_a_row_that_fails_at_its_time_limit_is_terminated():
    env = build(reach=0.0)
    env.reset(seed=0)
    env.env.episode_length_buf[:] = 100
    step = env.step(torch.zeros(6, 2))
    assert bool(step.terminated.all()) and not bool(step.truncated.any())


def test_a_finite_horizon_ends_the_task():
    env = build(is_finite_horizon=True)
    env.reset(seed=0)
    env.env.episode_length_buf[:] = 100
    step = env.step(torch.zeros(6, 2))
    assert bool(step.terminated.all()) and env.spec.truncates is False


def test_a_log_is_reported_once_though_it_stays():
    env = build()
    env.reset(seed=0)
    _, step = step_until_end(env)
    assert set(step.metrics) == {"Episode_Reward/stand", "Episode_Termination/time_out", "Curriculum/level"}
    assert all(value.shape == () and value.dtype == torch.float32 for value in step.metrics.values())
    later = env.step(torch.zeros(6, 2))
    assert env.env.extras["log"] and later.metrics == {}


def test_a_deadline_hides_not_that_training_leaves_a_trace():
    env = FiniteHorizon(build())
    assert reset_is_clean(env)
    env.env.set_progress(START)
    assert not reset_is_clean(env)


def test_episodes_have_random_ages_in_training_only():
    env = build(num_envs=64)
    env.reset(seed=0)
    assert env.env.episode_length_buf.unique().tolist() == [0] and env.reset_is_clean
    env.set_progress(START)
    assert len(env.env.episode_length_buf.unique()) > 5
    assert int(env.env.episode_length_buf.max()) < env.env.max_episode_length and not env.reset_is_clean
    ages = env.env.episode_length_buf.clone()
    env.set_progress(START)
    assert torch.equal(ages, env.env.episode_length_buf)
    still = build(random_start=False)
    still.set_progress(START)
    assert still.env.episode_length_buf.unique().tolist() == [0]


def test_counters_levels_and_ages_outlive_a_resume():
    env = build()
    env.reset(seed=0)
    env.set_progress(START)
    step_until_end(env)
    state = env.state_dict()
    other = build()
    other.reset(seed=0)
    other.load_state_dict(state)
    other.reset(seed=1)
    other.set_progress(START)
    assert other.env.common_step_counter == env.env.common_step_counter > 0
    terrain, levels = other.env.scene.terrain, env.env.scene.terrain.terrain_levels
    assert torch.equal(terrain.terrain_levels, levels) and int(levels.max()) > 0
    assert torch.equal(terrain.env_origins[:, 0], levels.float())
    assert torch.equal(other.env.episode_length_buf, state["episode_length"])


def test_a_reset_without_a_loaded_state_starts_new_episodes():
    env = build()
    env.reset(seed=0)
    levels = env.env.scene.terrain.terrain_levels.clone()
    step_until_end(env)
    env.reset(seed=0)
    assert env.env.common_step_counter == 0 and torch.equal(env.env.scene.terrain.terrain_levels, levels)


def test_settings_of_the_task_can_be_changed_by_their_names():
    assert build(**{"sim.dt": 0.01}).env.step_dt == 0.04
    assert build(sim={"dt": 0.01}).env.step_dt == 0.04
    env = EnvConfig(id="isaaclab:Isaac-Points-v0", num_envs=2, reset_steps=7).build("cpu")
    assert env.env.max_episode_length == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reech": 2.0}, r"env.options.reech=2.0: the task has no such setting, did you mean reach\?"),
        ({"sim.dtt": 1}, r"env.options.sim.dtt=1: the task has no such setting, did you mean dt\?"),
        ({"final_obs": "perhaps"}, "env.options.final_obs='perhaps' must be exact or approximate"),
    ],
)
def test_settings_that_are_not_there(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_an_unknown_task_names_the_nearest():
    with pytest.raises(ValueError, match=r"unknown Isaac Lab task 'Isaac-Pionts-v0': did you mean Isaac-Points-v0"):
        build("Isaac-Pionts-v0")


def test_isaac_lab_that_is_not_installed():
    del sys.modules["isaaclab"]
    with pytest.raises(ImportError, match="isaaclab:Isaac-Points-v0 needs Isaac Lab: install Isaac Sim and Isaac Lab"):
        build()


def test_mjlab_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "mjlab", None)
    with pytest.raises(ImportError, match=r'mjlab:Any needs mjlab: pip install "canter\[mjlab\]"'):
        EnvConfig(id="mjlab:Any").build("cpu")


def test_the_tasks_own_settings_are_the_starting_point():
    own = task_settings("isaaclab:Isaac-Points-v0", "cpu")
    assert own is not None and own.config.env == EnvConfig(
        id="isaaclab:Isaac-Points-v0", num_envs=16, options={"clip_actions": 0.5}
    )
    algorithm = own.config.algorithm
    assert isinstance(algorithm, PPOConfig) and algorithm.horizon == 8
    assert algorithm.model.policy.obs_groups == ("policy", "feet/left")
    assert own.config.until.iterations == 2 and own.config.seed == 42 and own.report.dialect == "RSL-RL 3.x"
    assert task_settings("tensor:cartpole", None) is None


def test_observations_may_have_a_limit():
    env = build(clip_observations=0.1)
    seen = [*env.reset(3).values(), *env.step(torch.full((6, 2), 9.0)).obs.values()]
    assert max(float(part.abs().max()) for part in seen) == pytest.approx(0.1)


def trained(**changes):
    own = task_settings("isaaclab:Isaac-Points-v0", "cpu")
    assert own is not None
    return replace(own.config, **changes)


def test_it_trains_and_reports_the_simulators_metrics():
    reports = []
    with Trainer(trained(), reports.append) as trainer:
        trainer.learn()
        assert trainer.env.env.common_step_counter == 2 * 8
    assert trainer.progress.ended_by == "until.iterations"
    assert "env/Episode_Reward/stand" in reports[-1].metrics and "env/Curriculum/level" in reports[-1].metrics


def test_nan_in_the_physics_names_the_environment():
    config: TrainConfig = trained()
    with Trainer(config) as trainer:
        trainer.env.env.nan_row = 3
        with pytest.raises(RunFailed, match="environment 3 returned"):
            trainer.learn()


def test_closing_twice_is_fine_and_leaves_the_application_running():
    env = build()
    env.close()
    env.close()
    assert env.env.is_closed
