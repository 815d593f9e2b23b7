"""Planted culprits: a run stops at NaN or infinity, and its black box names the source."""

import math
from dataclasses import dataclass, replace

import pytest
import torch

from canter.algorithms.extension import Extension
from canter.algorithms.ppo import CentralValueConfig, PPOConfig
from canter.algorithms.ppo.rewards import RewardConfig
from canter.app.cli import main
from canter.config import TrainConfig
from canter.core.registry import register
from canter.core.storage.checkpoint import CheckpointStore, load_checkpoint
from canter.envs import EnvConfig
from canter.envs.tensor import Pendulum
from canter.envs.tensor.base import Outcome
from canter.nn.actor_critic import ModelConfig
from canter.nn.network import NetworkConfig
from canter.nn.rnn import RNNConfig
from canter.runs.run_folder import BLACK_BOX, RunFolder
from canter.training.black_box import explain
from canter.training.execution import ExecutionConfig
from canter.training.guard import RunFailed
from canter.training.trainer import Trainer

HORIZON = 8
SMALL = ModelConfig(policy=NetworkConfig(hidden=(8,)))
CONFIG = TrainConfig(
    env=EnvConfig(id="tensor:pendulum", num_envs=4),
    algorithm=PPOConfig(
        horizon=HORIZON, epochs=2, num_minibatches=2, model=ModelConfig(policy=NetworkConfig(hidden=(8,)))
    ),
    total_steps=100_000,
)


class Divides(Pendulum):
    """A reward with a division, by zero in environment `row` at step `at` of all."""

    def __init__(self, row=2, at=21, kind="reward", device="cpu"):
        super().__init__(4, device)
        self.rows = torch.arange(4, device=device)
        self.row, self.at, self.kind = row, at, kind

    def _advance(self, state, action):
        out = super()._advance(state, action)
        bad = (self._step_count == self.at) & (self.rows == self.row)
        distance = torch.where(bad, 0.0, 1.0)
        if self.kind == "reward":
            return Outcome(out.state, out.reward * 0 / distance, out.terminated)
        spoilt = {name: torch.log(distance).view(-1, *[1] * (x.ndim - 1)) + x for name, x in out.state.items()}
        return Outcome(spoilt, out.reward, out.terminated)


def run(tmp_path, config, env=None, prepare=lambda trainer: None, iterations=6):
    """Train until it fails or is done; return the box."""
    try:
        with Trainer(config, env=env, folder=RunFolder(tmp_path, settings="seed: 0\n")) as trainer:
            trainer.learn(2)
            prepare(trainer)
            trainer.learn(iterations)
    except RunFailed as failed:
        return load_checkpoint(tmp_path / BLACK_BOX), failed
    return load_checkpoint(tmp_path / BLACK_BOX), None


@pytest.mark.parametrize(("row", "at"), [(0, 16), (1, 21), (2, 23), (3, 40), (3, 17)])
@pytest.mark.parametrize("kind", ["reward", "state"])
def test_a_division_in_an_environment(kind, row, at, tmp_path):
    box, failed = run(tmp_path, CONFIG, Divides(row, at, kind))
    assert failed is not None
    found = explain(CONFIG, box, Divides(row, at, kind))
    # An observation counts with the step that follows it.
    assert (found.kind, found.env, found.step) == ("environment", row, at if kind == "reward" else at + 1)
    assert found.operation == ("div" if kind == "reward" else "log")
    assert "test_replay.py" in found.place
    assert f"environment {row} returned" in found.text


@pytest.mark.parametrize("engine", ["native", "autograd"])
def test_a_division_with_a_recurrent_policy_and_each_engine(engine, tmp_path):
    memory = NetworkConfig(hidden=(8,), rnn=RNNConfig(cell="lstm", hidden=8) if engine == "autograd" else None)
    config = replace(CONFIG, algorithm=replace(CONFIG.algorithm, model=ModelConfig(policy=memory), sequence_length=4))
    config = replace(config, execution=ExecutionConfig(engine=engine))
    box, failed = run(tmp_path, config, Divides(3, 29))
    assert failed is not None
    found = explain(config, box, Divides(3, 29))
    assert (found.kind, found.env, found.step, found.operation) == ("environment", 3, 29, "div")


def test_a_central_value_network_that_explodes(tmp_path):
    algorithm = replace(CONFIG.algorithm, central_value=CentralValueConfig(epochs=1))
    config = replace(CONFIG, algorithm=algorithm)

    def explode(trainer):
        for parameter in trainer.algorithm.model.critic.parameters():
            parameter.data.sign_().mul_(3e38)

    box, _ = run(tmp_path, config, prepare=explode)
    assert explain(config, box).kind == "update"


def test_an_action_that_follows_from_an_observation_is_not_the_culprit(tmp_path):
    _, failed = run(tmp_path, CONFIG, Divides(1, 18, "state"))
    assert failed.what.startswith("environment 1 returned observation 'policy' component [0] = nan at its step 19")


def test_without_the_environment_it_is_still_named_which_and_when(tmp_path):
    box, _ = run(tmp_path, CONFIG, Divides())
    found = explain(CONFIG, box)
    assert (found.kind, found.env, found.step) == ("environment", 2, 21)


def test_a_replay_returns_the_same_bits(tmp_path):
    box, _ = run(tmp_path, CONFIG, Divides())
    first, second = explain(CONFIG, box, Divides()), explain(CONFIG, box, Divides())
    assert first == second


@register("extension", "root-of-reward")
@dataclass(frozen=True)
class RootConfig:
    """A user's reward that takes the root of what may be negative."""

    row: int = 1

    def build(self, spec, model, generator):
        return Root(self.row)


class Root(Extension):
    def __init__(self, row):
        super().__init__()
        self.row, self.count = row, 0

    def reward(self, rollout):
        sign = torch.ones_like(rollout.reward)
        sign[5, self.row] = -1.0
        return sign.sqrt() + rollout.reward


@pytest.mark.parametrize("log_every", [1, 4])
@pytest.mark.parametrize("row", [0, 3])
def test_a_root_in_a_users_reward(row, log_every, tmp_path, caplog):
    algorithm = replace(CONFIG.algorithm, extensions=(RootConfig(row),))
    config = replace(CONFIG, algorithm=algorithm, log_every=log_every)
    box, failed = run(tmp_path, config)
    assert failed is None, "steps by such gradients are left out, and the run goes on"
    assert "To find the cause: canter explain" in caplog.text
    found = explain(config, box)
    assert (found.kind, found.operation, found.env, found.step) == ("update", "sqrt", row, 5)
    assert "test_replay.py" in found.place


@pytest.mark.parametrize("at", [33, 40, 52, 63], ids=lambda at: f"iteration {at // HORIZON + 1}")
@pytest.mark.parametrize("kind", ["reward", "state"])
def test_a_rollout_that_later_ones_have_overwritten_is_kept(kind, at, tmp_path):
    """The host reads late, as on a GPU: here after iterations 2, 4, 8 and so on."""
    config = replace(CONFIG, log_every=4)

    def late(trainer):
        trainer.collector.tracker.reads_at_once = False

    box, failed = run(tmp_path, config, Divides(2, at, kind), prepare=late, iterations=10)
    step = at if kind == "reward" else at + 1
    assert failed is not None and f"at its step {step}" in failed.what
    assert CheckpointStore(tmp_path / "checkpoints").steps()[-1] == at // HORIZON
    found = explain(config, box)
    assert (found.kind, found.env, found.step) == ("environment", 2, step)


def test_an_overflow_by_the_settings_of_the_reward(tmp_path):
    reward = RewardConfig(scale=3e38, shift=-3.0)
    config = replace(CONFIG, algorithm=replace(CONFIG.algorithm, reward=reward))
    box, _ = run(tmp_path, config)
    found = explain(config, box)
    assert found.kind == "update"
    assert "returns.py" in found.place


@pytest.mark.parametrize(("which", "kind"), [("actor", "policy"), ("critic", "update")])
def test_a_network_that_explodes(which, kind, tmp_path):
    def explode(trainer):
        for parameter in getattr(trainer.algorithm.model, which).parameters():
            parameter.data.sign_().mul_(3e38)

    box, _ = run(tmp_path, CONFIG, prepare=explode)
    found = explain(CONFIG, box)
    assert found.kind == kind
    assert found.operation == {"actor": "addmm", "critic": "mul"}[which]
    assert "canter" in found.place


def test_a_bad_normaliser(tmp_path):
    def spoil(trainer):
        next(m for n, m in trainer.algorithm.model.named_buffers() if n.endswith("mean")).fill_(math.nan)

    box, failed = run(tmp_path, CONFIG, prepare=spoil)
    assert failed is not None
    found = explain(CONFIG, box)
    assert found.kind == "state"
    assert "normalizer" in found.text


def test_from_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(__file__.rpartition("/tests/")[0] + "/benchmarks/faults")
    small = ["--algorithm.horizon=16", "--algorithm.epochs=1", "--algorithm.num-minibatches=1", "--num-envs=2"]
    flags = ["--env.options.kind=obs_nan", "--console=quiet", "--run-dir", str(tmp_path), "--name=run"]
    with pytest.raises(SystemExit):
        main(["--allow-import", "misbehaving", "train", "misbehaving:Misbehaving", *small, *flags])
    capsys.readouterr()
    main(["--allow-import", "misbehaving", "explain", str(tmp_path / "run")])
    out = capsys.readouterr().out
    assert "environment 0 returned observation 'policy' component [1] = nan at its step 400" in out


def test_a_run_without_a_box_is_refused(tmp_path, capsys):
    RunFolder(tmp_path / "run", settings="seed: 0\n").__enter__().__exit__(None, None, None)
    with pytest.raises(SystemExit) as leaving:
        main(["explain", str(tmp_path / "run")])
    assert leaving.value.code == 2
    assert "has no black_box: nothing in this run was NaN or infinite" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("log_every", [1, 4])
@pytest.mark.parametrize("kind", ["reward", "state"])
def test_a_division_inside_a_captured_iteration(kind, log_every, tmp_path, caplog):
    config = replace(CONFIG, device="cuda", log_every=log_every, execution=ExecutionConfig(mode="graph", tf32=False))
    at = 8 * HORIZON + 3  # in the ninth iteration, long after the capture
    box, failed = run(tmp_path, config, Divides(2, at, kind, "cuda"), iterations=20)
    assert "not captured" not in caplog.text
    step = at if kind == "reward" else at + 1
    assert failed is not None
    assert failed.what.startswith("environment 2 returned")
    assert f"at its step {step}" in failed.what
    assert CheckpointStore(tmp_path / "checkpoints").steps()[-1] == 8, "nothing was learned from it"
    assert all(torch.isfinite(x).all() for x in box["algorithm"]["model"].values())
    found = explain(replace(config, device="cpu"), box)
    assert (found.kind, found.env, found.step) == ("environment", 2, step)


def test_random_states_of_a_gpu_are_left_out_on_a_cpu(tmp_path):
    box, failed = run(tmp_path, CONFIG, Divides(2, 8 * HORIZON + 3, "reward"), iterations=20)
    assert failed is not None
    short = torch.zeros(16, dtype=torch.uint8)  # a GPU's is 16 bytes long
    box["algorithm"] |= {name: short for name in ("policy_rng", "shuffle_rng", "extensions_rng")}
    box["random"] = [short for _ in box.get("random", ())]
    found = explain(CONFIG, box)
    assert (found.kind, found.env, found.step) == ("environment", 2, 8 * HORIZON + 3)
