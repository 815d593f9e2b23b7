"""An environment that fails on one rank: all ranks save together what was before its rollout."""

import json
import re

import pytest
import torch
from torchrun import torchrun

from canter.app.cli import main
from canter.core.storage.checkpoint import CheckpointStore
from canter.runs.records import read_record

HORIZON, ITERATIONS, AT = 64, 9, 400
LAST_GOOD = (AT - 1) // HORIZON
"""Iterations that end before step `AT` is taken; the last checkpoint before that is of iteration 4."""
LATE = f'''
import math, os
import gymnasium

class Late(gymnasium.Wrapper):
    """CartPole, until the second environment of rank 1 takes its step {AT}."""
    state_attributes = ("count",)
    made = 0

    def __init__(self, kind="", render_mode=None):
        super().__init__(gymnasium.make("CartPole-v1"))
        self.number, Late.made = Late.made, Late.made + 1
        self.kind, self.count = "" if "MENDED" in os.environ else kind, 0

    def reset(self, *, seed=None, options=None):
        self.count = self.count if seed is None else 0  # the look before a run takes steps too
        return self.env.reset(seed=seed, options=options)

    def step(self, action):
        obs, reward, *rest = self.env.step(action)
        self.count += 1
        bad = self.count == {AT} and os.environ.get("RANK") == "1" and self.number % 2 == 1
        if bad and self.kind == "raise":
            raise ValueError("the robot fell apart")
        if bad and self.kind == "die":
            os._exit(3)
        return obs, math.nan if bad and self.kind == "nan" else reward, *rest
'''
SMALL = [f"--algorithm.horizon={HORIZON}", "--algorithm.epochs=1", "--algorithm.num-minibatches=1", "--num-envs=4"]
SMALL += [f"--until.iterations={ITERATIONS}", "--total-steps=100000", "--console=quiet", "--checkpoints.save-every=4"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("late")
    (folder / "late.py").write_text(LATE)
    return folder


def train(place, kind, *flags, **how):
    own = [f"--env.options.kind={kind}", "--run-dir", place, "--name", kind, *flags]
    return torchrun(2, "-m", "canter", "--allow-import", "late", "train", "late:Late", *SMALL, *own, cwd=place, **how)


@pytest.fixture(scope="module")
def undisturbed(place):
    train(place, "never")
    return place / "never"


def outcome(run):
    """The last checkpoint but for times, and what the log tells but for times."""
    step, tree = CheckpointStore(run / "checkpoints").load_latest()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return step, tree, [{k: v for k, v in row.items() if "time" not in k and k != "seconds"} for row in rows]


RAISED = r"step\(\) raised ValueError: the robot fell apart \(\S+late.py:\d+\)"
WORDS = {
    "raise": rf"environment 3 failed at its step {AT - 1}: {RAISED}",
    "nan": rf"environment 3 returned reward = nan at its step {AT - 1}",
}


@pytest.mark.long
@pytest.mark.parametrize("kind", WORDS)
def test_it_costs_one_rollout_and_the_run_ends_like_another(kind, place, undisturbed, monkeypatch, capsys):
    _, err = train(place, kind, fails=True)
    run = place / kind
    assert err.count("canter: ") == 1 and "Traceback" not in err.partition("torch/distributed")[0], err
    assert re.search(rf"canter: rank 1: {WORDS[kind]}\n", err), err
    assert f"Only that rollout was lost, and nothing was learned from it: {LAST_GOOD} iterations" in err, err
    assert f"Go on with: torchrun --standalone --nproc-per-node 2 -m canter resume {run}\n" in err, err
    assert CheckpointStore(run / "checkpoints").steps()[-1] == LAST_GOOD
    assert "on rank 1:\nTraceback" in (run / "traceback.txt").read_text()
    assert read_record(run)["status"] == "failed" and not (run / "run.lock").exists()

    if kind == "nan":
        capsys.readouterr()
        monkeypatch.syspath_prepend(place)
        main(["--allow-import", "late", "explain", str(run)])
        out = capsys.readouterr().out
        assert f"environment 3 returned reward = nan at its step {AT - 1}\nthe rollout was replayed" in out, out

    monkeypatch.setenv("MENDED", "yes")
    torchrun(2, "-m", "canter", "resume", run, "--console=quiet", cwd=place)
    (step, tree, rows), (last, expected, all_rows) = outcome(run), outcome(undisturbed)
    assert step == last == ITERATIONS and rows == all_rows
    for name, weight in expected["algorithm"]["model"].items():
        assert torch.equal(tree["algorithm"]["model"][name], weight)
    assert str(tree["algorithm"]) == str(expected["algorithm"])
    theirs, others = ([part for part in one["ranks"][0] if "seconds" not in part[0]] for one in (tree, expected))
    assert str(theirs) == str(others), "rank 1 has other episodes"


@pytest.mark.long
def test_a_rank_that_dies_costs_what_came_after_the_last_checkpoint(place):
    _, err = train(place, "die", fails=True)
    assert re.search(r"canter: rank 1 \(process \d+ on \S+\) has gone; it was ", err), err
    assert CheckpointStore(place / "die" / "checkpoints").steps()[-1] == 4


WHEN_READ = """
import math, sys
from canter.core import distributed
from canter.algorithms.ppo import PPOConfig
from canter.config import TrainConfig
from canter.core.distributed.world import world
from canter.envs import EnvConfig
from canter.envs.tensor import CartPole
from canter.runs.run_folder import RunFolder
from canter.core.storage.validity import flatten
from canter.training.guard import RunFailed
from canter.training.trainer import Trainer

class Fails(CartPole):
    def __init__(self, fails):
        super().__init__(4)
        self.fails, self.count = fails and distributed.rank() == 1, 0

    def step(self, action):
        step = super().step(action)
        self.count += 1
        if self.fails and self.count == 37:
            step.obs["policy"][2, 1] = math.nan
        return step

algorithm = PPOConfig(horizon=8, epochs=2, num_minibatches=2)
config = TrainConfig(env=EnvConfig(id="tensor:cartpole", num_envs=8), algorithm=algorithm, log_every=3, total_steps=576)
world.start()

def trainer_of(fails, folder=None):
    trainer = Trainer(config, env=Fails(fails), folder=folder)
    trainer.collector.tracker.reads_at_once = False  # as on a GPU
    return trainer

def state_of(trainer):
    return {name: str(value) for name, value in flatten(trainer.algorithm.state_dict()).items()}

straight = trainer_of(False)
straight.learn(4)
failing = trainer_of(True, RunFolder(sys.argv[1]))
try:
    failing.learn()
    raise SystemExit("it has not failed")
except RunFailed as failed:
    assert "environment 6 returned observation 'policy' component [1] = nan at its step 37" in failed.what, failed.what
    assert failed.rank == 1 and "4 iterations" in failed.kept, failed.kept
    failing.__exit__(type(failed), failed, None)
assert state_of(failing) == state_of(straight)
going_on = trainer_of(False, RunFolder(sys.argv[1]))
assert state_of(going_on) == state_of(straight)
going_on.learn()
assert going_on.progress.iteration == 9

spoilt = Trainer(config, env=Fails(False), folder=RunFolder(sys.argv[1] + "-spoilt"))
spoilt.learn(3)
before, usual = state_of(spoilt), spoilt.algorithm.model.update_statistics

def spoil(*arguments):
    usual(*arguments)
    if distributed.rank() == 1:
        next(spoilt.algorithm.model.parameters()).data.fill_(math.inf)

spoilt.algorithm.model.update_statistics = spoil
try:
    spoilt.learn()
    raise SystemExit("it has not failed")
except RunFailed as failed:
    assert failed.rank == 1 and "in an update" in failed.what and "3 iterations" in failed.kept, failed
assert state_of(spoilt) == before
print("the same")
world.end()
"""


@pytest.mark.long
def test_late_reads_and_corrupted_updates_cost_one_rollout_too(tmp_path):
    (tmp_path / "late.py").write_text(WHEN_READ)
    out, err = torchrun(2, tmp_path / "late.py", tmp_path / "run")
    assert out.count("the same") == 2, out + err
