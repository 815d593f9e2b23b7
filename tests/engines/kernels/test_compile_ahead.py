"""Kernels compiled before the first iteration: all of them, and nothing else happens."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import canter
from canter.core.storage.validity import flatten
from canter.engines.triton.kernels import has_triton
from canter.training import execution
from canter.training.execution import ExecutionConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() and has_triton()), reason="needs a GPU and Triton"),
]


def config(kind: str) -> canter.TrainConfig:
    network = canter.NetworkConfig(hidden=(512, 256, 128) if kind == "wide" else (32, 16), activation="elu")
    ppo = canter.PPOConfig(horizon=8, epochs=2, num_minibatches=2, model=canter.ModelConfig(policy=network))
    return canter.TrainConfig(
        env=canter.EnvConfig(id="tensor:pendulum", num_envs=64),
        algorithm=canter.SACConfig(batch_size=32, horizon=4, warmup_steps=256) if kind == "sac" else ppo,
        device="cuda",
        execution=ExecutionConfig(mode="graph"),
    )


def trained(settings: canter.TrainConfig, iterations: int = 4) -> dict[str, torch.Tensor]:
    with canter.Trainer(settings) as trainer:
        trainer.learn(iterations)
        return {name: x for name, x in flatten(trainer.algorithm.state_dict()).items() if isinstance(x, torch.Tensor)}


@pytest.mark.parametrize("kind", ["narrow", "wide", "sac"])
def test_weights_do_not_depend_on_it(kind, monkeypatch):
    ahead = trained(config(kind))
    monkeypatch.setattr(execution, "compile_ahead", lambda functions, generators: None)
    plain = trained(config(kind))
    assert all(torch.equal(ahead[name], plain[name]) for name in plain)


FRESH = """
import sys
from triton import knobs
sys.path.insert(0, {tests!r})
from test_compile_ahead import canter, config
compiled = []
knobs.compilation.listener = lambda *, src, cache_hit, **_: compiled.append(cache_hit)
with canter.Trainer(config({kind!r})) as trainer:
    trainer.algorithm.begin_iteration()
    rollout = trainer.programs.collect()
    before = len(compiled)
    trainer.programs.update(rollout)
print(before, len(compiled) - before, sum(compiled))
"""


@pytest.mark.parametrize("kind", ["narrow", "wide"])
def test_no_kernel_of_an_update_is_left_to_be_compiled(kind, tmp_path):
    # A process of its own: kernels that other tests have met are in the memory of this one.
    script = FRESH.format(tests=str(Path(__file__).parent), kind=kind)
    empty = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=empty, capture_output=True, text=True, check=True)
    before, during, cached = map(int, done.stdout.split())
    assert before > 10
    assert (during, cached) == (0, 0)
