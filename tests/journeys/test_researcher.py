"""A robotics researcher with a simulator in torch: batched worlds, a critic that sees more, stopping and going on."""

import json

import torch

import canter

SLIDE = '''
from typing import final

import torch

from canter.envs.tensor import Outcome, TensorEnv
from canter.core.specs import Continuous, TensorSpec


@final
class Slide(TensorEnv):
    """Push a mass to the origin over ground whose friction only the critic sees."""

    def __init__(self, num_envs, device="cpu", *, max_episode_steps=50, force=0.1):
        obs = {"policy": TensorSpec((2,)), "critic": TensorSpec((3,))}
        super().__init__(
            "slide", num_envs, device, obs=obs, action=Continuous((-1.0,), (1.0,)), max_episode_steps=max_episode_steps
        )
        self.force = force

    def _sample_state(self):
        return {"body": self._uniform(-1.0, 1.0, 2), "friction": self._uniform(0.0, 0.2, 1)}

    def _advance(self, state, action):
        position, speed = state["body"].unbind(-1)
        speed = (1.0 - state["friction"][:, 0]) * speed + self.force * action[:, 0]
        position = position + 0.1 * speed
        state = {"body": torch.stack((position, speed), -1), "friction": state["friction"]}
        metrics = {"distance": position.abs().mean()}
        return Outcome(state, reward=-position.square(), terminated=position.abs() > 5, metrics=metrics)

    def _observe(self, state):
        return {"policy": state["body"].clone(), "critic": torch.cat((state["body"], state["friction"]), -1)}
'''

SMALL = ("--num-envs", "64", "--algorithm.horizon", "16", "--algorithm.gamma", "0.95")


def weights(run):
    return canter.load(run).actor.state_dict()


def test_from_a_simulator_to_runs_that_stop_resume_and_are_fine_tuned(user):
    user.writes("slide.py", SLIDE)
    assert "arithmetic" in user.types("check", "slide:Slide", "--allow-import", "slide", *SMALL)
    train = ["train", "slide:Slide", "--allow-import", "slide", *SMALL, "--console", "lines"]
    user.types(*train, "--total-steps", "10240", "--name", "whole")
    last = json.loads((user.folder / "runs/whole/metrics.jsonl").read_text().splitlines()[-1])
    assert last["env/distance"] < 1.0 and last["env_steps"] == 10240

    # Stopped half way and gone on with: the same bits.
    user.types(*train, "--total-steps", "5120", "--name", "halves")
    user.types("resume", "halves", "--total-steps", "10240")
    for name, weight in weights("runs/whole").items():
        assert torch.equal(weight, weights("runs/halves")[name]), name

    # What may change does, and is written down; what may not is refused with the reason.
    told = user.types("resume", "halves", "--total-steps", "12288", "--algorithm.optimizer.learning-rate", "1e-4")
    assert "algorithm.optimizer.learning_rate" in told
    assert "learning_rate" in (user.folder / "runs/halves/edits.jsonl").read_text()
    code, told = user.tries("resume", "halves", "--env.num-envs", "128")
    assert code == 2 and "the checkpoint holds what each of them was doing" in told

    # A weaker motor, beginning with what was learned.
    told = user.types(*train, "--env.options.force", "0.05", "--init-from", "whole", "--total-steps", "2048")
    assert "Starting with the weights of runs/whole" in told


def test_the_same_from_python_with_the_class_itself(user):
    user.writes("slide.py", SLIDE)
    from slide import Slide

    seen = []
    result = canter.train(
        Slide,
        lambda report: seen.append(report.metrics["env/distance"]),
        num_envs=64,
        algorithm={"horizon": 16, "gamma": 0.95, "optimizer.learning_rate": 1e-3},
        total_steps=40_960,
        console="quiet",
    )
    assert len(seen) == 40 and seen[-1] < 0.5 * seen[0]
    assert result.score.mean > -20
    action, _ = result.predict({"policy": [1.0, 0.0]})  # the policy needs nothing of what the critic sees
    assert action.shape == (1,) and action[0] < 0
    assert "mean" in user.types("eval", result.path, "--episodes", "10")
