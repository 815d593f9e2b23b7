"""A simulator in torch: all its worlds are one batch, on the device that also trains.

    python examples/torch_simulator.py             # on the CPU
    python examples/torch_simulator.py cuda        # the whole rollout becomes one CUDA graph

Three functions define a world: initial states, one step, the observation. Canter adds restarts, time limits, seeds
and exact resuming.
"""

import sys
from typing import final

import torch

import canter
from canter.envs.tensor import Outcome, TensorEnv


@final
class Slide(TensorEnv):
    """Push a sliding mass to the origin."""

    def __init__(self, num_envs, device="cpu", *, max_episode_steps=100):
        obs, action = {"policy": canter.TensorSpec((2,))}, canter.Continuous((-1.0,), (1.0,))
        super().__init__("slide", num_envs, device, obs=obs, action=action, max_episode_steps=max_episode_steps)

    def _sample_state(self):
        return {"body": self._uniform(-1.0, 1.0, 2)}

    def _advance(self, state, action):
        position, speed = state["body"].unbind(-1)
        speed = speed + 0.1 * action[:, 0]
        position = position + 0.1 * speed
        body = torch.stack((position, speed), -1)
        return Outcome({"body": body}, reward=-position.square(), terminated=position.abs() > 5)

    def _observe(self, state):
        return {"policy": state["body"].clone()}


if __name__ == "__main__":
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    ppo = {"horizon": 32, "gamma": 0.95, "epochs": 5, "optimizer.learning_rate": 1e-3}
    result = canter.train(Slide, num_envs=256, device=device, algorithm=ppo, total_steps=100_000)
    print(f"mean return {result.score.mean:.1f} of at most 0")
