"""mjlab itself, on a CPU with 16 environments: `make test-mjlab` installs it and runs this; elsewhere it is skipped.

The task is mjlab's smallest, a pole on a cart, with episodes cut short.
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rerun import rerun

pytest.importorskip("mjlab", reason="mjlab is not installed: make test-mjlab")

from canter.compat import task_settings
from canter.core.specs import TrainingProgress
from canter.envs import EnvConfig
from canter.envs.robots import replacements as physics
from canter.envs.robots.captured import CapturedStep
from canter.envs.robots.mjlab import attach_metadata, onnx_metadata, tasks
from canter.play.player import Player
from canter.play.video import CannotRender, ViewerEnv, play_in_viewer, viewer_env_config
from canter.runs.run_folder import RunFolder
from canter.training.guard import RunFailed
from canter.training.trainer import Trainer

pytestmark = pytest.mark.filterwarnings("ignore")  # of mjlab's own packages

TASK = "Mjlab-Cartpole-Balance"
HORIZON, ITERATIONS = 4, 8
FLAGS = ["--num-envs", "16", "--until.iterations", ITERATIONS, "--algorithm.horizon", HORIZON, "--env.reset-steps", 10]
START = TrainingProgress(iteration=0, env_steps=0, fraction=0.0)


@pytest.fixture(autouse=True)
def without_pictures(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "disable")
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")


def canter(folder, *arguments):
    command = [sys.executable, "-m", "canter", *map(str, arguments)]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finished(process):
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output[-3000:]
    return output


def build(**options):
    return EnvConfig(id=f"mjlab:{TASK}", num_envs=4, options=options).build("cpu")


def test_it_trains_is_killed_resumes_plays_and_exports(tmp_path):
    run = tmp_path / "runs" / "a"
    process = canter(tmp_path, "train", f"mjlab:{TASK}", *FLAGS, "--name", "a", "--checkpoints.save-every", 1)
    deadline = time.monotonic() + 300
    while not (run.exists() and RunFolder(run).store.steps()) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    _, tree = RunFolder(run).store.load_latest()
    counter = tree["collector"]["env"]["common_step_counter"]
    assert 0 < counter < HORIZON * ITERATIONS, "it was to be killed before the end"

    output = finished(canter(tmp_path, "resume", "a"))
    assert "all episodes restart" in output and "Training ended by until.iterations" in output
    _, tree = RunFolder(run).store.load_latest()
    assert tree["collector"]["env"]["common_step_counter"] == HORIZON * ITERATIONS

    assert "episode 1: return" in finished(canter(tmp_path, "play", "a", "--episodes", 1))
    watched = finished(canter(tmp_path, "play", "a", "--viewer", "viser", "--episodes", 2))
    assert "listening" in watched and "episode 2: return" in watched
    endless = canter(tmp_path, "play", "a", "--viewer", "viser")
    assert all(any(words in line for line in endless.stdout) for words in ("listening", "Setting seed")), "first reset"
    endless.send_signal(signal.SIGINT)
    assert "Shutting down viewer" in finished(endless)
    assert "the same actions on" in finished(canter(tmp_path, "export", "a", "--observations", 32))
    assert {path.suffix for path in (run / "exports").iterdir()} >= {".onnx", ".pt2"}


class Sees:
    """A policy that does nothing and remembers what it saw."""

    def initial_state(self, num_envs):
        return ()

    def act(self, obs, state, reset, *, deterministic, generator):
        self.obs, self.reset = obs["actor"].clone(), reset.clone()
        return torch.zeros(4, 1), state


def test_an_episode_that_a_viewer_restarts_starts_over():
    env, policy = build(), Sees()
    stage = ViewerEnv(Player(policy, env), num_games=None, max_steps=8)
    for _ in range(3):
        stage.step(stage.act(stage.get_observations()))
    stage.unwrapped.reset(env_ids=torch.tensor([2]))
    before = policy.obs
    stage.step(None)
    assert policy.reset.tolist() == [False, False, True, False]
    assert torch.equal(stage.counter.length, torch.tensor([4, 4, 1, 4])), "what was played before it is forgotten"
    assert not torch.allclose(policy.obs[2], before[2], atol=1e-3)
    stage.reset()
    stage.step(None)
    assert bool(policy.reset.all()) and not stage.done
    for _ in range(5):
        stage.step(None)
    assert stage.done and stage.steps == 8


def test_missing_parts_of_a_viewer_are_named(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("mjlab.viewer")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "viser", None)
    with pytest.raises(ImportError, match="--viewer viser needs the package viser: pip install viser"):
        play_in_viewer(Player(Sees(), build()), "viser")
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    with pytest.raises(CannotRender, match="--viewer native needs a display"):
        viewer_env_config(EnvConfig(id=f"mjlab:{TASK}"), "native")
    monkeypatch.setenv("DISPLAY", ":987")
    with pytest.raises(CannotRender, match=r"--viewer native could not open a window .*--viewer viser shows it"):
        play_in_viewer(Player(Sees(), build()), "native")


def test_an_error_in_a_viewer_is_the_players_own():
    env = build()

    class Fails(Sees):
        def act(self, *given, **named):
            raise ValueError("no action")

    with pytest.raises(ValueError, match="no action"):
        play_in_viewer(Player(Fails(), env), "viser", max_steps=3)


def test_the_task_brings_its_own_settings():
    own = task_settings(f"mjlab:{TASK}", "cpu")
    assert own is not None and own.config.env == EnvConfig(id=f"mjlab:{TASK}", num_envs=16)
    algorithm = own.config.algorithm
    assert (algorithm.horizon, algorithm.model.policy.hidden) == (32, (64, 64))
    assert algorithm.model.policy.obs_groups == ("actor",) and algorithm.model.critic.obs_groups == ("critic",)
    assert own.config.until.iterations == 500


@pytest.mark.parametrize("task", tasks())
def test_every_registered_tasks_settings_can_be_imported_or_are_refused_with_a_reason(task):
    from canter.compat import ImportRefused

    try:
        own = task_settings(f"mjlab:{task}", "cpu")
    except ImportRefused as refused:
        assert "SpatialSoftmaxCNNModel" in str(refused)  # networks for cameras are mjlab's own
    else:
        assert own is not None and own.config.algorithm.horizon in (24, 32)


def test_last_observations_are_those_that_a_longer_episode_shows():
    short, long = build(final_obs="exact", max_episode_steps=3), build(final_obs="exact")
    assert short.spec.final_obs == "separate" and build().spec.final_obs == "unknown"
    short.reset(seed=5), long.reset(seed=5)
    for _ in range(3):
        action = torch.ones(4, 1)
        ended, going = short.step(action), long.step(action)
    assert bool(ended.truncated.all()) and not bool(going.truncated.any())
    assert torch.equal(ended.final_obs["actor"], going.obs["actor"])
    assert not torch.equal(ended.obs["actor"], going.obs["actor"])
    assert short.step(action).final_obs is None
    assert "Episode_Termination/time_out" in ended.metrics


def test_a_seed_reproduces_the_steps_and_counters_start_at_0():
    env = build()
    first = env.reset(seed=3)["actor"].clone()
    one = env.step(torch.ones(4, 1)).obs["actor"].clone()
    assert torch.equal(env.reset(seed=3)["actor"], first) and env.env.common_step_counter == 0
    assert torch.equal(env.step(torch.ones(4, 1)).obs["actor"], one)


def test_actions_are_cut_off_and_settings_changed():
    env = build(clip_actions=0.25, **{"rewards.smooth_reward.weight": 3.0})
    env.reset(seed=0)
    env.step(torch.full((4, 1), 7.0))
    assert env.env.action_manager.action.unique().tolist() == [0.25]
    assert env.env.reward_manager.get_term_cfg("smooth_reward").weight == 3.0


def test_episodes_have_random_ages_in_training():
    env = build()
    env.reset(seed=0)
    env.set_progress(START)
    assert len(env.env.episode_length_buf.unique()) > 1


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        (
            "Mjlab-Cartpole-Ballance",
            {},
            "unknown mjlab task 'Mjlab-Cartpole-Ballance': did you mean Mjlab-Cartpole-Balance",
        ),
        (TASK, {"decimaton": 2}, r"env.options.decimaton=2: the task has no such setting, did you mean decimation"),
        (TASK, {"final_obs": "lost"}, "env.options.final_obs='lost' must be exact or approximate"),
    ],
)
def test_bad_input(task, options, message):
    with pytest.raises(ValueError, match=message):
        EnvConfig(id=f"mjlab:{task}", num_envs=2, options=options).build("cpu")


def test_nan_in_the_physics_names_the_environment():
    own = task_settings(f"mjlab:{TASK}", "cpu")
    assert own is not None
    with Trainer(replace(own.config, algorithm=replace(own.config.algorithm, horizon=4))) as trainer:
        trainer.env.env.sim.data.qpos[3] = torch.nan
        with pytest.raises(RunFailed, match="environment 3 returned"):
            trainer.learn(1)


def test_onnx_files_of_a_robot_get_mjlabs_metadata(tmp_path):
    onnx = pytest.importorskip("onnx")
    robot = EnvConfig(id="mjlab:Mjlab-Velocity-Flat-Unitree-Go1", num_envs=1).build("cpu")
    metadata = onnx_metadata(robot, "runs/a")
    assert len(metadata["joint_names"]) == len(metadata["action_scale"]) == robot.spec.action.dim == 12
    assert metadata["observation_names"][-1] == "command" and onnx_metadata(build(), "runs/a") == {}
    graph, file = onnx.helper.make_graph([], "nothing", [], []), tmp_path / "a.onnx"
    onnx.save(onnx.helper.make_model(graph), file)
    attach_metadata(str(file), metadata)
    written = {entry.key: entry.value for entry in onnx.load(file).metadata_props}
    assert written["run_path"] == "runs/a" and written["joint_names"].count(",") == 11


def test_tasks_are_listed(tmp_path):
    assert f"mjlab:{TASK}" in finished(canter(tmp_path, "envs"))


def test_mjlabs_own_trainer_runs_on_canter_by_one_import(tmp_path):
    script = "import canter.compat.rsl_rl.install_shim, sys; from mjlab.scripts.train import main; main()"
    flags = ["--env.scene.num-envs", "4", "--agent.max-iterations", "2", "--agent.num-steps-per-env", "4"]
    flags += ["--agent.logger", "tensorboard", "--gpu-ids", "None", "--agent.save-interval", "1"]
    done = subprocess.run(
        [sys.executable, "-c", script, TASK, *flags], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [path.name for path in Path(tmp_path).rglob("model_*.pt")], "no model was written"


OPTIONS = {"Mjlab-Lift-Cube-Yam": {"commands.lift_height.resampling_time_range": [0.05, 0.3]}}


def steps_of(task, recorded):
    """Return 60 steps with short episodes, and how they were run."""
    options = {"max_episode_steps": 20} | OPTIONS.get(task, {})
    env = EnvConfig(id=f"mjlab:{task}", num_envs=8, options=options).build("cpu")
    if recorded:
        env._step = CapturedStep(env.env, rerun)
    env.reset(seed=0)
    env.set_progress(START)
    noise, steps = torch.Generator().manual_seed(1), []
    for _ in range(60):
        taken = env.step(torch.randn(8, env.spec.action.dim, generator=noise))
        found = {**taken.obs, **taken.metrics, "reward": taken.reward, "ended": taken.terminated | taken.truncated}
        steps.append({name: tensor.clone() for name, tensor in found.items()})
    env.close()
    return steps, env.about()


@pytest.mark.parametrize(
    "task", [TASK, "Mjlab-Velocity-Flat-Unitree-Go1", "Mjlab-Velocity-Flat-Unitree-G1", "Mjlab-Lift-Cube-Yam"]
)
def test_a_step_in_recorded_parts_is_mjlabs_own_to_the_bit(task, monkeypatch):
    """With the stand-in for CUDA graphs; on a GPU `benchmarks/robots/mjlab_captured.py` checks every replay."""
    shortened, rest = [], physics._step_from_forces
    monkeypatch.setattr(physics, "_step_from_forces", lambda *args: shortened.append(1) or rest(*args))
    (eager, _), (replayed, about) = steps_of(task, recorded=False), steps_of(task, recorded=True)
    torch.testing.assert_close(eager, replayed, rtol=0, atol=0, equal_nan=True)
    assert "eagerly" not in about and "rewards" in about
    assert sum(int(step["ended"].sum()) for step in eager) >= 16
    if task == "Mjlab-Lift-Cube-Yam":  # a new command puts the cube somewhere else, after `forward`
        assert "every step of physics computes `forward` again (commands write to the simulation)" in about
    else:
        assert len(shortened) == 59, "all but the first, which follows a reset"
