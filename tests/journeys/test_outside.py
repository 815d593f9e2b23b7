"""Small things that new users try, from the command line and from Python."""

from pathlib import Path

import pytest

import canter
from canter.core.storage.checkpoint import CheckpointStore

ADMISSION = Path(__file__).parents[2] / "benchmarks" / "journeys" / "environments" / "admission.py"
SHORT = ("--env.reset-steps", "20", "--console", "quiet", "--final-episodes", "2")


@pytest.fixture
def queue(user):
    """A run of the user's own environment."""
    user.writes("admission.py", ADMISSION.read_text())
    flags = ("--allow-import", "admission", "--total-steps", "1024", "--name", "queue")
    user.types("train", "admission:Admission", *flags, *SHORT)
    return user


def test_an_own_environment_keeps_the_name_that_was_typed(queue):
    assert "in admission:Admission," in queue.types("eval", "queue", "--episodes", "2")
    assert "Policy(admission:Admission:" in repr(canter.load("runs/queue"))


def test_a_copied_policy_names_an_environment_that_can_be_made(queue):
    Path("runs/queue/policies/final_actor.safetensors").rename("mine.safetensors")
    flags = ("--episodes", "2", "--env.reset-steps", "20")
    assert "in admission:Admission with" in queue.types(
        "eval", "mine.safetensors", "--allow-import", "admission", *flags
    )


def test_a_copied_policy_of_envpool_is_evaluated_in_envpool(user):
    pytest.importorskip("envpool")
    with canter.Trainer(canter.TrainConfig(env=canter.EnvConfig(id="envpool:CartPole-v1", num_envs=2))) as trainer:
        trainer.algorithm.policy.save("mine.safetensors")
    assert canter.load("mine.safetensors").spec.env_id == "envpool:CartPole-v1"
    assert "in envpool:CartPole-v1," in user.types("eval", "mine.safetensors", "--episodes", "2")


def test_a_run_with_the_earlier_name_of_its_environment_resumes(queue, monkeypatch):
    load = CheckpointStore.load_latest

    def earlier(store):
        step, tree = load(store)
        assert tree["made_for"]["env"]["env_id"] == "admission:Admission"
        tree["made_for"]["env"]["env_id"] = "imported/admission.Admission-v0"
        return step, tree

    monkeypatch.setattr(CheckpointStore, "load_latest", earlier)
    assert "after 2,048 steps" in queue.types("resume", "queue", "--total-steps", "2048", *SHORT[2:])


def test_the_hall_of_fame_is_no_run(queue):
    paths = sorted(map(str, Path("runs").iterdir()))
    assert "runs/hall_of_fame" in paths
    queue.types("report", *paths, "--out", "all.html")
    code, text = queue.tries("report", "runs/hall_of_fame")
    assert code == 2 and "the hall of fame has no runs" in text
