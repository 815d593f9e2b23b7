"""SAC in a run folder: log, resume after kill -9, play, evaluation, export, and the loop that knows no algorithm."""

import json
import math
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gymnasium
import pytest
import torch

import canter
from canter.algorithms.sac import SACConfig
from canter.app.cli import main
from canter.config import TrainConfig
from canter.config.presets import name_for, preset_for, presets
from canter.core.data.replay import ReplayConfig
from canter.core.storage.checkpoint import load_checkpoint
from canter.core.storage.tree import encode
from canter.core.struct import maybe_any
from canter.envs import EnvConfig
from canter.nn.network import NetworkConfig
from canter.nn.stack import CriticConfig
from canter.runs.run_folder import CheckpointConfig, RunFolder
from canter.training.execution import GraphPerStage, time_updates
from canter.training.trainer import Trainer

NETWORK = NetworkConfig(hidden=(8,), activation="relu", init="default", normalize_obs=False)
CONFIG = TrainConfig(
    env=EnvConfig(id="tensor:pendulum", num_envs=16, options={"max_episode_steps": 20}),
    total_steps=16_000,
    algorithm=SACConfig(
        horizon=4,
        updates_per_step=0.25,
        batch_size=16,
        warmup_steps=512,
        policy=NETWORK,
        critic=CriticConfig(hidden=(8,)),
        replay=ReplayConfig(capacity=2048),
    ),
    checkpoints=CheckpointConfig(save_every=2),
)


def rows(path):
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if not k.startswith("time/") and k not in ("seconds", "wall_time")}
        for line in lines
    ]


def train(path, config=CONFIG):
    with Trainer(config, folder=RunFolder(path, config.checkpoints)) as trainer:
        trainer.learn()
        return trainer


def newest(path):
    store = RunFolder(path).store
    return store.steps()[-1], load_checkpoint(store.path(store.steps()[-1]))


def test_operations_left_out_on_a_cpu_had_no_effect(tmp_path, monkeypatch):
    config = replace(CONFIG, total_steps=2_000)
    left_out = train(tmp_path / "short", config).algorithm.state_dict()
    monkeypatch.setattr(maybe_any, "kernels", [])
    assert encode(train(tmp_path / "long", config).algorithm.state_dict()) == encode(left_out)
    assert rows(tmp_path / "short") == rows(tmp_path / "long")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the folder of a run that was never stopped, and its trainer."""
    path = tmp_path_factory.mktemp("sac") / "whole"
    return path, train(path)


def test_rows_and_checkpoints_come_by_steps_and_not_by_update(whole):
    path, trainer = whole
    logged = rows(path)
    assert trainer.algorithm.iterations_per_tick == 16  # a thousand steps of 16 environments, 4 steps an iteration
    assert [row["env_steps"] for row in logged[:3]] == [1024, 2048, 3072]
    assert logged[-1]["env_steps"] == 16_000 and logged[-1]["minibatch_updates"] == 250 - 7
    assert RunFolder(path).store.steps() == [192, 224, 250]
    assert logged[-1]["replay/rows"] == 2048


CHILD = """
import os, signal, sys
sys.path[:0] = [{tests!r}]
import test_sac_runs as runs
from canter.training.trainer import Trainer
from canter.runs.run_folder import RunFolder
def die(report):
    if report.env_steps >= {kill}:
        os.kill(os.getpid(), signal.SIGKILL)
with Trainer(runs.CONFIG, die, folder=RunFolder({path!r}, runs.CONFIG.checkpoints)) as trainer:
    trainer.learn()
"""


def test_after_kill_9_the_run_ends_with_the_bits_of_one_that_was_never_stopped(whole, tmp_path):
    whole, _ = whole
    killed = tmp_path / "killed"
    script = CHILD.format(tests=str(Path(__file__).parent), path=str(killed), kill=8_000)
    died = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=300)
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    train(killed)
    assert rows(whole) == rows(killed)
    (_, one), (_, other) = newest(whole), newest(killed)
    assert len(one["algorithm"]["replay"]["tables"]["reward"]) == 16 * 129  # the ring is there, and full
    assert encode(one["algorithm"]) == encode(other["algorithm"])


def test_a_run_without_its_ring_continues_and_says_so(tmp_path, caplog):
    config = replace(
        CONFIG, total_steps=4_000, algorithm=replace(CONFIG.algorithm, replay=ReplayConfig(capacity=2048, save=False))
    )
    with Trainer(config, folder=RunFolder(tmp_path / "run", config.checkpoints)) as trainer:
        trainer.learn(30)
        updates = trainer.algorithm.updates
        assert "left out of checkpoints (replay.save=false)" in trainer.algorithm.about()["replay"]
    sizes = [file.stat().st_size for file in (tmp_path / "run" / "checkpoints").rglob("tensors.safetensors")]
    assert max(sizes) < 40_000 and updates == 23
    with Trainer(config, folder=RunFolder(tmp_path / "run", config.checkpoints)) as trainer:
        assert "the policy collects 512 transitions before learning goes on" in caplog.text
        trainer.learn(7)
        assert trainer.algorithm.updates == updates
        trainer.learn()
    assert trainer.algorithm.updates > updates and trainer.progress.env_steps == 4_032


def test_commands_take_a_run_of_sac(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = "--algorithm.warmup-steps 100 --algorithm.policy.hidden 8 --algorithm.critic.hidden 8 --console quiet"
    flags += " --num-envs 8 --env.options.max_episode_steps 10"
    main(f"train tensor:pendulum --algorithm sac --total-steps 416 --name a {flags}".split())
    out = capsys.readouterr().out
    assert "Training SAC on tensor:pendulum with the preset Pendulum-sac" in out
    assert "then 32 updates on 256 replayed transitions each; the first 100 steps are random" in out
    assert "replay: 20,000 transitions, 1 MB on cpu, saved in checkpoints" in out
    main(["eval", "a", "--episodes", "2"])
    main(["report", "a"])
    settings = (tmp_path / "runs" / "a" / "config.yaml").read_text()
    assert re.search(r"algorithm:\n  kind: sac\n", settings) and "warmup_steps: 100" in settings
    page = next((tmp_path / "runs" / "a").glob("*.html")).read_text()
    assert "Critic loss" in page and "Temperature" in page
    main(["resume", "a", "--total-steps", "480", "--console", "quiet"])
    assert rows(tmp_path / "runs" / "a")[-1]["env_steps"] == 480


@pytest.mark.parametrize("policy", ["plain", pytest.param("large", marks=pytest.mark.long)])
def test_a_policy_in_a_file_acts_as_the_one_that_was_trained_and_is_exported(policy, tmp_path):
    network = NETWORK
    if policy == "large":
        network = canter.StackNetworkConfig(hidden=(8,), blocks=1, norm="batch", input_norm="batch", output_norm="rms")
    config = replace(CONFIG, total_steps=2_000, algorithm=replace(CONFIG.algorithm, policy=network))
    trainer = train(tmp_path / "run", config)
    obs = {"policy": torch.randn(64, 3)}
    expected, _ = trainer.algorithm.policy.act(obs)
    loaded = canter.load_policy(tmp_path / "run" / "policies" / "final_actor.safetensors")
    assert torch.equal(loaded.act(obs)[0], expected)
    for format in ("torch", "onnx"):
        pytest.importorskip("onnxruntime")
        assert canter.export_policy(loaded, tmp_path / f"policy.{format}", format, obs).max_difference <= 1e-5


class Unbounded(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Box(-math.inf, math.inf, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.uniform(-1, 1, 2).astype("float32"), {}

    def step(self, action):
        return self.np_random.uniform(-1, 1, 2).astype("float32"), 0.5, False, False, {}


@pytest.mark.parametrize(
    ("env_id", "words"),
    [
        (
            "CartPole-v1",
            "sac needs continuous actions, and those of CartPole-v1 are Discrete(n=2); use --algorithm ppo",
        ),
        ("Unbounded-v0", "component 0 of Unbounded-v0 has low=-inf, high=inf: bound the action space to the range"),
    ],
)
def test_actions_that_it_cannot_learn_are_refused_before_anything_is_trained(env_id, words, tmp_path, capsys):
    if env_id not in gymnasium.registry:
        gymnasium.register(env_id, Unbounded, max_episode_steps=20)
    with pytest.raises(SystemExit):
        main(["train", env_id, "--algorithm", "sac", "--run-dir", str(tmp_path)])
    assert words in capsys.readouterr().err
    assert not [*tmp_path.rglob("metrics.jsonl")]


def test_presets_are_plain_on_a_cpu_and_large_on_a_gpu():
    assert name_for("HalfCheetah-v5", "sac") == "HalfCheetah-sac"
    assert name_for("HalfCheetah-v5", "sac", "cuda:0") == "HalfCheetah-sac-large"
    assert name_for("MyTask-v3", "sac") == "sac" and name_for("MyTask-v3") is None
    assert preset_for("MyTask-v3", "sac").env.id == "MyTask-v3"
    for name in presets:
        if name.endswith("large") and "sac" in name:
            assert presets[name].device == "cuda" and presets[name].algorithm.critic.atoms == 101


def test_each_stage_of_an_algorithm_has_its_own_graph():
    class Turns(canter.Algorithm):
        stage = 0

    algorithm, made = Turns(), []

    def make():
        made.append(algorithm.stage)
        return lambda number, stage=algorithm.stage: (stage, number)

    graphs = GraphPerStage(algorithm, make)
    seen = []
    for number in range(4):
        algorithm.stage = number % 2
        seen.append(graphs(number))
    assert seen == [(0, 0), (1, 1), (0, 2), (1, 3)] and made == [0, 1]


def test_threads_are_measured_with_updates_that_learn():
    with Trainer(replace(CONFIG, total_steps=10_000)) as trainer:
        seconds = time_updates(trainer.collector, [1], repeats=1, warmup=512)
        assert trainer.algorithm.stage.learns and trainer.algorithm.replay.count >= 512 and seconds[1] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["quadrotor-sac", "quadrotor-sac-large"])
def test_graphs_learn_what_eager_execution_learns(name):
    preset = presets[name]
    algorithm = replace(preset.algorithm, warmup_steps=2048, batch_size=256, replay=ReplayConfig(capacity=20_000))
    states = []
    for mode in ("eager", "graph"):
        config = replace(
            preset,
            env=replace(preset.env, num_envs=64),
            device="cuda",
            total_steps=64 * 4 * 60,
            algorithm=algorithm,
            execution=replace(preset.execution, mode=mode),
        )
        with Trainer(config) as trainer:
            trainer.learn(40)
            states.append(encode(trainer.algorithm.state_dict()))
    assert states[0] == states[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("name", ["quadrotor-sac", "quadrotor-sac-large"])
def test_an_iteration_never_waits_for_the_gpu(name):
    from canter.envs.tensor import tensor_envs
    from canter.training.collector import Collector

    env = tensor_envs["quadrotor"](64, "cuda")
    config = replace(presets[name].algorithm, warmup_steps=128, replay=ReplayConfig(capacity=20_000))
    algorithm = config.build(env.spec, seed=0)
    collector = Collector(env, algorithm, seed=0)
    for _ in range(6):
        algorithm.begin_iteration()
        algorithm.update(collector.collect())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        algorithm.begin_iteration()
        metrics = algorithm.update(collector.collect())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.isfinite(value) for value in metrics.values())
